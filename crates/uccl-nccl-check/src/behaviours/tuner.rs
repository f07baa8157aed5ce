//! A tuner's answers.

use std::{
    collections::hash_map::DefaultHasher,
    ffi::{c_int, c_void},
    hash::{Hash as _, Hasher as _},
    ptr::null_mut,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::{
    NcclResult,
    tuner::{ALGORITHMS, Constants, GetCollInfo, NvlDomains, PROTOCOLS},
};

use crate::{library::TunerTable, log, rank::Rank};

/// The most channels that fit into NCCL's field.
const MOST_CHANNELS: c_int = 127;
const CALLS: u64 = 10_000;
const COMMUNICATORS: [(usize, usize); 4] = [(2, 2), (8, 1), (16, 2), (1024, 128)];

pub(super) fn tuner(rank: &mut Rank) -> Result<String> {
    let (mut hash, mut took, mut chosen) = (DefaultHasher::new(), Duration::ZERO, 0);
    for (ranks, nodes) in COMMUNICATORS {
        let one = Open::new(rank, ranks, nodes)?;
        let mut random = fastrand::Rng::with_seed(ranks as u64);
        for _ in 0..CALLS / COMMUNICATORS.len() as u64 {
            let call = Call::random(&mut random);
            let start = Instant::now();
            let answer = one.ask(&call)?;
            took += start.elapsed();
            chosen += u64::from(answer.0 != call.table || answer.1 != 0);
            let bits = answer.0.map(|row| row.map(f32::to_bits));
            (bits, answer.1).hash(&mut hash);
        }
        one.close()?;
    }
    rank.tell(rank.peer(), &hash.finish().to_ne_bytes())?;
    let same = rank.hear(rank.peer())? == hash.finish().to_ne_bytes();
    ensure!(same, "two ranks have different answers to the same calls");
    let each = took / u32::try_from(CALLS).unwrap_or(u32::MAX);
    Ok(format!("{CALLS} calls, {chosen} answers of its own, {each:?} a call"))
}

/// A call of getCollInfo.
pub(crate) struct Call {
    pub(crate) collective: c_int,
    pub(crate) bytes: usize,
    pub(crate) operations: c_int,
    pub(crate) table: [[f32; PROTOCOLS]; ALGORITHMS],
    pub(crate) is_registered: c_int,
}

impl Call {
    fn random(random: &mut fastrand::Rng) -> Self {
        let mut table = [[-1.0; PROTOCOLS]; ALGORITHMS];
        for cost in table.iter_mut().flatten() {
            if random.u8(..) < 160 {
                *cost = random.f32() * 1000.0;
            }
        }
        Self {
            collective: random.i32(0..5),
            bytes: random.usize(..) >> random.u32(20..64),
            operations: random.i32(1..9),
            table,
            is_registered: random.i32(0..2),
        }
    }
}

/// A tuner of one communicator.
pub(crate) struct Open {
    context: *mut c_void,
    get: GetCollInfo,
    table: TunerTable,
}

impl Open {
    fn new(rank: &Rank, ranks: usize, nodes: usize) -> Result<Self> {
        let library = rank.library.as_ref().context("the library is loaded")?;
        let version = rank.job.version;
        let found = library.tuners().into_iter().find(|table| table.version() == version);
        let table = found.with_context(|| format!("there is no ncclTunerPlugin_v{version}"))?;
        Self::of(table, ranks, nodes)
    }

    /// Of the newest table; none if the library has no tuner.
    pub(crate) fn newest(rank: &Rank, ranks: usize, nodes: usize) -> Result<Option<Self>> {
        let library = rank.library.as_ref().context("the library is loaded")?;
        library.tuners().pop().map(|table| Self::of(table, ranks, nodes)).transpose()
    }

    fn of(table: TunerTable, ranks: usize, nodes: usize) -> Result<Self> {
        let (mut context, log) = (null_mut(), log::logger());
        let mut domains = NvlDomains { count: 1, min_ranks: 1, max_ranks: 8 };
        // SAFETY: numbers alone.
        let mut constants = unsafe { std::mem::zeroed::<Constants>() };
        // SAFETY: called as NCCL does; all places outlive the call.
        let (result, get) = unsafe {
            match table {
                TunerTable::V4(table) => {
                    let init = table.init.context("init is null")?;
                    (init(ranks, nodes, log, &mut context), table.get_coll_info)
                }
                TunerTable::V5(table) => {
                    let init = table.init.context("init is null")?;
                    let made =
                        init(&mut context, 1, ranks, nodes, log, &mut domains, &mut constants);
                    (made, table.get_coll_info)
                }
            }
        };
        ensure!(result == NcclResult::SUCCESS, "init returned {result}");
        Ok(Self { context, get: get.context("getCollInfo is null")?, table })
    }

    /// The costs and the channels after a call.
    pub(crate) fn ask(&self, call: &Call) -> Result<([[f32; PROTOCOLS]; ALGORITHMS], c_int)> {
        let (mut table, mut channels) = (call.table, 0);
        // SAFETY: the table has as many rows and columns as the call says.
        let result = unsafe {
            (self.get)(
                self.context,
                call.collective,
                call.bytes,
                call.operations,
                table.as_mut_ptr().cast(),
                ALGORITHMS as c_int,
                PROTOCOLS as c_int,
                call.is_registered,
                &mut channels,
            )
        };
        ensure!(result == NcclResult::SUCCESS, "getCollInfo returned {result}");
        for (now, before) in table.iter().flatten().zip(call.table.iter().flatten()) {
            ensure!(*before >= 0.0 || now == before, "a choice that is not possible was changed");
        }
        ensure!((0..=MOST_CHANNELS).contains(&channels), "{channels} channels: NCCL keeps 7 bits");
        Ok((table, channels))
    }

    pub(crate) fn close(self) -> Result<()> {
        let end = match self.table {
            TunerTable::V4(table) => table.end,
            TunerTable::V5(table) => table.end,
        };
        // SAFETY: the context is used no more.
        let result = unsafe { end.context("the last function is null")?(self.context) };
        ensure!(result == NcclResult::SUCCESS, "the end returned {result}");
        Ok(())
    }
}
