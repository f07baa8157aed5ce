//! Normal mode: one rank's inputs, and what the two devices make of them.

use std::{sync::Arc, time::Duration};

use uccl_ep::{
    Group, Result,
    combine::{Combine, Combined, Order, Results, Sends, Sums},
    cuda::{self, normal},
    dispatch::{self, Dispatch, Handle, Layout, Outputs, Payload, Room, Tokens},
    numerics::bf16,
    record::{Record, Row},
    routing::{self, Routing},
};

use super::{Gpu, Lost, Ranks, case::assert_same, world};

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
    /// Dispatches, each with its combine.
    pub(crate) rounds: usize,
    /// How many calls' bytes the pool has room for.
    pub(crate) places: usize,
    pub(crate) blocks: u32,
    /// Whether weights go with choices, and with rows that go back.
    pub(crate) has_weights: bool,
    /// Rows that each sum begins with.
    pub(crate) biases: usize,
    pub(crate) order: Order,
    /// Whether there are rows for all tokens that may come, and the host does not ask how many do.
    pub(crate) is_worst: bool,
    /// Whether tokens go once more to where they went, with the handle.
    pub(crate) is_again: bool,
    /// A rank that is left out, if any.
    pub(crate) lost: Option<(usize, Lost)>,
    /// What the last rank does wrong on the GPU.
    pub(crate) wrong: Option<Wrong>,
}

/// What no rank may do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wrong {
    /// There are so many rows for what arrives.
    FewRows(usize),
    /// So many rows go back.
    FewResults(usize),
    /// The first token chooses this expert first, and the next one second.
    Choice(i32),
    /// The host gives up while it waits for counts.
    Interrupted,
}

/// What a rank has for one round.
struct Inputs {
    tokens: usize,
    rows: Vec<u8>,
    again: Vec<u8>,
    scales: Vec<u32>,
    experts: Vec<i32>,
    goes: Vec<bool>,
    per_expert: Vec<u32>,
    weights: Vec<f32>,
    /// What its experts make of what arrives, and the weights of it.
    made: Vec<u16>,
    made_weights: Vec<f32>,
    biases: [Vec<u16>; 2],
}

/// What a rank gets of one round.
struct Got {
    /// Tokens by rank, tokens by expert of any rank, and which tokens go to which ranks. Of choices only.
    layout: (Vec<u32>, Vec<u32>, Vec<u8>),
    from: Vec<u32>,
    per_expert: Vec<u32>,
    rows: Vec<u8>,
    scales: Vec<u32>,
    choices: Vec<i32>,
    weights: Vec<f32>,
    src_info: Vec<i32>,
    again: Vec<u8>,
    sums: Vec<u16>,
    summed_weights: Vec<f32>,
}

/// What nobody has written to.
const UNTOUCHED: u8 = 0x5a;
/// Far more than any wait takes.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a rank is waited for that is left out then: longer than a busy machine keeps one rank behind another.
const SOON: Duration = Duration::from_secs(4);

impl Normal {
    /// The same with all else drawn.
    pub(crate) fn drawn(self, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let top_k = random.usize(..=8);
        let has_scales = random.bool();
        Self {
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
            is_again: random.bool(),
            ..self
        }
    }

    /// Runs it on both devices, and compares.
    pub(crate) fn run(self) {
        world(self.ranks, |ranks, me| {
            let rounds = if self.is_lost(me) { 0 } else { self.rounds };
            let inputs: Vec<_> = (0..rounds).map(|round| self.inputs(me, round)).collect();
            let expected = self.on_cpu(ranks, me, &inputs);
            ranks.meet();
            let found = self.on_gpu(ranks, me, &inputs);
            for (round, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let at = format!("{self:?}, rank {me}, round {round}");
                let bits = |values: &[f32]| -> Vec<u32> {
                    values.iter().map(|value| value.to_bits()).collect()
                };
                let (found_layout, wanted) = (&found.layout, &expected.layout);
                assert_same(&at, "tokens by rank", &found_layout.0, &wanted.0);
                assert_same(&at, "choices by expert", &found_layout.1, &wanted.1);
                assert_same(&at, "ranks of tokens", &found_layout.2, &wanted.2);
                assert_same(&at, "rows by rank", &found.from, &expected.from);
                assert_same(&at, "tokens by expert", &found.per_expert, &expected.per_expert);
                assert_same(&at, "source tokens", &found.src_info, &expected.src_info);
                assert_same(&at, "rows", &found.rows, &expected.rows);
                assert_same(&at, "scales", &found.scales, &expected.scales);
                assert_same(&at, "choices", &found.choices, &expected.choices);
                assert_same(&at, "weights", &bits(&found.weights), &bits(&expected.weights));
                assert_same(&at, "rows of the second time", &found.again, &expected.again);
                assert_same(&at, "sums", &found.sums, &expected.sums);
                let (one, other) = (&found.summed_weights, &expected.summed_weights);
                assert_same(&at, "summed weights", &bits(one), &bits(other));
            }
        });
    }

