//! Connections to peers that callers know by address only.

use std::{net::SocketAddr, time::Duration};

use super::{Endpoint, Interrupt};
use crate::{
    error::{Error, Result},
    ids::ConnId,
};

impl Endpoint {
    /// The connection to the endpoint that listens at one of these addresses, such as those that
    /// [`parse_address`](super::parse_address) found for a name: [`reach`](Self::reach) of each in
    /// turn.
    ///
    /// # Errors
    /// There is no address, or the error of the last one.
    pub fn reach_any(
        &self,
        addrs: &[SocketAddr],
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let mut failed = Err(Error::Invalid("there is no address to reach".into()));
        for addr in addrs {
            match self.reach(*addr, timeout, interrupt) {
                Err(e) if !matches!(e, Error::Interrupted | Error::Closed) => failed = Err(e),
                ended => return ended,
            }
        }
        failed
    }

    /// The connection to the endpoint that listens at `addr`: the one that this function made
    /// before, if its peer is still there, else a new one. So a peer that was started anew at the
    /// same address is reached by the next call. Any number of threads may ask for the same address
    /// at a time: one connects, and the others get its connection, or its error.
    ///
    /// [`disconnect`](Self::disconnect) ends the connection, and the next call makes another.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn reach(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let core = self.here()?;
        core.usable()?;
        let is_there = |known: ConnId, interrupt: &mut dyn Interrupt| {
            match self.check_peer(known, interrupt) {
                Ok(()) => Ok(true),
                Err(Error::Interrupted) => Err(Error::Interrupted),
                // The peer may have died, and another may be in its place.
                Err(_) => {
                    let _already_lost = self.disconnect(known);
                    Ok(false)
                }
            }
        };
        let connect = |interrupt: &mut dyn Interrupt| {
            core.reached.retain(|conn| core.conn(conn).is_ok());
            self.connect(addr, timeout, interrupt)
        };
        core.reached.reach(addr, interrupt, is_there, connect)
    }
}
