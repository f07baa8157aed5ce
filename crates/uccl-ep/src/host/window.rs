//! A rank's window, which its peers write to, and its access to theirs: a mapping where they are
//! near, and the network where they are far.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use rustix::fs::{Mode, OFlags};
use uccl_fabric::shm::{MapMode, Mapping, Segment};
use uccl_wire::ep_card::{EpCard, EpEndpoint, HOST_LEN};

use crate::{
    far::{self, FarPeers, Listener, Staging},
    shared::{
        error::{Error, Result},
        header,
        join::{EndpointMaker, Position},
        nodes::Node,
        places::SLOTS,
        protocol::{Mark, Stream, Words},
        view::{self, PAGE, View, control_len},
    },
};

/// The access to a rank's window.
enum PeerWindow {
    /// The rank has not come.
    Absent,
    Near(View),
    Far,
}

/// A rank's own window, and its access to those of its peers.
pub(crate) struct Window {
    me: usize,
    host: [u8; HOST_LEN],
    node: u64,
    segment: Segment,
    own: View,
    /// By rank, with its own, which is near.
    peers: Vec<PeerWindow>,
    far: Option<FarPeers>,
    nonce: u64,
}

impl Window {
    pub(crate) fn new(me: usize, ranks: usize, pool: usize, node: Option<u64>) -> Result<Self> {
        let len = pool.checked_next_multiple_of(PAGE);
        let len = len.and_then(|pool| pool.checked_add(control_len(ranks)));
        let len = len.ok_or_else(|| Error::invalid(format!("a pool of {pool} bytes")))?;
        let what = || format!("making a window of {len} bytes");
        let os = |source| Error::Os { what: what(), source };
        let segment = Segment::create("uccl-ep", len).map_err(os)?;
        let own = View::new(Arc::clone(&segment), ranks).map_err(os)?;
        let nonce = getrandom::u64().map_err(|e| os(io::Error::other(e)))?;
        own.word(view::NONCE_AT).store(nonce, Ordering::Release);
        let peer =
            |rank| if rank == me { PeerWindow::Near(own.clone()) } else { PeerWindow::Absent };
        let peers = (0..ranks).map(peer).collect();
        let Node { host, node } = Node::of_this_process(node)?;
        Ok(Self { me, host, node, segment, own, peers, far: None, nonce })
    }

    /// A card with all that peers need to reach the window.
    pub(crate) fn card(&self, position: Position, endpoint: Option<EpEndpoint>) -> EpCard {
        let Position { generation, next_call } = position;
        EpCard {
            rank: self.me as u32,
            ranks: self.peers.len() as u32,
            pool: self.own.pool_len() as u64,
            pid: std::process::id(),
            descriptor: self.segment.fd().as_raw_fd() as u32,
            nonce: self.nonce,
            next_call,
            generation,
            node: self.node,
            host: self.host,
            endpoint,
        }
    }

    /// Makes an endpoint for peers on other nodes.
    pub(crate) fn listen(
        &self,
        network: Option<uccl_p2p::Config>,
        (timeout, staging): (Duration, Staging),
        make: &mut EndpointMaker<'_>,
    ) -> Result<Listener> {
        Listener::new(network, make, self.own.mapping(), (timeout, staging))
    }

    /// Maps the window of a near peer.
    ///
    /// # Errors
    /// This process cannot reach it.
    pub(crate) fn map(&mut self, card: &EpCard) -> Result<()> {
        let rank = card.rank as usize;
        if rank != self.me {
            self.peers[rank] = PeerWindow::Near(self.of_peer(card)?);
        }
        Ok(())
    }

    /// Uses the network for far peers from now on.
    pub(crate) fn join_far(&mut self, far: FarPeers, cards: &[Option<EpEndpoint>]) {
        self.far = Some(far);
        for (peer, _) in self.peers.iter_mut().zip(cards).filter(|(_, card)| card.is_some()) {
            *peer = PeerWindow::Far;
        }
    }

    fn of_peer(&self, card: &EpCard) -> Result<View> {
        let path = format!("/proc/{}/fd/{}", card.pid, card.descriptor);
        let what = || format!("opening the window of rank {} at {path}", card.rank);
        let os = |source| Error::Os { what: what(), source };
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd: OwnedFd =
            rustix::fs::open(&*path, flags, Mode::empty()).map_err(|e| os(e.into()))?;
        let mapping = Mapping::of(fd, MapMode::ReadWrite, usize::MAX).map_err(os)?;
        let view = View::new(Arc::new(mapping), self.peers.len()).map_err(os)?;
        let is_it = view.pool_len() as u64 == card.pool
            && view.word(view::NONCE_AT).load(Ordering::Acquire) == card.nonce;
        is_it.then_some(view).ok_or_else(|| os(io::Error::other("it is another process's memory")))
    }

    pub(crate) fn own(&self) -> &View {
        &self.own
    }

    /// Whether a rank is there.
    pub(crate) fn has(&self, rank: usize) -> bool {
        !matches!(self.peers[rank], PeerWindow::Absent)
    }

