//! Another agent (or this one, to itself): where it is, and the connection to it.

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint, NoInterrupt, Status, TransferHandle};

use crate::{conn_info::ConnInfo, cost::Cost, log::LoggedFailures, status::Result};

/// One agent that transfers go to. The first caller that needs the connection makes it. It is made
/// again if it was lost and the same endpoint is still there.
pub(crate) struct Remote {
    pub(crate) info: ConnInfo,
    conn: Mutex<Option<ConnId>>,
    /// Notifications that were sent alone and not seen to arrive.
    sent: Mutex<Vec<TransferHandle>>,
    pub(crate) cost: Mutex<Cost>,
    pub(crate) logged: LoggedFailures,
}

impl Remote {
    pub(crate) fn new(info: ConnInfo) -> Self {
        Self {
            info,
            conn: Mutex::default(),
            sent: Mutex::default(),
            cost: Mutex::default(),
            logged: LoggedFailures::default(),
        }
    }

    /// The connection; made if there is none, within the endpoint's timeout.
    pub(crate) fn conn(&self, endpoint: &Endpoint) -> Result<ConnId> {
        let mut conn = self.conn.lock();
        if let Some(known) = *conn {
            if endpoint.check_connection(known).is_ok() {
                return Ok(known);
            }
            *conn = None;
            let _already_lost = endpoint.disconnect(known);
        }
        let ConnInfo { addr, instance } = self.info;
        let made = endpoint.connect_to(addr, instance, None, &mut NoInterrupt)?;
        self.logged.clear();
        *conn = Some(made);
        Ok(made)
    }

    /// Sends a notification alone. No caller waits for it, so an earlier one that did not arrive is
    /// reported now, once.
    pub(crate) fn notify(&self, endpoint: &Endpoint, payload: &[u8]) -> Result<()> {
        let mut sent = self.sent.lock();
        let mut failed = None;
        sent.retain(|notif| match notif.poll() {
            Ok(Status::Pending) => true,
            Ok(Status::Done(_)) => false,
            Ok(Status::Failed(e)) | Err(e) => {
                failed = Some(e);
                false
            }
        });
        if let Some(e) = failed {
            return Err(e.into());
        }
        let conn = self.conn(endpoint)?;
        sent.push(endpoint.send_notif_held(conn, payload, None)?);
        Ok(())
    }

    /// Closes the connection; unfinished transfers over it fail.
    pub(crate) fn disconnect(&self, endpoint: &Endpoint) {
        let conn = self.conn.lock().take();
        if let Some(conn) = conn {
            // A connection that was lost has been reported to its transfers.
            let _already_lost = endpoint.disconnect(conn);
            // All notifications have ended. A polled handle keeps its result, and not the
            // connection.
            self.sent.lock().iter().for_each(|notif| _ = notif.poll());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::Ipv4Addr,
        time::{Duration, Instant},
    };

    use uccl_p2p::{Config, Error as Engine, Status as Stand};

    use super::*;
    use crate::status::{Error, Status};

    /// Longer than anything takes that has to happen.
    const FAR: Duration = Duration::from_secs(20);

    fn endpoint() -> Endpoint {
        let bind = Some(Ipv4Addr::LOCALHOST.into());
        let endpoint = Endpoint::new(Config { bind, ..Config::default() }).expect("an endpoint");
        endpoint.start_passive_accept().expect("it accepts");
        endpoint
    }

    /// A port that another endpoint got since the metadata was made.
    #[test]
    fn another_endpoint_at_the_address_is_refused_and_not_kept() {
        let (a, b) = (endpoint(), endpoint());
        let stranger = ConnInfo { addr: b.addr(), instance: b.instance() ^ 1 };
        let refused = Remote::new(stranger).conn(&a).expect_err("it is not the one");
        assert_eq!(refused.status(), Status::RemoteDisconnect);
        assert!(matches!(&refused, Error::Engine(Engine::Connect { .. })), "{refused}");
        assert_eq!(
            a.stats().expect("it is open").connections,
            0,
            "no connection to the stranger is left"
        );
        let right = ConnInfo { addr: b.addr(), instance: b.instance() };
        let remote = Remote::new(right);
        let conn = remote.conn(&a).expect("it is the one");
        assert_eq!(remote.conn(&a).expect("it is there"), conn);
    }

    #[test]
    fn a_notification_that_failed_is_told_however_many_transfers_end_meanwhile() {
        let (a, b) = (endpoint(), endpoint());
        let remote = Remote::new(ConnInfo { addr: b.addr(), instance: b.instance() });
        let conn = remote.conn(&a).expect("it is there");
        // Repeats until one is cancelled before the other end has answered.
        let failed = || {
            remote.notify(&a, b"lost").expect("sent");
            let last = remote.sent.lock().last().map(TransferHandle::id).expect("it is the last");
            matches!(a.cancel(last), Ok(Stand::Failed(Engine::Cancelled { .. })))
        };
        assert!((0..10_000).any(|_| failed()), "all were answered");
        // More notifications than the engine keeps results of.
        for _ in 0..300 {
            let many = [(); 64].map(|()| a.send_notif(conn, b"other", None).expect("sent"));
            for one in many {
                let ended = a.wait(one, None, &mut NoInterrupt).expect("it is known");
                assert!(matches!(ended, Stand::Done(_)), "{ended:?}");
            }
            b.take_notifs().expect("it is open");
        }
        let told = remote.notify(&a, b"next").expect_err("the one before was lost");
        assert!(matches!(&told, Error::Engine(Engine::Cancelled { .. })), "{told}");
        remote.notify(&a, b"next").expect("it was told");
    }

    #[test]
    fn a_connection_that_was_lost_is_made_anew() {
        let bind = Some(Ipv4Addr::LOCALHOST.into());
        let b = Endpoint::new(Config { bind, ..Config::default() }).expect("an endpoint");
        let a = endpoint();
        let remote = Remote::new(ConnInfo { addr: b.addr(), instance: b.instance() });
        let first = remote.conn(&a).expect("it is there");
        let theirs = b.accept(Some(FAR), &mut NoInterrupt).expect("it comes").conn;
        b.disconnect(theirs).expect("it was there");
        let begun = Instant::now();
        while a.check_connection(first).is_ok() {
            assert!(begun.elapsed() < FAR, "it is still connected");
            std::thread::sleep(Duration::from_millis(1));
        }
        let second = remote.conn(&a).expect("the endpoint is still there");
        assert!(
            second != first && a.check_connection(second).is_ok(),
            "the lost one is used again"
        );
        assert_eq!(a.stats().expect("it is open").connections, 1, "the lost one is kept");
    }
}
