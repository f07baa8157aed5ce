//! Notifications from the peer: they are delivered in order, and long ones are fetched first.

use std::sync::{Arc, atomic::Ordering::*};

use smallvec::smallvec;
use uccl_fabric::mem::RemoteSpan;
use uccl_proto::notifications::NextStep;
use uccl_wire::message::Source;

use super::{
    core::{
        Core, NOTIF_LIMIT, charge,
        connection::{
            Connection,
            talk::Talk,
            transfer::{After, Kind, Plan},
        },
    },
    payload::Payload,
};
use crate::types::{Notification, Op};

impl Core {
    /// Takes the delivered notifications, and lets in those that had to wait for room.
    pub(crate) fn take_notifs(&self) -> Vec<Notification> {
        if !self.have_notifs.load(Acquire) {
            return Vec::new();
        }
        let taken: Vec<_> = {
            let mut notifs = self.notifs.lock();
            self.have_notifs.store(false, Release);
            notifs.drain(..).collect()
        };
        let bytes: usize = taken.iter().map(charge).sum();
        let before = self.notif_bytes.fetch_sub(bytes, Relaxed);
        if before > NOTIF_LIMIT {
            self.open_conns().iter().for_each(|conn| conn.resume_notifs());
        }
        taken
    }
}

impl Connection {
    /// Delivers the notifications that can be delivered in order, and fetches the payload of the
    /// next one if need be.
    pub(crate) fn resume_notifs(self: &Arc<Self>) {
        let mut fetch = None;
        {
            // Locked throughout, so that notifications are delivered in order.
            let mut talk = self.talk.lock();
            let Talk { session, message } = &mut *talk;
            while self.core.notif_bytes.load(Relaxed) <= NOTIF_LIMIT {
                message.clear();
                match session.notifications.next(message) {
                    NextStep::Deliver(payload) => {
                        if !self.may_tell() {
                            return;
                        }
                        let notif = Notification { conn: self.id, payload };
                        self.core.push_notif(notif, || self.send_message(&[message]));
                    }
                    NextStep::Fetch { id, source } => {
                        fetch = Some((id, source));
                        break;
                    }
                    NextStep::Nothing => break,
                }
            }
        }
        if let Some((id, source)) = fetch {
            self.fetch_notif(id, source);
        }
    }

    /// Makes the peer's earlier writes visible to GPUs before a notification, which may be about
    /// them. If that fails, the connection ends, and nobody gets the notification.
    fn may_tell(&self) -> bool {
        let shown = self.show_gpus();
        if let Err(e) = &shown {
            self.condemn(0, format_args!("a notification's data cannot be shown: {e}"));
        }
        shown.is_ok()
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
            after: After::Deliver { id, payload, to: Self::notif_fetched },
            targets: smallvec![],
        };
        match self.admit(plan) {
            Ok(transfer) => {
                self.post_ops(&transfer, Op::Read, [local].into(), [remote].into());
                self.call_help();
                transfer.op_ended();
                self.kick_if_busy();
            }
            Err(_) => self.notif_fetched(id, None),
        }
    }

    /// Called when the payload of a long notification is here, or could not be fetched.
    fn notif_fetched(self: &Arc<Self>, id: u64, payload: Option<Payload>) {
        {
            let mut talk = self.talk.lock();
            let Talk { session, message } = &mut *talk;
            message.clear();
            if !session.notifications.fetched(id, payload.is_some(), message) {
                return;
            }
            let answer = || self.send_message(&[message]);
            match payload {
                None => answer(),
                Some(payload) => {
                    if !self.may_tell() {
                        return;
                    }
                    // SAFETY: all of it has been fetched.
                    let payload = unsafe { payload.filled() };
                    self.core.push_notif(Notification { conn: self.id, payload }, answer);
                }
            }
        }
        self.resume_notifs();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uccl_proto::limits::EAGER_MAX;

    use crate::{Error, NoInterrupt, Status, drive::pair::JoinedPair};

    /// The sender sees the end of a notification only when the peer's caller can take it, whether
    /// it came with its message or was fetched.
    #[test]
    fn a_delivered_notification_can_be_taken() {
        let pair = JoinedPair::by_tcp();
        let (a, b) = (&pair.a, &pair.b);
        for len in [10, 2 * EAGER_MAX] {
            let full = b.core().notifs.lock();
            let sent = a.send_notif(pair.to_b, vec![7_u8; len], None).expect("posted");
            let soon = Some(Duration::from_millis(100));
            let status = a.wait(sent, soon, &mut NoInterrupt).expect("known");
            assert!(matches!(status, Status::Pending), "{status:?}");
            drop(full);
            let status = a.wait(sent, None, &mut NoInterrupt).expect("known");
            assert!(matches!(status, Status::Done(_)), "{status:?}");
            let taken = b.take_notifs().expect("open");
            assert_eq!(taken.iter().map(|n| n.payload.len()).collect::<Vec<_>>(), [len]);
        }
        pair.close();
    }

    /// Notifications from before the end are taken first.
    #[test]
    fn a_caller_that_waits_for_notifications_of_a_lost_peer_is_told() {
        let pair = JoinedPair::by_tcp();
        let (a, b) = (&pair.a, &pair.b);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let mut taken = Vec::new();
                let patience = Some(Duration::from_secs(30));
                loop {
                    match a.wait_notifs_from(pair.to_b, patience, &mut NoInterrupt) {
                        Ok(none) if none.is_empty() => return (taken, None),
                        Ok(some) => taken.extend(some),
                        Err(e) => return (taken, Some(e)),
                    }
                }
            });
            b.run_notif(pair.to_a, b"last", None, &mut NoInterrupt).expect("delivered");
            b.close().expect("closed");
            let (taken, end) = waits.join().expect("it ends");
            assert_eq!(taken.iter().map(|n| &n.payload[..]).collect::<Vec<_>>(), [b"last"]);
            assert!(matches!(end, Some(Error::ConnectionLost { .. })), "{end:?}");
        });
        a.close().expect("closed");
    }
}
