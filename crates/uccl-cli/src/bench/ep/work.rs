//! What one rank does in each round: every kind of call, and beside each a copy of as many bytes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use uccl_device::{
    CpuList,
    affinity::{allowed_cpus, keep_on},
};
use uccl_ep::{
    Config, Exchange, Group,
    combine::{Combine, Combined, Results, Sends, Sums},
    dispatch::{Dispatch, Handle, Layout, Outputs, Payload, Room, ScalesOut, Tokens},
    numerics::{bf16, e4m3, quantise::Scales},
    record::{Record, Row},
    routing::{Choices, Routing},
};

use super::{
    shape::Shape,
    task::{Ranks, Timed},
};

/// Rounds before those that are timed: memory is touched, and the first one is verified.
const WARM_UP: u32 = 3;
/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Joins the group, and measures.
pub(crate) fn measure(
    ranks: Ranks,
    rank: usize,
    exchange: &mut Exchange<'_>,
) -> Result<Vec<Timed>> {
    let shape = ranks.shape;
    pin(rank, shape.ranks)?;
    let config = Config {
        rank,
        ranks: shape.ranks,
        pool: pool(shape),
        timeout: TIMEOUT,
        masks_late: false,
        node: None,
        network: None,
    };
    let group = Group::join(config, exchange)?;
    let choices = shape.choices(rank);
    let routing = |experts: &[i32]| {
        let Shape { num_topk: top_k, num_experts, ranks, .. } = shape;
        Routing::new(Choices { experts, top_k, num_experts, ranks }).map(Arc::new)
    };
    let rank = Rank {
        shape,
        meet: routing(&[])?,
        routing: routing(&choices)?,
        choices,
        x: (0..shape.ranks).map(|rank| shape.tokens(rank)).collect(),
        group,
    };
    let mut memory = Memory::of(shape, &rank.choices);
    let mut all: Vec<_> = Work::ALL.iter().map(|work| rank.timed(*work)).collect();
    for round in 0..WARM_UP + ranks.rounds {
        let mut handle = None;
        for (work, timed) in Work::ALL.iter().zip(&mut all) {
            rank.meet()?;
            let started = Instant::now();
            rank.call(*work, &mut memory, &mut handle)?;
            let call = started.elapsed();
            if round == 0 {
                rank.verify(*work, &memory, handle.as_deref())?;
            }
            rank.meet()?;
            let started = Instant::now();
            memory.copy(timed.bytes as usize);
            let copy = started.elapsed();
            if round >= WARM_UP {
                timed.calls.push(call);
                timed.copies.push(copy);
            }
        }
    }
    Ok(all)
}

/// Keeps a rank on a CPU of its own, if there are enough: two that wait for each other on one CPU measure the scheduler.
fn pin(rank: usize, ranks: usize) -> Result<()> {
    let allowed: Vec<_> = allowed_cpus().iter().flat_map(CpuList::iter).collect();
    if ranks <= allowed.len() {
        keep_on(&allowed[rank..=rank].iter().copied().collect())?;
    }
    Ok(())
}

/// A kind of call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    LowLatencyFp8,
    LowLatency,
    LowLatencyCombine,
    Elastic,
    ElasticCombine,
}

impl Work {
    /// In the order of a round: a combine takes what the dispatch before it gave.
    const ALL: [Self; 5] = [
        Self::LowLatencyFp8,
        Self::LowLatency,
        Self::LowLatencyCombine,
        Self::Elastic,
        Self::ElasticCombine,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::LowLatencyFp8 => "low latency dispatch, FP8",
            Self::LowLatency => "low latency dispatch, bf16",
            Self::LowLatencyCombine => "low latency combine",
            Self::Elastic => "elastic dispatch, expanded",
            Self::ElasticCombine => "elastic combine, expanded",
        }
    }

    /// Bytes of a row.
    fn row(self, hidden: usize) -> usize {
        match self {
            Self::LowLatencyFp8 => hidden + 4 * Scales::Exact.words(hidden),
            _ => 2 * hidden,
        }
    }
}

/// Room for two dispatches and two combines.
fn pool(shape: Shape) -> usize {
    let Shape { ranks, num_tokens, hidden, num_topk: top_k, .. } = shape;
    let record = Record { payload: 2 * hidden, scales: 0, top_k };
    let row = Row { values: 2 * hidden, weights: top_k, slots: top_k };
    2 * (ranks * record.area(shape.local(), num_tokens) + row.place(num_tokens))
}

