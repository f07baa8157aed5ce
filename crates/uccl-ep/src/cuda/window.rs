//! A rank's window in a GPU's memory, and this GPU's access to those of its peers.
//!
//! Its layout is that of a window of the CPU, words for each rank and then the pool, but tagged
//! words and the ready flags of chunks may be between them. Peers in this process use its address;
//! peers in other processes of the host open it by a handle, and peers on other hosts by a fabric
//! handle, where NVLink joins them. A window that its rank has dropped lives as long as a peer in
//! this process holds it, and the driver keeps it for processes that have opened it: late stores
//! hit no other memory.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, LazyLock, OnceLock, Weak},
};

use parking_lot::Mutex;
use uccl_device::{
    HostIdentity, Process,
    cuda::{
        Context, DeviceBuffer, Direction, Exporter, FabricExport, FabricHandle, GpuError, Importer,
        IpcHandle, Mapping, MemoryExport, PeerId, PinnedBuffer, Priority, Stream,
    },
};
use uccl_wire::{
    ep_card::HOST_LEN,
    ep_gpu_card::{EpGpuCard, EpGpuHandleKind},
};

use super::{
    params::{CHUNKS, TAGGED_WORDS},
    watch::{self, own_start},
};
use crate::shared::{
    error::{Error, Result},
    join::Position,
    nodes::host_of,
    places::SLOTS,
    view::{self, PAGE, control_len},
};

/// The offset of a window's nonce: the second word of the line of rank 0's fault.
const NONCE_AT: u64 = (8 * view::NONCE_AT) as u64;

/// The windows of this process's ranks, by nonce.
static WINDOWS: LazyLock<Mutex<HashMap<u64, Weak<DeviceBuffer>>>> = LazyLock::new(Mutex::default);

/// The importer of other processes' windows.
static IMPORTER: LazyLock<Importer> = LazyLock::new(Importer::default);

/// Bytes of so many words from each rank, for each call that may be in flight.
pub(super) const fn words_len(ranks: usize, words: usize) -> usize {
    SLOTS * ranks * words * size_of::<u64>()
}

/// A window that this GPU reaches.
enum PeerWindow {
    Local(Arc<DeviceBuffer>),
    Imported(Arc<Mapping>),
}

impl PeerWindow {
    fn address(&self) -> u64 {
        match self {
            Self::Local(memory) => memory.address(),
            Self::Imported(mapping) => mapping.address(),
        }
    }
}

/// A rank's own window and those of its peers.
pub(super) struct Window {
    memory: Arc<DeviceBuffer>,
    /// The reason why the memory has no fabric handle, though it should have.
    fabric_refusal: Option<String>,
    context: &'static Context,
    me: usize,
    flags: usize,
    pool: usize,
    nonce: u64,
    /// By rank; `None` for absent ranks.
    peers: Vec<Option<PeerWindow>>,
}

impl Window {
    /// A window with a pool of so many bytes, and with tagged words and ready flags if `has_flags`.
    /// With `in_fabric` it has a fabric handle, if the driver makes one.
    pub(super) fn new(
        context: &'static Context,
        (me, ranks): (usize, usize),
        pool: usize,
        has_flags: bool,
        in_fabric: bool,
    ) -> Result<Self> {
        let invalid = || Error::invalid(format!("a pool of {pool} bytes"));
        let pool = pool.checked_next_multiple_of(PAGE).ok_or_else(invalid)?;
        let flags = if has_flags { words_len(ranks, TAGGED_WORDS + CHUNKS) } else { 0 };
        let words = control_len(ranks) + flags;
        let len = words.checked_add(pool).ok_or_else(invalid)?;
        let (memory, fabric_refusal) = match in_fabric {
            true => allocate_in_fabric(context, len)?,
            false => (DeviceBuffer::new(context, len)?, None),
        };
        let memory = Arc::new(memory);
        let nonce = random()?;
        let stream = Stream::new(context, Priority::Normal)?;
        let mut staged = PinnedBuffer::new(context, 8)?;
        // SAFETY: no other code uses the memory yet.
        unsafe { staged.as_mut_slice() }.copy_from_slice(&nonce.to_ne_bytes());
        let (to, from) = (memory.address() + NONCE_AT, staged.address());
        // SAFETY: no other code uses the window yet, and both live until the stream has been waited
        // for.
        unsafe {
            stream.fill(memory.address(), 0, words)?;
            stream.copy(to, from, 8, Direction::HostToDevice)?;
        }
        stream.synchronize()?;
        let mut known = WINDOWS.lock();
        known.retain(|_, window| window.strong_count() > 0);
        known.insert(nonce, Arc::downgrade(&memory));
        Ok(Self { memory, fabric_refusal, context, me, flags, pool, nonce, peers: Vec::new() })
    }

    /// Bytes of the tagged words, and of the ready flags behind them, before the pool.
    pub(super) fn flags_len(&self) -> usize {
        self.flags
    }

    /// Bytes of the pool.
    pub(super) fn pool_len(&self) -> usize {
        self.pool
    }

    /// The memory.
    pub(super) fn memory(&self) -> &Arc<DeviceBuffer> {
        &self.memory
    }

    /// The reason why the memory has no fabric handle, though it should have.
    pub(super) fn fabric_refusal(&self) -> Option<&str> {
        self.fabric_refusal.as_deref()
    }

