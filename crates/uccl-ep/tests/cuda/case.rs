//! One rank's inputs, and the results of the two devices.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_ep::{
    Group, RankSet, Result,
    combine::{Combine, CombineInput, CombineOutput, CombineRows, SumOrder},
    cuda::{self, low_latency},
    dispatch::{Dispatch, DispatchInput, DispatchOutput, Payload, Room, RowLayout, ScalesOut},
    numerics::{bf16, logfmt, quantise::ScaleFormat},
    record::{Record, Row},
    routing::{Choices, Routing},
};

use super::{
    Gpu, Masks, Ranks, Reference, Route,
    masks::{Step, mask_on_gpu, steps_of},
    world,
};

/// Calls that all ranks make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) local_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) hidden: usize,
    pub(crate) format: Format,
    /// Whether rows go back as LogFMT-10.
    pub(crate) is_packed: bool,
    /// Tokens of a rank at most.
    pub(crate) slots: usize,
    /// Dispatches, each with its combine.
    pub(crate) rounds: usize,
    /// The number of calls that the pool has room for.
    pub(crate) places: usize,
    pub(crate) blocks: u32,
    /// The time for which the last rank leaves returned rows where they are, before it sums them.
    pub(crate) late: Duration,
    /// A rank that is left out, if any.
    pub(crate) lost: Option<(usize, Loss)>,
    /// Ranks that are left out for a while, in steps that replace `rounds`.
    pub(crate) masks: Option<Masks>,
    pub(crate) route: Route,
}

/// How rows are quantised on their way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Format {
    Bf16,
    Fp8(ScaleFormat),
    /// With this global scale, which is in the GPU's memory if the seed is odd.
    Nvfp4(f32),
}

/// A rank's inputs of one round.
pub(super) struct Inputs {
    rows: Vec<u16>,
    pub(super) experts: Vec<i32>,
    weights: Vec<f32>,
    /// The results of its experts, which do not depend on the received rows.
    made: Vec<u16>,
}

/// A rank's results of one round.
#[derive(PartialEq)]
pub(super) struct CallResults {
    pub(super) rows: Vec<u8>,
    scales: Vec<u32>,
    count: Vec<u32>,
    src_info: Vec<i32>,
    layout_range: Vec<i64>,
    pub(super) sums: Vec<u16>,
}

/// The wait for a rank that is then left out, or that has failed: longer than a busy machine keeps
/// one rank behind another.
pub(super) const SOON: Duration = Duration::from_secs(4);
/// The wait for the rest of a call of which most has come.
pub(super) const REST: Duration = Duration::from_secs(2);
/// Far more than any wait of a group of many ranks takes, which have a processor or two.
pub(super) const LIMIT: Duration = Duration::from_secs(100);

/// How a rank is lost.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Loss {
    /// The others leave it out when it is late.
    Late,
    /// The others leave it out before the calls.
    Masked,
}

/// The bytes of memory that no call has written to.
const UNTOUCHED: u8 = 0x5a;

impl Case {
    /// Runs it on both devices, and compares.
    pub(crate) fn run(self) {
        world(self.ranks, |ranks, me| {
            let rounds = self.steps().len();
            let inputs: Vec<_> = (0..rounds).map(|round| self.inputs(me, round)).collect();
            // A rank that is lost joins, and makes no call.
            let inputs =
                if self.lost.is_some_and(|(lost, _)| lost == me) { &[] } else { &inputs[..] };
            let expected = self.on_cpu(ranks, me, inputs);
            ranks.meet();
            let found = self.on_gpu(ranks, me, inputs);
            for (round, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let at = format!("{self:?}, rank {me}, round {round}");
                assert_same(&at, "counts", &found.count, &expected.count);
                assert_same(&at, "ranges", &found.layout_range, &expected.layout_range);
                assert_same(&at, "source tokens", &found.src_info, &expected.src_info);
                assert_same(&at, "rows", &found.rows, &expected.rows);
                assert_same(&at, "scales", &found.scales, &expected.scales);
                assert_same(&at, "sums", &found.sums, &expected.sums);
            }
        });
    }

    fn num_experts(&self) -> usize {
        self.ranks * self.local_experts
    }

    fn steps(&self) -> Vec<Step> {
        steps_of(self.masks, self.rounds)
    }

    /// A rank that is masked is not waited for.
    fn timeout(&self) -> Duration {
        match self.lost {
            Some((_, Loss::Late)) => SOON,
            _ => LIMIT,
        }
    }

