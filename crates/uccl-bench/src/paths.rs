//! The engine's own choice of a path, on a connection of this host that moves nothing.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    control::{EndpointOptions, Point, Request},
    kinds::{Direction, OpKind, TransportKind},
    peer::Peer,
    place::{Place, Places},
    run::{join, prepare},
    side::{PointMemory, Side},
};

/// Bytes of a transfer that counts as long, and so has the path that people ask for.
const LONG: u64 = 64 << 10;

/// The longest that an offer of shared memory is waited for, and the paths within a host that go
/// without it.
const OFFER_TIME: Duration = Duration::from_secs(1);
const NEEDS_NO_OFFER: [&str; 3] = ["cma", "shm", "owner"];

/// Milliseconds that a connection may take.
const PATIENCE_MS: u64 = 10_000;

/// The other end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OtherEnd {
    /// Another endpoint of this process.
    SameProcess,
    /// An endpoint of another process of this host.
    SameHost,
}

/// The ordinals of two GPUs that this process sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuPair {
    /// The GPU of this end.
    pub here: u32,
    /// The GPU of the other end.
    pub there: u32,
}

/// The paths that the engine chooses for long writes, by its names: `cma`, `mapped`, `cuda_ipc`,
/// `tcp` and others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChosenPaths {
    /// Between memory of the two processes' own.
    pub heap: &'static str,
    /// To memory of the other end's `alloc`.
    pub alloc: &'static str,
}

/// As [`ChosenPaths`], from a GPU's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChosenGpuPaths {
    /// To the memory of the other end's GPU.
    pub gpu: &'static str,
    /// To memory of the other process's own, and of the other end's `alloc`.
    pub host: ChosenPaths,
}

/// Connects with the settings of the environment, and asks the engine for its paths.
///
/// # Errors
/// The two ends cannot be connected.
pub fn chosen_paths(other: OtherEnd) -> Result<ChosenPaths> {
    let mut asked = ConnectedPeer::new(other, None)?;
    let chosen = asked.host_paths(Place::Heap)?;
    asked.close()?;
    Ok(chosen)
}

/// As [`chosen_paths`], from the memory of a GPU to a process of this host.
///
/// # Errors
/// The two ends cannot be connected, or have no memory on these GPUs.
pub fn chosen_gpu_paths(gpus: GpuPair) -> Result<ChosenGpuPaths> {
    let mut asked = ConnectedPeer::new(OtherEnd::SameHost, Some(gpus))?;
    let lead = Place::Gpu(gpus.here);
    let gpu = asked.path(Places { lead, serve: Place::Gpu(gpus.there) })?;
    let host = asked.host_paths(lead)?;
    asked.close()?;
    Ok(ChosenGpuPaths { gpu, host })
}

/// A connection, and the peer at its other end.
struct ConnectedPeer {
    // Its endpoint closes before the peer ends.
    side: Side,
    peer: Peer,
}

impl ConnectedPeer {
    fn new(other: OtherEnd, gpus: Option<GpuPair>) -> Result<Self> {
        let mut peer = match other {
            OtherEnd::SameProcess => Peer::start_thread()?,
            OtherEnd::SameHost => Peer::spawn()?,
        };
        let here = EndpointOptions {
            transport: TransportKind::Auto,
            checksum: None,
            streams: None,
            loopback: true,
            timeout_ms: PATIENCE_MS,
            gpu: gpus.map(|gpus| gpus.here),
        };
        let there = EndpointOptions { gpu: gpus.map(|gpus| gpus.there), ..here };
        let (side, _) = join(&mut peer, &here, there)?;
        Ok(Self { side, peer })
    }

    /// The paths from memory of this end to host memory of the other end.
    fn host_paths(&mut self, lead: Place) -> Result<ChosenPaths> {
        let mut to = |serve| self.path(Places { lead, serve });
        Ok(ChosenPaths { heap: to(Place::Heap)?, alloc: to(Place::Alloc)? })
    }

    fn path(&mut self, places: Places) -> Result<&'static str> {
        let (op, direction, size) = (OpKind::Write, Direction::Uni, LONG);
        let point = Point { op, direction, places, size, iovs: 1, slots: 1, stream: false };
        let memory = prepare(&mut self.peer, &self.side, point)?;
        let path = self.settled_path(&memory, places.serve)?;
        self.peer.channel.order(&Request::Release)?;
        Ok(path)
    }

    /// The path once the other end's offer of its memory has come, which nothing waits for.
    fn settled_path(&self, memory: &PointMemory, serve: Place) -> Result<&'static str> {
        let until = Instant::now() + OFFER_TIME;
        loop {
            let path = memory.one_sided_path(&self.side)?;
            let is_final = matches!(serve, Place::Heap) || !NEEDS_NO_OFFER.contains(&path);
            if is_final || until <= Instant::now() {
                return Ok(path);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn close(mut self) -> Result<()> {
        self.peer.channel.order(&Request::Close)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_of_this_process_is_reached_through_memory() {
        let chosen = chosen_paths(OtherEnd::SameProcess).expect("an answer");
        assert!(["mapped", "cma", "shm"].contains(&chosen.alloc), "{chosen:?}");
        assert_ne!(chosen.heap, "mapped");
    }
}
