//! The results of a rank on the CPU.

use std::sync::Arc;

use uccl_ep::{
    Group,
    combine::{Combine, CombineInput, CombineOutput, Order, SumOrder},
    dispatch::{self, Dispatch, DispatchInput, DispatchOutput, Handle, Payload, Room, RowLayout},
    routing::{self, Routing},
};

use super::{
    super::{Ranks, Reference, masks::Step},
    CallResults, Inputs, Normal,
};

impl Normal {
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
        (rows, is_cached): (&[u8], bool),
        outputs: DispatchOutput,
    ) -> Handle {
        let tokens = DispatchInput {
            rows: rows.as_ptr(),
            stride: self.row_len(),
            payload: Payload::Bytes(self.row_len()),
            scales: (self.scales > 0).then_some(dispatch::ScalesIn {
                words: inputs.scales.as_ptr(),
                count: self.scales,
                token_stride: self.scales,
                word_stride: 1,
            }),
            weights: (self.has_weights && !is_cached).then_some(inputs.weights.as_ptr()),
            is_stable: true,
        };
        let room = Room::Tokens(self.slots);
        // SAFETY: the vectors live until the call is over, and are as long as the arguments state.
        unsafe {
            let begun = Dispatch::begin(group, Arc::clone(routing), tokens, room, &mut || false);
            let mut begun = begun.expect("a dispatch");
            let counts = begun.counts(&mut || false).expect("counts");
            let layout = match self.by_expert {
                None => RowLayout::ByToken,
                Some(unit) => RowLayout::ByExpert(starts(&counts.of_experts(), unit)),
            };
            begun.receive(outputs, &layout, &mut || false).expect("a dispatch")
        }
    }

    fn round_on_cpu(&self, group: &Arc<Group>, inputs: &Inputs, step: Step) -> CallResults {
        let routing = Arc::new(self.routing(inputs));
        let mut got = self.untouched(inputs);
        if self.top_k > 0 && !self.has_layout {
            let layout = &mut got.layout;
            layout.2.fill(0);
            for rank in 0..self.ranks {
                layout.0[rank] = routing.tokens_to(rank).len() as u32;
                let its = rank * self.local_experts..(rank + 1) * self.local_experts;
                layout.1[its].copy_from_slice(routing.per_expert_of(rank));
                for token in routing.tokens_to(rank) {
                    layout.2[*token as usize * self.ranks + rank] = 1;
                }
            }
        }
        let mut outputs = DispatchOutput {
            len: self.most_rows(),
            rows: got.rows.as_mut_ptr(),
            stride: self.row_len(),
            scales: (self.scales > 0).then_some(dispatch::ScalesOut::Strided {
                words: got.scales.as_mut_ptr(),
                row_stride: self.scales,
                expert_stride: 0,
                word_stride: 1,
            }),
            choices: match self.by_expert {
                None => Some(dispatch::ChoicesOut::I32(got.choices.as_mut_ptr())),
                Some(_) => None,
            },
            weights: self.has_weights.then_some(got.weights.as_mut_ptr()),
            zero_foreign_weights: self.zero_foreign_weights(),
        };
        let to = (group, &routing);
        let handle = Arc::new(self.dispatch_on_cpu(to, inputs, (&inputs.rows, false), outputs));
        let arrived = handle.counts.total();
        got.from.clone_from(&handle.counts.per_rank);
        got.per_expert = handle.counts.of_experts();
        for (row, entry) in handle.table.chunks_exact(handle.width()).enumerate() {
            got.src_info[row] = entry[0];
            if self.by_expert.is_some() {
                let from = entry[1] * self.top_k as i32;
                let metadata = &mut got.metadata[row * handle.width()..][..handle.width()];
                metadata.copy_from_slice(entry);
                metadata[0] = entry[1] * self.slots as i32 + entry[0];
                metadata[1] = from + i32::from(handle.last_choices[row]);
            }
        }
        if let Some(unit) = self.by_expert {
            self.tell_experts(&mut got, unit);
        }
        if self.is_worst && self.by_expert.is_none() {
            got.choices[arrived * self.top_k..].fill(-1);
        }
        if self.is_cached {
            outputs.rows = got.cached.as_mut_ptr();
            (outputs.choices, outputs.weights) = (None, None);
            self.dispatch_on_cpu(to, inputs, (&inputs.cached, true), outputs);
            if let Some(unit) = self.by_expert.filter(|_| self.zero_gaps) {
                self.zero_gaps(&got.per_expert, unit, (&mut got.cached, self.row_len()));
            }
        }
        if !step.has_combine {
            return got;
        }
        let returns_weights = self.num_returned_weights() > 0;
        let results = CombineInput {
            rows: inputs.made.as_ptr().cast(),
            len: self.most_rows(),
            stride: 2 * self.hidden,
            hidden: self.hidden,
            sends: self.sends(),
            weights: returns_weights.then_some(inputs.made_weights.as_ptr()),
            is_packed: false,
            relays: None,
            is_stable: true,
        };
        let bias = [0, 1].map(|nth| (nth < self.biases).then_some(inputs.biases[nth].as_ptr()));
        let sums = match self.order {
            Order::ByRank => SumOrder::ByRank,
            Order::ByChoice => SumOrder::ByChoice,
        };
        let weights = returns_weights.then_some(got.summed_weights.as_mut_ptr());
        let combined = CombineOutput { rows: got.sums.as_mut_ptr(), sums, bias, weights };
        // SAFETY: the vectors live until the call is over, and are as long as the arguments state.
        unsafe {
            let combine = Combine::begin(&handle, results, &mut || false);
            combine.and_then(|c| c.finish(combined, &mut || false)).expect("a combine");
        }
        got
    }
}

/// The first row of each expert.
fn starts(per_expert: &[u32], unit: usize) -> Vec<usize> {
    let before = per_expert.iter().scan(0, |next, count| {
        let start = *next;
        *next += (*count as usize).next_multiple_of(unit);
        Some(start)
    });
    before.collect()
}

impl Normal {
    /// Fills in the ends of experts' rows, and zeroes the rows between them if the case asks for
    /// that.
    fn tell_experts(&self, got: &mut CallResults, unit: usize) {
        let starts = starts(&got.per_expert, unit);
        let ends = starts.iter().zip(&got.per_expert).map(|(start, count)| *start as u32 + count);
        got.ends = ends.collect();
        if !self.zero_gaps {
            return;
        }
        self.zero_gaps(&got.per_expert, unit, (&mut got.rows, self.row_len()));
        self.zero_gaps(&got.per_expert, unit, (&mut got.scales, self.scales));
        self.zero_gaps(&got.per_expert, unit, (&mut got.weights, self.num_row_weights()));
    }

    /// Zeroes the rows between experts' rows, of `len` values each.
    fn zero_gaps<T: Default + Clone>(
        &self,
        per_expert: &[u32],
        unit: usize,
        (rows, len): (&mut [T], usize),
    ) {
        for (start, count) in starts(per_expert, unit).into_iter().zip(per_expert) {
            let (count, end) = (*count as usize, start + (*count as usize).next_multiple_of(unit));
            rows[(start + count) * len..end * len].fill(T::default());
        }
    }
}
