//! Counters of a proxy.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Counters of a rank's proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ProxyStats {
    /// Commands that it took.
    pub commands: u64,
    /// Writes that it posted; each has all pieces that were gathered for a peer.
    pub writes: u64,
    /// Time in which it worked itself.
    pub working: Duration,
    /// Time in which writes were under way.
    pub under_way: Duration,
}

/// The same counters, as the proxy updates them.
#[derive(Default)]
pub(super) struct Counters {
    commands: AtomicU64,
    writes: AtomicU64,
    working_ns: AtomicU64,
    under_way_ns: AtomicU64,
}

impl Counters {
    pub(super) fn count_command(&self) {
        self.commands.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_write(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_working(&self, time: Duration) {
        self.working_ns.fetch_add(nanos(time), Ordering::Relaxed);
    }

    pub(super) fn add_under_way(&self, time: Duration) {
        self.under_way_ns.fetch_add(nanos(time), Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> ProxyStats {
        let read = |word: &AtomicU64| word.load(Ordering::Relaxed);
        ProxyStats {
            commands: read(&self.commands),
            writes: read(&self.writes),
            working: Duration::from_nanos(read(&self.working_ns)),
            under_way: Duration::from_nanos(read(&self.under_way_ns)),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