/// Memory that calls use again in each round.
struct Memory {
    rows: Vec<u16>,
    scales: Vec<u32>,
    row_weights: Vec<f32>,
    combined: Vec<u16>,
    ones: Vec<f32>,
    copied: [Vec<u8>; 2],
}

impl Memory {
    fn of(shape: Shape, choices: &[i32]) -> Self {
        let Shape { num_tokens, hidden, .. } = shape;
        let rows = shape.local() * shape.rows_of_expert();
        let selected = choices.len() * 2 * hidden;
        Self {
            rows: vec![0; rows * hidden],
            scales: vec![0; rows * Scales::Exact.words(hidden)],
            row_weights: vec![0.0; rows],
            combined: vec![0; num_tokens * hidden],
            ones: vec![1.0; choices.len()],
            copied: [vec![1; selected], vec![2; selected]],
        }
    }

    fn copy(&mut self, len: usize) {
        let [from, to] = &mut self.copied;
        to[..len].copy_from_slice(std::hint::black_box(&from[..len]));
    }
}

/// One rank.
struct Rank {
    shape: Shape,
    group: Arc<Group>,
    /// Of no token.
    meet: Arc<Routing>,
    routing: Arc<Routing>,
    choices: Vec<i32>,
    /// Every rank's tokens.
    x: Vec<Vec<u16>>,
}

