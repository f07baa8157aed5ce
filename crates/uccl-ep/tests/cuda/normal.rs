//! Normal mode: one rank's inputs, and the results of the two devices.

mod faults;
mod on_cpu;
mod on_gpu;
mod ready_flags;
mod zero_copy;

use std::time::{Duration, Instant};

use uccl_ep::{
    combine::{CombineRows, Order},
    numerics::bf16,
    record::{Record, Row},
};

use self::on_gpu::GpuCalls;
use super::{
    Gpu, Loss, Masks, Route,
    case::{SOON, assert_same, choices},
    masks::{Step, steps_of},
    world,
};

/// Calls of normal mode that all ranks make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normal {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) local_experts: usize,
    /// Choices of a token; none if its ranks are given instead.
    pub(crate) top_k: usize,
    /// Values of a row of bf16; and bytes of one with scales, which is FP8.
    pub(crate) hidden: usize,
    /// Words of scales that a row comes with.
    pub(crate) scales: usize,
    /// Tokens of a rank at most.
    pub(crate) slots: usize,
    /// Whether every rank has `slots` tokens.
    pub(crate) is_full: bool,
    /// Dispatches, each with its combine.
    pub(crate) rounds: usize,
    /// The number of calls that the pool has room for.
    pub(crate) places: usize,
    pub(crate) blocks: u32,
    /// Whether choices have weights, and rows that are sent back too.
    pub(crate) has_weights: bool,
    /// Rows that each sum begins with.
    pub(crate) biases: usize,
    pub(crate) order: Order,
    /// Whether there are rows for all tokens that may come, so that the host does not wait for
    /// counts.
    pub(crate) is_worst: bool,
    /// The number of rows before the host has the counts, where it waits for them; none: it waits
    /// for counts first.
    pub(crate) guess: Option<usize>,
    /// Whether received rows are a view of the window. Then there are rows for all that may come.
    pub(crate) zero_copy: bool,
    /// Whether tokens are sent once more to the same ranks, with the handle, or the layout.
    pub(crate) is_cached: bool,
    /// Whether dispatches take an earlier layout after its choices and counts were overwritten. Of
    /// choices only.
    pub(crate) has_layout: bool,
    /// The alignment of an expert's rows, if rows are by expert.
    pub(crate) by_expert: Option<usize>,
    /// Whether the row of each expert is sent back, and not their sum.
    pub(crate) is_each: bool,
    /// Whether the rows between experts' rows become 0.
    pub(crate) zero_gaps: bool,
    /// A rank that is left out, if any.
    pub(crate) lost: Option<(usize, Loss)>,
    /// Ranks that are left out for a while, in steps that replace `rounds`.
    pub(crate) masks: Option<Masks>,
    /// The fault of the last rank on the GPU.
    pub(crate) fault: Option<Fault>,
    pub(crate) route: Route,
}

/// Faults of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The outputs have this many rows.
    FewRows(usize),
    /// The tables have room for this many tokens, where rows are by expert.
    FewTokens(usize),
    /// This many rows are sent back.
    FewResults(usize),
    /// Tokens are in the buffer.
    TokensInBuffer,
    /// The rows to send back are in the buffer.
    ResultsInBuffer,
    /// The table of each row's token is overwritten before the combine.
    Spoilt,
    /// The table of each rank's first row is overwritten before the combine.
    SpoiltStarts,
    /// The first token has this expert as its first choice, and the next expert as its second.
    Choice(i32),
    /// The only rank's window is changed after the count: it says that no token is for this rank.
    Shrunk,
    /// The host gives up while it waits for counts.
    Interrupted,
}

/// A rank's inputs of one round.
struct Inputs {
    tokens: usize,
    rows: Vec<u8>,
    cached: Vec<u8>,
    scales: Vec<u32>,
    experts: Vec<i32>,
    goes: Vec<bool>,
    per_expert: Vec<u32>,
    weights: Vec<f32>,
    /// The results of its experts, with their weights, which do not depend on the received rows.
    made: Vec<u16>,
    made_weights: Vec<f32>,
    biases: [Vec<u16>; 2],
}

/// A rank's results of one round.
struct CallResults {
    /// Tokens by rank, tokens by expert of any rank, and which tokens go to which ranks. Of choices
    /// only.
    layout: (Vec<u32>, Vec<u32>, Vec<u8>),
    from: Vec<u32>,
    per_expert: Vec<u32>,
    rows: Vec<u8>,
    scales: Vec<u32>,
    choices: Vec<i32>,
    weights: Vec<f32>,
    src_info: Vec<i32>,
    /// By expert only.
    ends: Vec<u32>,
    metadata: Vec<i32>,
    cached: Vec<u8>,
    sums: Vec<u16>,
    summed_weights: Vec<f32>,
}