    fn masks_late(&self) -> bool {
        self.lost.is_some() || self.masks.is_some_and(|masks| masks.masks_late)
    }

    fn expert_rows(&self) -> usize {
        self.ranks * self.slots
    }

    fn row_len(&self) -> usize {
        match self.format {
            Format::Bf16 => 2 * self.hidden,
            Format::Fp8(_) => self.hidden,
            Format::Nvfp4(_) => self.hidden / 2,
        }
    }

    fn payload(&self) -> Payload {
        match self.format {
            Format::Bf16 => Payload::Bytes(2 * self.hidden),
            Format::Fp8(how) => Payload::Quantised(self.hidden, how),
            Format::Nvfp4(global_scale) => Payload::Nvfp4(self.hidden, global_scale),
        }
    }

    /// Words of a row's scales.
    fn words(&self) -> usize {
        match self.format {
            Format::Bf16 => 0,
            Format::Fp8(how) => how.words(self.hidden),
            Format::Nvfp4(_) => self.hidden / 64,
        }
    }

    /// Rows of tiles that an expert's scales have, if they are in tiles.
    fn tile_rows(&self) -> Option<usize> {
        matches!(self.format, Format::Nvfp4(_)).then(|| self.expert_rows().div_ceil(128))
    }

    /// Words of all scales that may arrive.
    fn scales_len(&self) -> usize {
        let rows = self.tile_rows().map_or(self.expert_rows(), |tiles| tiles * 128);
        self.local_experts * rows * self.words()
    }

    /// Where the records of the second rank are in a place.
    pub(super) fn area(&self) -> Range<usize> {
        let area = self.record().area(self.local_experts, self.slots);
        let first = Record::first_at(self.local_experts);
        area + first..2 * area
    }

    fn record(&self) -> Record {
        Record { payload: self.row_len(), scales: self.words(), top_k: self.top_k }
    }

    /// Bytes for `places` calls.
    pub(super) fn pool(&self) -> usize {
        let dispatch = self.ranks * self.record().area(self.local_experts, self.slots);
        let values = match self.is_packed {
            true => logfmt::max_len(self.hidden),
            false => 2 * self.hidden,
        };
        let combine = Row { values, weights: 0, slots: self.top_k };
        self.places * dispatch.max(combine.place(self.slots))
    }

    fn inputs(&self, me: usize, round: usize) -> Inputs {
        let seed = (self.seed * 64 + me as u64) * 64 + round as u64;
        let tokens = fastrand::Rng::with_seed(seed).usize(0..=self.slots);
        self.inputs_of(me, round, tokens)
    }

    pub(super) fn inputs_of(&self, me: usize, round: usize, tokens: usize) -> Inputs {
        let seed = (self.seed * 64 + me as u64) * 64 + round as u64;
        let mut random = fastrand::Rng::with_seed(seed);
        let experts = choices(&mut random, tokens, self.num_experts(), self.top_k);
        let mut value = |spread: i32| {
            let exponent = random.i32(-spread..=spread) as f32;
            bf16::from_f32((random.f32() - 0.5) * exponent.exp2())
        };
        let mut rows: Vec<u16> = (0..tokens * self.hidden).map(|_| value(6)).collect();
        // Groups that quantisation treats differently.
        for (group, values) in rows.chunks_mut(128).enumerate() {
            let at = group % values.len();
            match group % 17 {
                3 => values.fill(0x8000 * (group as u16 & 1)),
                5 => values.iter_mut().for_each(|v| *v = *v & 0x80ff | 0x0700),
                7 => values[at] = 0x7fc1,
                9 => values.iter_mut().for_each(|v| *v &= 0x807f),
                11 => values[at] = 0x7f80,
                13 => values[at] = 0xff80,
                15 => values.iter_mut().for_each(|v| *v |= 0x7f00),
                _ => {}
            }
        }
        let made_len = self.local_experts * self.expert_rows() * self.hidden;
        let mut made: Vec<u16> = (0..made_len).map(|_| value(3)).collect();
        // Groups that packing treats differently: it takes groups with all magnitudes below 1.
        for (group, values) in made.chunks_mut(128).enumerate() {
            let at = group % values.len();
            if group % 4 > 0 {
                let large = values.iter_mut().filter(|v| **v & 0x7fff >= 0x3f80);
                large.for_each(|v| *v = *v & 0x807f | 0x3f00);
            }
            match group % 13 {
                2 => values[at] = 0,
                3 => values.iter_mut().for_each(|v| *v = *v & 0x8000 | 0x3e55),
                4 => values.iter_mut().for_each(|v| *v &= 0x807f),
                5 => values[at] = 0x7fc1,
                6 => values[at] = 0xff80,
                7 => values.iter_mut().step_by(2).for_each(|v| *v &= 0x9fff),
                8 => values.iter_mut().for_each(|v| *v &= 0xbf80),
                9 => values.fill(0),
                _ => {}
            }
        }
        let weights = (0..tokens * self.top_k).map(|_| random.f32()).collect();
        Inputs { rows, experts, weights, made }
    }

