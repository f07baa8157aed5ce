//! The ranks that exchange weights, as every one of them knows them.

use super::{
    catalogue::plan_of,
    error::{Error, Result},
    manifest::Manifest,
    memory::MOST_READERS,
};
use crate::plan::{Options, Peer, Plan};

/// All ranks of an exchange. Each rank has equal lists.
#[derive(Clone, Debug)]
pub struct Party {
    /// The ranks that publish.
    pub sources: Vec<Manifest>,
    /// The ranks that read.
    pub targets: Vec<Manifest>,
    /// The choices of the plan.
    pub options: Options,
}

impl Party {
    /// The reads of all targets.
    ///
    /// # Errors
    /// As for [`plan`](crate::plan::plan); or there are too many targets.
    pub fn plan(&self) -> Result<Plan> {
        if self.targets.len() > MOST_READERS {
            let count = self.targets.len();
            return Err(Error::Invalid(format!("{count} targets: the most are {MOST_READERS}")));
        }
        Ok(plan_of(&self.sources, &self.targets, &self.options)?)
    }

    /// The manifest of a rank.
    pub(super) fn manifest(&self, peer: Peer) -> &Manifest {
        match peer {
            Peer::Source(rank) => &self.sources[rank],
            Peer::Target(rank) => &self.targets[rank],
        }
    }
}

/// The targets that read from a rank.
pub(super) fn readers_of(plan: &Plan, peer: Peer) -> Vec<usize> {
    let reads_from = |rank: &usize| {
        let steps = &plan.targets[*rank].steps;
        steps.iter().flat_map(|step| &step.reads).any(|read| read.from == peer)
    };
    (0..plan.targets.len()).filter(reads_from).collect()
}