/// Values of bf16 that sums must be right for too: infinities, several NaNs, the largest and the
/// smallest, and a zero with a sign.
const RARE: [u16; 10] =
    [0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0x7fff, 0xffff, 0x7f7f, 0x0001, 0x8000];

/// The bytes of memory that no call has written to.
const UNTOUCHED: u8 = 0x5a;
/// Far more than any wait takes.
const LIMIT: Duration = Duration::from_secs(60);

impl Normal {
    /// The same with all other fields drawn.
    pub(crate) fn drawn(self, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let top_k = random.usize(..=8);
        let has_scales = random.bool();
        let mut drawn = Self {
            seed,
            ranks: random.usize(1..=4),
            local_experts: random.usize(1..=5),
            top_k,
            hidden: 16 * random.usize(1..=70),
            scales: if has_scales { random.usize(1..=70) } else { 0 },
            slots: random.usize(1..=self.slots),
            places: random.usize(1..=3),
            blocks: random.u32(1..=self.blocks),
            has_weights: top_k > 0 && random.bool(),
            biases: random.usize(..=2),
            order: if top_k > 0 && random.bool() { Order::ByChoice } else { Order::ByRank },
            is_worst: random.bool(),
            guess: random.bool().then(|| random.usize(..=4 * self.slots)),
            is_cached: random.bool(),
            by_expert: (top_k > 0 && random.bool()).then(|| random.usize(1..=5)),
            zero_gaps: random.bool(),
            ..self
        };
        drawn.is_each =
            drawn.by_expert.is_some() && drawn.order == Order::ByChoice && random.bool();
        drawn.has_layout = drawn.top_k > 0 && random.bool();
        let can_stay = drawn.is_worst && drawn.by_expert.is_none() && drawn.lost.is_none();
        drawn.zero_copy = can_stay && matches!(drawn.route, Route::Direct) && random.bool();
        drawn.guess = drawn.guess.map(|rows| rows.min(drawn.most_rows()));
        drawn
    }

    /// Runs it on both devices, and compares.
    pub(crate) fn run(self) {
        world(self.ranks, |ranks, me| {
            let rounds = if self.is_lost(me) { 0 } else { self.steps().len() };
            let inputs: Vec<_> = (0..rounds).map(|round| self.inputs(me, round)).collect();
            let expected = self.on_cpu(ranks, me, &inputs);
            ranks.meet();
            let found = self.on_gpu(ranks, me, &inputs);
            for (round, (found, expected)) in found.iter().zip(&expected).enumerate() {
                self.compare((me, round), found, expected);
            }
        });
    }

    /// Asserts that a rank's results of a round are the same on both devices.
    fn compare(&self, (me, round): (usize, usize), found: &CallResults, expected: &CallResults) {
        let at = format!("{self:?}, rank {me}, round {round}");
        let bits =
            |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
        let (found_layout, wanted) = (&found.layout, &expected.layout);
        assert_same(&at, "tokens by rank", &found_layout.0, &wanted.0);
        assert_same(&at, "choices by expert", &found_layout.1, &wanted.1);
        assert_same(&at, "ranks of tokens", &found_layout.2, &wanted.2);
        assert_same(&at, "rows by rank", &found.from, &expected.from);
        assert_same(&at, "tokens by expert", &found.per_expert, &expected.per_expert);
        assert_same(&at, "source tokens", &found.src_info, &expected.src_info);
        assert_same(&at, "ends of experts", &found.ends, &expected.ends);
        assert_same(&at, "tables of tokens", &found.metadata, &expected.metadata);
        assert_same(&at, "rows", &found.rows, &expected.rows);
        assert_same(&at, "scales", &found.scales, &expected.scales);
        assert_same(&at, "choices", &found.choices, &expected.choices);
        assert_same(&at, "weights", &bits(&found.weights), &bits(&expected.weights));
        assert_same(&at, "rows of the second time", &found.cached, &expected.cached);
        assert_same(&at, "sums", &found.sums, &expected.sums);
        let (one, other) = (&found.summed_weights, &expected.summed_weights);
        assert_same(&at, "summed weights", &bits(one), &bits(other));
    }

    /// The time of a dispatch and its combine on the GPU, and the most tokens that a rank gets.
    pub(crate) fn time(self, rounds: u32) -> (Duration, u32) {
        let took = world(self.ranks, |ranks, me| {
            let inputs = self.inputs(me, 0);
            let group = self.join(ranks, me, LIMIT);
            let gpu = Gpu::new();
            let round = GpuCalls::new(&self, &gpu, &inputs);
            let run = |rounds: u32| {
                ranks.meet();
                let began = Instant::now();
                for _ in 0..rounds {
                    round.enqueue(&self, &group, &gpu).expect("a dispatch and its combine");
                }
                gpu.stream.synchronize().expect("kernels end well");
                began.elapsed() / rounds
            };
            run(5);
            let took = run(rounds);
            group.check().expect("calls go well");
            ranks.meet();
            (took, round.got(&self, &gpu).from.iter().sum())
        });
        took.into_iter().max().unwrap_or_default()
    }

