//! Notifications: how they are sent, taken and waited for.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::{SmallVec, smallvec};

use super::{Endpoint, Interrupt, LOOKS, NotifPayload, Notification, SLICE, transfers::settle};
use crate::{
    drive::{
        core::connection::{
            Connection,
            transfer::{After, Kind, Plan, Transfer},
        },
        wait,
    },
    error::{Error, Result},
    ids::{ConnId, TransferId},
};

impl Endpoint {
    /// Sends a message to the peer, at most 64 MiB.
    pub fn send_notif<'a>(
        &self,
        conn: ConnId,
        payload: impl Into<NotifPayload<'a>>,
        timeout: Option<Duration>,
    ) -> Result<TransferId> {
        self.post_notif(conn, payload.into(), timeout).map(|transfer| transfer.id)
    }

    pub(super) fn post_notif(
        &self,
        conn: ConnId,
        payload: NotifPayload<'_>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let conn = self.usable_conn(conn)?;
        let transfer = self.start_notif(&conn, payload, timeout)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer)
    }

    /// Sends a message to the peer and waits until it has arrived.
    pub fn run_notif<'a>(
        &self,
        conn: ConnId,
        payload: impl Into<NotifPayload<'a>>,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<()> {
        let conn = self.usable_conn(conn)?;
        let claim = conn.claim();
        let transfer = self.start_notif(&conn, payload.into(), timeout)?;
        self.finish(claim, &transfer, interrupt).map(drop)
    }

    fn start_notif(
        &self,
        conn: &Arc<Connection>,
        payload: NotifPayload<'_>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let transfer = conn.admit(Plan {
            kind: Kind::Notif,
            context: 0,
            conn: Arc::clone(conn),
            bytes: payload.as_ref().len() as u64,
            timeout: self.deadline_of(timeout),
            leases: smallvec![],
            after: After::Publish,
            targets: smallvec![],
        })?;
        let hold = transfer.hold();
        transfer.expect_ops(1);
        let posted = conn.post_notif(&transfer, payload);
        settle(hold, posted)
    }

    /// Takes the notifications that have arrived; those of one connection are in order.
    pub fn take_notifs(&self) -> Result<Vec<Notification>> {
        let core = self.here()?;
        let taken = core.take_notifs();
        if !taken.is_empty() {
            return Ok(taken);
        }
        for conn in core.open_conns() {
            let _claim = conn.claim();
            conn.progress();
        }
        Ok(core.take_notifs())
    }

    /// Waits until a notification has arrived or `timeout` has passed; takes the notifications that
    /// are there.
    pub fn wait_notifs(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        self.wait_notifs_of(None, timeout, interrupt)
    }

    /// The same as [`wait_notifs`](Self::wait_notifs), for a caller that waits for the peer of this
    /// connection. It takes the notifications of all connections.
    ///
    /// # Errors
    /// Also the reason for which the connection was lost, once all notifications have been taken.
    pub fn wait_notifs_from(
        &self,
        conn: ConnId,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        self.wait_notifs_of(Some(conn), timeout, interrupt)
    }

    fn wait_notifs_of(
        &self,
        conn: Option<ConnId>,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        let started = Instant::now();
        let until = timeout.and_then(|timeout| started.checked_add(timeout));
        loop {
            let core = self.here()?;
            core.usable()?;
            let lost = conn.and_then(|conn| self.check_connection(conn).err());
            let taken = self.spin_for_notifs(started, until);
            if !taken.is_empty() {
                return Ok(taken);
            }
            // The last look was after the end of the connection: all notifications before the end
            // have been taken.
            if let Some(lost) = lost {
                return Err(lost);
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(taken);
            }
            let left = until.map_or(SLICE, |until| until - now).min(SLICE);
            core.open_conns().iter().for_each(|conn| conn.leave_to_workers());
            core.sleep_for_notif(left);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Takes the notifications that have arrived; if there are none, makes progress for as long as
    /// threads spin.
    fn spin_for_notifs(&self, started: Instant, until: Option<Instant>) -> Vec<Notification> {
        let core = self.core();
        let conns = core.open_conns();
        // Held throughout: without claims, workers would take in the events that this call waits
        // for.
        let claims: SmallVec<[_; 8]> = conns.iter().map(|conn| conn.claim()).collect();
        loop {
            // A look costs less than reading the clock.
            for _ in 0..LOOKS {
                let taken = core.take_notifs();
                if !taken.is_empty() {
                    return taken;
                }
                conns.iter().for_each(|conn| {
                    conn.progress();
                });
            }
            claims.iter().for_each(|claim| claim.beat());
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) || now - started >= self.config().spin {
                return core.take_notifs();
            }
            if now - started >= wait::YIELD_AFTER {
                std::thread::yield_now();
            }
        }
    }
}