    /// What each rank is told when some do not come, or make other calls.
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
            let on_gpu = on_gpu.map(|(case, inputs)| (case, OnGpu::new(&case, &gpu, inputs)));
            ranks.meet();
            let told = on_gpu.as_ref().and_then(|(case, on_gpu)| {
                on_gpu.enqueue(case, &group, &gpu).err().map(|e| e.to_string())
            });
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            let later = group.check().err().map(|e| e.to_string());
            ranks.meet();
            told.or(later).unwrap_or_default()
        })
    }

    /// Whether it is this rank that is lost. It joins, and makes no call.
    fn is_lost(&self, rank: usize) -> bool {
        self.lost.is_some_and(|(lost, _)| lost == rank)
    }

    fn timeout(&self) -> Duration {
        match self.lost {
            Some((_, Lost::Late)) => SOON,
            _ => LIMIT,
        }
    }

    fn num_experts(&self) -> usize {
        self.ranks * self.local_experts
    }

    /// Rows that may come.
    fn most_rows(&self) -> usize {
        self.ranks * self.slots
    }

    fn row_len(&self) -> usize {
        if self.scales > 0 { self.hidden } else { 2 * self.hidden }
    }

    /// Weights of a token.
    fn num_weights(&self) -> usize {
        if self.has_weights { self.top_k } else { 0 }
    }

    /// Bytes for as many calls as there are places.
    fn pool(&self) -> usize {
        let record = Record { payload: self.row_len(), scales: self.scales, top_k: self.top_k };
        let dispatch = self.ranks * record.area(self.local_experts, self.slots);
        let slots = if self.top_k == 0 { self.ranks } else { self.ranks.min(self.top_k) };
        let combine = Row { values: 2 * self.hidden, weights: self.num_weights(), slots };
        self.places * dispatch.max(combine.place(self.slots))
    }

    fn inputs(&self, me: usize, round: usize) -> Inputs {
        let seed = (self.seed * 64 + me as u64) * 64 + round as u64;
        let mut random = fastrand::Rng::with_seed(seed);
        let tokens = match random.u8(..5) {
            // A rank that does something wrong has tokens to do it with.
            0 if self.wrong.is_none() => 0,
            _ => random.usize(1..=self.slots),
        };
        let mut experts = Vec::new();
        for _ in 0..tokens {
            let mut all: Vec<i32> = (0..self.num_experts() as i32).collect();
            random.shuffle(&mut all);
            all.resize(all.len().max(self.top_k), -1);
            let chosen = all.iter().take(self.top_k);
            experts.extend(chosen.map(|e| if random.u8(..6) == 0 { -1 } else { *e }));
        }
        if let Some(Wrong::Choice(expert)) = self.wrong.filter(|_| me + 1 == self.ranks) {
            experts[..2].copy_from_slice(&[expert, expert + 1]);
        }
        let goes = (0..tokens * self.ranks).map(|_| random.bool()).collect();
        let per_expert = (0..self.num_experts()).map(|_| random.u32(..9)).collect();
        let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random.u8(..)).collect() };
        let [rows, again] = [(); 2].map(|()| bytes(tokens * self.row_len()));
        let scales = (0..tokens * self.scales).map(|_| random.u32(..)).collect();
        let mut weights = |count: usize| -> Vec<f32> { (0..count).map(|_| random.f32()).collect() };
        let (sent, returned) =
            (weights(tokens * self.num_weights()), weights(self.most_rows() * self.num_weights()));
        let mut values = |count: usize| -> Vec<u16> {
            let value = |_| {
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
            again,
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

    fn untouched(&self, inputs: &Inputs) -> Got {
        let (rows, word) = (self.most_rows(), u32::from_ne_bytes([UNTOUCHED; 4]));
        let again = if self.is_again { rows * self.row_len() } else { 0 };
        let (ranks, experts) =
            if self.top_k == 0 { (0, 0) } else { (self.ranks, self.num_experts()) };
        Got {
            layout: (
                vec![word; ranks],
                vec![word; experts],
                vec![UNTOUCHED; inputs.tokens * ranks],
            ),
            from: vec![word; self.ranks],
            per_expert: vec![word; self.local_experts],
            rows: vec![UNTOUCHED; rows * self.row_len()],
            scales: vec![word; rows * self.scales],
            choices: vec![word.cast_signed(); rows * self.top_k],
            weights: vec![f32::from_bits(word); rows * self.num_weights()],
            src_info: vec![word.cast_signed(); rows],
            again: vec![UNTOUCHED; again],
            sums: vec![0x5a5a; inputs.tokens * self.hidden],
            summed_weights: vec![f32::from_bits(word); inputs.tokens * self.num_weights()],
        }
    }
}

/// On the CPU.
impl Normal {
    fn on_cpu(&self, ranks: &Ranks, me: usize, inputs: &[Inputs]) -> Vec<Got> {
        let config = uccl_ep::Config {
            rank: me,
            ranks: self.ranks,
            pool: self.pool(),
            timeout: self.timeout(),
            masks_late: self.lost.is_some(),
            node: None,
            network: None,
        };
        let group = Group::join(config, &mut ranks.exchange(me)).expect("it joins");
        if let Some((lost, Lost::Masked)) = self.lost {
            group.mask(lost, true).expect("a rank");
        }
        let got = inputs.iter().map(|inputs| self.round_on_cpu(&group, inputs)).collect();
        ranks.meet();
        got
    }

    fn routing(&self, inputs: &Inputs) -> Routing {
        let routing = match self.top_k {
            0 => Routing::by_rank(&inputs.goes, &inputs.per_expert, self.ranks),
            top_k => Routing::new(routing::Choices {
                experts: &inputs.experts,
                top_k,
                num_experts: self.num_experts(),
                ranks: self.ranks,
            }),
        };
        routing.expect("a routing")
    }

    fn dispatch_on_cpu(
        &self,
        (group, routing): (&Arc<Group>, &Arc<Routing>),
        inputs: &Inputs,
        (rows, is_again): (&[u8], bool),
        outputs: Outputs,
    ) -> Handle {
        let tokens = Tokens {
            rows: rows.as_ptr(),
            stride: self.row_len(),
            payload: Payload::Bytes(self.row_len()),
            scales: (self.scales > 0).then_some(dispatch::ScalesIn {
                words: inputs.scales.as_ptr(),
                count: self.scales,
                token_stride: self.scales,
                word_stride: 1,
            }),
            weights: (self.has_weights && !is_again).then_some(inputs.weights.as_ptr()),
            stays: true,
        };
        let room = Room::Tokens(self.slots);
        // SAFETY: the vectors live until the call is over, and are as long as is said.
        unsafe {
            let begun = Dispatch::begin(group, Arc::clone(routing), tokens, room, &mut || false);
            let received = begun.and_then(|d| d.receive(outputs, &Layout::Rows, &mut || false));
            received.expect("a dispatch")
        }
    }

    fn round_on_cpu(&self, group: &Arc<Group>, inputs: &Inputs) -> Got {
        let routing = Arc::new(self.routing(inputs));
        let mut got = self.untouched(inputs);
        if self.top_k > 0 {
            let layout = &mut got.layout;
            layout.2.fill(0);
            for rank in 0..self.ranks {
                layout.0[rank] = routing.to(rank).len() as u32;
                let its = rank * self.local_experts..(rank + 1) * self.local_experts;
                layout.1[its].copy_from_slice(routing.per_expert_of(rank));
                for token in routing.to(rank) {
                    layout.2[*token as usize * self.ranks + rank] = 1;
                }
            }
        }
        let mut outputs = Outputs {
            len: self.most_rows(),
            rows: got.rows.as_mut_ptr(),
            stride: self.row_len(),
            scales: (self.scales > 0).then_some(dispatch::ScalesOut::Strided {
                words: got.scales.as_mut_ptr(),
                row_stride: self.scales,
                expert_stride: 0,
                word_stride: 1,
            }),
            choices: Some(dispatch::Choices::I32(got.choices.as_mut_ptr())),
            weights: self.has_weights.then_some(got.weights.as_mut_ptr()),
            zeroes_foreign_weights: self.zeroes_foreign(),
        };
        let to = (group, &routing);
        let handle = Arc::new(self.dispatch_on_cpu(to, inputs, (&inputs.rows, false), outputs));
        let arrived = handle.counts.total();
        got.from.clone_from(&handle.counts.from);
        got.per_expert = handle.counts.of_experts();
        for (row, entry) in handle.table.chunks_exact(handle.width()).enumerate() {
            got.src_info[row] = entry[0];
        }
        if self.is_worst {
            got.choices[arrived * self.top_k..].fill(-1);
        }
        if self.is_again {
            outputs.rows = got.again.as_mut_ptr();
            (outputs.choices, outputs.weights) = (None, None);
            self.dispatch_on_cpu(to, inputs, (&inputs.again, true), outputs);
        }
        let results = Results {
            rows: inputs.made.as_ptr().cast(),
            len: self.most_rows(),
            stride: 2 * self.hidden,
            hidden: self.hidden,
            sends: Sends::Row,
            weights: self.has_weights.then_some(inputs.made_weights.as_ptr()),
            is_packed: false,
            relays: None,
            stays: true,
        };
        let bias = [0, 1].map(|nth| (nth < self.biases).then_some(inputs.biases[nth].as_ptr()));
        let sums = match self.order {
            Order::ByRank => Sums::ByRank,
            Order::ByChoice => Sums::ByChoice,
        };
        let weights = self.has_weights.then_some(got.summed_weights.as_mut_ptr());
        let combined = Combined { rows: got.sums.as_mut_ptr(), sums, bias, weights };
        // SAFETY: the vectors live until the call is over, and are as long as is said.
        unsafe {
            let combine = Combine::begin(&handle, results, &mut || false);
            combine.and_then(|c| c.finish(combined, &mut || false)).expect("a combine");
        }
        got
    }
}

/// On a GPU.
impl Normal {
    fn join(&self, ranks: &Ranks, me: usize, timeout: Duration) -> Arc<cuda::Group> {
        let config = cuda::Config {
            rank: me,
            ranks: self.ranks,
            pool: self.pool(),
            timeout,
            masks_late: self.lost.is_some(),
            device: 0,
            blocks: self.blocks,
        };
        cuda::Group::join(config, &mut ranks.exchange(me)).expect("it joins")
    }

    fn on_gpu(&self, ranks: &Ranks, me: usize, inputs: &[Inputs]) -> Vec<Got> {
        let group = self.join(ranks, me, self.timeout());
        let gpu = Gpu::new();
        if let Some((lost, Lost::Masked)) = self.lost {
            // SAFETY: there is no memory.
            unsafe { group.mask((1 << lost, 0), 0, &gpu.stream) }.expect("a mask");
        }
        let rounds: Vec<_> = inputs.iter().map(|inputs| OnGpu::new(self, &gpu, inputs)).collect();
        ranks.meet();
        // Without questions, all rounds are enqueued before any is waited for.
        for round in &rounds {
            round.enqueue(self, &group, &gpu).expect("a dispatch and its combine");
        }
        gpu.stream.synchronize().expect("kernels end well");
        group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        ranks.meet();
        let got = rounds.iter().map(|round| round.got(self, &gpu)).collect();
        ranks.meet();
        got
    }
}

/// A round's memory on the GPU: all of it there before any kernel waits, since the driver gives none then.
struct OnGpu<'a> {
    inputs: &'a Inputs,
    tokens: u64,
    again: u64,
    scales: u64,
    chosen: u64,
    told: u64,
    weights: u64,
    made: u64,
    made_weights: u64,
    biases: [u64; 2],
    scratch: [u64; 4],
    layout: normal::Layout,
    to: normal::Outputs,
    to_again: normal::Outputs,
    table: normal::Table,
    sums: u64,
    summed_weights: u64,
}