    pub(super) fn on_cpu(&self, ranks: &Ranks, me: usize, inputs: &[Inputs]) -> Vec<CallResults> {
        let reference = Reference {
            me,
            ranks: self.ranks,
            pool: self.pool(),
            timeout: self.timeout(),
            masks_late: self.masks_late(),
            lost: self.lost,
            masks: self.masks,
        };
        let rounds = inputs.iter().zip(self.steps());
        reference.run(ranks, rounds, |group, inputs, step| self.round_on_cpu(group, inputs, step))
    }

    fn round_on_cpu(&self, group: &Arc<Group>, inputs: &Inputs, step: Step) -> CallResults {
        let (rows, local, words) = (self.expert_rows(), self.local_experts, self.words());
        let choices = Choices {
            experts: &inputs.experts,
            top_k: self.top_k,
            num_experts: self.num_experts(),
            ranks: self.ranks,
        };
        let routing = Arc::new(Routing::new(choices).expect("choices"));
        let tokens = DispatchInput {
            rows: inputs.rows.as_ptr().cast(),
            stride: 2 * self.hidden,
            payload: self.payload(),
            scales: None,
            weights: None,
            is_stable: true,
        };
        let mut got = self.untouched(inputs);
        let outputs = DispatchOutput {
            len: local * rows,
            rows: got.rows.as_mut_ptr(),
            stride: self.row_len(),
            scales: (words > 0).then(|| match self.tile_rows() {
                Some(tile_rows) => ScalesOut::Tiled { words: got.scales.as_mut_ptr(), tile_rows },
                None => ScalesOut::Strided {
                    words: got.scales.as_mut_ptr(),
                    row_stride: 1,
                    expert_stride: (words - 1) * rows,
                    word_stride: rows,
                },
            }),
            choices: None,
            weights: None,
            zero_foreign_weights: false,
        };
        let layout = RowLayout::ByExpert((0..local).map(|expert| expert * rows).collect());
        let room = Room::Tokens(self.slots);
        // SAFETY: the vectors live until the calls are over, and are as long as the arguments
        // state.
        unsafe {
            let dispatch = Dispatch::begin(group, routing, tokens, room, &mut || false);
            let received = dispatch.and_then(|d| d.receive(outputs, &layout, &mut || false));
            let handle = Arc::new(received.expect("a dispatch"));
            got.count = handle.counts.of_experts();
            for entry in handle.table.chunks_exact(handle.width()) {
                for row in entry[2..].iter().filter(|row| **row >= 0) {
                    got.src_info[*row as usize] = entry[0];
                }
            }
            for expert in 0..local {
                let mut begin = 0;
                for rank in 0..self.ranks {
                    let count = i64::from(handle.counts.per_expert[rank * local + expert]);
                    got.layout_range[expert * self.ranks + rank] = begin << 32 | count;
                    begin += count;
                }
            }
            if !step.has_combine {
                return got;
            }
            let results = CombineInput {
                rows: inputs.made.as_ptr().cast(),
                len: local * rows,
                stride: 2 * self.hidden,
                hidden: self.hidden,
                sends: CombineRows::EachExpert,
                weights: None,
                is_packed: self.is_packed,
                relays: None,
                is_stable: true,
            };
            let sums = CombineOutput {
                rows: got.sums.as_mut_ptr(),
                sums: SumOrder::Weighted(inputs.weights.as_ptr()),
                bias: [None; 2],
                weights: None,
            };
            let combine = Combine::begin(&handle, results, &mut || false);
            combine.and_then(|combine| combine.finish(sums, &mut || false)).expect("a combine");
        }
        got
    }

