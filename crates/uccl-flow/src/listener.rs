//! Listening for flows.

use std::sync::Arc;

use uccl_wire::flow::Handle;

use crate::{
    arrivals::Arrivals,
    error::FlowError,
    flows::{Flows, random},
    recv::RecvFlow,
};

/// Listens for flows of its handle. All listeners of a process share one port. Dropping it closes
/// it; flows that it has accepted live on.
pub struct Listener {
    flows: Flows,
    handle: Handle,
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
        let arrivals = Arc::new(Arrivals::new(own.name.clone()));
        shared.listeners.lock().insert(handle.nonce, Arc::clone(&arrivals));
        Ok(Self { flows: flows.clone(), handle, arrivals })
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
        let sink = self.arrivals.pop();
        Ok(sink.map(|sink| RecvFlow::new(self.flows.clone(), sink)))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let shared = self.flows.shared();
        shared.listeners.lock().remove(&self.handle.nonce);
        while let Some(sink) = self.arrivals.pop() {
            shared.sinks.write().remove(&sink.flow);
            sink.close();
        }
    }
}
