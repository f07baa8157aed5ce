//! Faults of links.

use fastrand::Rng;

/// Losses in a row (Gilbert, "Capacity of a Burst-Noise Channel", 1960): a link is good or bad, and
/// loses every packet while it is bad.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bursts {
    /// The part of packets after which a good link turns bad, 0 to 1.
    pub begin: f64,
    /// The part of packets after which a bad link turns good, 0 to 1: the mean length of a burst is
    /// the inverse.
    pub end: f64,
}

/// A link that is down again and again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flaps {
    /// From one time to the next, in nanoseconds.
    pub period_ns: u64,
    /// How long it is down, in nanoseconds.
    pub down_ns: u64,
}

/// Packets that are overtaken.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReorderFault {
    /// Their part, 0 to 1.
    pub part: f64,
    /// The most time that one loses, in nanoseconds.
    pub most_ns: u64,
}

/// The faults of a link.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct LinkFaults {
    /// The part of packets that is lost, 0 to 1.
    pub loss: f64,
    /// Losses in a row.
    pub bursts: Option<Bursts>,
    /// Times without the link.
    pub flaps: Option<Flaps>,
    /// Packets that are overtaken.
    pub reordering: Option<ReorderFault>,
}

/// A link's faults and their state.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct FaultState {
    faults: LinkFaults,
    is_bad: bool,
    has_any: bool,
}

impl FaultState {
    pub(crate) fn new(faults: LinkFaults) -> Self {
        Self { faults, is_bad: false, has_any: faults != LinkFaults::default() }
    }

    /// Whether a packet that is sent now is lost.
    pub(crate) fn loses(&mut self, now_ns: u64, rng: &mut Rng) -> bool {
        if !self.has_any {
            return false;
        }
        if let Some(bursts) = self.faults.bursts {
            let turns = rng.f64() < if self.is_bad { bursts.end } else { bursts.begin };
            self.is_bad ^= turns;
        }
        self.is_bad || self.is_down(now_ns) || rng.f64() < self.faults.loss
    }

    /// The time by which a packet that is sent now is overtaken, in nanoseconds.
    pub(crate) fn late_ns(&self, rng: &mut Rng) -> u64 {
        match self.faults.reordering {
            Some(reordering) if rng.f64() < reordering.part => rng.u64(0..=reordering.most_ns),
            _ => 0,
        }
    }

    fn is_down(&self, now_ns: u64) -> bool {
        // A link is up at first.
        self.faults.flaps.is_some_and(|flaps| {
            now_ns % flaps.period_ns.max(1) >= flaps.period_ns.saturating_sub(flaps.down_ns)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(faults: LinkFaults) -> Vec<bool> {
        let (mut state, mut rng) = (FaultState::new(faults), Rng::with_seed(3));
        (0..100_000).map(|now_ns| state.loses(now_ns, &mut rng)).collect()
    }

    #[test]
    fn losses_have_their_part_and_bursts_their_length() {
        let lost = losses(LinkFaults { loss: 0.01, ..LinkFaults::default() });
        assert!((800..1200).contains(&lost.iter().filter(|lost| **lost).count()));
        let bursts = Some(Bursts { begin: 0.001, end: 0.1 });
        let lost = losses(LinkFaults { bursts, ..LinkFaults::default() });
        let begins = lost.windows(2).filter(|pair| !pair[0] && pair[1]).count();
        let mean = lost.iter().filter(|lost| **lost).count() as f64 / begins as f64;
        assert!((7.0..13.0).contains(&mean), "{mean}");
    }

    #[test]
    fn a_link_that_flaps_is_down_at_the_end_of_each_period() {
        let flaps = Some(Flaps { period_ns: 1000, down_ns: 100 });
        let lost = losses(LinkFaults { flaps, ..LinkFaults::default() });
        assert!(lost.iter().enumerate().all(|(now, lost)| *lost == (now % 1000 >= 900)));
    }
}
