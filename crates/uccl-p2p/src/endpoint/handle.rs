//! Handles of transfers.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{
    Endpoint, Interrupt, Request, Status, TryOutcome,
    transfers::{StartOutcome, end},
};
use crate::{
    drive::{core::connection::transfer::Transfer, timers, wait},
    error::Result,
    ids::{ConnId, TransferId},
    process::Process,
    types::NotifPayload,
};

/// A transfer that was started. Its result is kept as long as this exists, however many other
/// transfers end meanwhile. The result of a transfer of which a caller has only the id is forgotten
/// at some time.
///
/// It does not keep its endpoint from closing, which ends the transfer. When it is dropped, the
/// transfer goes on.
#[derive(Debug)]
pub struct TransferHandle {
    id: TransferId,
    process: Process,
    stand: Mutex<Stand>,
}

enum Stand {
    Live(Arc<Transfer>),
    /// Only the result is kept: a transfer keeps its connection.
    Ended(Status),
}

impl std::fmt::Debug for Stand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Live(_) => f.write_str("Live"),
            Self::Ended(status) => status.fmt(f),
        }
    }
}

impl TransferHandle {
    fn new(transfer: Arc<Transfer>, process: Process) -> Self {
        Self { id: transfer.id, process, stand: Mutex::new(Stand::Live(transfer)) }
    }

    /// Its id, for functions that take one.
    pub fn id(&self) -> TransferId {
        self.id
    }

    /// Its state. Asking about an unfinished transfer makes progress on its connection.
    ///
    /// # Errors
    /// The calling process is a forked child of the one that started it.
    pub fn poll(&self) -> Result<Status> {
        self.after(|transfer| {
            if !transfer.finished() {
                let _claim = transfer.conn.claim();
                transfer.conn.progress();
            }
            Ok(transfer.status())
        })
    }

    /// Its state as far as is known, without progress.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn status(&self) -> Result<Status> {
        self.after(|transfer| Ok(transfer.status()))
    }

    /// Waits for its end, for at most `timeout`. The transfer goes on after that.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll), or the wait was interrupted.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn Interrupt) -> Result<Status> {
        self.after(|transfer| {
            let until = timers::end_of(timeout);
            wait::wait(transfer.conn.claim(), transfer, until, interrupt)?;
            Ok(transfer.status())
        })
    }

    /// Ends it, as [`Endpoint::cancel`] does.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn cancel(&self) -> Result<Status> {
        self.after(|transfer| Ok(end(transfer)))
    }

    /// Its status after `act`, which is skipped if the transfer is known to have ended.
    fn after(&self, act: impl FnOnce(&Arc<Transfer>) -> Result<Status>) -> Result<Status> {
        self.process.check()?;
        let transfer = match &*self.stand.lock() {
            Stand::Live(transfer) => Arc::clone(transfer),
            Stand::Ended(status) => return Ok(status.clone()),
        };
        // Without the lock: other threads may ask meanwhile.
        let status = act(&transfer)?;
        if !matches!(status, Status::Pending) {
            *self.stand.lock() = Stand::Ended(status.clone());
        }
        Ok(status)
    }
}

impl Drop for TransferHandle {
    fn drop(&mut self) {
        if !self.process.is_this()
            && let Stand::Live(transfer) = self.stand.get_mut()
        {
            // A forked child must not release its parent's objects.
            std::mem::forget(Arc::clone(transfer));
        }
    }
}

impl Endpoint {
    /// Starts a transfer, as [`post`](Self::post) does, and returns a handle.
    ///
    /// # Errors
    /// The same as those of `post`.
    pub fn post_held(&self, request: &Request<'_>) -> Result<TransferHandle> {
        self.post_transfer(request).map(|transfer| self.handle_of(transfer))
    }

    /// Does a transfer at once or starts it, as [`try_run`](Self::try_run) does; a started one gets
    /// a handle.
    ///
    /// # Errors
    /// The same as those of `try_run`.
    pub fn try_run_held(&self, request: &Request<'_>) -> Result<TryOutcome<TransferHandle>> {
        Ok(match self.try_begin(request)? {
            StartOutcome::Done(outcome) => TryOutcome::Done(outcome),
            StartOutcome::Transfer(transfer) => TryOutcome::Under(self.handle_of(transfer)),
        })
    }

    /// Sends a message to the peer, as [`send_notif`](Self::send_notif) does, and returns a handle.
    ///
    /// # Errors
    /// The same as those of `send_notif`.
    pub fn send_notif_held<'a>(
        &self,
        conn: ConnId,
        payload: impl Into<NotifPayload<'a>>,
        timeout: Option<Duration>,
    ) -> Result<TransferHandle> {
        self.post_notif(conn, payload.into(), timeout).map(|transfer| self.handle_of(transfer))
    }

    pub(super) fn handle_of(&self, transfer: Arc<Transfer>) -> TransferHandle {
        TransferHandle::new(transfer, self.handle.process)
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Change, Error, NoInterrupt, Op, Request, Signal, Status, TryOutcome,
        drive::{core::connection::transfers::KEPT, pair::JoinedPair},
    };

    #[test]
    fn a_handle_keeps_its_result_however_many_other_transfers_end() {
        let pair = JoinedPair::by_tcp();
        let word = [0_u64];
        // SAFETY: only looked at by the engine, until it is closed.
        let mr = unsafe { pair.b.register(word.as_ptr() as usize, 8) }.expect("registered");
        let advert = pair.b.advertise(mr, word.as_ptr() as usize, 8).expect("advertised");
        let signal = Some(Signal { advert, change: Change::Add(0), strong: false });
        let write = Request { signal, ..Request::new(pair.to_b, Op::Write, &[], &[]) };
        let (held, known) = (pair.a.post_held(&write), pair.a.post(&write));
        let (held, known) = (held.expect("posted"), known.expect("posted"));
        let tried = pair.a.try_run_held(&write).expect("posted");
        let TryOutcome::Under(failing) = tried else { panic!("nobody has answered") };
        failing.cancel().expect("ours");
        for _ in 0..KEPT / 64 + 1 {
            let many = [(); 64].map(|()| pair.a.post_held(&write).expect("posted"));
            for one in many {
                let ended = one.wait(None, &mut NoInterrupt).expect("ours");
                assert!(matches!(ended, Status::Done(_)), "{ended:?}");
            }
        }
        assert!(matches!(pair.a.poll(known), Err(Error::UnknownTransfer(_))));
        assert!(matches!(pair.a.poll(held.id()), Err(Error::UnknownTransfer(_))));
        assert!(matches!(held.poll(), Ok(Status::Done(_))));
        assert!(matches!(held.cancel(), Ok(Status::Done(_))), "it has ended well");
        let conn = pair.a.core().conn(pair.to_b).expect("a connection");
        pair.close();
        assert!(matches!(held.poll(), Ok(Status::Done(_))), "also after the end");
        drop(failing);
        assert_eq!(std::sync::Arc::strong_count(&conn), 1, "a handle keeps its connection");
    }
}
