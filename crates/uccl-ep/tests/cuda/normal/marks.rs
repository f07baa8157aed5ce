//! Marks of parts that come late, or say what is not so. A test writes them to the first rank's window when the second has sent
//! all, and the first has not begun.

use std::{ops::Range, sync::Arc, thread::sleep, time::Duration};

use uccl_ep::{cuda, placing::SLOTS, record::Record};

use super::{
    super::{Gpu, Ranks, case::assert_second_is_late, world},
    Got, Inputs, LIMIT, Normal, Wrong,
    on_gpu::OnGpu,
};

/// As the kernels have them: marks of a call from a rank, and of a row, where there are few.
const PARTS: usize = 2048;
const PIECES: usize = 8;
/// What is added to a mark by the next call, and how many rows it may say that a part has.
const CALL: u64 = 1 << 22;
const MOST_ROWS: u64 = 63;
/// Far longer than a part takes that is not waited for.
const WHILE: Duration = Duration::from_millis(150);

/// What is done to marks, of which the first is given.
#[derive(Clone, Copy, Debug)]
enum Tampering {
    /// Those of a row's pieces from this one on are those of an earlier call for a while, in which there are no rows.
    Late(usize),
    /// Each says that its part has as many rows as it can.
    Boasting,
}

/// The first rank's window.
struct Window<'a> {
    gpu: &'a Gpu,
    /// Where its pool begins, behind the marks.
    pool: u64,
}

/// What is in the window and was taken from it.
struct Held {
    rows: (u64, Vec<u8>),
    marks: (u64, Vec<u64>),
}

impl Window<'_> {
    /// The first mark of a call from the second of two ranks.
    fn marks_of(&self, call: usize) -> u64 {
        let nth = call % SLOTS * 2 + 1;
        self.pool - ((SLOTS * 2 - nth) * PARTS * size_of::<u64>()) as u64
    }

    /// The marks of so many rows, when all of them have come.
    fn marks(&self, call: usize, rows: usize) -> Vec<u64> {
        loop {
            let marks: Vec<u64> = self.gpu.download(self.marks_of(call), PIECES * rows);
            if marks.iter().all(|mark| mark / CALL == call as u64) {
                return marks;
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Tampers with the marks of a call's rows, which are in a range of the pool.
    fn tamper(&self, how: Tampering, (call, rows): (usize, usize), at: Range<usize>) -> Held {
        let marks = self.marks(call, rows);
        let address = self.pool + at.start as u64;
        let held = Held {
            rows: (address, self.gpu.download(address, at.len())),
            marks: (self.marks_of(call), marks.clone()),
        };
        let tampered = marks.iter().enumerate().map(|(at, mark)| match how {
            Tampering::Late(first) if at % PIECES < first => *mark,
            Tampering::Late(_) => mark - CALL,
            Tampering::Boasting => mark | MOST_ROWS,
        });
        self.gpu.write(held.marks.0, &tampered.collect::<Vec<_>>());
        if let Tampering::Late(_) = how {
            self.gpu.write(address, &vec![0x3fu8; at.len()]);
        }
        held
    }

    /// Has late rows and their marks come, after a while.
    fn give_back(&self, how: Tampering, held: &Held) {
        let Tampering::Late(_) = how else { return };
        sleep(WHILE);
        self.gpu.write(held.rows.0, &held.rows.1);
        self.gpu.write(held.marks.0, &held.marks.1);
    }
}

impl Normal {
    /// Nothing is taken or summed before its mark has come.
    pub(crate) fn waits_for_marks(self) {
        for first in [0, 1] {
            self.tampered(Tampering::Late(first));
        }
    }

    /// What marks say leads no further than counts.
    pub(crate) fn goes_no_further_than_counts(self) {
        self.tampered(Tampering::Boasting);
    }

    /// Own tokens go no further than the counts that the window has.
    pub(crate) fn takes_no_more_of_its_own_than_counts(self) {
        let case = Self { ranks: 1, is_full: true, wrong: Some(Wrong::Shrunk), ..self };
        world(1, |ranks, me| {
            let inputs = case.inputs(me, 0);
            let (group, gpu) = (case.join(ranks, me, LIMIT), Gpu::new());
            let round = OnGpu::new(&case, &gpu, &inputs);
            round.dispatch(&case, (&group, &gpu), round.routed(&case)).expect("a dispatch");
            gpu.stream.synchronize().expect("kernels end well");
            let (found, untouched) = (round.got(&case, &gpu), case.untouched(&inputs));
            assert!(found.rows == untouched.rows, "rows are written that there is no room for");
        });
    }

    /// A rank whose counts have come, and whose parts have not, is named with the call that waits for them.
    pub(crate) fn names_whose_part_does_not_come(self) {
        let case = Self { ranks: 2, is_full: true, is_worst: true, ..self };
        let told = world(2, |ranks, me| {
            let inputs = case.inputs(me, 0);
            let timeout = if me == 0 { Duration::from_millis(500) } else { LIMIT };
            let group = case.join(ranks, me, timeout);
            let (gpu, other) = (Gpu::new(), Gpu::new());
            let round = OnGpu::new(&case, &gpu, &inputs);
            ranks.meet();
            if me == 0 {
                let window = Window { gpu: &other, pool: group.pool_address() };
                let marks = window.marks(1, case.slots);
                other.write(window.marks_of(1), &vec![0u64; marks.len()]);
            }
            round.dispatch(&case, (&group, &gpu), round.routed(&case)).expect("a dispatch");
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            ranks.meet();
            group.check().err().map(|e| e.to_string()).unwrap_or_default()
        });
        assert_second_is_late(&told);
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
    ) -> Got {
        let group = self.join(ranks, me, LIMIT);
        let gpu = Gpu::new();
        let round = OnGpu::new(self, &gpu, inputs);
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

    /// Makes each of the first rank's calls when the second has sent all of it.
    fn behind_the_second(
        &self,
        how: Tampering,
        (round, inputs): (&OnGpu<'_>, &Inputs),
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) {
        let other = Gpu::new();
        let window = Window { gpu: &other, pool: group.pool_address() };
        let record = Record { payload: self.row_len(), scales: self.scales, top_k: self.top_k };
        let area = record.area(self.local_experts, self.slots);
        let records = area + Record::first_at(self.local_experts)..2 * area;
        let held = window.tamper(how, (1, self.slots), records);
        round.lay_out(self, group, gpu).expect("a layout");
        let handle = round.dispatch(self, (group, gpu), round.routed(self)).expect("a dispatch");
        window.give_back(how, &held);
        gpu.stream.synchronize().expect("kernels end well");
        if self.by_expert.is_some() {
            // Its own rows come to its window too, in between, and would be written over.
            return round.combine(self, (group, &handle), gpu).expect("a combine");
        }
        let held = window.tamper(how, (2, self.sent_to_the_second(inputs)), 0..self.pool());
        round.combine(self, (group, &handle), gpu).expect("a combine");
        window.give_back(how, &held);
    }

    /// How many of the first rank's tokens go to the second.
    fn sent_to_the_second(&self, inputs: &Inputs) -> usize {
        let is_there = |expert: &i32| *expert >= self.local_experts as i32;
        inputs.experts.chunks(self.top_k).filter(|choices| choices.iter().any(is_there)).count()
    }
}