impl<'a> OnGpu<'a> {
    fn new(case: &Normal, gpu: &Gpu, inputs: &'a Inputs) -> Self {
        let blank = case.untouched(inputs);
        let given = |address: u64, is_given: bool| if is_given { address } else { 0 };
        let table = normal::Table {
            src_info: gpu.upload(&blank.src_info),
            origin: gpu.upload(&blank.src_info),
            starts: gpu.upload(&vec![0u32; 1 + case.ranks]),
            per_expert: gpu.upload(&blank.per_expert),
        };
        let scales =
            |words: u64| normal::ScalesOut { words, row_stride: case.scales, word_stride: 1 };
        let choices = match case.is_64() {
            true => gpu.upload(&blank.choices.iter().map(|c| i64::from(*c)).collect::<Vec<_>>()),
            false => gpu.upload(&blank.choices),
        };
        let to = normal::Outputs {
            len: case.most_rows(),
            rows: gpu.upload(&blank.rows),
            stride: case.row_len(),
            scales: (case.scales > 0).then(|| scales(gpu.upload(&blank.scales))),
            choices: given(choices, case.top_k > 0),
            is_64: case.is_64(),
            weights: given(gpu.upload(&blank.weights), case.has_weights),
            zeroes_foreign_weights: case.zeroes_foreign(),
            table: Some(table),
        };
        let to_again = normal::Outputs {
            rows: gpu.upload(&blank.again),
            scales: (case.scales > 0).then(|| scales(gpu.upload(&blank.scales))),
            choices: 0,
            weights: 0,
            table: None,
            ..to
        };
        let mut on_gpu = Self {
            inputs,
            tokens: gpu.upload(&inputs.rows),
            again: gpu.upload(&inputs.again),
            scales: gpu.upload(&inputs.scales),
            chosen: match (case.top_k, case.is_64()) {
                (0, _) => gpu.upload(&inputs.goes),
                (_, true) => {
                    gpu.upload(&inputs.experts.iter().map(|e| i64::from(*e)).collect::<Vec<_>>())
                }
                (_, false) => gpu.upload(&inputs.experts),
            },
            told: gpu.upload(&inputs.per_expert),
            weights: given(gpu.upload(&inputs.weights), case.has_weights),
            made: gpu.upload(&inputs.made),
            made_weights: given(gpu.upload(&inputs.made_weights), case.has_weights),
            biases: [0, 1].map(|nth| given(gpu.upload(&inputs.biases[nth]), nth < case.biases)),
            scratch: [0; 4],
            layout: normal::Layout {
                per_rank: gpu.upload(&blank.layout.0),
                per_expert: gpu.upload(&blank.layout.1),
                goes: gpu.upload(&blank.layout.2),
            },
            to,
            to_again,
            table,
            sums: gpu.upload(&blank.sums),
            summed_weights: given(gpu.upload(&blank.summed_weights), case.has_weights),
        };
        let len = on_gpu.routed(case).scratch_len(case.ranks);
        let lens = [len, cuda::COMBINE_SCRATCH_LEN, cuda::COMBINE_SCRATCH_LEN, len];
        on_gpu.scratch = lens.map(|len| gpu.upload(&vec![0xeeu8; len]));
        on_gpu
    }