    fn untouched(&self, inputs: &Inputs) -> CallResults {
        let rows = self.local_experts * self.expert_rows();
        let word = u32::from_ne_bytes([UNTOUCHED; 4]);
        CallResults {
            rows: vec![UNTOUCHED; rows * self.row_len()],
            scales: vec![word; self.scales_len()],
            count: vec![word; self.local_experts],
            src_info: vec![word.cast_signed(); rows],
            layout_range: vec![-1; self.num_experts()],
            sums: vec![0x5a5a; inputs.rows.len()],
        }
    }

    /// One rank's end of a group on the GPU.
    pub(crate) fn join(&self, ranks: &Ranks, me: usize, timeout: Duration) -> Arc<cuda::Group> {
        let config = self.config(me, timeout);
        cuda::Group::join(config, &mut ranks.exchange(me)).expect("it joins")
    }

    /// Ranks of one node, one of which does not describe its window.
    pub(crate) fn says_why_it_goes_by_the_host(self) {
        let errors = world(self.ranks, |ranks, me| {
            let (mut exchange, mut exchanged) = (ranks.exchange(me), 0);
            let mut spoils = |mine: Vec<u8>| {
                exchanged += 1;
                // The second exchange has the cards.
                exchange(if (me, exchanged) == (1, 2) { Vec::new() } else { mine })
            };
            let config = self.config(me, LIMIT);
            let group = cuda::Group::join(config, &mut spoils).expect("it joins");
            assert!(group.is_via_host(), "rank {me}");
            group.unreached_reason().map(str::to_owned)
        });
        let is_named = errors[0].as_ref().is_some_and(|why| why.contains("rank 1"));
        assert!(is_named && errors.iter().all(Option::is_some), "{errors:?}");
    }

    pub(super) fn config(&self, me: usize, timeout: Duration) -> cuda::Config {
        self.route.of(cuda::Config {
            rank: me,
            ranks: self.ranks,
            pool: self.pool(),
            timeout,
            masks_late: self.masks_late(),
            device: 0,
            blocks: self.blocks,
            is_alone: self.ranks == 1,
            reach: cuda::Reach::Any,
            node: None,
            network: None,
        })
    }

    /// The time of a dispatch and its combine on the GPU, one behind the other, with as many tokens
    /// as there are slots; and the work of the slowest rank's proxy for each, if it has one.
    pub(crate) fn time(self, rounds: u32) -> (Duration, Option<uccl_ep::ProxyStats>) {
        let took = world(self.ranks, |ranks, me| {
            let inputs = self.inputs_of(me, 0, self.slots);
            let group = self.join(ranks, me, LIMIT);
            let gpu = Gpu::new();
            let round = GpuCalls::new(&self, &gpu, &inputs);
            let run = |rounds: u32| {
                ranks.meet();
                let began = Instant::now();
                for _ in 0..rounds {
                    round.enqueue(&self, &group, &gpu);
                }
                gpu.stream.synchronize().expect("kernels end well");
                began.elapsed() / rounds.max(1)
            };
            run(5);
            let before = group.proxy_stats();
            let took = run(rounds);
            let after = group.proxy_stats();
            group.check().expect("calls go well");
            ranks.meet();
            (took, before.zip(after).map(|(before, after)| each(before, after, rounds)))
        });
        took.into_iter().max_by_key(|(took, _)| *took).expect("a rank")
    }

    /// Ranks that do not come, and ranks that make other calls. Returns each rank's error, empty if
    /// it has none.
    pub(crate) fn fails(
        self,
        timeout: Duration,
        as_seen_by: impl Fn(usize) -> Option<Self> + Sync,
    ) -> Vec<String> {
        self.errors(timeout, |me| as_seen_by(me).map(|case| (case, case.inputs(me, 0))))
    }

    /// Each rank's error of a dispatch of its inputs, with its view of the case; empty if it has
    /// none.
    fn errors(
        self,
        timeout: Duration,
        of_rank: impl Fn(usize) -> Option<(Self, Inputs)> + Sync,
    ) -> Vec<String> {
        world(self.ranks, |ranks, me| {
            let group = self.join(ranks, me, timeout);
            let gpu = Gpu::new();
            let given = of_rank(me);
            let on_gpu = given.as_ref().map(|(case, inputs)| GpuCalls::new(case, &gpu, inputs));
            ranks.meet();
            if let Some(((case, _), on_gpu)) = given.as_ref().zip(on_gpu) {
                // The other rank's fault may be known before all is enqueued.
                let _ = on_gpu.enqueue_dispatch(case, &group, &gpu);
            }
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            let errors = group.check().err().map(|e| e.to_string()).unwrap_or_default();
            ranks.meet();
            errors
        })
    }

