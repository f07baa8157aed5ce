//! One rank's end of a group of ranks with GPUs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::{
    Process,
    cuda::{Context, DeviceBuffer, Gpus, Priority, Stream},
};
use uccl_wire::ep_gpu_card::EpGpuCard;

use super::{
    host_windows::HostWindows,
    kernels::{Kernel, Kernels},
    mailbox::CountsMailbox,
    params::{CallParams, GroupParams, MAX_RANKS, Mask, Own, TAGGED_WORDS},
    share::{GpuShare, RESERVED},
    status::{Reports, TOO_MANY},
    watch::Watch,
    window::{Window, words_len},
};
use crate::{
    far::ProxyStats,
    shared::{
        error::{Error, Phase, Result},
        header::Header,
        join::{Exchange, agree, agree_on_outcome, all_joined},
        nodes::{Node, Nodes},
        places::PLACE_ALIGN,
        view::{self, control_len},
    },
};

/// How a rank takes part in a group.
#[derive(Clone, Debug)]
pub struct Config {
    /// This rank's number.
    pub rank: usize,
    /// The number of ranks, [`MAX_RANKS`] at most.
    pub ranks: usize,
    /// Bytes of the pool in which calls are placed; all ranks have the same.
    pub pool: usize,
    /// How long a call waits for its peers.
    pub timeout: Duration,
    /// Whether a rank that is late is left out of the call and of later ones, instead of failing
    /// the call.
    pub masks_late: bool,
    /// The GPU, by the driver's number.
    pub device: u32,
    /// The most blocks of a launch, of [`GpuShare`]; 0: those of a rank that is alone on its GPU,
    /// with [`RESERVED`]. The blocks of all ranks on a GPU have to fit on it at the same time,
    /// because they wait for each other.
    pub blocks: u32,
    /// Whether no other rank is on the GPU: all blocks of a launch then begin together, or wait
    /// until they can.
    pub is_alone: bool,
    /// The path between ranks.
    pub reach: Reach,
    /// A number for this rank's node, as for [a group of the CPU](crate::Config::node).
    pub node: Option<u64>,
    /// Settings of the network between nodes, as for [a group of the CPU](crate::Config::network).
    pub network: Option<uccl_p2p::Config>,
}

/// The path between the ranks of a group. All ranks have the same value, but if some have
/// [`ViaHost`](Self::ViaHost), those with [`Any`](Self::Any) use the host too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reach {
    /// Direct access if all ranks are on one node and each reaches all windows; else the host.
    #[default]
    Any,
    /// Windows are in the GPUs' memory, and every rank stores to all of them.
    Direct,
    /// Windows are in locked host memory. Ranks of a node store to each other's; data for another
    /// node is carried by a proxy, a thread of the sender.
    ViaHost,
}

/// A change of masks, with a bit for each rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct MaskChange {
    /// Ranks that take no part in later calls.
    pub left_out: u64,
    /// Ranks that take part again.
    pub let_in: u64,
}

/// One rank's end of a group. Dropping it tells the other ranks nothing.
///
/// Calls are enqueued on a stream and do not wait. A call that fails, because a peer is late, ends
/// like any other; its outputs are then undefined, and [`check`](Self::check) and each later call
/// return the error. The GPU's context stays usable.
pub struct Group {
    config: Config,
    context: &'static Context,
    windows: Windows,
    unreached_reason: Option<String>,
    kernels: Arc<Kernels>,
    own: DeviceBuffer,
    reports: Arc<Reports>,
    mailbox: Mutex<CountsMailbox>,
    /// The most blocks of a launch: fewer than asked for where a stream has fewer multiprocessors.
    blocks: AtomicU32,
    /// The group's parameters for all kernels.
    pub(super) params: GroupParams,
}

/// The memory of the ranks' windows.
enum Windows {
    /// In GPU memory; with the thread that watches the processes of other ranks, if there are any.
    Direct(Window, Option<Watch>),
    ViaHost(Box<HostWindows>),
}

impl Windows {
    fn pool_len(&self) -> usize {
        match self {
            Self::Direct(window, _) => window.pool_len(),
            Self::ViaHost(host_windows) => host_windows.pool_len(),
        }
    }
}

impl Group {
    /// Joins the ranks of a group: each calls this, and each reaches the windows of all others.
    ///
    /// # Errors
    /// A rank's window cannot be reached, or ranks do not agree on the group. All ranks fail then.
    pub fn join(config: Config, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        let is_direct = match config.reach {
            Reach::Direct => return Self::join_directly(&config, exchange)?.map(Arc::new),
            Reach::Any | Reach::ViaHost => may_be_direct(&config, exchange)?,
        };
        // All ranks learn whether that succeeds, so all continue in the same way.
        let unreached_reason = match is_direct {
            true => match Self::join_directly(&config, exchange)? {
                Ok(group) => return Ok(Arc::new(group)),
                Err(why) => Some(why.to_string()),
            },
            false => None,
        };
        let group = Self::join_via_host(&config, exchange)?;
        Ok(Arc::new(Self { unreached_reason, ..group }))
    }

