//! A rank and the others leave each other out for some calls, and take part again.

use uccl_ep::{Group, RankSet, cuda};

use super::Gpu;

/// Rounds in which they do so: once for each number of calls in a range, with rounds of all
/// ranks behind each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Masks {
    /// The rank that is left out, and leaves out all others.
    pub(crate) rank: usize,
    /// The least and the largest of these numbers of calls.
    pub(crate) calls: (usize, usize),
    /// Whether ranks that are late are left out too.
    pub(crate) masks_late: bool,
    /// Whether ranks take part again between a dispatch and its combine.
    pub(crate) is_between: bool,
    /// Rounds of all ranks behind each time.
    pub(crate) behind: usize,
}

/// The masks and the calls of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Whether its dispatch leaves ranks out.
    is_apart: bool,
    /// Whether they take part again behind the dispatch.
    is_let_in: bool,
    pub(super) has_combine: bool,
}

const TOGETHER: Step = Step { is_apart: false, is_let_in: false, has_combine: true };

impl Masks {
    fn steps(&self) -> Vec<Step> {
        let (least, most) = self.calls;
        let apart = Step { is_apart: true, ..TOGETHER };
        let mut steps = vec![TOGETHER];
        for calls in least..=most {
            let alone = (calls % 2 == 1).then_some(Step { has_combine: false, ..apart });
            steps.extend(alone);
            steps.extend([apart].repeat(calls / 2));
            steps.extend(self.is_between.then_some(Step { is_let_in: true, ..apart }));
            steps.extend(vec![TOGETHER; self.behind]);
        }
        steps
    }

    /// The ranks that a rank leaves out in a step.
    fn left_out(&self, step: Step, me: usize, ranks: usize) -> RankSet {
        let lost = RankSet::of(self.rank);
        match step.is_apart {
            false => RankSet::EMPTY,
            true if me == self.rank => RankSet::first(ranks) - lost,
            true => lost,
        }
    }
}

/// The steps of the masks, or `rounds` steps without masks.
pub(super) fn steps_of(masks: Option<Masks>, rounds: usize) -> Vec<Step> {
    masks.map_or_else(|| vec![TOGETHER; rounds], |masks| masks.steps())
}

/// Makes a group of the CPU leave out the ranks of a step.
pub(super) fn mask_on_cpu(masks: Option<Masks>, step: Step, group: &Group) {
    let Some(masks) = masks else { return };
    let left_out = masks.left_out(step, group.rank(), group.ranks());
    for rank in (0..group.ranks()).filter(|rank| *rank != group.rank()) {
        group.mask(rank, left_out.has(rank)).expect("a rank");
    }
}

/// Does the same with a group on a GPU, before a step's dispatch, and before its combine.
pub(super) fn mask_on_gpu(
    masks: Option<Masks>,
    (step, is_behind): (Step, bool),
    (group, gpu): (&cuda::Group, &Gpu),
) {
    let Some(masks) = masks.filter(|_| !is_behind || step.is_let_in) else { return };
    let step = Step { is_apart: step.is_apart && !is_behind, ..step };
    let left_out = masks.left_out(step, group.rank(), group.ranks());
    let let_in = RankSet::first(group.ranks()) - left_out;
    let change = cuda::MaskChange { left_out, let_in };
    // SAFETY: no memory is given: the address is 0.
    unsafe { group.mask(change, 0, &gpu.stream) }.expect("a mask");
}
