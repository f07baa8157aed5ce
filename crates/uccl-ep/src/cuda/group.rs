//! One rank's end of a group of ranks with GPUs.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::cuda::{Context, Gpus, Stream};

use super::{
    config::{Config, Reach},
    join::{Candidate, Rendezvous, may_be_direct, meet_directly, meet_via_host},
    kernels::{Kernel, Kernels},
    mailbox::CountsMailbox,
    occupancy::{Occupancy, RESERVED},
    params::{Addresses, CallParams, GroupParams, Mask, TAGGED_WORDS},
    state::State,
    status::{Reports, TOO_MANY},
    window::words_len,
    windows::{PoolHold, Windows},
};
use crate::{
    far::ProxyStats,
    shared::{
        error::{Error, Phase, Result},
        header::Header,
        join::{Exchange, Position},
        nodes::Nodes,
        places::PLACE_ALIGN,
        rank_set::{MAX_RANKS, RankSet},
        view::{self, control_len},
    },
};

/// A change of masks.
#[derive(Clone, Copy, Debug, Default)]
pub struct MaskChange {
    /// Ranks that take no part in later calls.
    pub left_out: RankSet,
    /// Ranks that take part again.
    pub let_in: RankSet,
}

/// One rank's end of a group. Dropping it tells the other ranks nothing.
///
/// Calls are enqueued on a stream and do not wait. A call that fails, because a peer is late, ends
/// like any other; its outputs are then undefined, and [`check`](Self::check) and each later call
/// return the error. The GPU's context stays usable.
pub struct Group {
    config: Config,
    context: &'static Context,
    /// The windows in which the ranks last met.
    pub(super) windows: Mutex<Arc<Windows>>,
    is_via_host: bool,
    unreached_reason: Option<String>,
    kernels: Arc<Kernels>,
    pub(super) state: State,
    pub(super) reports: Arc<Reports>,
    mailbox: Mutex<CountsMailbox>,
    /// The most blocks of a launch: fewer than asked for where a stream has fewer multiprocessors.
    blocks: AtomicU32,
    is_alone: AtomicBool,
    pool_len: usize,
    /// The address of this rank's pool.
    pool_address: AtomicU64,
    /// The ranks that are there.
    present: Mutex<RankSet>,
    pub(super) generation: AtomicU32,
    /// Held by the meeting that is under way.
    pub(super) meeting: Mutex<()>,
    /// The group's parameters for all kernels: the same for as long as the group lives.
    pub(super) params: GroupParams,
}

impl Group {
    /// Joins the ranks of a group: each calls this, and each reaches the windows of all others.
    ///
    /// # Errors
    /// A rank's window cannot be reached, or ranks do not agree on the group. All ranks fail then.
    pub fn join(config: Config, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        let is_direct = match config.reach {
            Reach::Direct => return Self::join_directly(&config, exchange)?.map(Arc::new),
            Reach::Any | Reach::Fabric | Reach::ViaHost => may_be_direct(&config, false, exchange)?,
        };
        // All ranks learn whether that succeeds, so all continue in the same way.
        let unreached_reason = match is_direct {
            true => match Self::join_directly(&config, exchange)? {
                Ok(group) => return Ok(Arc::new(group)),
                Err(why) => Some(why.to_string()),
            },
            false => None,
        };
        let (resources, met) =
            meet_via_host(&config, Resources::prepared(&config), None, exchange)?;
        let group = resources.into_group(&config, met)?;
        Ok(Arc::new(Self { unreached_reason, ..group }))
    }

    /// All ranks know of the inner error.
    fn join_directly(config: &Config, exchange: &mut Exchange<'_>) -> Result<Result<Self>> {
        let met = meet_directly(config, Resources::prepared(config), exchange)?;
        Ok(met.and_then(|(resources, met)| resources.into_group(config, met)))
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
        self.pool_len
    }

    /// The group's configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the path between ranks was given, and so needs no agreement.
    pub(super) fn is_reach_fixed(&self) -> bool {
        self.config.reach == Reach::Direct
    }

    /// Whether the path between ranks is through the host.
    #[must_use]
    pub fn is_via_host(&self) -> bool {
        self.is_via_host
    }