    /// The first rank names one that does not come. Returns each rank's error.
    pub(crate) fn names_the_rank_that_does_not_come(self) -> Vec<String> {
        let errors = self.fails(Duration::from_millis(500), |me| (me == 0).then_some(self));
        assert_second_is_late(&errors);
        errors
    }

    /// A choice that is no expert is named, and the other rank does not wait for its tokens for
    /// long.
    pub(crate) fn names_a_wrong_choice(self) {
        let errors = self.errors(Duration::from_secs(50), |me| {
            let mut inputs = self.inputs_of(me, 0, self.slots);
            if me == 1 {
                inputs.experts[1] = self.num_experts() as i32;
            }
            Some((self, inputs))
        });
        assert!(errors[1].contains("choice 1 of token 0 is no expert"), "{errors:?}");
        assert!(errors[0].contains("rank 1"), "{errors:?}");
    }

    /// Choices of the rank with the fewest, in the first round.
    pub(crate) fn least_choices(&self) -> usize {
        (0..self.ranks).map(|me| self.inputs(me, 0).experts.len()).min().unwrap_or_default()
    }

    /// The last rank leaves without a call. Returns the others' errors, which come long before
    /// their timeouts. It leaves `before` they call: a driver may not free memory while kernels of
    /// its process run.
    pub(crate) fn loses_the_last(self, before: Duration) -> Vec<String> {
        world(self.ranks, |ranks, me| {
            let group = self.join(ranks, me, Duration::from_secs(60));
            let gpu = Gpu::new();
            let inputs = self.inputs(me, 0);
            let on_gpu = GpuCalls::new(&self, &gpu, &inputs);
            ranks.meet();
            if me + 1 == self.ranks {
                drop(group);
                ranks.meet();
                return String::new();
            }
            std::thread::sleep(before);
            // The others' faults may be known before all is enqueued.
            let _ = on_gpu.enqueue_dispatch(&self, &group, &gpu);
            let began = Instant::now();
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            assert!(began.elapsed() < Duration::from_secs(30), "after {:?}", began.elapsed());
            let errors = group.check().err().map(|e| e.to_string()).unwrap_or_default();
            ranks.meet();
            errors
        })
    }

    fn on_gpu(&self, ranks: &Ranks, me: usize, inputs: &[Inputs]) -> Vec<CallResults> {
        let group = self.join(ranks, me, self.timeout());
        let gpu = Gpu::new();
        if let Some((lost, Loss::Masked)) = self.lost {
            let change = cuda::MaskChange { left_out: RankSet::of(lost), ..Default::default() };
            // SAFETY: no memory is given: the address is 0.
            unsafe { group.mask(change, 0, &gpu.stream) }.expect("a mask");
        }
        let rounds: Vec<_> =
            inputs.iter().map(|inputs| GpuCalls::new(self, &gpu, inputs)).collect();
        ranks.meet();
        // All rounds are enqueued before any is waited for.
        for (round, step) in rounds.iter().zip(self.steps()) {
            mask_on_gpu(self.masks, (step, false), (&group, &gpu));
            let handle = round.enqueue_dispatch(self, &group, &gpu).expect("a dispatch");
            mask_on_gpu(self.masks, (step, true), (&group, &gpu));
            if step.has_combine {
                round.enqueue_combine(self, (&group, &handle), &gpu).expect("a combine");
            }
        }
        gpu.stream.synchronize().expect("kernels end well");
        group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        self.check_masks(&group, &gpu);
        ranks.meet();
        let got = rounds.iter().map(|round| round.got(self, &gpu)).collect();
        ranks.meet();
        got
    }
}

impl Case {
    /// A lost rank stays left out: the others do not wait for it again.
    fn check_masks(&self, group: &cuda::Group, gpu: &Gpu) {
        let Some((lost, _)) = self.lost.filter(|(lost, _)| *lost != group.rank()) else { return };
        let status = gpu.upload(&vec![0u32; self.ranks]);
        // SAFETY: a number for each rank, until the stream has been waited for.
        unsafe { group.mask(cuda::MaskChange::default(), status, &gpu.stream) }.expect("masks");
        gpu.stream.synchronize().expect("masks");
        let masked: Vec<u32> = gpu.download(status, self.ranks);
        let expected = (0..self.ranks).map(|rank| u32::from(rank == lost));
        assert!(masked.iter().copied().eq(expected), "{self:?}: {masked:?}");
    }
}