    /// The time of a layout on the GPU: the count of tokens that callers ask for before they
    /// dispatch.
    pub(crate) fn time_layout(self, rounds: u32) -> Duration {
        let took = world(self.ranks, |ranks, me| {
            let inputs = self.inputs(me, 0);
            let group = self.join(ranks, me, LIMIT);
            let gpu = Gpu::new();
            let round = GpuCalls::new(&self, &gpu, &inputs);
            ranks.meet();
            let began = Instant::now();
            for _ in 0..rounds {
                round.lay_out(&self, &group, &gpu).expect("a layout");
            }
            gpu.stream.synchronize().expect("kernels end well");
            began.elapsed() / rounds
        });
        took.into_iter().max().unwrap_or_default()
    }

    /// Each rank's error when some do not come, or make other calls: that of a call, or after the
    /// end of all.
    pub(crate) fn fails(
        self,
        timeout: Duration,
        as_seen_by: impl Fn(usize) -> Option<Self> + Sync,
    ) -> Vec<String> {
        world(self.ranks, |ranks, me| {
            let group = self.join(ranks, me, timeout);
            let gpu = Gpu::new();
            let case = as_seen_by(me);
            let inputs = case.map(|case| case.inputs(me, 0));
            let on_gpu = case.zip(inputs.as_ref());
            let on_gpu = on_gpu.map(|(case, inputs)| (case, GpuCalls::new(&case, &gpu, inputs)));
            ranks.meet();
            let errors = on_gpu.as_ref().and_then(|(case, on_gpu)| {
                on_gpu.enqueue(case, &group, &gpu).err().map(|e| e.to_string())
            });
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            let later = group.check().err().map(|e| e.to_string());
            ranks.meet();
            [errors, later].into_iter().flatten().collect::<Vec<_>>().join(" / ")
        })
    }

    /// Whether this rank is the lost one. It joins, and makes no call.
    fn is_lost(&self, rank: usize) -> bool {
        self.lost.is_some_and(|(lost, _)| lost == rank)
    }

    fn steps(&self) -> Vec<Step> {
        steps_of(self.masks, self.rounds)
    }

    fn masks_late(&self) -> bool {
        self.lost.is_some() || self.masks.is_some_and(|masks| masks.masks_late)
    }

    fn timeout(&self) -> Duration {
        match self.lost {
            Some((_, Loss::Late)) => SOON,
            _ => LIMIT,
        }
    }

    fn num_experts(&self) -> usize {
        self.ranks * self.local_experts
    }

    /// Tokens that may come.
    fn most_tokens(&self) -> usize {
        self.ranks * self.slots
    }

    /// Rows that may come.
    fn most_rows(&self) -> usize {
        let (tokens, local) = (self.most_tokens(), self.local_experts);
        match self.by_expert {
            None => tokens,
            Some(unit) => {
                (tokens * self.top_k.min(local) + (unit - 1) * local).next_multiple_of(unit)
            }
        }
    }

    /// The rows of `tokens` tokens, with `per_expert` of them for each expert.
    fn rows_of(&self, per_expert: &[u32], tokens: usize) -> usize {
        match self.by_expert {
            None => tokens,
            Some(unit) => {
                per_expert.iter().map(|count| (*count as usize).next_multiple_of(unit)).sum()
            }
        }
    }

    fn row_len(&self) -> usize {
        if self.scales > 0 { self.hidden } else { 2 * self.hidden }
    }

    /// Weights of a token.
    fn num_weights(&self) -> usize {
        if self.has_weights { self.top_k } else { 0 }
    }

    /// Weights of a token that are sent back.
    fn num_returned_weights(&self) -> usize {
        if self.is_each { 0 } else { self.num_weights() }
    }

    /// The rows that are sent back.
    fn sends(&self) -> CombineRows {
        match self.by_expert {
            None => CombineRows::Row,
            Some(_) if self.is_each => CombineRows::EachExpert,
            Some(_) => CombineRows::SumOfExperts,
        }
    }

    /// Weights of a row that arrives.
    fn num_row_weights(&self) -> usize {
        if self.by_expert.is_some() { usize::from(self.has_weights) } else { self.num_weights() }
    }

