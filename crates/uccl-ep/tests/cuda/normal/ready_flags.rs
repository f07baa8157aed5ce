//! Ready flags of chunks that come late, or are wrong. A test writes them to the first rank's
//! window after the second has sent all, and before the first begins.

use std::{sync::Arc, time::Duration};

use uccl_ep::{cuda, record::Record};

use super::{
    super::{
        Gpu, Ranks,
        case::assert_second_is_late,
        window::{HeldBack, Window},
        world,
    },
    CallResults, Fault, Inputs, LIMIT, Normal,
    on_gpu::GpuCalls,
};

/// Constants of the kernels: the flags of a row, where rows are few, and the most rows that a flag
/// can give a chunk.
const PIECES: usize = 8;
const MOST_ROWS: u64 = 63;

/// A change of flags.
#[derive(Clone, Copy, Debug)]
enum Tampering {
    /// From this piece of a row on, the flags are those of an earlier call for a while, and the
    /// rows are missing.
    Late(usize),
    /// Each flag gives its chunk as many rows as it can.
    Boasting,
}

impl Tampering {
    /// Changes flags, and the rows of late flags.
    fn tamper(self, window: &Window<'_>, held: &HeldBack, flags: &[usize]) {
        match self {
            Self::Late(first) => {
                let late = flags.iter().copied().filter(|flag| flag % PIECES >= first);
                window.hide(held, &late.collect::<Vec<_>>());
            }
            Self::Boasting => window.change(held, flags, |flag| flag | MOST_ROWS),
        }
    }

    /// Puts late rows and their flags back, after a while.
    fn restore(self, window: &Window<'_>, held: &HeldBack) {
        if let Self::Late(_) = self {
            window.restore(held);
        }
    }
}

/// The flags of the first `rows` rows.
fn flags_of(rows: usize) -> Vec<usize> {
    (0..PIECES * rows).collect()
}

impl Normal {
    /// Nothing is taken or summed before its flag has come.
    pub(crate) fn waits_for_flags(self) {
        for first in [0, 1] {
            self.tampered(Tampering::Late(first));
        }
    }

    /// Marks lead no further than counts.
    pub(crate) fn goes_no_further_than_counts(self) {
        self.tampered(Tampering::Boasting);
    }

    /// Own tokens go no further than the counts that the window has.
    pub(crate) fn takes_no_more_of_its_own_than_counts(self) {
        let case = Self { ranks: 1, is_full: true, fault: Some(Fault::Shrunk), ..self };
        world(1, |ranks, me| {
            let inputs = case.inputs(me, 0);
            let (group, gpu) = (case.join(ranks, me, LIMIT), Gpu::new());
            let round = GpuCalls::new(&case, &gpu, &inputs);
            round.dispatch(&case, (&group, &gpu), round.routing(&case)).expect("a dispatch");
            gpu.stream.synchronize().expect("kernels end well");
            let (found, untouched) = (round.got(&case, &gpu), case.untouched(&inputs));
            assert!(found.rows == untouched.rows, "rows are written that there is no room for");
        });
    }

    /// A rank with counts that have come, and parts that have not, is named with the call that
    /// waits for them.
    pub(crate) fn names_the_rank_of_a_missing_chunk(self) {
        let case = Self { ranks: 2, is_full: true, is_worst: true, ..self };
        let errors = world(2, |ranks, me| {
            let inputs = case.inputs(me, 0);
            let timeout = if me == 0 { Duration::from_millis(500) } else { LIMIT };
            let group = case.join(ranks, me, timeout);
            let (gpu, other) = (Gpu::new(), Gpu::new());
            let round = GpuCalls::new(&case, &gpu, &inputs);
            ranks.meet();
            if me == 0 {
                let (window, flags) = (Window::of(&group, &other), flags_of(case.slots));
                window.change(&window.hold(1, &flags, 0..0), &flags, |_| 0);
            }
            round.dispatch(&case, (&group, &gpu), round.routing(&case)).expect("a dispatch");
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            ranks.meet();
            group.check().err().map(|e| e.to_string()).unwrap_or_default()
        });
        assert_second_is_late(&errors);
    }

    fn tampered(self, how: Tampering) {
        let case = Self { ranks: 2, rounds: 1, is_full: true, is_worst: true, ..self };
        world(2, |ranks, me| {
            let inputs = [case.inputs(me, 0)];
            let expected = case.on_cpu(ranks, me, &inputs);
            ranks.meet();
            let found = case.on_gpu_tampered(ranks, (me, how), &inputs[0]);
            case.compare((me, 0), &found, &expected[0]);
        });
    }

    fn on_gpu_tampered(
        &self,
        ranks: &Ranks,
        (me, how): (usize, Tampering),
        inputs: &Inputs,
    ) -> CallResults {
        let group = self.join(ranks, me, LIMIT);
        let gpu = Gpu::new();
        let round = GpuCalls::new(self, &gpu, inputs);
        ranks.meet();
        match me {
            0 => self.behind_the_second(how, (&round, inputs), &group, &gpu),
            _ => round.enqueue(self, &group, &gpu).expect("a dispatch and its combine"),
        }
        gpu.stream.synchronize().expect("kernels end well");
        group.check().expect("calls go well");
        ranks.meet();
        round.got(self, &gpu)
    }

    /// Makes each of the first rank's calls after the second has sent all of its rows.
    fn behind_the_second(
        &self,
        how: Tampering,
        (round, inputs): (&GpuCalls<'_>, &Inputs),
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) {
        let other = Gpu::new();
        let window = Window::of(group, &other);
        let record = Record { payload: self.row_len(), scales: self.scales, top_k: self.top_k };
        let area = record.area(self.local_experts, self.slots);
        let records = area + Record::first_at(self.local_experts)..2 * area;
        let flags = flags_of(self.slots);
        let held = window.hold(1, &flags, records);
        how.tamper(&window, &held, &flags);
        round.lay_out(self, group, gpu).expect("a layout");
        let handle = round.dispatch(self, (group, gpu), round.routing(self)).expect("a dispatch");
        how.restore(&window, &held);
        gpu.stream.synchronize().expect("kernels end well");
        if self.by_expert.is_some() {
            // Its own rows come to its window too, in between, and would be written over.
            return round.combine(self, (group, &handle), gpu).expect("a combine");
        }
        let flags = flags_of(self.sent_to_the_second(inputs));
        let held = window.hold(2, &flags, 0..self.pool());
        how.tamper(&window, &held, &flags);
        round.combine(self, (group, &handle), gpu).expect("a combine");
        how.restore(&window, &held);
    }

    /// The number of the first rank's tokens that the second gets.
    fn sent_to_the_second(&self, inputs: &Inputs) -> usize {
        let is_there = |expert: &i32| *expert >= self.local_experts as i32;
        inputs.experts.chunks(self.top_k).filter(|choices| choices.iter().any(is_there)).count()
    }
}
