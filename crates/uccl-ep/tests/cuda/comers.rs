//! The last rank leaves, and another takes its place.

use std::sync::Arc;

use uccl_ep::{Error, RankSet, Result, cuda};

use super::{
    Case, Gpu,
    case::{GpuCalls, LIMIT},
    ranks::Ranks,
    world,
};

/// Exchanges of a meeting in GPU memory: nodes, cards and outcomes.
const EXCHANGES: usize = 3;
/// More calls than there are slots.
const ROUNDS: usize = 5;

impl Case {
    /// The last rank leaves while a call waits for it; the others meet, and call without it. A new
    /// one comes, and calls have the bytes of before.
    pub(crate) fn meets_anew(self) {
        world(self.ranks, |ranks, me| {
            let (gpu, inputs) = (Gpu::new(), self.inputs_of(me, 0, self.slots));
            let calls = GpuCalls::new(&self, &gpu, &inputs);
            let group = self.join(ranks, me, LIMIT);
            let rounds = || {
                (0..ROUNDS).for_each(|_| calls.enqueue(&self, &group, &gpu));
                gpu.stream.synchronize().expect("kernels end well");
                group.check().expect("calls succeed");
            };
            rounds();
            let before = calls.got(&self, &gpu);
            ranks.meet();
            let stays = me + 1 < self.ranks;
            let group = if stays {
                self.goes_on(ranks, &group, (&calls, &gpu));
                group
            } else {
                drop(group);
                (0..EXCHANGES).for_each(|_| ranks.stays_away(me));
                let mut alone = |mine: Vec<u8>| {
                    Ok((0..self.ranks).map(|rank| (rank == me).then(|| mine.clone())).collect())
                };
                let config = self.config(me, LIMIT);
                cuda::Group::join(config, &mut alone).expect("it joins by itself")
            };
            meet(&group, (ranks, me), &gpu).expect("all meet");
            assert!((0..self.ranks).all(|rank| group.has(rank)));
            (0..ROUNDS).for_each(|_| calls.enqueue(&self, &group, &gpu));
            gpu.stream.synchronize().expect("kernels end well");
            group.check().expect("calls succeed again");
            assert_eq!(calls.got(&self, &gpu).sums, before.sums, "{self:?}, rank {me}");
            ranks.meet();
        });
    }

    /// The life of the others until a new rank comes.
    fn goes_on(
        &self,
        ranks: &Ranks,
        group: &Arc<cuda::Group>,
        (calls, gpu): (&GpuCalls<'_>, &Gpu),
    ) {
        let handle = calls.enqueue_dispatch(self, group, gpu).expect("a dispatch");
        group.interrupt();
        gpu.stream.synchronize().expect("kernels end well");
        group.check().expect_err("a rank is missing");
        meet(group, (ranks, group.rank()), gpu).expect("the others meet");
        group.check().expect("the group is sound again");
        let stale = calls.enqueue_combine(self, (group, &handle), gpu);
        assert!(matches!(stale, Err(Error::Stale { of: 1, is: 2, .. })), "{stale:?}");
        let gone = self.ranks - 1;
        let change = cuda::MaskChange { let_in: RankSet::of(gone), ..Default::default() };
        // SAFETY: no memory is given: the address is 0.
        unsafe { group.mask(change, 0, &gpu.stream) }.expect_err("an absent rank is let in");
        (0..ROUNDS).for_each(|_| calls.enqueue(self, group, gpu));
        gpu.stream.synchronize().expect("kernels end well");
        group.check().expect("calls succeed without the rank");
        assert_eq!(group.masked(&gpu.stream).expect("masks"), RankSet::of(gone));
    }
}

fn meet(group: &cuda::Group, (ranks, me): (&Ranks, usize), gpu: &Gpu) -> Result<()> {
    let occupancy = cuda::Occupancy { blocks: 2, is_alone: false };
    // SAFETY: the stream outlives the borrow.
    let stream = unsafe { uccl_device::cuda::Stream::borrow(gpu.context, gpu.stream.handle()) };
    group.regroup(&[stream], occupancy, &mut ranks.exchange(me))
}
