//! The results of a rank with a GPU.

use std::{num::NonZero, sync::Arc, time::Duration};

use uccl_ep::{
    RankSet, Result,
    cuda::{self, normal},
};

use super::{
    super::{Gpu, Loss, Ranks, masks::mask_on_gpu},
    CallResults, Fault, Inputs, LIMIT, Normal, UNTOUCHED,
};

impl Normal {
    pub(super) fn join(&self, ranks: &Ranks, me: usize, timeout: Duration) -> Arc<cuda::Group> {
        let config = cuda::Config {
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
        };
        cuda::Group::join(self.route.of(config), &mut ranks.exchange(me)).expect("it joins")
    }

    pub(super) fn on_gpu(&self, ranks: &Ranks, me: usize, inputs: &[Inputs]) -> Vec<CallResults> {
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
        // Where no host waits for counts, all rounds are enqueued before any is waited for.
        for (round, step) in rounds.iter().zip(self.steps()) {
            mask_on_gpu(self.masks, (step, false), (&group, &gpu));
            let handle = round.dispatches(self, &group, &gpu).expect("a dispatch");
            mask_on_gpu(self.masks, (step, true), (&group, &gpu));
            if step.has_combine {
                round.combine(self, (&group, &handle), &gpu).expect("a combine");
            }
        }
        gpu.stream.synchronize().expect("kernels end well");
        group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        ranks.meet();
        let got = rounds.iter().map(|round| round.got(self, &gpu)).collect();
        ranks.meet();
        got
    }
}

/// A round's memory on the GPU: all of it there before any kernel waits, since the driver gives
/// none then.
pub(super) struct GpuCalls<'a> {
    pub(super) inputs: &'a Inputs,
    tokens: u64,
    cached: u64,
    scales: u64,
    chosen: u64,
    token_counts: u64,
    weights: u64,
    pub(super) made: u64,
    pub(super) made_weights: u64,
    biases: [u64; 2],
    scratch: [u64; 4],
    layout: normal::LayoutOutput,
    to: normal::DispatchOutput,
    to_cached: normal::DispatchOutput,
    pub(super) tables: normal::RowTables,
    by_expert: Option<normal::ExpertLayout>,
    sums: u64,
    summed_weights: u64,
}

impl<'a> GpuCalls<'a> {
    pub(super) fn new(case: &Normal, gpu: &Gpu, inputs: &'a Inputs) -> Self {
        let blank = case.untouched(inputs);
        let given = |address: u64, is_given: bool| if is_given { address } else { 0 };
        let tables = normal::RowTables {
            src_info: gpu.upload(&case.widened(&blank.src_info)),
            origin: gpu.upload(&case.widened(&blank.src_info)),
            starts: gpu.upload(&vec![0u32; 1 + case.ranks]),
            per_expert: gpu.upload(&blank.per_expert),
        };
        let by_expert = case.by_expert.map(|alignment| normal::ExpertLayout {
            alignment,
            tokens: case.most_tokens(),
            ends: gpu.upload(&blank.ends),
            metadata: gpu.upload(&blank.metadata),
        });
        let scales =
            |words: u64| normal::ScalesOut { words, row_stride: case.scales, word_stride: 1 };
        let choices = gpu.upload_integers(&case.widened(&blank.choices), case.is_64());
        let to = normal::DispatchOutput {
            len: case.most_rows(),
            rows: gpu.upload(&blank.rows),
            stride: case.row_len(),
            scales: (case.scales > 0).then(|| scales(gpu.upload(&blank.scales))),
            choices: given(choices, case.num_row_choices() > 0),
            is_64: case.is_64(),
            weights: given(gpu.upload(&case.widened(&blank.weights)), case.has_weights),
            zero_foreign_weights: case.zero_foreign_weights(),
            zero_gaps: case.zero_gaps,
            tables: Some(tables),
            by_expert,
        };
        let to_cached = normal::DispatchOutput {
            rows: gpu.upload(&blank.cached),
            scales: (case.scales > 0).then(|| scales(gpu.upload(&blank.scales))),
            choices: 0,
            weights: 0,
            tables: case.has_layout.then_some(tables),
            by_expert: by_expert.filter(|_| case.has_layout),
            ..to
        };
        let returns_weights = case.num_returned_weights() > 0;
        let mut on_gpu = Self {
            inputs,
            tokens: gpu.upload(&inputs.rows),
            cached: gpu.upload(&inputs.cached),
            scales: gpu.upload(&inputs.scales),
            chosen: match case.top_k {
                0 => gpu.upload(&inputs.goes),
                _ => gpu.upload_integers(&inputs.experts, case.is_64()),
            },
            token_counts: gpu.upload(&inputs.per_expert),
            weights: given(gpu.upload(&inputs.weights), case.has_weights),
            made: gpu.upload(&case.widened(&inputs.made)),
            made_weights: given(gpu.upload(&case.widened(&inputs.made_weights)), returns_weights),
            biases: [0, 1].map(|nth| given(gpu.upload(&inputs.biases[nth]), nth < case.biases)),
            scratch: [0; 4],
            layout: normal::LayoutOutput {
                per_rank: gpu.upload(&blank.layout.0),
                per_expert: gpu.upload(&blank.layout.1),
                token_in_rank: gpu.upload(&blank.layout.2),
            },
            to,
            to_cached,
            tables,
            by_expert,
            sums: gpu.upload(&blank.sums),
            summed_weights: given(gpu.upload(&blank.summed_weights), returns_weights),
        };
        let len = on_gpu.routing(case).scratch_len(case.ranks);
        let short = cuda::COMBINE_SCRATCH_LEN;
        let lens = [if case.has_layout { short } else { len }, short, short, len];
        on_gpu.scratch = lens.map(|len| gpu.upload(&vec![0xeeu8; len]));
        on_gpu
    }

