//! Another agent (or this one, to itself): where it is, and the connection to it.

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint, Error as Engine, Status, TransferId, Uninterrupted};

use crate::{conn_info::ConnInfo, cost::Cost, status::Result};

/// One agent that transfers go to. The connection is made when it is first needed, by whoever needs it, and made again
/// if it was lost and the same endpoint is still there.
pub(crate) struct Remote {
    pub(crate) info: ConnInfo,
    conn: Mutex<Option<ConnId>>,
    /// Notifications that were sent alone and not seen to arrive.
    sent: Mutex<Vec<TransferId>>,
    pub(crate) cost: Mutex<Cost>,
}

impl Remote {
    pub(crate) fn new(info: ConnInfo) -> Self {
        Self { info, conn: Mutex::default(), sent: Mutex::default(), cost: Mutex::default() }
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
        let made = endpoint.connect(self.info.addr, None, &mut Uninterrupted)?;
        if endpoint.connection(made)?.instance != self.info.instance {
            endpoint.disconnect(made)?;
            let reason = "another endpoint listens there now: load the agent's metadata again";
            return Err(Engine::Connect { addr: self.info.addr, reason: reason.into() }.into());
        }
        *conn = Some(made);
        Ok(made)
    }

    /// Sends a notification alone. An earlier one that did not arrive is reported now, once: nobody waits for them.
    pub(crate) fn notify(&self, endpoint: &Endpoint, payload: &[u8]) -> Result<()> {
        let mut sent = self.sent.lock();
        let mut failed = None;
        sent.retain(|&notif| match endpoint.poll(notif) {
            Ok(Status::Pending) => true,
            Ok(Status::Done(_)) | Err(_) => false,
            Ok(Status::Failed(e)) => {
                failed = Some(e);
                false
            }
        });
        if let Some(e) = failed {
            return Err(e.into());
        }
        let conn = self.conn(endpoint)?;
        sent.push(endpoint.send_notif(conn, payload, None)?);
        Ok(())
    }

    /// Closes the connection; unfinished transfers over it fail.
    pub(crate) fn disconnect(&self, endpoint: &Endpoint) {
        if let Some(conn) = self.conn.lock().take() {
            // One that was lost has been reported to its transfers.
            let _already_lost = endpoint.disconnect(conn);
        }
    }
}
