//! Patterns of traffic: which host sends to which.

use fastrand::Rng;

/// A pattern of traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// So many hosts send to the first host.
    Incast {
        /// How many.
        senders: u16,
    },
    /// Each host sends to one other and receives from one other, at random. Where there are leaves,
    /// the other is at another leaf.
    Permutation,
    /// Each host sends to every other.
    AllToAll,
    /// Each host sends to the next.
    Ring,
    /// So many flows from the second host to the first.
    Pair {
        /// How many.
        flows: u16,
    },
}

/// A flow of a pattern.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowPlan {
    /// The host that sends.
    pub from: u16,
    /// The host that receives.
    pub to: u16,
    /// How many flows share the link of either host that most flows share.
    pub sharers: u16,
}

impl Pattern {
    /// The fewest hosts that it needs.
    #[must_use]
    pub fn least_hosts(&self) -> u32 {
        match *self {
            Self::Incast { senders } => u32::from(senders) + 1,
            _ => 2,
        }
    }

    /// Its flows between so many hosts, of which each `per_leaf` are at one leaf.
    pub(crate) fn flows(&self, hosts: u16, per_leaf: u16, rng: &mut Rng) -> Vec<FlowPlan> {
        let plan = |from: u16, to: u16, sharers: u16| FlowPlan { from, to, sharers };
        match *self {
            Self::Incast { senders } => (1..=senders).map(|from| plan(from, 0, senders)).collect(),
            Self::Permutation => {
                let to = permutation(hosts, per_leaf, rng);
                (0..hosts).zip(to).map(|(from, to)| plan(from, to, 1)).collect()
            }
            Self::AllToAll => (0..hosts)
                .flat_map(|from| (1..hosts).map(move |step| (from, (from + step) % hosts)))
                .map(|(from, to)| plan(from, to, hosts - 1))
                .collect(),
            Self::Ring => (0..hosts).map(|from| plan(from, (from + 1) % hosts, 1)).collect(),
            Self::Pair { flows } => (0..flows).map(|_| plan(1, 0, flows)).collect(),
        }
    }
}

/// A permutation in which no host stays at its leaf, or in which none stays where it is if there is
/// only one leaf.
fn permutation(hosts: u16, per_leaf: u16, rng: &mut Rng) -> Vec<u16> {
    let per_leaf = if per_leaf >= hosts { 1 } else { per_leaf };
    let mut to: Vec<u16> = (0..hosts).collect();
    rng.shuffle(&mut to);
    // Each host at its own leaf changes places with one for which both are better off.
    for from in 0..hosts {
        let clashes = |from: u16, to: u16| from / per_leaf == to / per_leaf;
        if !clashes(from, to[usize::from(from)]) {
            continue;
        }
        let mine = to[usize::from(from)];
        let other = (0..hosts)
            .map(|step| (from + step) % hosts)
            .find(|other| !clashes(from, to[usize::from(*other)]) && !clashes(*other, mine));
        if let Some(other) = other {
            to.swap(from.into(), other.into());
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_host_once_and_leaves_every_leaf() {
        for seed in 0..50 {
            let flows = Pattern::Permutation.flows(32, 8, &mut Rng::with_seed(seed));
            let mut to: Vec<_> = flows.iter().map(|flow| flow.to).collect();
            assert!(flows.iter().all(|flow| flow.from / 8 != flow.to / 8), "seed {seed}");
            to.sort_unstable();
            assert_eq!(to, (0..32).collect::<Vec<_>>());
        }
        let flows = Pattern::Permutation.flows(5, 5, &mut Rng::with_seed(1));
        assert!(flows.iter().all(|flow| flow.from != flow.to));
    }

    #[test]
    fn all_to_all_and_rings_have_their_flows() {
        let mut rng = Rng::with_seed(1);
        assert_eq!(Pattern::AllToAll.flows(5, 5, &mut rng).len(), 20);
        let ring = Pattern::Ring.flows(3, 3, &mut rng);
        assert_eq!(ring[2], FlowPlan { from: 2, to: 0, sharers: 1 });
        assert_eq!(Pattern::Incast { senders: 4 }.flows(9, 9, &mut rng)[3].from, 4);
    }
}