    /// All ranks know of the inner error.
    fn join_directly(config: &Config, exchange: &mut Exchange<'_>) -> Result<Result<Self>> {
        let Config { rank, ranks, pool, .. } = *config;
        let prepared = Resources::new(config).and_then(|resources| {
            let has_flags = !config.masks_late;
            let window = Window::new(resources.context, (rank, ranks), pool, has_flags)?;
            let card = window.card(ranks)?;
            Ok((resources, window, card))
        });
        // A rank that failed sends no card, so that the others do not wait for it in vain.
        let card =
            prepared.as_ref().map_or_else(|_| Vec::new(), |(.., card)| card.encode().to_vec());
        let cards = exchange(card)?;
        let joined = prepared.and_then(|(resources, mut window, _)| {
            let processes = open_all(config, &mut window, &cards)?;
            let watch = Watch::of_processes(processes, &resources.reports)?;
            Ok(resources.into_group(config, Windows::Direct(window, watch)))
        });
        agree_on_outcome(rank, joined, exchange)
    }

    fn join_via_host(config: &Config, exchange: &mut Exchange<'_>) -> Result<Self> {
        let resources = all_joined(config.rank, Resources::new(config), exchange)?;
        let Config { rank, ranks, pool, timeout, masks_late, node, .. } = *config;
        let network = config.network.clone();
        let host = crate::Config { rank, ranks, pool, timeout, masks_late, node, network };
        let group = crate::Group::join_for_device(host, exchange)?;
        let host_windows = HostWindows::new(group, resources.context, &resources.reports);
        let joined = host_windows.map(|host_windows| {
            resources.into_group(config, Windows::ViaHost(Box::new(host_windows)))
        });
        all_joined(rank, joined, exchange)
    }