impl Rank {
    fn timed(&self, work: Work) -> Timed {
        let row = work.row(self.shape.hidden) as u64;
        let me = self.group.rank();
        let is_foreign =
            |choice: &&i32| self.routing.owner(**choice).is_some_and(|(rank, _)| rank != me);
        let foreign = self.choices.iter().filter(is_foreign).count() as u64;
        Timed {
            name: work.name().to_owned(),
            bytes: self.choices.len() as u64 * row,
            foreign: foreign * row,
            calls: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// Waits until all ranks are here: a dispatch of nothing.
    fn meet(&self) -> Result<()> {
        let nothing = Tokens {
            rows: std::ptr::null(),
            stride: 0,
            payload: Payload::Bytes(0),
            scales: None,
            weights: None,
            stays: true,
        };
        let routing = Arc::clone(&self.meet);
        // SAFETY: there is no token, and no row of one.
        unsafe {
            let dispatch =
                Dispatch::begin(&self.group, routing, nothing, Room::Tokens(0), &mut never)?;
            dispatch.receive(outputs(&mut [], 0), &Layout::Rows, &mut never)?;
        }
        Ok(())
    }

    fn call(
        &self,
        work: Work,
        memory: &mut Memory,
        handle: &mut Option<Arc<Handle>>,
    ) -> Result<()> {
        match (work, &handle) {
            (Work::LowLatencyFp8 | Work::LowLatency | Work::Elastic, _) => {
                *handle = Some(Arc::new(self.dispatch(work, memory)?));
                Ok(())
            }
            (Work::LowLatencyCombine | Work::ElasticCombine, Some(handle)) => {
                self.combine(work, memory, handle)
            }
            (_, None) => bail!("a combine comes behind a dispatch"),
        }
    }

    fn dispatch(&self, work: Work, memory: &mut Memory) -> Result<Handle> {
        let hidden = self.shape.hidden;
        let is_elastic = work == Work::Elastic;
        let payload = match work {
            Work::LowLatencyFp8 => Payload::Quantised(hidden, Scales::Exact),
            _ => Payload::Bytes(2 * hidden),
        };
        let tokens = Tokens {
            rows: self.x[self.group.rank()].as_ptr().cast(),
            stride: 2 * hidden,
            payload,
            scales: None,
            weights: is_elastic.then_some(memory.ones.as_ptr()),
            stays: true,
        };
        let (routing, room) = (Arc::clone(&self.routing), Room::Tokens(self.shape.num_tokens));
        // SAFETY: `x` has a row for each token and `ones` a weight for each choice, and both stay.
        let mut dispatch =
            unsafe { Dispatch::begin(&self.group, routing, tokens, room, &mut never)? };
        let counts = dispatch.counts(&mut never)?;
        let most = self.shape.rows_of_expert();
        let starts = match is_elastic {
            true => starts(&counts.of_experts()),
            false => (0..self.shape.local()).map(|expert| expert * most).collect(),
        };
        let mut outputs = outputs(&mut memory.rows, work.payload(hidden));
        if work == Work::LowLatencyFp8 {
            // As the rows of one scale are contiguous.
            let words = Scales::Exact.words(hidden);
            let words = (memory.scales.as_mut_ptr(), (words - 1) * most);
            let (words, expert_stride) = words;
            outputs.scales =
                Some(ScalesOut::Strided { words, row_stride: 1, expert_stride, word_stride: most });
        }
        outputs.weights = is_elastic.then_some(memory.row_weights.as_mut_ptr());
        // SAFETY: `memory` has as many rows, weights and scales as experts may get, and nobody else uses it.
        Ok(unsafe { dispatch.receive(outputs, &Layout::Experts(starts), &mut never)? })
    }

    fn combine(&self, work: Work, memory: &mut Memory, handle: &Arc<Handle>) -> Result<()> {
        let hidden = self.shape.hidden;
        let is_elastic = work == Work::ElasticCombine;
        let results = Results {
            rows: memory.rows.as_ptr().cast(),
            len: memory.rows.len() / hidden,
            stride: 2 * hidden,
            hidden,
            sends: if is_elastic { Sends::SumOfExperts } else { Sends::EachExpert },
            weights: None,
            is_packed: false,
            relays: None,
            stays: true,
        };
        let combined = Combined {
            rows: memory.combined.as_mut_ptr(),
            sums: if is_elastic { Sums::ByChoice } else { Sums::Weighted(memory.ones.as_ptr()) },
            bias: [None, None],
            weights: None,
        };
        // SAFETY: rows are those of the dispatch before, and stay; there is a row of sums for each token.
        unsafe {
            let combine = Combine::begin(handle, results, &mut never)?;
            combine.finish(combined, &mut never)?;
        }
        Ok(())
    }

    /// Looks at every row that the call gave.
    fn verify(&self, work: Work, memory: &Memory, handle: Option<&Handle>) -> Result<()> {
        let Shape { hidden, num_topk, .. } = self.shape;
        if matches!(work, Work::LowLatencyCombine | Work::ElasticCombine) {
            let x = &self.x[self.group.rank()];
            let is_right =
                |(have, x): (&u16, &u16)| bf16::to_f32(*have) == num_topk as f32 * bf16::to_f32(*x);
            return match memory.combined.iter().zip(x).all(is_right) {
                true => Ok(()),
                false => bail!("{}: a sum is wrong", work.name()),
            };
        }
        let Some(handle) = handle else { bail!("a dispatch leaves a handle") };
        for entry in handle.table.chunks_exact(handle.width()) {
            let (token, from) = (entry[0] as usize, entry[1] as usize);
            let x = &self.x[from][token * hidden..][..hidden];
            for row in entry[2..].iter().filter(|row| **row >= 0) {
                if !memory.has(work, self.shape, *row as usize, x) {
                    bail!("{}: row {row}, of token {token} of rank {from}, is wrong", work.name());
                }
            }
        }
        Ok(())
    }
}

impl Work {
    /// Bytes from one row to the next.
    fn payload(self, hidden: usize) -> usize {
        if self == Self::LowLatencyFp8 { hidden } else { 2 * hidden }
    }
}

impl Memory {
    /// Whether a row is a token's.
    fn has(&self, work: Work, shape: Shape, row: usize, x: &[u16]) -> bool {
        let hidden = shape.hidden;
        if work != Work::LowLatencyFp8 {
            return self.rows[row * hidden..][..hidden] == *x;
        }
        let most = shape.rows_of_expert();
        let (expert, nth) = (row / most, row % most);
        let words = Scales::Exact.words(hidden);
        let bytes =
            self.rows[row * hidden / 2..][..hidden / 2].iter().flat_map(|two| two.to_le_bytes());
        bytes.zip(x).enumerate().all(|(channel, (byte, x))| {
            let scale = self.scales[(expert * words + channel / 128) * most + nth];
            let value = e4m3::to_f32(byte) * f32::from_bits(scale);
            bf16::from_f32(value) == *x
        })
    }
}

fn never() -> bool {
    false
}

/// Where each expert's rows begin, one behind the other.
fn starts(counts: &[u32]) -> Vec<usize> {
    let next = |start: &mut usize, count: &u32| {
        let begin = *start;
        *start += *count as usize;
        Some(begin)
    };
    counts.iter().scan(0, next).collect()
}

/// Rows of `stride` bytes in this memory.
fn outputs(rows: &mut [u16], stride: usize) -> Outputs {
    Outputs {
        len: 2 * rows.len() / stride.max(1),
        rows: rows.as_mut_ptr().cast(),
        stride,
        scales: None,
        choices: None,
        weights: None,
        zeroes_foreign_weights: false,
    }
}
