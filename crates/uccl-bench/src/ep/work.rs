//! One rank's rounds: every kind of call, and beside each a copy of as many bytes.

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
    Block, Config, Exchange, Group,
    combine::{Combine, CombineInput, CombineOutput, slots_of},
    dispatch::{
        Dispatch, DispatchInput, DispatchOutput, Handle, Payload, Room, RowLayout, ScalesOut,
    },
    nodes::Nodes,
    numerics::{bf16, e4m3, quantise::ScaleFormat},
    record::{Areas, Record, Row},
    routing::{Choices, Routing},
};
use uccl_p2p::Transport;

use super::{
    kind::{RowCounts, Work},
    shape::Shape,
    task::{CallTimes, Ranks},
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
) -> Result<Vec<CallTimes>> {
    let shape = ranks.shape;
    pin(rank, shape.ranks)?;
    let config = Config {
        rank,
        ranks: shape.ranks,
        pool: pool(shape),
        timeout: TIMEOUT,
        masks_late: false,
        node: (shape.nodes > 1).then_some((rank / (shape.ranks / shape.nodes)) as u64),
        network: (shape.nodes > 1).then(network).transpose()?,
    };
    let group = Group::join(config, exchange)?;
    let choices = shape.choices(rank);
    let routing = |experts: &[i32]| {
        let Shape { num_topk: top_k, num_experts, ranks, .. } = shape;
        Routing::new(Choices { experts, top_k, num_experts, ranks }).map(Arc::new)
    };
    let flat = routing(&choices)?;
    let rank = Rank {
        shape,
        meet: routing(&[])?,
        relayed: match group.relays() {
            Some(nodes) => Arc::new(Routing::clone(&flat).relayed(nodes)?),
            None => Arc::clone(&flat),
        },
        flat,
        choices,
        x: (0..shape.ranks).map(|rank| shape.tokens(rank)).collect(),
        group,
    };
    let mut memory = Memory::of(&rank.group, shape, &rank.choices)?;
    let mut all: Vec<_> = Work::ALL.iter().map(|work| rank.timed(*work)).collect();
    for round in 0..WARM_UP + ranks.rounds {
        let mut handle = None;
        for (work, timed) in Work::ALL.iter().zip(&mut all) {
            if *work == Work::LowLatencyCombineInPlace {
                memory.fill_block();
            }
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

/// The network between nodes of this host: TCP, unless the environment names a transport.
fn network() -> Result<uccl_p2p::Config> {
    let network = uccl_p2p::Config::from_env()?;
    Ok(match network.transport {
        Transport::Auto => uccl_p2p::Config { transport: Transport::Tcp, ..network },
        _ => network,
    })
}

/// Keeps a rank on a CPU of its own, if there are enough: two that wait for each other on one CPU
/// measure the scheduler.
fn pin(rank: usize, ranks: usize) -> Result<()> {
    let allowed: Vec<_> = allowed_cpus().iter().flat_map(CpuList::iter).collect();
    if ranks <= allowed.len() {
        keep_on(&allowed[rank..=rank].iter().copied().collect())?;
    }
    Ok(())
}

/// Room for two dispatches and two combines.
fn pool(shape: Shape) -> usize {
    let Shape { ranks, nodes, num_tokens, hidden, num_topk: top_k, .. } = shape;
    let record = Record { payload: 2 * hidden, scales: 0, top_k };
    let nodes = Nodes { count: nodes, ranks: ranks / nodes };
    let areas = Areas { record, local_experts: shape.local(), nodes };
    let slots = top_k.max(slots_of(nodes, top_k));
    let row = Row { values: 2 * hidden, weights: top_k, slots };
    2 * (areas.place(num_tokens) + row.place(num_tokens))
}

/// Memory that all rounds share.
struct Memory {
    rows: Vec<u16>,
    /// The same rows, where peers read them.
    block: Arc<Block>,
    scales: Vec<u32>,
    row_weights: Vec<f32>,
    combined: Vec<u16>,
    ones: Vec<f32>,
    copied: [Vec<u8>; 2],
}

impl Memory {
    fn of(group: &Group, shape: Shape, choices: &[i32]) -> Result<Self> {
        let Shape { num_tokens, hidden, num_topk, ranks, .. } = shape;
        let rows = shape.local() * shape.rows_of_expert();
        let selected = choices.len() * 2 * hidden;
        Ok(Self {
            rows: vec![0; rows * hidden],
            block: group.block(2 * rows * hidden)?,
            scales: vec![0; rows * ScaleFormat::Exact.words(hidden)],
            row_weights: vec![0.0; rows.max(ranks * num_tokens * num_topk)],
            combined: vec![0; num_tokens * hidden],
            ones: vec![1.0; choices.len()],
            copied: [vec![1; selected], vec![2; selected]],
        })
    }

    /// Copies the rows to where peers read them. The combine before has ended, so no peer reads
    /// them now.
    fn fill_block(&mut self) {
        let to = self.block.as_ptr().cast::<u16>();
        // SAFETY: the block has as many bytes, and only this rank uses it now.
        unsafe { to.copy_from_nonoverlapping(self.rows.as_ptr(), self.rows.len()) };
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
    /// The routing of no tokens, for `meet`.
    meet: Arc<Routing>,
    /// The routing of this rank's tokens.
    flat: Arc<Routing>,
    /// The same through relays, where the group has any.
    relayed: Arc<Routing>,
    choices: Vec<i32>,
    /// Every rank's tokens.
    x: Vec<Vec<u16>>,
}

impl Rank {
    fn timed(&self, work: Work) -> CallTimes {
        let row = work.row(self.shape.hidden) as u64;
        let RowCounts { all, foreign, across } =
            work.counted(self.shape, self.group.rank(), &self.choices);
        let [bytes, foreign, across] = [all, foreign, across].map(|rows| rows as u64 * row);
        CallTimes {
            name: work.name().to_owned(),
            bytes,
            foreign,
            across,
            calls: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// Waits until all ranks are here, by a dispatch without tokens.
    fn meet(&self) -> Result<()> {
        let nothing = DispatchInput {
            rows: std::ptr::null(),
            stride: 0,
            payload: Payload::Bytes(0),
            scales: None,
            weights: None,
            is_stable: true,
        };
        let routing = Arc::clone(&self.meet);
        // SAFETY: there is no token, so there is no row.
        unsafe {
            let dispatch =
                Dispatch::begin(&self.group, routing, nothing, Room::Tokens(0), &mut never)?;
            dispatch.receive(outputs(&mut [], 0), &RowLayout::ByToken, &mut never)?;
        }
        Ok(())
    }

    fn call(
        &self,
        work: Work,
        memory: &mut Memory,
        handle: &mut Option<Arc<Handle>>,
    ) -> Result<()> {
        if !work.is_combine() {
            *handle = Some(Arc::new(self.dispatch(work, memory)?));
            return Ok(());
        }
        let Some(handle) = handle else { bail!("a combine comes behind a dispatch") };
        self.combine(work, memory, handle)
    }

    fn dispatch(&self, work: Work, memory: &mut Memory) -> Result<Handle> {
        let hidden = self.shape.hidden;
        let (is_elastic, is_normal) = (work == Work::Elastic, work.is_normal());
        let has_weights = is_elastic || is_normal;
        let payload = match work {
            Work::LowLatencyFp8 => Payload::Quantised(hidden, ScaleFormat::Exact),
            _ => Payload::Bytes(2 * hidden),
        };
        let tokens = DispatchInput {
            rows: self.x[self.group.rank()].as_ptr().cast(),
            stride: 2 * hidden,
            payload,
            scales: None,
            weights: has_weights.then_some(memory.ones.as_ptr()),
            is_stable: true,
        };
        let routing = Arc::clone(if work.may_relay() { &self.relayed } else { &self.flat });
        let room = match is_normal {
            true => Room::Bytes(self.group.pool_len() / 2 / 64 * 64),
            false => Room::Tokens(self.shape.num_tokens),
        };
        // SAFETY: `x` has a row for each token and `ones` a weight for each choice, and both
        // outlive the call.
        let mut dispatch =
            unsafe { Dispatch::begin(&self.group, routing, tokens, room, &mut never)? };
        let counts = dispatch.counts(&mut never)?;
        let most = self.shape.rows_of_expert();
        let layout = match (is_normal, is_elastic) {
            (true, _) => RowLayout::ByToken,
            (_, true) => RowLayout::ByExpert(starts(&counts.of_experts())),
            _ => RowLayout::ByExpert((0..self.shape.local()).map(|expert| expert * most).collect()),
        };
        let mut outputs = outputs(&mut memory.rows, work.payload(hidden));
        if work == Work::LowLatencyFp8 {
            // Column-major scales: words of one index lie side by side for all rows of an expert.
            let words = ScaleFormat::Exact.words(hidden);
            let words = (memory.scales.as_mut_ptr(), (words - 1) * most);
            let (words, expert_stride) = words;
            outputs.scales =
                Some(ScalesOut::Strided { words, row_stride: 1, expert_stride, word_stride: most });
        }
        outputs.weights = has_weights.then_some(memory.row_weights.as_mut_ptr());
        // SAFETY: `memory` has as many rows, weights and scales as experts may get, and nobody else
        // uses it.
        Ok(unsafe { dispatch.receive(outputs, &layout, &mut never)? })
    }

    fn combine(&self, work: Work, memory: &mut Memory, handle: &Arc<Handle>) -> Result<()> {
        let hidden = self.shape.hidden;
        let (sends, sums, relays) = work.sends(&memory.ones);
        let rows = match work {
            Work::LowLatencyCombineInPlace => memory.block.as_ptr().cast_const(),
            _ => memory.rows.as_ptr().cast(),
        };
        let results = CombineInput {
            rows,
            len: memory.rows.len() / hidden,
            stride: 2 * hidden,
            hidden,
            sends,
            weights: None,
            is_packed: false,
            relays,
            is_stable: true,
        };
        let combined = CombineOutput {
            rows: memory.combined.as_mut_ptr(),
            sums,
            bias: [None, None],
            weights: None,
        };
        // SAFETY: the rows are those of the dispatch before, and outlive the call; there is a row
        // of sums for each token.
        unsafe {
            let combine = Combine::begin(handle, results, &mut never)?;
            combine.finish(combined, &mut never)?;
        }
        Ok(())
    }

    /// Looks at every row that the call gave.
    fn verify(&self, work: Work, memory: &Memory, handle: Option<&Handle>) -> Result<()> {
        let hidden = self.shape.hidden;
        if work.is_combine() {
            return self.verify_sums(work, memory);
        }
        let Some(handle) = handle else { bail!("a dispatch leaves a handle") };
        for (at, entry) in handle.table.chunks_exact(handle.width()).enumerate() {
            let (token, from) = (entry[0] as usize, entry[1] as usize);
            let x = &self.x[from][token * hidden..][..hidden];
            let rows = match work.is_normal() {
                true => vec![at],
                false => entry[2..].iter().filter_map(|row| usize::try_from(*row).ok()).collect(),
            };
            for row in rows {
                if !memory.has(work, self.shape, row, x) {
                    bail!("{}: row {row}, of token {token} of rank {from}, is wrong", work.name());
                }
            }
        }
        Ok(())
    }

    /// Looks at every sum: experts changed nothing, so each is a multiple of its token.
    fn verify_sums(&self, work: Work, memory: &Memory) -> Result<()> {
        let Shape { ranks, hidden, num_topk, .. } = self.shape;
        let x = self.x[self.group.rank()].chunks(hidden);
        for (token, (sum, x)) in memory.combined.chunks(hidden).zip(x).enumerate() {
            let goes =
                |rank: &usize| self.flat.tokens_to(*rank).binary_search(&(token as u32)).is_ok();
            let times = match work.is_normal() {
                true => (0..ranks).filter(goes).count(),
                false => num_topk,
            };
            let is_right =
                |(have, x): (&u16, &u16)| bf16::to_f32(*have) == times as f32 * bf16::to_f32(*x);
            if !sum.iter().zip(x).all(is_right) {
                bail!("{}: the sum of token {token} is wrong", work.name());
            }
        }
        Ok(())
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
        let words = ScaleFormat::Exact.words(hidden);
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
fn outputs(rows: &mut [u16], stride: usize) -> DispatchOutput {
    DispatchOutput {
        len: 2 * rows.len() / stride.max(1),
        rows: rows.as_mut_ptr().cast(),
        stride,
        scales: None,
        choices: None,
        weights: None,
        zero_foreign_weights: false,
    }
}