    /// This rank's number.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.config.ranks
    }

    /// Bytes of the pool.
    #[must_use]
    pub fn pool_len(&self) -> usize {
        self.windows.pool_len()
    }

    /// Whether the path between ranks is through the host.
    #[must_use]
    pub fn is_via_host(&self) -> bool {
        self.via_host().is_some()
    }

    /// The spread of ranks over nodes, as for [a group of the CPU](crate::Group::nodes); one node
    /// where they reach each other directly.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.via_host().map_or_else(|| Nodes::one(self.ranks()), crate::Group::nodes)
    }

    /// The reason why ranks of one node do not reach each other's GPU memory, if [`Reach::Any`] was
    /// tried.
    #[must_use]
    pub fn unreached_reason(&self) -> Option<&str> {
        self.unreached_reason.as_deref()
    }

    /// Counts of traffic over the network; `None` if there is none.
    #[must_use]
    pub fn network_stats(&self) -> Option<uccl_p2p::Stats> {
        self.via_host()?.network_stats()
    }

    /// Counts of this rank's proxy; `None` if it has none.
    #[must_use]
    pub fn proxy_stats(&self) -> Option<ProxyStats> {
        self.via_host()?.proxy_stats()
    }

    /// Whether one launch may do a whole call, which in normal mode sends its rows in chunks. The
    /// blocks of such a launch wait for each other, so all have to see the same ranks, and none may
    /// wait for a proxy.
    #[must_use]
    pub fn can_fuse(&self) -> bool {
        !self.is_via_host() && !self.config.masks_late
    }

    fn via_host(&self) -> Option<&crate::Group> {
        match &self.windows {
            Windows::Direct(..) => None,
            Windows::ViaHost(host_windows) => Some(host_windows.group()),
        }
    }

    /// The GPU's address of this rank's own pool, valid as long as the group.
    #[must_use]
    pub fn pool_address(&self) -> u64 {
        self.params.windows[self.rank()] + self.params.pool_at
    }

    /// Fails for rows in this rank's pool, as peers may overwrite them while they are sent.
    pub(super) fn check_outside_pool(&self, rows: u64) -> Result<()> {
        let pool = self.pool_address();
        if !(pool..pool + self.pool_len() as u64).contains(&rows) {
            return Ok(());
        }
        Err(Error::invalid(
            "these rows are in the buffer, where they stay until the next call begins, which would be this one: copy them first",
        ))
    }

    /// The GPU's context.
    #[must_use]
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Whether all ended calls have succeeded.
    ///
    /// # Errors
    /// The error of the first call that failed.
    pub fn check(&self) -> Result<()> {
        match self.reports.read() {
            Some(report) => Err(report.to_error(self.rank(), |peer| self.loss(peer))),
            None => Ok(()),
        }
    }

    fn loss(&self, peer: usize) -> Option<String> {
        match &self.windows {
            Windows::Direct(_, watch) => watch.as_ref()?.loss(peer),
            Windows::ViaHost(host_windows) => host_windows.loss(peer),
        }
    }

    /// Ends the calls that wait for peers. They fail, and so do all later calls.
    pub fn interrupt(&self) {
        self.reports.poison();
    }

    /// Enqueues a message to the peers that this rank has more tokens than a call has room for, and
    /// makes no call. Their calls then fail with this reason at once, instead of at their deadline.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// The stream is of the group's context.
    pub unsafe fn announce_too_many(&self, stream: &Stream) -> Result<()> {
        if let Some(group) = self.via_host() {
            // After the earlier calls, as on the stream.
            stream.synchronize()?;
            group.report_fault(TOO_MANY);
            return Ok(());
        }
        let at = (size_of::<u64>() * view::fault_at(self.rank())) as u64;
        for (peer, window) in self.params.windows[..self.ranks()].iter().enumerate() {
            if peer != self.rank() {
                // SAFETY: the caller guarantees it; the word is within the peer's window, which
                // this rank has open.
                unsafe { stream.fill(window + at, 0xff, size_of::<u64>())? };
            }
        }
        Ok(())
    }

    /// The parameters of a call that takes so many bytes of the pool. Kernels number and place it
    /// themselves, in the memory at `placement`, so a graph can repeat it.
    pub(super) fn call<const AGREED: usize, const VALUES: usize>(
        &self,
        len: usize,
        header: &Header<AGREED, VALUES>,
        placement: u64,
    ) -> Result<CallParams> {
        let pool = self.pool_len();
        let len = len.next_multiple_of(PLACE_ALIGN);
        if len > pool {
            let why = format!(
                "the call needs {len} bytes of the buffer, which has {pool}; make it with more"
            );
            return Err(Error::invalid(why));
        }
        if !placement.is_multiple_of(8) {
            return Err(Error::invalid(format!(
                "scratch memory at {placement:#x} is not aligned to 8 bytes"
            )));
        }
        Ok(CallParams {
            placement,
            len: len as u64,
            dispatch_placement: 0,
            header: header.to_words(),
            agreed: 1 + AGREED as u32,
            phase: if header.phase == Phase::Combine { 2 } else { 1 },
            zero_copy: 0,
            zero: 0,
        })
    }

    /// Enqueues a change of masks. Unless `status` is 0, it gets an i32 by rank: 1 for those that
    /// are left out then.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// The stream is of the group's context. `status` is memory for as many integers, until this
    /// work has ended.
    pub unsafe fn mask(
        &self,
        MaskChange { left_out, let_in }: MaskChange,
        status: u64,
        stream: &Stream,
    ) -> Result<()> {
        let ranks = self.config.ranks as u32;
        let mask =
            Mask { own: self.own.address(), set: left_out, clear: let_in, status, ranks, zero: 0 };
        // SAFETY: the kernel takes this struct; for the rest, the caller guarantees it.
        unsafe { self.kernels.mask.launch(stream, 1, &mask) }
    }

    /// Memory for the report of one dispatch at a time.
    pub(super) fn mailbox(&self) -> MutexGuard<'_, CountsMailbox> {
        self.mailbox.lock()
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Launches a kernel with a block for each of `rows`, or with as many blocks as the group has.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub(super) unsafe fn launch<P>(
        &self,
        stream: &Stream,
        (kernel, rows): (Kernel, usize),
        parameter: &P,
    ) -> Result<()> {
        let blocks_of = |most: u32| rows.clamp(1, most as usize) as u32;
        let most = self.blocks.load(Ordering::Relaxed);
        if !self.config.is_alone {
            // SAFETY: the caller guarantees it.
            return unsafe { kernel.launch(stream, blocks_of(most), parameter) };
        }
        // SAFETY: the caller guarantees it.
        match unsafe { kernel.launch_together(stream, blocks_of(most), parameter) } {
            Err(why) if why.is_too_large() => {
                let there = stream.multiprocessors().filter(|there| (1..most).contains(there));
                let fewer = there.ok_or(why)?;
                self.blocks.fetch_min(fewer, Ordering::Relaxed);
                // SAFETY: the caller guarantees it; nothing was launched.
                Ok(unsafe { kernel.launch_together(stream, blocks_of(fewer), parameter) }?)
            }
            launched => Ok(launched?),
        }
    }
}

/// A rank's resources before it meets the others.
struct Resources {
    context: &'static Context,
    kernels: Arc<Kernels>,
    own: DeviceBuffer,
    reports: Arc<Reports>,
    mailbox: CountsMailbox,
    blocks: u32,
}

