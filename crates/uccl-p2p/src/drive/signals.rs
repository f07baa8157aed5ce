//! Signals: words in the peer's memory that writes change when all their bytes are there, and words
//! in ours that the peer changes.
//!
//! A lane that reaches the word changes it at once. A write that is one operation of the first lane
//! takes its signal along (`route.rs`). Otherwise a message on the first lane asks the owner to
//! change the word. The owner always answers, unless the connection ends. A signal is never sent
//! twice.

use std::sync::{Arc, atomic::Ordering::Acquire};

use uccl_fabric::{
    lane::{Handling, OpResult},
    mem::RemoteSpan,
    signal::{self, Word},
};
use uccl_wire::{
    frame::Status,
    message::Place,
    signal::{Change, SIGNAL_LEN},
};

use super::{
    core::connection::{Connection, talk::Talk, transfer::Transfer},
    gpu_signal::SignalStep,
};
use crate::error::{Error, Result};

impl Connection {
    /// Changes a word at once, if the lane reaches it.
    pub(crate) fn try_signal(&self, word: Word) -> Option<OpResult> {
        self.lanes.host.as_ref()?.try_signal(&word.span, word.change)
    }

    /// Refuses a signal that the peer would not understand: it would end the connection.
    pub(crate) fn check_signals(&self) -> Result<()> {
        match self.peer.takes_signals {
            true => Ok(()),
            false => Err(Error::TooOld { peer: Arc::clone(&self.peer.name), what: "signals" }),
        }
    }

    /// Asks the owner of a word to change it. The peer's answer ends one operation of the transfer.
    pub(super) fn post_signal(&self, transfer: &Arc<Transfer>, word: Word) -> Result<()> {
        self.check_signals()?;
        let RemoteSpan { addr, key, slot, .. } = word.span;
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        self.check_open(session)?;
        message.clear();
        let place = Place { addr, key, slot };
        transfer.body.lock().is_signalling = true;
        session.signals.send(place, word.change, Arc::clone(transfer), message)?;
        self.send_message(&[message]);
        Ok(())
    }

    /// Changes a word of ours for the peer, and answers once it has changed.
    pub(super) fn take_signal(&self, id: u64, place: Place, change: Change) -> Handling {
        let Place { addr, key, slot } = place;
        let span = RemoteSpan { addr, len: SIGNAL_LEN, key, slot };
        let apply = || signal::apply(&self.core.mrs.table, &Word { span, change });
        // A reader that sees the word must also see the earlier writes of devices.
        let visible = self.show_gpus();
        match visible.map_err(|_| Status::Fault).and_then(|()| apply()) {
            Ok(Some(under_way)) => {
                self.gpu_signal.begin(id, under_way);
                return Handling::UnderWay;
            }
            Ok(None) => self.answer_signal(id, Status::Ok),
            Err(refused) => self.answer_signal(id, refused),
        }
        Handling::Ended
    }

    /// Looks at the peer's signal that a GPU applies, and answers once it has.
    pub(super) fn go_on_with_signal(&self) -> Handling {
        match self.gpu_signal.look() {
            SignalStep::Nothing => {}
            SignalStep::UnderWay => return Handling::UnderWay,
            SignalStep::Ended(id, status) => self.answer_signal(id, status),
        }
        Handling::Ended
    }

    fn answer_signal(&self, id: u64, status: Status) {
        self.core.signalled.notify();
        self.tell(|session, out| session.signals.answer(id, status, out));
    }

    /// Whether a strong signal of this context waits for no earlier write.
    pub(crate) fn is_context_clear(&self, context: u32) -> bool {
        // Acquire: a write that has failed is noted as failed before it is counted out.
        self.pending.load(Acquire) == 0 && self.failed_contexts.check(context).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering::Acquire},
        thread,
        time::{Duration, Instant},
    };

    use std::sync::Arc;

    use super::{
        super::{
            core::connection::{Connection, Peer},
            links::Links,
            pair::JoinedPair,
        },
        Change,
    };
    use crate::{Error, NoInterrupt, Op, Request, Signal};

    /// Longer than anything takes that has to happen.
    const FAR: Duration = Duration::from_secs(20);

    #[test]
    fn a_caller_that_waits_for_a_word_is_woken_by_a_signal_with_its_write() {
        let p = JoinedPair::by_tcp();
        let word = Box::new(AtomicU64::new(0));
        let at = word.as_ptr() as usize;
        // SAFETY: an atomic, which stays until the endpoint has been closed.
        let mr = unsafe { p.b.register(at, 8) }.expect("registered");
        let advert = p.b.advertise(mr, at, 8).expect("advertised");
        let signal = Some(Signal { advert, change: Change::Add(1), strong: false });
        let write = Request { signal, ..Request::new(p.to_b, Op::Write, &[], &[]) };
        let begun = Instant::now();
        let mut written = 0;
        thread::scope(|scope| {
            let waiter = scope.spawn(|| p.b.core().signalled.sleep(FAR));
            // More than one, because the first may come before the waiter sleeps.
            while !waiter.is_finished() {
                p.a.run(&write, &mut NoInterrupt).expect("signalled");
                written += 1;
            }
        });
        assert!(begun.elapsed() < FAR / 2, "{written} signals did not wake the waiter");
        assert_eq!(word.load(Acquire), written, "each changed the word once");
        p.close();
    }

    #[test]
    fn a_peer_that_knows_no_signals_is_sent_none() {
        let p = JoinedPair::by_tcp();
        let word = Box::new(AtomicU64::new(0));
        let at = word.as_ptr() as usize;
        // SAFETY: an atomic, which stays until the endpoint has been closed.
        let mr = unsafe { p.b.register(at, 8) }.expect("registered");
        let advert = p.b.advertise(mr, at, 8).expect("advertised");
        let signal = Some(Signal { advert, change: Change::Add(1), strong: false });
        let write = Request { signal, ..Request::new(p.to_b, Op::Write, &[], &[]) };
        let conn = p.a.core().conn(p.to_b).expect("a connection");
        let peer = Peer {
            name: Arc::clone(&conn.peer.name),
            addr: conn.peer.addr,
            gpu_index: 0,
            instance: conn.peer.instance,
            same_host: true,
            takes_signals: false,
            publishes: false,
        };
        let links = Links { streams: conn.lanes.streams.clone(), host: None, rails: None };
        let old = Arc::new(Connection::new(p.to_b, Arc::clone(p.a.core()), peer, links));
        let refused = p.a.start(Arc::clone(&old), &write, None);
        assert!(matches!(refused, Err(Error::TooOld { .. })), "it was posted");
        p.a.run(&write, &mut NoInterrupt).expect("the connection lives");
        assert_eq!(word.load(Acquire), 1);
        drop(old);
        p.close();
    }
}
