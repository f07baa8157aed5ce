//! A port: a queue, and the link behind it.

use fastrand::Rng;

use crate::faults::{FaultState, LinkFaults};

/// The properties of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortParams {
    pub(crate) bytes_per_s: f64,
    /// From this end of the link to the other, in nanoseconds.
    pub(crate) delay_ns: u64,
    /// Bytes that may wait.
    pub(crate) capacity: u64,
    /// The queue from which on some packets are marked, and from which on all are, in bytes.
    pub(crate) mark: Option<(u64, u64)>,
    pub(crate) faults: LinkFaults,
}

/// The fate of a packet at a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Arrives {
        at_ns: u64,
        is_marked: bool,
    },
    /// The queue was full.
    Full,
    /// The link lost it.
    Lost,
}

/// A packet that a port takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parcel {
    pub(crate) bytes: u32,
    /// Acknowledgements, probes and credits have a class of their own, which goes first.
    pub(crate) is_control: bool,
}

/// The queue is not kept packet by packet: the time at which it will have been sent is enough,
/// since nothing leaves it but in order.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    ps_per_byte: f64,
    free_ps: u64,
    delay_ns: u64,
    capacity: u64,
    mark: Option<(u64, u64)>,
    faults: FaultState,
    /// Bytes that wait behind this port after the last packet.
    pub(crate) depth: u64,
}

impl Port {
    pub(crate) fn new(params: &PortParams) -> Self {
        Self {
            ps_per_byte: 1e12 / params.bytes_per_s,
            free_ps: 0,
            delay_ns: params.delay_ns,
            capacity: params.capacity,
            mark: params.mark,
            faults: FaultState::new(params.faults),
            depth: 0,
        }
    }

    /// Bytes that wait.
    pub(crate) fn queued(&self, now_ns: u64) -> u64 {
        (self.free_ps.saturating_sub(now_ns * 1000) as f64 / self.ps_per_byte) as u64
    }

    /// When so many bytes are left.
    pub(crate) fn drained_ns(&self, left: u64) -> u64 {
        self.free_ps.saturating_sub((left as f64 * self.ps_per_byte) as u64) / 1000
    }

    /// Takes a packet.
    pub(crate) fn take(&mut self, now_ns: u64, parcel: Parcel, rng: &mut Rng) -> Fate {
        let queued = self.queued(now_ns);
        let takes_ps = (f64::from(parcel.bytes) * self.ps_per_byte) as u64;
        self.depth = queued + u64::from(parcel.bytes);
        if self.depth > self.capacity && !parcel.is_control {
            self.depth = queued;
            return Fate::Full;
        }
        let begins_ps = self.free_ps.max(now_ns * 1000);
        self.free_ps = begins_ps + takes_ps;
        if self.faults.loses(now_ns, rng) {
            return Fate::Lost;
        }
        let sent_ps = match parcel.is_control {
            true => now_ns * 1000 + takes_ps,
            false => self.free_ps,
        };
        let at_ns = sent_ps.div_ceil(1000) + self.delay_ns + self.faults.late_ns(rng);
        Fate::Arrives { at_ns, is_marked: !parcel.is_control && self.marks(queued, rng) }
    }

    /// Whether a packet behind so many bytes is marked: never, with growing probability, always
    /// (Floyd and Jacobson, "Random Early Detection", 1993, on the queue of the moment as DCTCP).
    fn marks(&self, queued: u64, rng: &mut Rng) -> bool {
        match self.mark {
            Some((low, _)) if queued < low => false,
            Some((low, high)) if queued < high => {
                rng.f64() < (queued - low) as f64 / (high - low) as f64
            }
            Some(_) => true,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(mark: Option<(u64, u64)>) -> Port {
        Port::new(&PortParams {
            bytes_per_s: 1e9,
            delay_ns: 500,
            capacity: 10_000,
            mark,
            faults: LinkFaults::default(),
        })
    }

    const DATA: Parcel = Parcel { bytes: 1000, is_control: false };

    #[test]
    fn packets_wait_for_each_other_and_drop_where_the_queue_is_full() {
        let (mut port, mut rng) = (port(None), Rng::with_seed(1));
        for nth in 1..=10 {
            let at_ns = 1000 * nth + 500;
            let fate = port.take(0, DATA, &mut rng);
            assert_eq!(fate, Fate::Arrives { at_ns, is_marked: false });
        }
        assert_eq!(port.take(0, DATA, &mut rng), Fate::Full);
        assert_eq!(
            (port.queued(0), port.queued(4000), port.drained_ns(2000)),
            (10_000, 6000, 8000)
        );
        assert!(matches!(port.take(1000, DATA, &mut rng), Fate::Arrives { at_ns: 11_500, .. }));
        let control = Parcel { bytes: 100, is_control: true };
        assert!(matches!(port.take(1000, control, &mut rng), Fate::Arrives { at_ns: 1600, .. }));
        assert_eq!(port.queued(1000), 10_100, "it takes the link's time from the others");
    }

    #[test]
    fn a_long_queue_marks() {
        let (mut port, mut rng) = (port(Some((3000, 3000))), Rng::with_seed(1));
        let mut marks = (0..6).map(|_| port.take(0, DATA, &mut rng));
        let is_marked = |fate| matches!(fate, Some(Fate::Arrives { is_marked: true, .. }));
        assert_eq!(
            [(); 6].map(|()| is_marked(marks.next())),
            [false, false, false, true, true, true]
        );
    }
}
