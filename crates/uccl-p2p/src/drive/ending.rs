//! Ends of connections: lanes are killed, the memory that the peer may still touch is watched, and
//! the transfers that are left end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    core::connection::{
        Connection,
        talk::{Ask, PendingMessage},
    },
    timers,
};
use crate::{
    error::{Error, Result},
    types::Interrupt,
};

/// How long to sleep between two looks at whether a connection has ended.
const NAP: Duration = Duration::from_micros(200);

impl Connection {
    /// Ends the connection. When this returns, nothing touches memory through it any more, and
    /// every transfer on it has ended or ends when the last hold (`Transfer::hold`) on it is
    /// dropped. If another thread is ending it already, this returns at once, before that is true.
    /// Must not be called from a completion or a message.
    pub(crate) fn fail(self: &Arc<Self>, e: Error) {
        if !self.end.begin(&e) {
            return;
        }
        tracing::debug!(conn = %self.id, peer = %self.peer.name, "connection ends: {e}");
        self.core.workers.detach(&self.care.take());
        // Before the lanes are killed, so that their operations are not posted again.
        let orphans = self.talk.lock().session.lanes.close();
        drop(orphans);
        self.accepting.lock().take();
        self.lanes.all.iter().for_each(|lane| lane.kill());
        self.gpu_signal.cancel();
        let closed = self.talk.lock().session.close();
        let asks = closed.asks.into_iter().flat_map(Ask::lent);
        let lent = asks
            .chain(closed.sends.into_iter().chain(closed.notifs).flat_map(PendingMessage::lent));
        let lent = lent.collect();
        self.deferred.close();
        // Before the transfers end, because their memory may be deregistered then.
        self.core.watch_aftermath(self, lent);
        self.core.look_after_aftermaths();
        // Before the list of transfers is read: a transfer that is posted now is either in the
        // list, or sees that the connection has ended.
        self.end.complete();
        let unfinished = self.unfinished();
        unfinished.iter().for_each(|transfer| transfer.end_with_connection());
        self.core.conn_lost(self, e);
    }

    /// Tells the peer that the connection ends, then ends it as [`fail`](Self::fail) does.
    pub(crate) fn close(self: &Arc<Self>, e: Error) {
        self.lanes.living_streams().for_each(|(_, lane)| lane.bye());
        self.fail(e);
    }

    /// Waits until a closed connection and every transfer on it have ended. Another thread may be
    /// ending it. Peers that copy for us get as much time as they get to let a transfer end.
    pub(crate) fn wait_for_end(self: &Arc<Self>) {
        while !self.has_left() {
            std::thread::sleep(NAP);
        }
    }

    /// Whether a closed connection and every transfer on it have ended.
    pub(crate) fn has_left(self: &Arc<Self>) -> bool {
        let is_over = self.has_ended() && self.unfinished().is_empty();
        if !is_over {
            self.core.look_after_aftermaths();
        }
        is_over
    }

    /// If a socket shows that the peer has ended, waits until the connection has. A thread that
    /// looks after the lanes ends it, once all that came before has been taken in; that takes no
    /// longer than the endpoint's timeout.
    pub(crate) fn take_in_end(self: &Arc<Self>, interrupt: &mut dyn Interrupt) -> Result<()> {
        let begun = Instant::now();
        let most = timers::to_take_in_end(&self.core.config);
        while !self.is_failed() && self.lanes.shows_end() && begun.elapsed() < most {
            self.kick();
            std::thread::sleep(NAP);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }
}