    pub(super) fn routing(&self, case: &Normal) -> normal::Routing<'static> {
        let (tokens, num_experts) = (self.inputs.tokens, case.num_experts());
        match case.top_k {
            0 => normal::Routing::Ranks(normal::TokenRanks {
                token_in_rank: self.chosen,
                per_expert: self.token_counts,
                tokens,
                num_experts,
            }),
            top_k => normal::Routing::Choices(cuda::Choices {
                experts: self.chosen,
                is_64: case.is_64(),
                tokens,
                top_k,
                num_experts,
            }),
        }
    }

    fn tokens(&self, case: &Normal, rows: u64, weights: u64) -> normal::DispatchInput {
        normal::DispatchInput {
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
            max_blocks: NonZero::new(case.seed as usize % 3),
        }
    }

    /// Counts the tokens, if they have choices.
    pub(super) fn lay_out(
        &self,
        case: &Normal,
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) -> Result<Option<normal::DispatchLayout>> {
        let normal::Routing::Choices(choices) = self.routing(case) else { return Ok(None) };
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe { self.layout.count(group, &choices, self.launch(3, gpu)) }.map(Some)
    }

    /// The GPU's stream, and one of the calls' scratch memories.
    fn launch<'b>(&self, call: usize, gpu: &'b Gpu) -> normal::Launch<'b> {
        normal::Launch { stream: &gpu.stream, scratch: self.scratch[call] }
    }

    /// Overwrites the choices, and the counts of their layout.
    fn forget_choices(&self, case: &Normal, gpu: &Gpu) {
        let (experts, ranks) = (&self.inputs.experts, case.ranks);
        let chosen = experts.len() * if case.is_64() { 8 } else { 4 };
        let normal::LayoutOutput { per_rank, per_expert, token_in_rank } = self.layout;
        for (memory, len) in [
            (self.chosen, chosen),
            (per_rank, 4 * ranks),
            (per_expert, 4 * case.num_experts()),
            (token_in_rank, self.inputs.tokens * ranks),
        ] {
            // SAFETY: each memory has `len` bytes, and the stream is waited for before they are
            // freed.
            unsafe { gpu.stream.fill(memory, UNTOUCHED, len) }.expect("a fill");
        }
    }

    /// The first dispatch, which waits for counts unless it has rows for all tokens that may come.
    pub(super) fn dispatch(
        &self,
        case: &Normal,
        (group, gpu): (&Arc<cuda::Group>, &Gpu),
        routing: normal::Routing<'_>,
    ) -> Result<Arc<normal::Handle>> {
        let rows = match case.wrong_of(group) {
            Some(Fault::TokensInBuffer) => group.pool_address(),
            _ => self.tokens,
        };
        let tokens = self.tokens(case, rows, self.weights);
        let launch = self.launch(0, gpu);
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe {
            let mut dispatch =
                normal::Dispatch::begin(group, &tokens, routing, case.slots, launch)?;
            let (mut outputs, wrong) = (self.to, case.wrong_of(group));
            if !case.is_worst {
                let mut is_interrupted = || matches!(wrong, Some(Fault::Interrupted));
                let counts = match case.guess {
                    None => dispatch.counts(&gpu.stream, LIMIT, &mut is_interrupted)?,
                    Some(len) => {
                        let mut guess = normal::DispatchOutput { len, ..outputs };
                        if let Some(by_expert) = &mut guess.by_expert {
                            by_expert.tokens = by_expert.tokens.min(len / 2);
                        }
                        let stream = &gpu.stream;
                        let attempt =
                            dispatch.try_receive(&guess, stream, LIMIT, &mut is_interrupted)?;
                        if let Some(handle) = attempt.handle {
                            return Ok(Arc::new(handle));
                        }
                        self.assert_untouched(case, gpu);
                        attempt.counts
                    }
                };
                outputs.len = case.rows_of(&counts.per_expert, counts.total());
                if let Some(by_expert) = &mut outputs.by_expert {
                    by_expert.tokens = counts.total();
                }
            }
            if let Some(Fault::Shrunk) = wrong {
                // Behind the window's words are the flags of eight calls. The header is of the
                // first call.
                let window = group.pool_address() - 8 * 2048 * 8 - 4096;
                gpu.write(window + (3 + 1) * 64 + 6 * 8, &[0u64]);
                outputs.len = 0;
            }
            match (wrong, &mut outputs.by_expert) {
                (Some(Fault::FewRows(rows)), _) => outputs.len = rows,
                (Some(Fault::FewTokens(tokens)), Some(by_expert)) => by_expert.tokens = tokens,
                _ => {}
            }
            if case.zero_copy {
                return self
                    .receive_zero_copy(case, (group, gpu), (dispatch, &outputs))
                    .map(Arc::new);
            }
            dispatch.receive(&outputs, &gpu.stream).map(Arc::new)
        }
    }

    /// Asserts that no row was taken out yet.
    fn assert_untouched(&self, case: &Normal, gpu: &Gpu) {
        gpu.stream.synchronize().expect("kernels end well");
        let (found, blank) = (self.got(case, gpu), case.untouched(self.inputs));
        assert!(found.rows == blank.rows && found.choices == blank.choices, "{case:?}: rows");
        assert!(found.src_info == blank.src_info && found.ends == blank.ends, "{case:?}: tables");
    }

    /// Fills a table with values that no dispatch writes, if that is the fault.
    fn spoil(&self, case: &Normal, fault: Option<Fault>, gpu: &Gpu) {
        let blank = case.untouched(self.inputs);
        let (tables, len) = match (fault, self.by_expert) {
            (Some(Fault::Spoilt), Some(tables)) => (tables.metadata, blank.metadata.len()),
            (Some(Fault::Spoilt), None) => (self.tables.src_info, blank.src_info.len()),
            // The total, behind the starts, is kept.
            (Some(Fault::SpoiltStarts), _) => (self.tables.starts, case.ranks),
            _ => return,
        };
        // SAFETY: the table has `len` integers, and the stream is waited for before they are freed.
        unsafe { gpu.stream.fill(tables, 0x7f, 4 * len) }.expect("a fill");
    }

    pub(super) fn enqueue(&self, case: &Normal, group: &Arc<cuda::Group>, gpu: &Gpu) -> Result<()> {
        let handle = self.dispatches(case, group, gpu)?;
        self.combine(case, (group, &handle), gpu)
    }

    /// The dispatches of a round; the handle is the first one's.
    fn dispatches(
        &self,
        case: &Normal,
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) -> Result<Arc<normal::Handle>> {
        let layout = self.lay_out(case, group, gpu)?.filter(|_| case.has_layout);
        if layout.is_some() {
            self.forget_choices(case, gpu);
        }
        let layout = layout.as_ref().map(normal::Routing::Layout);
        let handle = self.dispatch(case, (group, gpu), layout.unwrap_or(self.routing(case)))?;
        self.spoil(case, case.wrong_of(group), gpu);
        let stream = &gpu.stream;
        if case.is_cached {
            let tokens = self.tokens(case, self.cached, 0);
            let routing = layout.unwrap_or(normal::Routing::Cached(&handle));
            let launch = self.launch(1, gpu);
            // SAFETY: the memory is as long as the arguments state, and lives until the stream has
            // been waited for.
            unsafe {
                let cached = normal::Dispatch::begin(group, &tokens, routing, case.slots, launch)?;
                match case.zero_copy {
                    true => {
                        self.receive_zero_copy(case, (group, gpu), (cached, &self.to_cached))?
                    }
                    false => cached.receive(&self.to_cached, stream)?,
                };
            }
        }
        Ok(handle)
    }

    /// The combine of a dispatch.
    pub(super) fn combine(
        &self,
        case: &Normal,
        (group, handle): (&cuda::Group, &Arc<normal::Handle>),
        gpu: &Gpu,
    ) -> Result<()> {
        let results = normal::CombineInput {
            len: match case.wrong_of(group) {
                Some(Fault::FewResults(rows)) => rows,
                _ => case.rows_on_gpu(),
            },
            rows: match case.wrong_of(group) {
                Some(Fault::ResultsInBuffer) => group.pool_address(),
                _ => self.made,
            },
            stride: 2 * case.hidden,
            hidden: case.hidden,
            weights: self.made_weights,
            sends: case.sends(),
            max_blocks: NonZero::new(case.seed as usize % 4),
        };
        let combined = normal::CombineOutput {
            rows: self.sums,
            order: case.order,
            bias: self.biases,
            weights: self.summed_weights,
        };
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe {
            normal::Combine::begin(handle, &results, self.launch(2, gpu))?
                .finish(&combined, &gpu.stream)
        }
    }

    pub(super) fn got(&self, case: &Normal, gpu: &Gpu) -> CallResults {
        let (rows, tokens) = (case.most_rows(), self.inputs.tokens);
        let blank = case.untouched(self.inputs);
        let starts: Vec<u32> = gpu.download(self.tables.starts, 1 + case.ranks);
        let cached = if case.is_cached { rows * case.row_len() } else { 0 };
        let count = case.widened(&blank.choices).len();
        let choices = match case.is_64() {
            true => {
                let all: Vec<i64> = gpu.download(self.to.choices, count);
                all.into_iter().map(|choice| choice as i32).collect::<Vec<_>>()
            }
            false => gpu.download(self.to.choices, count),
        };
        let weights = case.widened(&blank.weights).len();
        let infos = case.widened(&blank.src_info).len();
        let scales = self.to.scales.map_or(0, |scales| scales.words);
        let tables = self.by_expert.map_or((0, 0), |tables| (tables.ends, tables.metadata));
        CallResults {
            layout: (
                gpu.download(self.layout.per_rank, blank.layout.0.len()),
                gpu.download(self.layout.per_expert, blank.layout.1.len()),
                gpu.download(self.layout.token_in_rank, blank.layout.2.len()),
            ),
            from: starts.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            per_expert: gpu.download(self.tables.per_expert, case.local_experts),
            rows: gpu.download(self.to.rows, rows * case.row_len()),
            scales: gpu.download(scales, rows * case.scales),
            choices: case.in_order(&starts, choices),
            weights: case.in_order(&starts, gpu.download(self.to.weights, weights)),
            src_info: case.in_order(&starts, gpu.download(self.tables.src_info, infos)),
            ends: gpu.download(tables.0, blank.ends.len()),
            metadata: gpu.download(tables.1, blank.metadata.len()),
            cached: gpu.download(self.to_cached.rows, cached),
            sums: gpu.download(self.sums, tokens * case.hidden),
            summed_weights: gpu.download(self.summed_weights, blank.summed_weights.len()),
        }
    }
}

impl Normal {
    fn wrong_of(&self, group: &cuda::Group) -> Option<Fault> {
        self.fault.filter(|_| group.rank() + 1 == group.ranks())
    }
}
