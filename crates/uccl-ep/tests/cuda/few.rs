//! Few tokens in parts: marks that come late, and a table of records that the caller has spoilt.

use std::{sync::Arc, thread::sleep, time::Duration};

use uccl_ep::{cuda, placing::SLOTS};

use super::{
    Gpu,
    case::{Case, Inputs, OnGpu, assert_same},
    world,
};

/// As the kernels have them: marks of a call from a rank, pieces of a row at most, and what the next call adds to a mark.
const PARTS: usize = 2048;
const MOST_PIECES: usize = 16;
const CALL: u64 = 1 << 22;
/// Far longer than a part takes that is not waited for.
const WHILE: Duration = Duration::from_millis(150);

/// What is spoilt: of a record its token, or its rows, which are then far behind all; or where the records of ranks begin.
#[derive(Clone, Copy, Debug)]
enum Spoilt {
    Starts,
    Token,
    Rows,
}

impl Case {
    /// The first of two ranks finds the marks of an earlier call for a while, and no rows.
    pub(crate) fn waits_for_marks(self) {
        world(2, |ranks, me| {
            let inputs: Vec<_> = (0..2).map(|rank| self.inputs_of(rank, 0, self.slots)).collect();
            let expected = self.on_cpu(ranks, me, &inputs[me..=me]);
            let group = self.join(ranks, me, Duration::from_secs(20));
            let gpu = Gpu::new();
            let round = OnGpu::new(&self, &gpu, &inputs[me]);
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
            assert_same("late marks", "rows", &found.rows, &expected[0].rows);
            assert_same("late marks", "sums", &found.sums, &expected[0].sums);
        });
    }

    fn behind_the_second(
        &self,
        round: &OnGpu<'_>,
        inputs: &[Inputs],
        group: &Arc<cuda::Group>,
        gpu: &Gpu,
    ) {
        let other = Gpu::new();
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
        let give_back = self.hide(group, &other, 1, &records);
        let handle = round.enqueue_dispatch(self, group, gpu).expect("a dispatch");
        give_back();
        gpu.stream.synchronize().expect("a dispatch ends");
        let pieces = (PARTS / self.slots).min(MOST_PIECES);
        let marks: Vec<_> = goes(&inputs[0], 1)
            .iter()
            .flat_map(|token| token * pieces..(token + 1) * pieces)
            .collect();
        let give_back = self.hide(group, &other, 2, &marks);
        round.enqueue_combine(self, (group, &handle), gpu).expect("a combine");
        give_back();
    }

    /// Takes rows and marks of the second rank's call away when all have come. What is returned brings them back after a while.
    fn hide<'a>(
        &self,
        group: &cuda::Group,
        gpu: &'a Gpu,
        call: usize,
        marks: &[usize],
    ) -> impl FnOnce() + 'a {
        let pool = group.pool_address();
        let at = pool - ((SLOTS * 2 - (call % SLOTS * 2 + 1)) * PARTS * size_of::<u64>()) as u64;
        let all = loop {
            let all: Vec<u64> = gpu.download(at, PARTS);
            if marks.iter().all(|mark| all[*mark] / CALL == call as u64) {
                break all;
            }
            sleep(Duration::from_millis(1));
        };
        let area = self.area();
        let (begin, len) = if call == 1 { (area.0, area.1) } else { (0, self.pool()) };
        let rows: Vec<u8> = gpu.download(pool + begin as u64, len);
        let mut earlier = all.clone();
        marks.iter().for_each(|mark| earlier[*mark] -= CALL);
        gpu.write(at, &earlier);
        gpu.write(pool + begin as u64, &vec![0x3fu8; len]);
        move || {
            sleep(WHILE);
            gpu.write(pool + begin as u64, &rows);
            gpu.write(at, &all);
        }
    }

    /// A table of records that the caller has spoilt leads to no other memory, and the call ends.
    pub(crate) fn reaches_no_more_when_spoilt(self) {
        for spoilt in [Spoilt::Starts, Spoilt::Token, Spoilt::Rows] {
            world(self.ranks, |ranks, me| {
                let inputs = self.inputs_of(me, 0, self.slots);
                let group = self.join(ranks, me, Duration::from_secs(1));
                let gpu = Gpu::new();
                let round = OnGpu::new(&self, &gpu, &inputs);
                ranks.meet();
                let handle = round.enqueue_dispatch(&self, &group, &gpu).expect("a dispatch");
                gpu.stream.synchronize().expect("a dispatch ends");
                self.spoil(spoilt, round.records(), &gpu);
                ranks.meet();
                // The other rank's fault may be known before all is enqueued.
                let _ = round.enqueue_combine(&self, (&group, &handle), &gpu);
                gpu.stream.synchronize().expect("kernels end, and reach no other memory");
                assert!(group.check().is_err(), "{spoilt:?}: rank {me} has sums of nothing");
                ranks.meet();
            });
        }
    }

    fn spoil(&self, spoilt: Spoilt, records: u64, gpu: &Gpu) {
        let (len, width) = (self.ranks * self.slots * (1 + self.top_k), 1 + self.top_k);
        let whole = cuda::records_len(self.slots, self.ranks, self.top_k);
        let at = records + (whole - len * size_of::<u32>()) as u64;
        let mut words: Vec<u32> = gpu.download(at, len);
        for (nth, word) in words.iter_mut().enumerate() {
            match spoilt {
                Spoilt::Token if nth % width == 0 => *word = u32::MAX,
                Spoilt::Rows if nth % width > 0 => {
                    *word = (CALL as u32 - 1) << 5 | *word & 31;
                }
                _ => {}
            }
        }
        gpu.write(at, &words);
        if matches!(spoilt, Spoilt::Starts) {
            gpu.write(records, &vec![u32::MAX; whole / size_of::<u32>() - len]);
        }
    }
}