    /// Choices of a row that arrives.
    fn num_row_choices(&self) -> usize {
        if self.by_expert.is_some() { 0 } else { self.top_k }
    }

    /// Bytes for `places` calls.
    fn pool(&self) -> usize {
        let record = Record { payload: self.row_len(), scales: self.scales, top_k: self.top_k };
        let dispatch = self.ranks * record.area(self.local_experts, self.slots);
        let slots = match (self.top_k, self.is_each) {
            (0, _) => self.ranks,
            (top_k, true) => top_k,
            (top_k, false) => top_k.min(self.ranks),
        };
        let combine = Row { values: 2 * self.hidden, weights: self.num_returned_weights(), slots };
        let spare = if self.zero_copy { self.ranks * record.stride() } else { 0 };
        self.places * (dispatch + spare).max(combine.place(self.slots))
    }

    fn inputs(&self, me: usize, round: usize) -> Inputs {
        let seed = (self.seed * 64 + me as u64) * 64 + round as u64;
        let mut random = fastrand::Rng::with_seed(seed);
        let tokens = match random.u8(..5) {
            // A rank with a fault has tokens to show it with.
            0 if self.fault.is_none() => 0,
            _ => random.usize(1..=self.slots),
        };
        let tokens = if self.is_full { self.slots } else { tokens };
        let mut experts = choices(&mut random, tokens, self.num_experts(), self.top_k);
        if let Some(Fault::Choice(expert)) = self.fault.filter(|_| me + 1 == self.ranks) {
            experts[..2].copy_from_slice(&[expert, expert + 1]);
        }
        let goes = (0..tokens * self.ranks).map(|_| random.bool()).collect();
        let per_expert = (0..self.num_experts()).map(|_| random.u32(..9)).collect();
        let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random.u8(..)).collect() };
        let [rows, cached] = [(); 2].map(|()| bytes(tokens * self.row_len()));
        let scales = (0..tokens * self.scales).map(|_| random.u32(..)).collect();
        let mut weights = |count: usize| -> Vec<f32> { (0..count).map(|_| random.f32()).collect() };
        let sent = weights(tokens * self.num_weights());
        let returned = weights(self.most_rows() * self.num_row_weights());
        let mut values = |count: usize| -> Vec<u16> {
            let value = |_| {
                if random.u8(..) == 0 {
                    return RARE[random.usize(..RARE.len())];
                }
                let exponent = random.i32(-6..=6) as f32;
                bf16::from_f32((random.f32() - 0.5) * exponent.exp2())
            };
            (0..count).map(value).collect()
        };
        let made = values(self.most_rows() * self.hidden);
        let biases = [0, 1]
            .map(|nth| if nth < self.biases { values(tokens * self.hidden) } else { Vec::new() });
        Inputs {
            tokens,
            rows,
            cached,
            scales,
            experts,
            goes,
            per_expert,
            weights: sent,
            made,
            made_weights: returned,
            biases,
        }
    }

    fn untouched(&self, inputs: &Inputs) -> CallResults {
        let (rows, word) = (self.most_rows(), u32::from_ne_bytes([UNTOUCHED; 4]));
        let cached = if self.is_cached { rows * self.row_len() } else { 0 };
        let (ranks, experts) =
            if self.top_k == 0 { (0, 0) } else { (self.ranks, self.num_experts()) };
        CallResults {
            layout: (
                vec![word; ranks],
                vec![word; experts],
                vec![UNTOUCHED; inputs.tokens * ranks],
            ),
            from: vec![word; self.ranks],
            per_expert: vec![word; self.local_experts],
            rows: vec![UNTOUCHED; rows * self.row_len()],
            scales: vec![word; rows * self.scales],
            choices: vec![word.cast_signed(); rows * self.num_row_choices()],
            weights: vec![f32::from_bits(word); rows * self.num_row_weights()],
            src_info: vec![word.cast_signed(); self.most_tokens()],
            ends: vec![word; if self.by_expert.is_some() { self.local_experts } else { 0 }],
            metadata: vec![
                word.cast_signed();
                if self.by_expert.is_some() {
                    self.most_tokens() * (2 + self.top_k)
                } else {
                    0
                }
            ],
            cached: vec![UNTOUCHED; cached],
            sums: vec![0x5a5a; inputs.tokens * self.hidden],
            summed_weights: vec![f32::from_bits(word); inputs.tokens * self.num_returned_weights()],
        }
    }

    /// Whether choices have 64 bits.
    fn is_64(&self) -> bool {
        self.seed % 2 == 1
    }

    /// Whether weights of other ranks' experts become 0: in the first interface they do, in the
    /// second they do not.
    fn zero_foreign_weights(&self) -> bool {
        self.order == Order::ByRank
    }
}
