//! Listening for flows.

use std::{
    collections::VecDeque,
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use parking_lot::Mutex;
use uccl_wire::flow::{FlowHello, Handle};

use crate::{
    error::{FlowError, Peer},
    flows::{Flows, random},
    recv::RecvFlow,
};

/// The most connections that wait for `try_accept` at one listener.
const MOST_WAITING: usize = 4096;

/// A stream of a new flow.
pub(crate) struct Arrival {
    pub(crate) stream: TcpStream,
    pub(crate) addr: SocketAddr,
    pub(crate) hello: FlowHello,
}

/// New flows of a listener.
#[derive(Default)]
pub(crate) struct Arrivals(Mutex<VecDeque<Arrival>>);

impl Arrivals {
    pub(crate) fn is_full(&self) -> bool {
        self.0.lock().len() >= MOST_WAITING
    }

    /// Adds a flow; one that a peer has greeted for twice takes its later stream.
    pub(crate) fn push(&self, arrival: Arrival) {
        let mut waiting = self.0.lock();
        let name = |arrival: &Arrival| (arrival.hello.instance, arrival.hello.flow);
        match waiting.iter_mut().find(|other| name(other) == name(&arrival)) {
            Some(other) => *other = arrival,
            None => waiting.push_back(arrival),
        }
    }
}

/// Listens for flows of its handle. All listeners of a process share one port. Dropping it closes it;
/// flows that it has accepted live on.
pub struct Listener {
    flows: Flows,
    handle: Handle,
    device: String,
    arrivals: Arc<Arrivals>,
}

impl Listener {
    /// Listens on a device, by its number in the settings.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn listen(flows: &Flows, device: usize) -> Result<Self, FlowError> {
        let own = flows.device(device)?;
        let shared = flows.shared();
        // Addresses of the other devices follow, for peers that do not reach this one.
        let others = flows.settings().devices.iter().filter(|other| *other != own);
        let addrs: Vec<_> =
            own.addrs.iter().chain(others.flat_map(|other| &other.addrs)).copied().collect();
        let handle = Handle {
            device: device as u16,
            instance: shared.instance,
            nonce: random()?,
            network: shared.network,
            addrs: Handle::fitting(&addrs),
            port: shared.port,
        };
        let arrivals = Arc::default();
        shared.listeners.lock().insert(handle.nonce, Arc::clone(&arrivals));
        Ok(Self { flows: flows.clone(), handle, device: own.name.clone(), arrivals })
    }

    /// The name by which other processes connect; [`Handle::encode`] gives its bytes.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The next flow that a peer has connected; `None` if there is none yet.
    ///
    /// # Errors
    /// When its socket fails.
    pub fn try_accept(&self) -> Result<Option<RecvFlow>, FlowError> {
        let Some(arrival) = self.arrivals.0.lock().pop_front() else { return Ok(None) };
        let peer = Peer {
            instance: arrival.hello.instance,
            addr: Some(arrival.addr),
            device: self.device.clone(),
        };
        Ok(Some(RecvFlow::new(self.flows.clone(), arrival.stream, peer, arrival.hello.flow)))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.flows.shared().listeners.lock().remove(&self.handle.nonce);
    }
}