    fn routed(&self, case: &Normal) -> normal::Routed<'static> {
        let (tokens, num_experts) = (self.inputs.tokens, case.num_experts());
        match case.top_k {
            0 => normal::Routed::Ranks(normal::Ranks {
                goes: self.chosen,
                per_expert: self.told,
                tokens,
                num_experts,
            }),
            top_k => normal::Routed::Choices(cuda::Choices {
                experts: self.chosen,
                is_64: case.is_64(),
                tokens,
                top_k,
                num_experts,
            }),
        }
    }

    fn tokens(&self, case: &Normal, rows: u64, weights: u64) -> normal::Tokens {
        normal::Tokens {
            rows,
            stride: case.row_len(),
            payload: case.row_len(),
            scales: (case.scales > 0).then_some(normal::ScalesIn {
                words: self.scales,
                count: case.scales,
                token_stride: case.scales,
                word_stride: 1,
            }),
            weights,
        }
    }

    /// The first dispatch, which asks how much arrives unless it has rows for all that may.
    fn dispatch(
        &self,
        case: &Normal,
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) -> Result<Arc<normal::Handle>> {
        let tokens = self.tokens(case, self.tokens, self.weights);
        let to = (self.scratch[0], &gpu.stream);
        // SAFETY: the memory is as long as is said, and lives until the stream has been waited for.
        unsafe {
            if let normal::Routed::Choices(choices) = self.routed(case) {
                self.layout.count(group, &choices, (self.scratch[3], &gpu.stream))?;
            }
            let dispatch =
                normal::Dispatch::begin(group, &tokens, self.routed(case), case.slots, to)?;
            let (mut outputs, wrong) = (self.to, case.wrong_of(group));
            if !case.is_worst {
                let mut is_interrupted = || matches!(wrong, Some(Wrong::Interrupted));
                let counts = dispatch.counts(&gpu.stream, LIMIT, &mut is_interrupted)?;
                outputs.len = counts.total();
            }
            if let Some(Wrong::FewRows(rows)) = wrong {
                outputs.len = rows;
            }
            dispatch.receive(&outputs, &gpu.stream).map(Arc::new)
        }
    }

    fn enqueue(&self, case: &Normal, group: &Arc<cuda::Group>, gpu: &Gpu) -> Result<()> {
        let handle = self.dispatch(case, group, gpu)?;
        let stream = &gpu.stream;
        let results = normal::Results {
            len: match case.wrong_of(group) {
                Some(Wrong::FewResults(rows)) => rows,
                _ => case.most_rows(),
            },
            rows: self.made,
            stride: 2 * case.hidden,
            hidden: case.hidden,
            weights: self.made_weights,
        };
        let combined = normal::Combined {
            rows: self.sums,
            order: case.order,
            bias: self.biases,
            weights: self.summed_weights,
        };
        // SAFETY: the memory is as long as is said, and lives until the stream has been waited for.
        unsafe {
            if case.is_again {
                let tokens = self.tokens(case, self.again, 0);
                let (routed, to) = (normal::Routed::Again(&handle), (self.scratch[1], stream));
                normal::Dispatch::begin(group, &tokens, routed, case.slots, to)?
                    .receive(&self.to_again, stream)?;
            }
            normal::Combine::begin(&handle, &results, (self.scratch[2], stream))?
                .finish(&combined, stream)
        }
    }

    fn got(&self, case: &Normal, gpu: &Gpu) -> Got {
        let (rows, tokens) = (case.most_rows(), self.inputs.tokens);
        let starts: Vec<u32> = gpu.download(self.table.starts, 1 + case.ranks);
        let again = if case.is_again { rows * case.row_len() } else { 0 };
        let choices = match case.is_64() {
            true => {
                let all: Vec<i64> = gpu.download(self.to.choices, rows * case.top_k);
                all.into_iter().map(|choice| choice as i32).collect()
            }
            false => gpu.download(self.to.choices, rows * case.top_k),
        };
        let scales = self.to.scales.map_or(0, |scales| scales.words);
        let blank = case.untouched(self.inputs).layout;
        Got {
            layout: (
                gpu.download(self.layout.per_rank, blank.0.len()),
                gpu.download(self.layout.per_expert, blank.1.len()),
                gpu.download(self.layout.goes, blank.2.len()),
            ),
            from: starts.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            per_expert: gpu.download(self.table.per_expert, case.local_experts),
            rows: gpu.download(self.to.rows, rows * case.row_len()),
            scales: gpu.download(scales, rows * case.scales),
            choices,
            weights: gpu.download(self.to.weights, rows * case.num_weights()),
            src_info: gpu.download(self.table.src_info, rows),
            again: gpu.download(self.to_again.rows, again),
            sums: gpu.download(self.sums, tokens * case.hidden),
            summed_weights: gpu.download(self.summed_weights, tokens * case.num_weights()),
        }
    }
}

impl Normal {
    fn wrong_of(&self, group: &cuda::Group) -> Option<Wrong> {
        self.wrong.filter(|_| group.rank() + 1 == group.ranks())
    }

    fn is_64(&self) -> bool {
        self.seed % 2 == 1
    }

    /// As the first interface has it, and the second has not.
    fn zeroes_foreign(&self) -> bool {
        self.order == Order::ByRank
    }
}
