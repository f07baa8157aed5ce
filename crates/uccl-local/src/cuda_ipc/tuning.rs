//! How turns are cut, which measurements may change.

use std::time::Duration;

/// The environment variable: `slice=8,other=16,all=32,from=8,streams=1,hold=20,blocks=0,alone=64`, in MiB and
/// microseconds.
const VARIABLE: &str = "UCCL_GPU_TURNS";

/// How a GPU that copies to several others shares its time among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    /// Bytes of a slice.
    pub(super) slice: u64,
    /// The most bytes enqueued for one other GPU.
    pub(super) other: u64,
    /// The most bytes enqueued for all.
    pub(super) all: u64,
    /// An operation of so many bytes is cut into slices.
    pub(super) from: u64,
    /// Streams that all lanes share; 0: each has its own.
    pub(super) streams: usize,
    /// The most bytes enqueued while all are for one other GPU.
    pub(super) alone: u64,
    /// How long a GPU waits for operations that go to others.
    pub(super) hold: Duration,
    /// With so many blocks the kernel copies each slice; 0: copy engines do.
    pub(super) blocks: u32,
}

impl Tuning {
    pub(super) fn now() -> Self {
        const MIB: u64 = 1 << 20;
        let mut tuning = Self {
            slice: 8 * MIB,
            other: 16 * MIB,
            all: 32 * MIB,
            from: 8 * MIB,
            streams: 1,
            alone: 64 * MIB,
            hold: Duration::from_micros(20),
            blocks: 0,
        };
        let Ok(text) = std::env::var(VARIABLE) else { return tuning };
        for (name, value) in text.split(',').filter_map(|setting| setting.split_once('=')) {
            let Ok(value) = value.parse::<u64>() else { continue };
            match name {
                "slice" => tuning.slice = value.max(1) * MIB,
                "other" => tuning.other = value * MIB,
                "all" => tuning.all = value * MIB,
                "alone" => tuning.alone = value.max(32) * MIB,
                "from" => tuning.from = value * MIB,
                "streams" => tuning.streams = value as usize,
                "hold" => tuning.hold = Duration::from_micros(value),
                "blocks" => tuning.blocks = value as u32,
                _ => {}
            }
        }
        tuning.other = tuning.other.max(tuning.slice);
        tuning.all = tuning.all.max(tuning.other);
        tuning
    }
}
