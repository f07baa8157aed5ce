//! Connecting to a listener, without waiting.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use uccl_wire::flow::{FlowHello, Handle, Purpose, Status};

use crate::{
    attempt::Introduction,
    error::{FlowError, Peer},
    flows::{Flows, random},
    outlet::FlowName,
    pairs::{Pairs, routes},
    race::{Race, Winner},
    ring::RingSender,
    send::SendFlow,
    socket,
};

/// A connection that is being made. Dropping it ends it.
pub struct Connect {
    flows: Flows,
    handle: Handle,
    peer: Peer,
    hello: FlowHello,
    race: Race,
    begun: Instant,
    is_done: bool,
}

impl Connect {
    /// Begins to connect to a listener, from a device by its number in the settings. Every address
    /// of the handle is tried, the listener's device's first, from this device's addresses first.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn begin(flows: &Flows, handle: &Handle, device: usize) -> Result<Self, FlowError> {
        let own = flows.device(device)?;
        let flow = u64::from_le_bytes(random()?);
        let peer = Peer {
            instance: handle.instance,
            addr: handle.sockets().next(),
            device: own.name.clone(),
        };
        let settings = flows.settings();
        Ok(Self {
            hello: FlowHello {
                purpose: Purpose::Flow,
                key: handle.nonce,
                instance: flows.shared().instance,
                flow,
                chunk_len: settings.chunk_len as u64,
            },
            race: Race::new(routes(&own.addrs, handle)),
            flows: flows.clone(),
            handle: handle.clone(),
            peer,
            begun: Instant::now(),
            is_done: false,
        })
    }

    /// The flow, once the peer has taken it; `None` before. The peer need not have called
    /// [`Listener::try_accept`](crate::Listener::try_accept).
    ///
    /// # Errors
    /// When no address has answered within the settings' limit, or after it has given the flow.
    pub fn poll(&mut self) -> Result<Option<SendFlow>, FlowError> {
        if self.is_done {
            return Err(FlowError::Closed);
        }
        let psk = self.flows.settings().psk.as_ref();
        let introduction = Introduction { hello: self.hello, instance: self.handle.instance, psk };
        if let Some(winner) = self.race.step(&introduction)
            && winner.welcome.status == Status::Taken
        {
            return self.finish(winner).map(Some);
        }
        let waited = self.begun.elapsed();
        if waited < self.flows.settings().limit {
            return Ok(None);
        }
        self.is_done = true;
        Err(self.unreachable(waited))
    }

    fn finish(&mut self, winner: Winner) -> Result<SendFlow, FlowError> {
        let Winner { stream, to, welcome } = winner;
        self.is_done = true;
        let limit = self.flows.settings().limit;
        socket::tune(&stream, limit).map_err(FlowError::system("setsockopt"))?;
        let peer = Peer { addr: Some(to), ..self.peer.clone() };
        tracing::debug!("a flow to {peer} goes from {:?}", stream.local_addr());
        let bundle = self.flows.shared().join(&peer, welcome.key, || self.pairs());
        let name = FlowName { flow: self.hello.flow, to };
        Ok(SendFlow::new(self.flows.clone(), stream, bundle, name, self.ring()))
    }

    /// Whether the listener's process is of the same kernel and network namespace.
    fn is_local(&self) -> bool {
        let network = self.flows.shared().network;
        network != [0; 16] && self.handle.network == network
    }

    /// A ring to a process of the same host, if it is asked for.
    fn ring(&self) -> Option<RingSender> {
        if !self.is_local() || !self.flows.settings().local {
            return None;
        }
        let made = random().and_then(|token| {
            let ring = RingSender::new(u64::from_le_bytes(token));
            ring.map_err(FlowError::system("memory for a ring"))
        });
        made.inspect_err(|error| tracing::info!("a flow goes without a ring: {error}")).ok()
    }

    /// The pairs of addresses of all devices, for streams of chunks.
    fn pairs(&self) -> Pairs {
        let all = self.flows.settings().devices.iter().flat_map(|device| &device.addrs);
        Pairs::new(&all.copied().collect::<Vec<_>>(), &self.handle, self.is_local())
    }

    fn unreachable(&self, waited: Duration) -> FlowError {
        let mut tried = String::new();
        for to in self.handle.sockets() {
            let error = self.race.failure(to).unwrap_or("no answer");
            let _ = write!(tried, "{}{to}: {error}", if tried.is_empty() { "" } else { "; " });
        }
        FlowError::Unreachable { peer: self.peer.clone(), waited, tried }
    }
}
