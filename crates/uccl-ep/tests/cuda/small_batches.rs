//! Small batches in chunks: ready flags that come late, and a table of records that the caller has
//! overwritten.

use std::sync::Arc;

use uccl_ep::cuda::{self, low_latency};

use super::{
    Gpu,
    case::{Case, GpuCalls, Inputs, LIMIT, REST, assert_same},
    window::{CALL, Window},
    world,
};

/// The library's constants: the most pieces of a row, where tokens are few, and the bytes of the
/// smallest piece.
const MOST_PIECES: usize = 16;
const PIECE: usize = 16 * 32;

/// The spoilt part of a table of records: a record's token, or its rows, or the first of them,
/// which is then far behind all; or the starts of the ranks' records.
#[derive(Clone, Copy, PartialEq, Debug)]
enum RecordFault {
    Starts,
    Token,
    Rows,
    FirstRow,
}

impl Case {
    /// The first of two ranks finds the flags of an earlier call for a while, and no rows.
    pub(crate) fn waits_for_flags(self) {
        world(2, |ranks, me| {
            let inputs: Vec<_> = (0..2).map(|rank| self.inputs_of(rank, 0, self.slots)).collect();
            let expected = self.on_cpu(ranks, me, &inputs[me..=me]);
            let group = self.join(ranks, me, LIMIT);
            let gpu = Gpu::new();
            let round = GpuCalls::new(&self, &gpu, &inputs[me]);
            ranks.meet();
            if me == 0 {
                self.behind_the_second(&round, &inputs, &group, &gpu);
            } else {
                round.enqueue(&self, &group, &gpu);
            }
            gpu.stream.synchronize().expect("kernels end well");
            group.check().expect("calls go well");
            ranks.meet();
            let found = round.got(&self, &gpu);
            assert_same("late flags", "rows", &found.rows, &expected[0].rows);
            assert_same("late flags", "sums", &found.sums, &expected[0].sums);
        });
    }

    fn behind_the_second(
        &self,
        round: &GpuCalls<'_>,
        inputs: &[Inputs],
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) {
        let other = Gpu::new();
        let window = Window::of(group, &other);
        let goes = |inputs: &Inputs, to: usize| -> Vec<usize> {
            let is_there =
                |expert: &i32| *expert >= 0 && *expert as usize / self.local_experts == to;
            let tokens = inputs.experts.chunks(self.top_k).enumerate();
            tokens
                .filter(|(_, chosen)| chosen.iter().any(is_there))
                .map(|(token, _)| token)
                .collect()
        };
        let records: Vec<_> = (0..goes(&inputs[1], 0).len()).collect();
        let held = window.hold(1, &records, self.area());
        window.hide(&held, &records);
        let handle = round.enqueue_dispatch(self, group, gpu).expect("a dispatch");
        window.restore(&held);
        gpu.stream.synchronize().expect("a dispatch ends");
        let pieces = (2 * self.hidden).div_ceil(PIECE).min(MOST_PIECES);
        let flags: Vec<_> = goes(&inputs[0], 1)
            .iter()
            .flat_map(|token| token * pieces..(token + 1) * pieces)
            .collect();
        let held = window.hold(2, &flags, 0..self.pool());
        window.hide(&held, &flags);
        round.enqueue_combine(self, (group, &handle), gpu).expect("a combine");
        window.restore(&held);
    }

    /// The second of two ranks announces more records than there are slots: the first gets an
    /// error.
    pub(crate) fn names_a_rank_with_too_large_counts(self) {
        let errors = world(2, |ranks, me| {
            let group = self.join(ranks, me, LIMIT);
            let (gpu, other) = (Gpu::new(), Gpu::new());
            let inputs = self.inputs_of(me, 0, self.slots);
            let round = GpuCalls::new(&self, &gpu, &inputs);
            ranks.meet();
            if me == 0 {
                // The tagged word behind those of the experts.
                let (nth, too_much) = (self.local_experts, self.slots as u64 + 1);
                Window::of(&group, &other).change_tagged_word(1, nth, too_much);
            }
            round.enqueue_dispatch(&self, &group, &gpu).expect("a dispatch");
            gpu.stream.synchronize().expect("kernels end, and the context stays usable");
            ranks.meet();
            group.check().err().map(|e| e.to_string()).unwrap_or_default()
        });
        let wanted =
            format!("rank 1 has tokens for this rank {}, this rank {}", self.slots + 1, self.slots);
        assert!(errors[0].ends_with(&wanted), "{}", errors[0]);
    }

    /// A table of records that the caller has spoilt leads to no other memory, and the call ends.
    pub(crate) fn reaches_no_more_when_spoilt(self) {
        for spoilt in
            [RecordFault::Starts, RecordFault::Token, RecordFault::Rows, RecordFault::FirstRow]
        {
            world(self.ranks, |ranks, me| {
                let inputs = self.inputs_of(me, 0, self.slots);
                let group = self.join(ranks, me, REST);
                let gpu = Gpu::new();
                let round = GpuCalls::new(&self, &gpu, &inputs);
                ranks.meet();
                let handle = round.enqueue_dispatch(&self, &group, &gpu).expect("a dispatch");
                gpu.stream.synchronize().expect("a dispatch ends");
                self.spoil(spoilt, round.records(), &gpu);
                ranks.meet();
                // The other rank's fault may be known before all is enqueued.
                let _ = round.enqueue_combine(&self, (&group, &handle), &gpu);
                gpu.stream.synchronize().expect("kernels end, and reach no other memory");
                // Marks are of all rows of a token together, and own rows may all be first ones.
                let may_end_well = spoilt == RecordFault::FirstRow;
                let has_failed = group.check().is_err();
                assert!(may_end_well || has_failed, "{spoilt:?}: rank {me} has sums of nothing");
                ranks.meet();
            });
        }
    }

    fn spoil(&self, spoilt: RecordFault, records: u64, gpu: &Gpu) {
        let (len, width) = (self.ranks * self.slots * (1 + self.top_k), 1 + self.top_k);
        let whole = low_latency::records_len(self.slots, self.ranks, self.top_k);
        let at = records + (whole - len * size_of::<u32>()) as u64;
        let mut words: Vec<u32> = gpu.download(at, len);
        for (nth, word) in words.iter_mut().enumerate() {
            match spoilt {
                RecordFault::Token if nth % width == 0 => *word = u32::MAX,
                RecordFault::Rows | RecordFault::FirstRow
                    if nth % width == 1 || spoilt == RecordFault::Rows && nth % width > 1 =>
                {
                    *word = (CALL as u32 - 1) << 5 | *word & 31;
                }
                _ => {}
            }
        }
        gpu.write(at, &words);
        if matches!(spoilt, RecordFault::Starts) {
            gpu.write(records, &vec![u32::MAX; whole / size_of::<u32>() - len]);
        }
    }
}
