//! How long transfers and memory wait for a peer before it is given up (`liveness.rs` judges
//! silence). Each time derives from a setting: `timeout`, within which a peer has to answer, or a
//! transfer's own timeout.

use std::time::{Duration, Instant};

use uccl_rma::Silence;

use crate::config::Config;

/// The end of a time that begins now; `None` if it has no end, or none within the clock's range.
pub(crate) fn end_of(time: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(time?)
}

/// As [`end_of`], for times of which zero has no end.
pub(crate) fn end_unless_zero(time: Duration) -> Option<Instant> {
    end_of(Some(time).filter(|time| !time.is_zero()))
}

/// How long a peer may take to end a transfer that was called off, if `timeout` is off and silence
/// is never given up: a cancel has to come to an end all the same.
const WITHOUT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long streams go on waiting for a transfer that was called off and does not end. The work
/// that it waits for may stand behind the streams' own waits in a hardware queue.
pub(crate) const TO_HOLD_STREAMS: Duration = Duration::from_millis(500);

/// How long before its deadline a transfer begins to end, so that it has ended by then: a tenth of
/// its time, at most a fortieth of the connection's.
pub(crate) fn to_fence(config: &Config, timeout: Duration) -> Duration {
    (timeout / 10).min(to_end(config) / 40)
}

/// How long a peer may take to let a transfer end that was called off by a cancel or its deadline.
pub(crate) fn to_end(config: &Config) -> Duration {
    if config.timeout.is_zero() { WITHOUT_TIMEOUT } else { config.timeout }
}

/// How long it may take to take in the data that a peer sent before it ended.
pub(crate) fn to_take_in_end(config: &Config) -> Duration {
    to_end(config)
}

/// How long a peer may take to say that rails have been tried.
pub(crate) fn to_try_rails(config: &Config) -> Duration {
    to_end(config)
}

/// How long a rail's probe may take where data can go another way.
pub(crate) const TO_PROBE: Duration = Duration::from_secs(4);

/// How long rails may be silent. Where nothing but rails is allowed, a probe has the time that the
/// peer has: the connecting side decides how long to wait for it then.
pub(crate) fn of_rails(config: &Config) -> Silence {
    let stall = Some(config.timeout).filter(|timeout| !timeout.is_zero());
    let probe = if config.transport.needs_rails() { stall } else { Some(TO_PROBE) };
    Silence { stall, probe }
}

/// How long a peer may take to let go of memory.
pub(crate) fn to_let_go(config: &Config) -> Duration {
    config.timeout
}

/// How long a worker may take to end. It may be in the middle of a copy, or may be ending a lane
/// that is.
const TO_LEAVE: Duration = Duration::from_secs(5);

/// How long workers are waited for when their endpoint closes.
pub(crate) fn to_stop(config: &Config) -> Duration {
    if config.timeout.is_zero() { Duration::ZERO } else { config.timeout.max(TO_LEAVE) }
}

/// Whether a time has passed; a zero time never passes.
pub(crate) fn is_over(since: Instant, time: Duration) -> bool {
    !time.is_zero() && since.elapsed() > time
}
