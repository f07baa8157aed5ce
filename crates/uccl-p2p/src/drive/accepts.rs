//! The connections that wait for `accept`: some until their rails have been tried, or for so long
//! as that may take.

use std::{sync::Arc, time::Instant};

use super::{
    core::{Accepts, Core, MAX_ACCEPTS, connection::Connection},
    timers,
};
use crate::types::Acceptance;

impl Accepts {
    fn forget_ended(&mut self) {
        self.untried.retain(|(conn, _)| conn.upgrade().is_some_and(|conn| !conn.is_failed()));
    }
}

impl Core {
    /// Whether the queue of connections that wait for accept is full.
    pub(crate) fn has_unaccepted(&self) -> bool {
        let mut accepts = self.accepts.lock();
        accepts.forget_ended();
        accepts.waiting.len() + accepts.untried.len() >= MAX_ACCEPTS
    }

    /// Notes a connection with rails that are being tried. It waits for accept once they have been
    /// tried, or their time is up.
    pub(super) fn await_rails(&self, conn: &Arc<Connection>) {
        self.accepts.lock().untried.push((Arc::downgrade(conn), Instant::now()));
        self.workers.hurry();
    }

    /// Goes on without rails that are out of time. Returns whether some still have time.
    pub(crate) fn look_after_untried(&self) -> bool {
        let time = timers::to_try_rails(&self.config);
        let late: Vec<_> = {
            let mut accepts = self.accepts.lock();
            if accepts.untried.is_empty() {
                return false;
            }
            accepts.forget_ended();
            accepts.untried.extract_if(.., |(_, since)| timers::is_over(*since, time)).collect()
        };
        // Without a lock: this may close connections.
        late.iter().filter_map(|(conn, _)| conn.upgrade()).for_each(|conn| conn.do_without_rails());
        !self.accepts.lock().untried.is_empty()
    }

    pub(crate) fn offer_accept(&self, accepted: Acceptance) {
        let mut accepts = self.accepts.lock();
        accepts.untried.retain(|(conn, _)| conn.upgrade().is_some_and(|c| c.id != accepted.conn));
        // Under the lock: a connection that ends from now on removes itself again.
        if !accepts.passive && self.conn(accepted.conn).is_ok() {
            accepts.waiting.push_back(accepted);
            self.accepted.notify_one();
        }
    }
}

impl Connection {
    /// Offers the connection to `accept`: now, or when its rails have been tried or their time is
    /// up.
    pub(crate) fn accept_when_settled(self: &Arc<Self>, accepted: Acceptance) {
        *self.accepting.lock() = Some(accepted);
        let is_settled = || self.lanes.rails.as_ref().is_none_or(|rails| rails.is_settled());
        if !is_settled() {
            self.core.await_rails(self);
        }
        // Checked again, because the last rail may have been tried meanwhile.
        if is_settled() {
            self.offer_accept();
        }
    }

    /// Called when the peer has not said in time that the rails have been tried: goes on without
    /// them.
    pub(super) fn do_without_rails(self: &Arc<Self>) {
        if self.lanes.rails_up().is_none() && self.core.config.transport.needs_rails() {
            let why = self.why_no_rails();
            return self.close(self.lost_to(format!("no rail works: {why}")));
        }
        self.offer_accept();
    }

    pub(super) fn offer_accept(&self) {
        if let Some(accepted) = self.accepting.lock().take() {
            self.core.offer_accept(accepted);
        }
    }
}
