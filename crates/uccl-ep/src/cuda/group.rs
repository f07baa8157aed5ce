//! One rank's end of a group whose ranks have GPUs.

use std::{sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::cuda::{Context, DeviceBuffer, Function, Gpus, Grid, Priority, Stream};
use uccl_wire::ep_gpu_card::EpGpuCard;

use super::{
    kernels::Kernels,
    params::{CallParams, GroupParams, MAX_RANKS, Mask, Own, THREADS},
    status::Reports,
    told::ToldMemory,
    window::Window,
};
use crate::{
    error::{Error, Phase, Result},
    header::Header,
    joining::{Exchange, agree, all_joined},
    view::control_len,
};

/// How a rank takes part in a group.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which rank this is.
    pub rank: usize,
    /// How many ranks there are, [`MAX_RANKS`] at most.
    pub ranks: usize,
    /// Bytes of the pool in which calls are placed; all ranks have the same.
    pub pool: usize,
    /// How long a call waits for its peers.
    pub timeout: Duration,
    /// Whether a rank that is late is left out of the call and of those that follow, instead of failing the call.
    pub masks_late: bool,
    /// The GPU, by the number that the driver gives it.
    pub device: u32,
    /// Blocks of a launch; 0: as many as the GPU has multiprocessors. The blocks of all ranks on a GPU have to fit on it
    /// at the same time, because they wait for each other.
    pub blocks: u32,
}

/// One rank's end of a group. Dropping it says nothing to the others.
///
/// Calls are enqueued on a stream and do not wait. One that fails, because a peer is late, ends like any other; what it was to
/// write is then undefined, and [`check`](Self::check) and each call after it return the error. The GPU's context stays usable.
pub struct Group {
    config: Config,
    context: &'static Context,
    window: Window,
    kernels: Arc<Kernels>,
    own: DeviceBuffer,
    reports: Reports,
    told: Mutex<ToldMemory>,
}

impl Group {
    /// Joins the ranks of a group: each calls this, and each reaches the windows of all others.
    ///
    /// # Errors
    /// A rank's window cannot be reached, or ranks do not agree on the group. All ranks fail then.
    pub fn join(config: Config, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        let prepared = Self::prepare(config);
        // A rank that failed sends no card, so that the others do not wait for it in vain.
        let card = match &prepared {
            Ok((_, card)) => card.encode().to_vec(),
            Err(_) => Vec::new(),
        };
        let cards = exchange(card)?;
        let joined = prepared.and_then(|(mut group, _)| {
            group.open_all(&cards)?;
            Ok(group)
        });
        all_joined(config.rank, joined, exchange).map(Arc::new)
    }

    fn prepare(config: Config) -> Result<(Self, EpGpuCard)> {
        let Config { rank, ranks, pool, device, blocks, .. } = config;
        if rank >= ranks || ranks > MAX_RANKS {
            let why = format!("rank {rank} of {ranks}; a group on GPUs has up to {MAX_RANKS}");
            return Err(Error::invalid(why));
        }
        let context = Gpus::get().device(device)?.context()?;
        let kernels = Kernels::of(context)?;
        let window = Window::new(context, rank, ranks, pool)?;
        let own = DeviceBuffer::new(context, size_of::<Own>())?;
        let stream = Stream::new(context, Priority::Normal)?;
        // SAFETY: nobody else has it yet, and the stream is waited for.
        unsafe { stream.fill(own.address(), 0, own.len_bytes())? };
        stream.synchronize()?;
        let card = window.card(ranks)?;
        let most = context.device().multiprocessors().max(1);
        let config = Config { blocks: if blocks == 0 { most } else { blocks }, ..config };
        let reports = Reports::new(context)?;
        let told = Mutex::new(ToldMemory::new(context)?);
        Ok((Self { config, context, window, kernels, own, reports, told }, card))
    }

