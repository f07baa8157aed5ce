//! What a proxy has done, and how long it took.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// What the proxy of a rank has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ProxyStats {
    /// Commands that it took.
    pub commands: u64,
    /// Writes that it posted, each of all that was gathered for a peer.
    pub writes: u64,
    /// How long it was at work itself.
    pub working: Duration,
    /// How long writes were under way, from the first that was posted to the last that had ended.
    pub under_way: Duration,
}

/// The same, as the proxy counts it.
#[derive(Default)]
pub(super) struct Tally {
    commands: AtomicU64,
    writes: AtomicU64,
    working_ns: AtomicU64,
    under_way_ns: AtomicU64,
}

impl Tally {
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
