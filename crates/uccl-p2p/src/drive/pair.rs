//! Endpoints on the loopback interface, and two that are connected, for tests.

use std::sync::Arc;

use super::core::connection::{deferred_transfers::Mark, transfer::Transfer};
use crate::{Config, ConnId, Endpoint, NoInterrupt, Request, Result, Transport};

/// The settings of an endpoint on the loopback interface, at any free port.
pub(crate) fn on_loopback() -> Config {
    Config { bind: Some([127, 0, 0, 1].into()), port: Some(0), ..Config::default() }
}

/// Two endpoints that are connected.
pub(crate) struct JoinedPair {
    pub(crate) a: Endpoint,
    pub(crate) b: Endpoint,
    pub(crate) to_b: ConnId,
    pub(crate) to_a: ConnId,
}

impl JoinedPair {
    pub(crate) fn by_tcp() -> Self {
        Self::by(Transport::Tcp)
    }

    pub(crate) fn by(transport: Transport) -> Self {
        let config = || Config { transport, ..on_loopback() };
        let [a, b] = [config(), config()].map(|config| Endpoint::new(config).expect("an endpoint"));
        let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
        let to_a = b.accept(None, &mut NoInterrupt).expect("accepted").conn;
        Self { a, b, to_b, to_a }
    }

    pub(crate) fn close(self) {
        [self.a, self.b].iter().for_each(|ep| ep.close().expect("closed"));
    }
}

/// Starts a transfer that begins when the mark is reached, as [`Endpoint::post`] does behind a
/// stream.
pub(crate) fn post_behind(
    ep: &Endpoint,
    request: &Request<'_>,
    after: Option<Box<dyn Mark>>,
) -> Result<Arc<Transfer>> {
    let transfer = ep.start(ep.core().conn(request.conn)?, request, after)?;
    ep.core().workers.hurry();
    transfer.conn.kick_if_busy();
    Ok(transfer)
}
