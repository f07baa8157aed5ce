//! Notifications that come in: delivered in order, fetched first where they are long.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use smallvec::smallvec;
use uccl_fabric::mem::RemoteSpan;
use uccl_wire::message::Source;

use super::{
    connection::Connection,
    core::NOTIF_LIMIT,
    inbox::EAGER_WINDOW,
    payload::Payload,
    transfer::{After, Kind, Plan},
};
use crate::endpoint::{Notification, Op};

/// Notifications that may wait on one connection. Senders know it, and go no further.
pub(crate) const MAX_WAITING: usize = 65_536;

enum Waiting {
    Fetching,
    Here(Vec<u8>),
    There(Source),
}

/// Notifications of one connection that have not been delivered, oldest first.
#[derive(Default)]
pub(crate) struct NotifInbox {
    queue: VecDeque<(u64, Waiting)>,
    bytes: usize,
}

impl NotifInbox {
    /// Forgets everything, for a connection that ends.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.bytes = 0;
    }
}

impl Connection {
    /// A notification came with its message.
    pub(crate) fn on_notif(self: &Arc<Self>, id: u64, payload: &[u8]) -> Result<(), String> {
        {
            let mut notifs = self.notifs.lock();
            notifs.bytes += payload.len();
            if notifs.bytes > EAGER_WINDOW || notifs.queue.len() >= MAX_WAITING {
                return Err("more unanswered notifications than agreed".into());
            }
            notifs.queue.push_back((id, Waiting::Here(payload.to_vec())));
        }
        self.resume_notifs();
        Ok(())
    }

    /// A notification is there to be fetched.
    pub(crate) fn on_notif_rts(self: &Arc<Self>, id: u64, source: Source) -> Result<(), String> {
        {
            let mut notifs = self.notifs.lock();
            if notifs.queue.len() >= MAX_WAITING {
                return Err("more unanswered notifications than agreed".into());
            }
            notifs.queue.push_back((id, Waiting::There(source)));
        }
        self.resume_notifs();
        Ok(())
    }

    /// Delivers what can be delivered in order, and fetches what comes next.
    pub(crate) fn resume_notifs(self: &Arc<Self>) {
        let mut fetch = None;
        {
            let mut notifs = self.notifs.lock();
            while self.core.notif_bytes.load(Relaxed) <= NOTIF_LIMIT {
                match notifs.queue.pop_front() {
                    Some((id, Waiting::Here(payload))) => {
                        notifs.bytes = notifs.bytes.saturating_sub(payload.len());
                        // First the answer: whoever is told may close the connection at once.
                        self.send_notif_ack(id, true);
                        self.core.push_notif(Notification { conn: self.id, payload });
                    }
                    Some((id, Waiting::There(source))) => {
                        notifs.queue.push_front((id, Waiting::Fetching));
                        fetch = Some((id, source));
                        break;
                    }
                    Some(fetching) => {
                        notifs.queue.push_front(fetching);
                        break;
                    }
                    None => break,
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

    /// A long notification is here, or cannot be had.
    pub(crate) fn notif_fetched(self: &Arc<Self>, id: u64, payload: Option<Payload>) {
        {
            let mut notifs = self.notifs.lock();
            let front = notifs.queue.front().is_some_and(|(first, _)| *first == id);
            if !front {
                return;
            }
            notifs.queue.pop_front();
            // As above; and with the lock held, so that none that comes later is delivered before.
            self.send_notif_ack(id, payload.is_some());
            if let Some(payload) = payload {
                // SAFETY: all of it has been fetched.
                let payload = unsafe { payload.filled() };
                self.core.push_notif(Notification { conn: self.id, payload });
            }
        }
        self.resume_notifs();
    }
}