    /// The spread of ranks over nodes, as for [a group of the CPU](crate::Group::nodes); one node
    /// where they reach each other directly.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.via_host().map_or_else(|| Nodes::one(self.ranks()), |group| group.nodes())
    }

    /// The reason why ranks do not reach each other's GPU memory, though they are on one node, or
    /// have fabric handles.
    #[must_use]
    pub fn unreached_reason(&self) -> Option<&str> {
        self.unreached_reason.as_deref()
    }

    /// The reason why this rank's window has no fabric handle, if [`Reach::Fabric`] asked for one.
    /// The group is then as with [`Reach::Any`].
    #[must_use]
    pub fn fabric_refusal(&self) -> Option<String> {
        if self.config.reach != Reach::Fabric {
            return None;
        }
        match &**self.windows.lock() {
            Windows::Direct(window, _) => window.fabric_refusal().map(str::to_owned),
            Windows::ViaHost(_) => Some(match self.unreached_reason() {
                Some(why) => why.to_owned(),
                None => "not all ranks have one, and they are on several nodes".to_owned(),
            }),
        }
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
        !self.is_via_host() && self.config.has_flags()
    }

    fn via_host(&self) -> Option<Arc<crate::Group>> {
        self.windows.lock().host().cloned()
    }

    /// The GPU's address of this rank's own pool, valid until the ranks meet anew.
    #[must_use]
    pub fn pool_address(&self) -> u64 {
        self.pool_address.load(Ordering::Relaxed)
    }

    /// Keeps the memory of this rank's own pool.
    #[must_use]
    pub fn pool_hold(&self) -> PoolHold {
        PoolHold::of(&self.windows.lock())
    }

    /// The ranks that are there.
    #[must_use]
    pub fn present(&self) -> RankSet {
        *self.present.lock()
    }

    /// All ranks of the group.
    pub(super) fn every_rank(&self) -> RankSet {
        RankSet::first(self.ranks())
    }

    /// Notes what the host needs of these addresses. Returns the ranks that are there.
    pub(super) fn note_addresses(&self, addresses: &Addresses) -> RankSet {
        let pool = addresses.windows[self.rank()] + self.params.pool_at;
        self.pool_address.store(pool, Ordering::Relaxed);
        let ranks = addresses.windows.iter().enumerate();
        let present = ranks.filter(|(_, window)| **window != 0).map(|(rank, _)| rank).collect();
        *self.present.lock() = present;
        present
    }

    /// Changes this rank's share of its GPU.
    pub(super) fn set_occupancy(&self, Occupancy { blocks, is_alone }: Occupancy) {
        self.blocks.store(blocks_of(self.context, blocks), Ordering::Relaxed);
        self.is_alone.store(is_alone, Ordering::Relaxed);
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
        self.windows.lock().watch()?.loss(peer)
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
        let windows = self.windows.lock().addresses(self.rank()).windows;
        for (peer, window) in windows.iter().enumerate() {
            if peer != self.rank() && *window != 0 {
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
    /// A rank would be let in that is not there, or the driver refuses.
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
        let (ranks, absent) = (self.config.ranks as u32, self.every_rank() - self.present());
        if let Some(rank) = (let_in & absent).iter().next() {
            return Err(Error::invalid(format!("rank {rank} has not joined")));
        }
        let own = self.state.own();
        let mask = Mask { own, set: left_out, clear: let_in, status, ranks, zero: 0 };
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
        if !self.is_alone.load(Ordering::Relaxed) {
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
    state: State,
    reports: Arc<Reports>,
    mailbox: CountsMailbox,
}

impl Resources {
    fn prepared(config: &Config) -> Result<(Self, Candidate)> {
        let resources = Self::new(config)?;
        let (context, reports) = (resources.context, Arc::clone(&resources.reports));
        Ok((resources, Candidate { context, reports, position: Position::FIRST }))
    }

    fn new(config: &Config) -> Result<Self> {
        let Config { rank, ranks, device, .. } = *config;
        if rank >= ranks || ranks > MAX_RANKS {
            let why = format!("rank {rank} of {ranks}; a group has up to {MAX_RANKS}");
            return Err(Error::invalid(why));
        }
        let context = Gpus::get().device(device)?.context()?;
        let kernels = Kernels::of(context, ranks)?;
        let (state, mailbox) = (State::new(context)?, CountsMailbox::new(context)?);
        let reports = Arc::new(Reports::new(context)?);
        Ok(Self { context, kernels, state, reports, mailbox })
    }

    fn into_group(
        self,
        config: &Config,
        Rendezvous { windows, position }: Rendezvous,
    ) -> Result<Group> {
        let Self { context, kernels, state, reports, mailbox } = self;
        let params = params(config, &windows, (&state, &reports));
        let addresses = windows.addresses(config.rank);
        let group = Group {
            config: config.clone(),
            context,
            is_via_host: windows.host().is_some(),
            unreached_reason: None,
            kernels,
            state,
            reports,
            mailbox: Mutex::new(mailbox),
            blocks: AtomicU32::new(blocks_of(context, config.blocks)),
            is_alone: AtomicBool::new(config.is_alone),
            pool_len: windows.pool_len(),
            pool_address: AtomicU64::new(0),
            present: Mutex::new(RankSet::EMPTY),
            generation: AtomicU32::new(position.generation),
            meeting: Mutex::new(()),
            params,
            windows: Mutex::new(Arc::new(windows)),
        };
        let present = group.note_addresses(&addresses);
        group.state.begin(position, addresses, group.every_rank() - present)?;
        group.windows.lock().watch().iter().for_each(|watch| watch.begin());
        Ok(group)
    }
}

/// The most blocks of a launch, if the caller asks for so many.
fn blocks_of(context: &Context, blocks: u32) -> u32 {
    let all = context.device().multiprocessors();
    if blocks == 0 { Occupancy::of(all, RESERVED, 1).blocks } else { blocks }
}

/// The kernels' parameters of a group with such windows, and with a rank's own words and reports.
fn params(config: &Config, windows: &Windows, (state, reports): (&State, &Reports)) -> GroupParams {
    let Config { rank, ranks, timeout, masks_late, .. } = *config;
    let (control, flags) = (control_len(ranks) as u64, windows.flags_len() as u64);
    let tagged_at = if flags > 0 { control } else { 0 };
    let behind_tagged = tagged_at + words_len(ranks, TAGGED_WORDS) as u64;
    GroupParams {
        addresses: state.addresses(),
        own: state.own(),
        status: reports.address(),
        timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
        pool_at: control + flags,
        pool: windows.pool_len() as u64,
        flags_at: if flags > 0 { behind_tagged } else { 0 },
        tagged_at,
        rank: rank as u32,
        ranks: ranks as u32,
        masks_late: u32::from(masks_late),
        via_host: u32::from(windows.host().is_some()),
    }
}