/// A round's memory on the GPU.
pub(crate) struct GpuCalls<'a> {
    inputs: &'a Inputs,
    tokens: u64,
    experts: u64,
    weights: u64,
    made: u64,
    scratch: u64,
    combine_scratch: u64,
    rows: u64,
    scales: u64,
    global_scale: u64,
    count: u64,
    tables: low_latency::RowTables,
    sums: u64,
}

impl<'a> GpuCalls<'a> {
    pub(super) fn new(case: &Case, gpu: &Gpu, inputs: &'a Inputs) -> Self {
        let blank = case.untouched(inputs);
        let scratch = cuda::scratch_len(&case.choices(inputs, 0), case.ranks);
        let records = low_latency::records_len(case.slots, case.ranks, case.top_k);
        Self {
            inputs,
            tokens: gpu.upload(&inputs.rows),
            experts: gpu.upload_integers(&inputs.experts, case.is_64()),
            weights: gpu.upload(&inputs.weights),
            made: gpu.upload(&inputs.made),
            scratch: gpu.upload(&vec![0xeeu8; scratch]),
            combine_scratch: gpu.upload(&[0xeeu8; cuda::COMBINE_SCRATCH_LEN]),
            rows: gpu.upload(&blank.rows),
            scales: gpu.upload(&blank.scales),
            global_scale: match case.format {
                Format::Nvfp4(global_scale) if case.seed % 2 == 1 => gpu.upload(&[global_scale]),
                _ => 0,
            },
            count: gpu.upload(&blank.count),
            tables: low_latency::RowTables {
                src_info: gpu.upload(&blank.src_info),
                records: gpu.upload(&vec![0xeeu8; records]),
                layout_range: gpu.upload(&blank.layout_range),
            },
            sums: gpu.upload(&blank.sums),
        }
    }

    pub(super) fn enqueue_dispatch(
        &self,
        case: &Case,
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) -> Result<Arc<low_latency::Handle>> {
        let (rows, words) = (case.expert_rows(), case.words());
        let choices = case.choices(self.inputs, self.experts);
        let tokens = low_latency::DispatchInput {
            rows: self.tokens,
            stride: 2 * case.hidden,
            payload: match (case.payload(), self.global_scale) {
                (Payload::Nvfp4(hidden, _), 1..) => Payload::Nvfp4(hidden, 1.0),
                (payload, _) => payload,
            },
            global_scale: self.global_scale,
        };
        let outputs = low_latency::DispatchOutput {
            rows: self.rows,
            stride: case.row_len(),
            scales: (words > 0).then(|| match case.tile_rows() {
                Some(tile_rows) => low_latency::ScalesOut::Tiled { words: self.scales, tile_rows },
                None => low_latency::ScalesOut::Strided {
                    words: self.scales,
                    row_stride: 1,
                    expert_stride: (words - 1) * rows,
                    word_stride: rows,
                },
            }),
            count: self.count,
            stats: 0,
            waits: 0,
            tables: self.tables,
        };
        let (scratch, stream) = (self.scratch, &gpu.stream);
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe {
            let mut dispatch =
                low_latency::Dispatch::new(group, &tokens, &choices, case.slots, scratch)?;
            if case.has_chunks(group) {
                dispatch.begin(stream)?;
            }
            dispatch.receive(&outputs, stream).map(Arc::new)
        }
    }

    pub(super) fn enqueue(&self, case: &Case, group: &Arc<cuda::Group>, gpu: &Gpu) {
        let handle = self.enqueue_dispatch(case, group, gpu).expect("a dispatch");
        self.enqueue_combine(case, (group, &handle), gpu).expect("a combine");
    }