    fn open_all(&mut self, cards: &[Option<Vec<u8>>]) -> Result<()> {
        let Config { rank: me, ranks, .. } = self.config;
        if cards.len() != ranks {
            return Err(Error::invalid(format!("{} cards for {ranks} ranks", cards.len())));
        }
        for (rank, card) in cards.iter().enumerate() {
            let card = card.as_deref().unwrap_or_default();
            let card =
                EpGpuCard::decode(card).map_err(|e| Error::invalid(format!("rank {rank}: {e}")))?;
            let facts = [
                ("its rank", u64::from(card.rank), rank as u64),
                ("as the number of ranks", u64::from(card.ranks), ranks as u64),
                ("as bytes of the pool", card.pool, self.window.pool_len() as u64),
            ];
            agree(me, rank, facts)?;
            self.window.open(&card)?;
        }
        Ok(())
    }

    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.config.ranks
    }

    /// Bytes of the pool.
    #[must_use]
    pub fn pool_len(&self) -> usize {
        self.window.pool_len()
    }

    /// Where this rank's own pool begins, in the GPU's memory, for as long as the group lives.
    #[must_use]
    pub fn pool_address(&self) -> u64 {
        self.window.pool_address(self.ranks())
    }

    /// The GPU's context.
    #[must_use]
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Whether all calls have gone well that have ended.
    ///
    /// # Errors
    /// What the first call failed with that failed.
    pub fn check(&self) -> Result<()> {
        match self.reports.read() {
            Some(told) => Err(told.to_error(self.rank())),
            None => Ok(()),
        }
    }

    /// Has calls end that wait for peers. They and all calls after them fail.
    pub fn interrupt(&self) {
        self.reports.poison();
    }

    /// What kernels need to know of a call that takes so many bytes of the pool. They number and place it themselves, in the memory
    /// at `placed`, so a graph can repeat it.
    pub(super) fn call<const AGREED: usize, const TOLD: usize>(
        &self,
        len: usize,
        header: &Header<AGREED, TOLD>,
        placed: u64,
    ) -> Result<CallParams> {
        let pool = self.pool_len();
        if len > pool {
            let why = format!(
                "the call needs {len} bytes of the buffer, which has {pool}; make it with more"
            );
            return Err(Error::invalid(why));
        }
        if !placed.is_multiple_of(8) {
            return Err(Error::invalid(format!(
                "scratch memory at {placed:#x} is not aligned to 8 bytes"
            )));
        }
        Ok(CallParams {
            placed,
            len: len as u64,
            header: header.to_words(),
            agreed: 1 + AGREED as u32,
            phase: if header.phase == Phase::Combine { 2 } else { 1 },
        })
    }

    /// Enqueues that `left_out`, a bit for each rank, are left out of the calls behind it, and that `let_in` take part again. At
    /// `status`, unless it is 0, is written i32 by rank, 1 for those that are left out then.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// The stream is of the group's context. `status` is memory for as many integers, until this work has ended.
    pub unsafe fn mask(
        &self,
        (left_out, let_in): (u64, u64),
        status: u64,
        stream: &Stream,
    ) -> Result<()> {
        let ranks = self.config.ranks as u32;
        let mask =
            Mask { own: self.own.address(), set: left_out, clear: let_in, status, ranks, zero: 0 };
        let grid = Grid { blocks: 1, threads: MAX_RANKS as u32 };
        // SAFETY: the kernel takes this struct; otherwise as the caller has it.
        unsafe { stream.launch(self.kernels.mask, grid, &mask) }.map_err(Error::from)
    }

    /// Memory for what one dispatch at a time tells the host.
    pub(super) fn told(&self) -> MutexGuard<'_, ToldMemory> {
        self.told.lock()
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn params(&self) -> GroupParams {
        let mut windows = [0; MAX_RANKS];
        windows.iter_mut().zip(self.window.addresses()).for_each(|(to, at)| *to = at);
        GroupParams {
            windows,
            own: self.own.address(),
            status: self.reports.address(),
            timeout_ns: u64::try_from(self.config.timeout.as_nanos()).unwrap_or(u64::MAX),
            pool_at: control_len(self.ranks()) as u64,
            pool: self.pool_len() as u64,
            rank: self.config.rank as u32,
            ranks: self.config.ranks as u32,
            masks_late: u32::from(self.config.masks_late),
            zero: 0,
        }
    }

    /// Launches a kernel on a block for each of `rows`, or on as many blocks as the group has.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub(super) unsafe fn launch<P>(
        &self,
        stream: &Stream,
        (kernel, rows): (Function, usize),
        parameter: &P,
    ) -> Result<()> {
        let most = self.config.blocks as usize;
        let grid = Grid { blocks: rows.clamp(1, most) as u32, threads: THREADS };
        // SAFETY: as the caller has it.
        unsafe { stream.launch(kernel, grid, parameter) }.map_err(Error::from)
    }
}
