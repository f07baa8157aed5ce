//! A rank of a group of the CPU: a GPU's results are compared with its results.

use std::{sync::Arc, time::Duration};

use uccl_ep::{Config, Group};

use super::{
    Loss, Masks, Ranks,
    masks::{Step, mask_on_cpu},
};

pub(super) struct Reference {
    pub(super) me: usize,
    pub(super) ranks: usize,
    pub(super) pool: usize,
    pub(super) timeout: Duration,
    pub(super) masks_late: bool,
    pub(super) lost: Option<(usize, Loss)>,
    pub(super) masks: Option<Masks>,
}

impl Reference {
    /// Joins, masks the ranks that are left out from the beginning and in each step, and makes the
    /// rounds.
    pub(super) fn run<'a, Inputs: 'a, CallResults>(
        self,
        ranks: &Ranks,
        rounds: impl Iterator<Item = (&'a Inputs, Step)>,
        mut round: impl FnMut(&Arc<Group>, &Inputs, Step) -> CallResults,
    ) -> Vec<CallResults> {
        let config = Config {
            rank: self.me,
            ranks: self.ranks,
            pool: self.pool,
            timeout: self.timeout,
            masks_late: self.masks_late,
            node: None,
            network: None,
        };
        let group = Group::join(config, &mut ranks.exchange(self.me)).expect("it joins");
        if let Some((lost, Loss::Masked)) = self.lost
            && lost != self.me
        {
            group.mask(lost, true).expect("another rank");
        }
        let made = rounds.map(|(inputs, step)| {
            mask_on_cpu(self.masks, step, &group);
            round(&group, inputs, step)
        });
        let got = made.collect();
        ranks.meet();
        got
    }
}