    pub(super) fn enqueue_combine(
        &self,
        case: &Case,
        (group, handle): (&cuda::Group, &Arc<low_latency::Handle>),
        gpu: &Gpu,
    ) -> Result<()> {
        let results = low_latency::CombineInput {
            rows: self.made,
            stride: 2 * case.hidden,
            hidden: case.hidden,
            records: self.tables.records,
            is_packed: case.is_packed,
        };
        let sums = low_latency::CombineOutput {
            rows: self.sums,
            weights: self.weights,
            experts: self.experts,
            waits: 0,
        };
        let stream = &gpu.stream;
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe {
            let mut combine = low_latency::Combine::new(handle, &results, self.combine_scratch)?;
            if case.has_chunks(group) {
                combine.begin(stream)?;
            }
            if group.rank() + 1 == group.ranks() {
                std::thread::sleep(case.late);
            }
            combine.finish(&sums, stream)
        }
    }

    /// Where the table of records is.
    pub(super) fn records(&self) -> u64 {
        self.tables.records
    }

    pub(super) fn got(&self, case: &Case, gpu: &Gpu) -> CallResults {
        let rows = case.local_experts * case.expert_rows();
        CallResults {
            rows: gpu.download(self.rows, rows * case.row_len()),
            scales: gpu.download(self.scales, case.scales_len()),
            count: gpu.download(self.count, case.local_experts),
            src_info: gpu.download(self.tables.src_info, rows),
            layout_range: gpu.download(self.tables.layout_range, case.num_experts()),
            sums: gpu.download(self.sums, self.inputs.rows.len()),
        }
    }
}

impl Case {
    /// Whether a rank's calls are two launches each. Every other rank's are one.
    fn has_chunks(&self, group: &cuda::Group) -> bool {
        !self.late.is_zero() || (self.seed + group.rank() as u64).is_multiple_of(2)
    }

    fn choices(&self, inputs: &Inputs, experts: u64) -> cuda::Choices {
        cuda::Choices {
            experts,
            is_64: self.is_64(),
            tokens: inputs.experts.len() / self.top_k,
            top_k: self.top_k,
            num_experts: self.num_experts(),
        }
    }

    fn is_64(&self) -> bool {
        self.seed % 2 == 1
    }
}

/// A proxy's counters for one of `rounds` rounds.
fn each(
    before: uccl_ep::ProxyStats,
    mut after: uccl_ep::ProxyStats,
    rounds: u32,
) -> uccl_ep::ProxyStats {
    after.commands = (after.commands - before.commands) / u64::from(rounds);
    after.writes = (after.writes - before.writes) / u64::from(rounds);
    after.working = (after.working - before.working) / rounds;
    after.under_way = (after.under_way - before.under_way) / rounds;
    after
}

/// Choices of tokens: experts, and some that are none; some tokens name an expert again.
pub(super) fn choices(
    random: &mut fastrand::Rng,
    tokens: usize,
    num_experts: usize,
    top_k: usize,
) -> Vec<i32> {
    let mut experts = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<i32> = (0..num_experts as i32).collect();
        random.shuffle(&mut all);
        all.resize(all.len().max(top_k), -1);
        let chosen = all.iter().take(top_k);
        experts.extend(chosen.map(|e| if random.u8(..6) == 0 { -1 } else { *e }));
        if top_k > 0 && random.u8(..5) == 0 {
            let first = experts.len() - top_k;
            for _ in 0..random.usize(1..=top_k) {
                experts[first + random.usize(..top_k)] = experts[first + random.usize(..top_k)];
            }
        }
    }
    experts
}

/// Asserts that two slices are equal. The message has the first difference, which says more than
/// both in full.
pub(super) fn assert_same<T: PartialEq + std::fmt::Debug>(
    at: &str,
    what: &str,
    found: &[T],
    wanted: &[T],
) {
    assert_eq!(found.len(), wanted.len(), "{at}: {what}");
    let differ: Vec<_> = (0..found.len()).filter(|i| found[*i] != wanted[*i]).collect();
    if let Some(first) = differ.first() {
        let all = format!("{} of {} {what} differ", differ.len(), found.len());
        let some: Vec<_> = differ
            .iter()
            .take(8)
            .map(|i| format!("[{i}] {:x?} is not {:x?}", found[*i], wanted[*i]))
            .collect();
        panic!("{at}: {all}, the first at {first}: {}", some.join(", "));
    }
}

/// The first rank's error names the second, which has not come to the first dispatch.
pub(super) fn assert_second_is_late(errors: &[String]) {
    let late = "rank 1: data of call 1 round 0 expected, nothing seen";
    assert!(errors[0].starts_with("dispatch on rank 0 is not over"), "{errors:?}");
    assert!(errors[0].contains(late), "{errors:?}");
}
