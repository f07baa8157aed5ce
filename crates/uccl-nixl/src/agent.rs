//! An agent's side of the backend: its endpoint, its memory, and the agents that it knows.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;
use uccl_p2p::{
    Config, Endpoint, Iov, Op,
    wire::{advert::Advert, named::NamedMessage},
};

use crate::{
    conn_info::ConnInfo,
    memory::Memory,
    regions::Regions,
    remote::Remote,
    status::{Error, Result, Status},
    transfer::Transfer,
};

/// One NIXL agent's backend.
pub(crate) struct Agent {
    name: Vec<u8>,
    pub(crate) endpoint: Endpoint,
    regions: Regions,
    remotes: RwLock<HashMap<Vec<u8>, Arc<Remote>>>,
}

/// One descriptor of a transfer: NIXL's address and length, with the memory behind its metadata.
pub(crate) struct Piece<'a> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) memory: &'a Memory,
}

impl Agent {
    /// Starts the agent's endpoint. Peers may connect from now on.
    pub(crate) fn new(name: &[u8], config: Config) -> Result<Self> {
        let endpoint = Endpoint::new(config)?;
        endpoint.start_passive_accept()?;
        let regions = Regions::default();
        Ok(Self { name: name.to_vec(), endpoint, regions, remotes: RwLock::default() })
    }

    /// The address where it listens, and its instance: other agents load them.
    pub(crate) fn conn_info(&self) -> ConnInfo {
        ConnInfo { addr: self.endpoint.addr(), instance: self.endpoint.instance() }
    }

    /// Makes another agent known. Loaded again, nothing changes, unless the agent has been started
    /// anew.
    pub(crate) fn load_conn_info(&self, name: &[u8], info: ConnInfo) {
        let mut remotes = self.remotes.write();
        let known = remotes.get(name).is_some_and(|known| known.info == info);
        if known {
            return;
        }
        let replaced = remotes.insert(name.to_vec(), Arc::new(Remote::new(info)));
        drop(remotes);
        if let Some(replaced) = replaced {
            replaced.disconnect(&self.endpoint);
        }
    }

    /// Connects now, and not when a transfer first needs it. NIXL connects each agent to itself
    /// before anything else: for that the address is enough.
    pub(crate) fn connect(&self, name: &[u8]) -> Result<()> {
        if name == self.name {
            self.load_conn_info(name, self.conn_info());
            return Ok(());
        }
        self.remote(name)?.conn(&self.endpoint).map(drop)
    }

    /// Forgets another agent; unfinished transfers to it fail.
    pub(crate) fn disconnect(&self, name: &[u8]) -> Result<()> {
        let removed = self.remotes.write().remove(name);
        removed.ok_or_else(|| unknown(name))?.disconnect(&self.endpoint);
        Ok(())
    }

    /// Whether a failure of this kind is the first of the connection to another agent. For an
    /// unknown agent, which has no connection, every failure counts as the first.
    pub(crate) fn is_new_failure(&self, name: &[u8], status: Status) -> bool {
        self.remotes.read().get(name).is_none_or(|remote| remote.logged.is_new(status))
    }

    fn remote(&self, name: &[u8]) -> Result<Arc<Remote>> {
        self.remotes.read().get(name).cloned().ok_or_else(|| unknown(name))
    }

    /// Registers memory. `vram`: NIXL says that it is a GPU's.
    pub(crate) fn register(&self, addr: usize, len: usize, vram: bool) -> Result<Memory> {
        self.regions.register(&self.endpoint, addr, len, vram)
    }

    /// Ends a registration, and says whether it was the last of its memory: then nothing lands
    /// there any more.
    pub(crate) fn deregister(&self, memory: &Memory) -> Result<bool> {
        self.regions.deregister(&self.endpoint, memory)
    }

    /// The properties of registered memory, by name; `None` if not all of the memory is registered.
    pub(crate) fn query(
        &self,
        addr: usize,
        len: usize,
    ) -> Result<Option<Vec<(&'static str, String)>>> {
        let Some(mr) = self.endpoint.region_holding(addr, len) else { return Ok(None) };
        let info = self.endpoint.region_info(mr)?;
        let mut known = vec![("kind", info.kind.to_string())];
        known.extend(info.numa_node.map(|node| ("numa_node", node.to_string())));
        known.extend(info.nic.map(|near| ("nic", near.name)));
        Ok(Some(known))
    }

    /// Checks two lists of descriptors against the registered memory, before anything moves.
    pub(crate) fn prepare<'a>(
        &self,
        op: Op,
        name: &[u8],
        pairs: impl ExactSizeIterator<Item = (Piece<'a>, Piece<'a>)>,
    ) -> Result<Transfer> {
        let remote = self.remote(name)?;
        remote.conn(&self.endpoint)?;
        let mut iovs: Vec<Iov> = Vec::with_capacity(pairs.len());
        let mut adverts: Vec<Advert> = Vec::with_capacity(pairs.len());
        for (at, (local, other)) in pairs.enumerate() {
            if local.len != other.len {
                return Err(Error::Invalid(format!(
                    "descriptor {at}: {} bytes here and {} bytes there",
                    local.len, other.len
                )));
            }
            let advert = other.memory.piece(other.addr, other.len)?;
            let iov = local.memory.iov(local.addr, local.len)?;
            if let Some(iov) = iov.filter(|iov| iov.len > 0) {
                iovs.push(iov);
                adverts.push(advert);
            }
        }
        let prepared = match iovs.is_empty() {
            true => None,
            false => Some(self.endpoint.prepare(op, &iovs, &adverts)?),
        };
        Ok(Transfer::new(remote, prepared))
    }

    /// The bytes that carry a notification of this agent's to a peer.
    pub(crate) fn frame(&self, message: &[u8]) -> Result<Vec<u8>> {
        let framed = NamedMessage { name: &self.name, message }.encode();
        framed.ok_or_else(|| Error::Invalid("a notification has at most 64 MiB".into()))
    }

    /// Sends a notification that belongs to no transfer.
    pub(crate) fn notify(&self, name: &[u8], message: &[u8]) -> Result<()> {
        self.remote(name)?.notify(&self.endpoint, &self.frame(message)?)
    }
}

fn unknown(name: &[u8]) -> Error {
    Error::UnknownAgent(String::from_utf8_lossy(name).into_owned())
}