impl Resources {
    fn new(config: &Config) -> Result<Self> {
        let Config { rank, ranks, device, blocks, .. } = *config;
        if rank >= ranks || ranks > MAX_RANKS {
            let why = format!("rank {rank} of {ranks}; a group on GPUs has up to {MAX_RANKS}");
            return Err(Error::invalid(why));
        }
        let context = Gpus::get().device(device)?.context()?;
        let kernels = Kernels::of(context)?;
        let own = DeviceBuffer::new(context, size_of::<Own>())?;
        let stream = Stream::new(context, Priority::Normal)?;
        // SAFETY: no other code uses the memory yet, and the stream is waited for.
        unsafe { stream.fill(own.address(), 0, own.len_bytes())? };
        stream.synchronize()?;
        let all = context.device().multiprocessors();
        let blocks = if blocks == 0 { GpuShare::of(all, RESERVED, 1).blocks } else { blocks };
        let reports = Arc::new(Reports::new(context)?);
        Ok(Self { context, kernels, own, reports, mailbox: CountsMailbox::new(context)?, blocks })
    }

    fn into_group(self, config: &Config, windows: Windows) -> Group {
        let Self { context, kernels, own, reports, mailbox, blocks } = self;
        let config = Config { blocks, ..config.clone() };
        let params = params(&config, &windows, (&own, &reports));
        let (mailbox, blocks) = (Mutex::new(mailbox), AtomicU32::new(blocks));
        Group {
            blocks,
            config,
            context,
            windows,
            unreached_reason: None,
            kernels,
            own,
            reports,
            mailbox,
            params,
        }
    }
}

/// The kernels' parameters of a group with these windows, and with a rank's own words and reports.
fn params(
    config: &Config,
    windows: &Windows,
    (own, reports): (&DeviceBuffer, &Reports),
) -> GroupParams {
    let Config { rank, ranks, timeout, masks_late, .. } = *config;
    let mut params = GroupParams {
        windows: [0; MAX_RANKS],
        staging: 0,
        far: 0,
        mirrors: 0,
        ring: 0,
        own: own.address(),
        status: reports.address(),
        timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
        pool_at: control_len(ranks) as u64,
        pool: windows.pool_len() as u64,
        flags_at: 0,
        tagged_at: 0,
        rank: rank as u32,
        ranks: ranks as u32,
        masks_late: u32::from(masks_late),
        ring_slots: 0,
        via_host: u32::from(matches!(windows, Windows::ViaHost(_))),
        zero: 0,
    };
    match windows {
        Windows::Direct(window, _) => {
            params.windows.iter_mut().zip(window.addresses()).for_each(|(to, at)| *to = at);
            params.staging = params.windows[rank];
            if window.flags_len() > 0 {
                params.tagged_at = params.pool_at;
                params.flags_at = params.tagged_at + words_len(ranks, TAGGED_WORDS) as u64;
                params.pool_at += window.flags_len() as u64;
            }
        }
        Windows::ViaHost(host_windows) => host_windows.put_into(&mut params),
    }
    params
}

/// Whether all ranks are there and on one node, and none uses the host.
fn may_be_direct(config: &Config, exchange: &mut Exchange<'_>) -> Result<bool> {
    // A rank without a known node takes part in the exchange, and fails later, so that the others
    // do not wait for it in vain.
    let node = match config.reach {
        Reach::ViaHost => Vec::new(),
        _ => Node::of_this_process(config.node).map(|node| node.to_bytes()).unwrap_or_default(),
    };
    let nodes = exchange(node.clone())?;
    Ok(!node.is_empty() && nodes.iter().all(|other| other.as_ref() == Some(&node)))
}

/// Opens the windows of all ranks. Returns the processes that can be watched.
fn open_all(
    config: &Config,
    window: &mut Window,
    cards: &[Option<Vec<u8>>],
) -> Result<Vec<Option<Process>>> {
    let Config { rank: me, ranks, .. } = *config;
    if cards.len() != ranks {
        return Err(Error::invalid(format!("{} cards for {ranks} ranks", cards.len())));
    }
    let mut processes = Vec::new();
    for (rank, card) in cards.iter().enumerate() {
        let card = card.as_deref().unwrap_or_default();
        let card =
            EpGpuCard::decode(card).map_err(|e| Error::invalid(format!("rank {rank}: {e}")))?;
        let facts = [
            ("its rank", u64::from(card.rank), rank as u64),
            ("as the number of ranks", u64::from(card.ranks), ranks as u64),
            (
                "as bytes of marks, which are none where late ranks are left out,",
                u64::from(card.marks),
                window.flags_len() as u64,
            ),
            ("as bytes of the pool", card.pool, window.pool_len() as u64),
        ];
        agree(me, rank, &facts)?;
        processes.push(window.open(&card)?);
    }
    Ok(processes)
}
