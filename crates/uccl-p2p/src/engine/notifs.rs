//! Notifications from the peer: they are delivered in order, and long ones are fetched first.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use smallvec::smallvec;
use uccl_fabric::mem::RemoteSpan;
use uccl_proto::notifications::Next;
use uccl_wire::message::Source;

use super::{
    connection::{Connection, Talk},
    core::NOTIF_LIMIT,
    payload::Payload,
    transfer::{After, Kind, Plan},
};
use crate::types::{Notification, Op};

impl Connection {
    /// Delivers the notifications that can be delivered in order, and fetches the payload of the next one if need be.
    pub(crate) fn resume_notifs(self: &Arc<Self>) {
        let mut fetch = None;
        {
            // Locked throughout, so that notifications are delivered in order.
            let mut talk = self.talk.lock();
            let Talk { session, message } = &mut *talk;
            while self.core.notif_bytes.load(Relaxed) <= NOTIF_LIMIT {
                message.clear();
                match session.notifications.next(message) {
                    Next::Deliver(payload) => {
                        self.send_message(&[message]);
                        self.core.push_notif(Notification { conn: self.id, payload });
                    }
                    Next::Fetch { id, source } => {
                        fetch = Some((id, source));
                        break;
                    }
                    Next::Nothing => break,
                }
            }
        }
        if let Some((id, source)) = fetch {
            self.fetch_notif(id, source);
        }
    }

    /// Fetches a long notification from the sender's memory.
    fn fetch_notif(self: &Arc<Self>, id: u64, source: Source) {
        let mut payload = Payload::with_room_for(source.len as usize);
        let local = payload.span();
        let remote =
            RemoteSpan { addr: source.addr, len: source.len, key: source.key, slot: source.slot };
        let plan = Plan {
            kind: Kind::Fetch,
            context: 0,
            conn: Arc::clone(self),
            bytes: source.len,
            timeout: None,
            leases: smallvec![],
            after: After::Deliver { id, payload },
            targets: smallvec![],
        };
        match self.admit(plan) {
            Ok(transfer) => {
                self.post_ops(&transfer, Op::Read, smallvec![local], smallvec![remote]);
                self.call_help();
                transfer.op_ended();
                self.kick_if_busy();
            }
            Err(_) => self.notif_fetched(id, None),
        }
    }

    /// Called when the payload of a long notification is here, or could not be fetched.
    pub(crate) fn notif_fetched(self: &Arc<Self>, id: u64, payload: Option<Payload>) {
        {
            let mut talk = self.talk.lock();
            let Talk { session, message } = &mut *talk;
            message.clear();
            if !session.notifications.fetched(id, payload.is_some(), message) {
                return;
            }
            self.send_message(&[message]);
            if let Some(payload) = payload {
                // SAFETY: all of it has been fetched.
                let payload = unsafe { payload.filled() };
                self.core.push_notif(Notification { conn: self.id, payload });
            }
        }
        self.resume_notifs();
    }
}