    /// The handle by which other processes open the window.
    fn handle(&self) -> Result<([u8; 64], EpGpuHandleKind)> {
        if let Some(FabricExport { handle, len_bytes }) = self.memory.fabric_export() {
            return Ok((handle.0, EpGpuHandleKind::Fabric { len: len_bytes as u64 }));
        }
        let exported =
            Exporter::default().export(self.memory.address(), self.memory.len_bytes())?;
        match exported {
            MemoryExport::Legacy(export) => Ok((export.handle.0, EpGpuHandleKind::Host)),
            MemoryExport::Descriptors(_) => {
                Err(Error::invalid("the window's memory has no handle for other processes"))
            }
        }
    }

    /// A card with all that peers need to reach the window, and this rank's position.
    pub(super) fn card(&self, ranks: usize, position: Position) -> Result<EpGpuCard> {
        let (handle, kind) = self.handle()?;
        Ok(EpGpuCard {
            rank: self.me as u32,
            ranks: ranks as u32,
            marks: self.flags as u32,
            pool: self.pool as u64,
            nonce: self.nonce,
            process: process()?,
            host: own_host()?,
            handle,
            kind,
            pid: std::process::id(),
            started: own_start()?,
            next_call: position.next_call,
            generation: position.generation,
        })
    }

    /// Opens a peer's window, unless the rank is absent. Called for ranks 0, 1, and so on, in
    /// order. Returns the peer's process, if it is another one that can be watched.
    pub(super) fn open(&mut self, card: Option<&EpGpuCard>) -> Result<Option<Process>> {
        let Some(card) = card else {
            self.peers.push(None);
            return Ok(None);
        };
        let window = match card.rank as usize == self.me {
            true => PeerWindow::Local(Arc::clone(&self.memory)),
            false => self.reach(card)?,
        };
        let watched = match &window {
            PeerWindow::Imported(_) if card.host == own_host()? => {
                watch::process(card.pid, card.started)
            }
            _ => None,
        };
        self.peers.push(Some(window));
        Ok(watched)
    }

    fn reach(&self, card: &EpGpuCard) -> Result<PeerWindow> {
        let what = || format!("opening the window of rank {}", card.rank);
        let os = |source| Error::Os { what: what(), source };
        if card.process == process()? {
            let memory = WINDOWS.lock().get(&card.nonce).and_then(Weak::upgrade);
            let memory = memory.ok_or_else(|| os(io::Error::other("it is gone")))?;
            memory.allow_peer(self.context)?;
            return Ok(PeerWindow::Local(memory));
        }
        let mapping = match card.kind {
            EpGpuHandleKind::Fabric { len } => self.map_fabric(card, len)?,
            EpGpuHandleKind::Host if card.host == own_host()? => {
                IMPORTER.open(self.context, PeerId(card.process), IpcHandle(card.handle))?
            }
            EpGpuHandleKind::Host => {
                let why = "it is on another host, and its memory has no fabric handle";
                return Err(os(io::Error::new(io::ErrorKind::Unsupported, why)));
            }
        };
        let is_it = self.read_word(mapping.address() + NONCE_AT)? == card.nonce;
        is_it
            .then_some(PeerWindow::Imported(mapping))
            .ok_or_else(|| os(io::Error::other("it is another process's memory")))
    }

    fn map_fabric(&self, card: &EpGpuCard, len: u64) -> Result<Arc<Mapping>> {
        let len_bytes = usize::try_from(len).unwrap_or(usize::MAX);
        if len_bytes < self.memory.len_bytes() {
            let own = self.memory.len_bytes();
            let why = format!("the window of rank {} has {len} bytes, and not {own}", card.rank);
            return Err(Error::invalid(why));
        }
        let export = FabricExport { handle: FabricHandle(card.handle), len_bytes };
        Ok(Importer::map_fabric(self.context, export)?)
    }

    fn read_word(&self, address: u64) -> Result<u64> {
        let stream = Stream::new(self.context, Priority::Normal)?;
        let word = PinnedBuffer::new(self.context, 8)?;
        // SAFETY: a window has that word, and both live until the stream has been waited for.
        unsafe { stream.copy(word.address(), address, 8, Direction::DeviceToHost)? };
        stream.synchronize()?;
        // SAFETY: the copy has ended.
        let bytes = unsafe { word.as_slice() };
        Ok(u64::from_ne_bytes(bytes.first_chunk().copied().unwrap_or_default()))
    }

    /// This GPU's addresses of the ranks' windows; 0 for absent ranks.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        self.peers.iter().map(|peer| peer.as_ref().map_or(0, PeerWindow::address))
    }
}

/// Memory with a fabric handle; or memory without one, and the reason.
fn allocate_in_fabric(
    context: &'static Context,
    len: usize,
) -> Result<(DeviceBuffer, Option<String>)> {
    match DeviceBuffer::in_fabric(context, len) {
        Ok(memory) => Ok((memory, None)),
        Err(lost @ GpuError::Poisoned { .. }) => Err(lost.into()),
        Err(refused) => Ok((DeviceBuffer::new(context, len)?, Some(refused.to_string()))),
    }
}

fn own_host() -> Result<[u8; HOST_LEN]> {
    host_of(&HostIdentity::of_this_process())
}

fn random() -> Result<u64> {
    getrandom::u64().map_err(|e| Error::Os {
        what: "drawing a random number".to_owned(),
        source: io::Error::other(e),
    })
}

/// A number of this process that no other has.
fn process() -> Result<u64> {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    match NUMBER.get() {
        Some(number) => Ok(*number),
        None => {
            let number = random()?;
            Ok(*NUMBER.get_or_init(|| number))
        }
    }
}