    /// A near rank's window.
    pub(crate) fn near(&self, rank: usize) -> Option<&Arc<Mapping>> {
        match &self.peers[rank] {
            PeerWindow::Near(view) => Some(view.mapping()),
            PeerWindow::Absent | PeerWindow::Far => None,
        }
    }

    /// The connection to far peers, if there are any.
    pub(crate) fn far(&self) -> Option<&FarPeers> {
        self.far.as_ref()
    }

    /// The reason why a far peer cannot be reached any more.
    pub(crate) fn failure(&self, peer: usize) -> Option<String> {
        self.far.as_ref()?.failure(peer)
    }

    /// Stops sending to these peers, and ends the waits until they have received earlier data.
    pub(crate) fn give_up(&self, peers: &[usize]) {
        self.far.iter().for_each(|far| far.give_up(peers));
    }

    /// Counts of traffic over the network.
    pub(crate) fn network_stats(&self) -> Option<uccl_p2p::Stats> {
        self.far.as_ref()?.stats()
    }

    /// Begins a write to the window of a stream's peer; `None` if the peer is gone.
    pub(crate) fn writer(&self, stream: &Stream) -> Option<PeerWriter<'_>> {
        let target = match &self.peers[stream.peer] {
            PeerWindow::Absent => return None,
            PeerWindow::Near(view) => WriteTarget::Near(view),
            PeerWindow::Far => {
                let write = self.far.as_ref()?.begin_write(stream.peer)?;
                WriteTarget::Far(write, self.own.control_len())
            }
        };
        Some(PeerWriter { word: stream.remote_word, target })
    }

    /// The header of a stream's peer for a call, once its mark has been seen.
    pub(crate) fn header(&self, stream: &Stream, call: u64) -> header::Words {
        let at = view::header_at(stream.local_word, call);
        std::array::from_fn(|index| self.own.word(at + index).load(Ordering::Relaxed))
    }

    /// Sets a word of a rank's window. A reader that sees it also sees all earlier writes there.
    fn set(&self, at: usize, word: usize, value: u64) {
        match &self.peers[at] {
            PeerWindow::Absent => {}
            PeerWindow::Near(view) => view.word(word).store(value, Ordering::Release),
            PeerWindow::Far => self.far.iter().for_each(|far| far.signal(at, word, value)),
        }
    }

    /// Tells a stream's peer that its data is in place.
    pub(crate) fn set_arrived(&self, stream: &Stream, mark: Mark) {
        let word = view::arrived_at(stream.remote_word, mark.call as usize % SLOTS);
        self.set(stream.peer, word, mark.to_word());
    }

    /// Tells a rank, by one of its words, up to which round data was taken out.
    pub(crate) fn set_taken(&self, at: usize, word: usize, mark: Mark) {
        self.set(at, view::taken_at(word, mark.call as usize % SLOTS), mark.to_word());
    }

    /// Tells all peers that this rank has given up on a call.
    pub(crate) fn set_fault(&self, call: u64) {
        (0..self.peers.len()).for_each(|rank| self.set(rank, view::fault_at(self.me), call));
    }

    /// The call that a rank gave up on.
    pub(crate) fn fault(&self, of: usize) -> Option<u64> {
        let fault = self.own.word(view::fault_at(of)).load(Ordering::Acquire);
        Some(fault).filter(|call| *call != 0)
    }
}

impl Words for Window {
    fn arrived(&self, word: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.word(view::arrived_at(word, slot)).load(Ordering::Acquire))
    }

    fn taken(&self, word: usize, slot: usize) -> Mark {
        Mark::of_word(self.own.word(view::taken_at(word, slot)).load(Ordering::Acquire))
    }
}

/// A write to a rank's window. A reader that sees a mark set after the drop of this value sees all
/// of the write.
pub(crate) struct PeerWriter<'a> {
    /// The number of the stream's words there.
    word: usize,
    target: WriteTarget<'a>,
}

enum WriteTarget<'a> {
    Near(&'a View),
    /// With the bytes before the pool.
    Far(far::RemoteWrite<'a>, usize),
}

impl PeerWriter<'_> {
    /// Writes the rank's header of a call.
    pub(crate) fn write_header(&mut self, call: u64, words: header::Words) {
        let at = view::header_at(self.word, call);
        match &mut self.target {
            WriteTarget::Near(view) => {
                for (index, word) in words.into_iter().enumerate() {
                    view.word(at + index).store(word, Ordering::Relaxed);
                }
            }
            WriteTarget::Far(write, _) => {
                let to = write.memory_at(8 * at, 8 * header::WORDS).cast::<u64>();
                // SAFETY: there is room for so many words.
                unsafe { to.copy_from_nonoverlapping(words.as_ptr(), words.len()) };
            }
        }
    }

    /// Memory for `len` bytes at `at` of the rank's pool, to be filled before the next call of
    /// this.
    pub(crate) fn memory_at(&mut self, at: usize, len: usize) -> *mut u8 {
        match &mut self.target {
            WriteTarget::Near(view) => view.pool(at, len),
            WriteTarget::Far(write, control_len) => write.memory_at(*control_len + at, len),
        }
    }
}
