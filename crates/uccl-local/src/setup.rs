//! How two processes of a host come to share a lane.
//!
//! The side that connected makes the segment and sends it, with its table of regions, over a unix
//! socket; the other side answers with its own table. A token from their handshake says which
//! connection it is for.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use uccl_device::{Process, cuda::PeerId};
use uccl_fabric::{
    gpu::CopyBy,
    region::RegionTable,
    shm::{MapMode, Mapping, PeerTable, Segment},
};
use uccl_stream::{StreamLane, StreamOptions};

use super::{KILL_PATIENCE, LocalLane, bell::Bell, pipe::ShmPipe};
use crate::{
    cuda_ipc::{Bouncers, Owner},
    fdpass::{FdSocket, Message},
    shm::{ByteRing, Direct, Hazards, hazard::HAZARD_BYTES},
};

/// Bytes of each ring.
const RING: usize = 512 << 10;
const PAGE: usize = 4096;
const RINGS_AT: usize = PAGE;
const RING_STRIDE: usize = ByteRing::layout_len(RING).next_multiple_of(PAGE);
const SEGMENT: usize = RINGS_AT + 2 * RING_STRIDE;

/// Which side of the segment is ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ends {
    /// The side that accepted the connection.
    Acceptor,
    /// The side that connected, and made the segment.
    Connector,
}

/// One side's regions and settings for a lane.
pub struct Setup {
    /// Our memory that the peer may touch.
    pub regions: Arc<RegionTable>,
    /// The peer's process, if the kernel can copy to and from its memory.
    pub process: Option<Process>,
    /// Whether data in the stream carries a checksum.
    pub checksum: bool,
}

/// A segment that was sent to the peer, which has not answered yet.
pub struct Invitation {
    segment: Segment,
}

/// Makes a segment and sends it to the other end of `socket`.
///
/// # Errors
/// When there is no memory, or the socket is broken.
pub fn invite(socket: &mut FdSocket, token: u128, regions: &RegionTable) -> io::Result<Invitation> {
    let segment = Segment::create("uccl-lane", SEGMENT)?;
    socket.send(&token.to_le_bytes(), &[segment.fd(), regions.published_fd()])?;
    Ok(Invitation { segment })
}

impl Invitation {
    /// Makes the lane from the peer's answer.
    ///
    /// # Errors
    /// When the answer is invalid.
    pub fn accepted(
        self,
        socket: FdSocket,
        answer: Message,
        setup: Setup,
    ) -> io::Result<LocalLane> {
        let table = only(answer.fds)?;
        build(Ends::Connector, &self.segment, table, socket, setup)
    }
}

/// The token of an invitation.
#[must_use]
pub fn token_of(message: &Message) -> Option<u128> {
    Some(u128::from_le_bytes(message.bytes.as_slice().try_into().ok()?))
}

/// Accepts an invitation, answers it, and makes the lane.
///
/// # Errors
/// When the invitation is invalid, or the socket is broken.
pub fn accept(mut socket: FdSocket, invitation: Message, setup: Setup) -> io::Result<LocalLane> {
    let [segment, table]: [OwnedFd; 2] =
        invitation.fds.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    let segment = Mapping::of(segment, MapMode::ReadWrite, SEGMENT)?;
    if segment.len() != SEGMENT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    socket.send(&[1], &[setup.regions.published_fd().as_fd()])?;
    build(Ends::Acceptor, &Arc::new(segment), table, socket, setup)
}

fn only(fds: Vec<OwnedFd>) -> io::Result<OwnedFd> {
    let [fd]: [OwnedFd; 1] = fds.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(fd)
}

fn build(
    ends: Ends,
    segment: &Arc<Mapping>,
    table: OwnedFd,
    socket: FdSocket,
    setup: Setup,
) -> io::Result<LocalLane> {
    let first = Hazards::new(segment, 0)?;
    let second = Hazards::new(segment, HAZARD_BYTES)?;
    let there = ByteRing::new(segment, RINGS_AT, RING)?;
    let back = ByteRing::new(segment, RINGS_AT + RING_STRIDE, RING)?;
    let (hazards, peer_hazards, tx, rx) = match ends {
        Ends::Connector => (first, second, there.into_tx(), back.into_rx()),
        Ends::Acceptor => (second, first, back.into_tx(), there.into_rx()),
    };
    let cma = setup.process.is_some();
    let direct = Arc::new(Direct::new(PeerTable::map(table)?, hazards, setup.process));
    let pid = socket.peer()?.pid;
    let ours = pid == i32::try_from(std::process::id()).ok();
    // Counted here, because the system reuses process ids.
    //
    static PEERS: AtomicU64 = AtomicU64::new(1);
    let owner = match ours {
        true => Owner::Ourselves,
        false => Owner::Other(PeerId(PEERS.fetch_add(1, Relaxed))),
    };
    let bell = Arc::new(Bell::new(socket, Arc::clone(&direct), owner));
    let (pipe, tx, rx) = ShmPipe::new(tx, rx, &bell);
    let (regions, checksum) = (setup.regions, setup.checksum);
    let options = StreamOptions { regions, checksum, copy_by: CopyBy::default() };
    Ok(LocalLane {
        stream: StreamLane::new(pipe, tx, rx, options),
        direct,
        bell,
        peer_hazards,
        cma,
        jobs: Arc::default(),
        splits: Arc::default(),
        sharing: Arc::default(),
        gpu: Arc::default(),
        bouncers: Bouncers::default(),
        patience: KILL_PATIENCE,
    })
}
