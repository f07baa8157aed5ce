//! The parameters of a path, on which both ends agree.

use std::time::Duration;

use uccl_wire::ack::ACK_SPAN;

use crate::Congestion;

/// The parameters of a path. Both ends must have the same `first`, and the receiver's `ack_delay`
/// must not be above the sender's.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// Most messages that have not ended at any time; at most 256 less `reorder`.
    pub window: u32,
    /// How many later messages may overtake a message on the path; 0 for a queue pair.
    pub reorder: u32,
    /// The immediate of the first message.
    pub first: u32,
    /// The number of messages after which the receiver acknowledges.
    pub ack_every: u32,
    /// The longest time from a message to its acknowledgement by the receiver.
    pub ack_delay: Duration,
    /// The round trip that is assumed before one has been measured.
    pub initial_rtt: Duration,
    /// Shortest silence after which the sender probes.
    pub min_probe: Duration,
    /// Longest silence after which it probes, however often the time was doubled.
    pub max_probe: Duration,
    /// The silence after which the path is given up.
    pub dead_after: Duration,
    /// Limits the bytes under way. With `None`, `window` is the only limit.
    pub congestion: Option<Congestion>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            window: 192,
            reorder: 0,
            first: 0,
            ack_every: 4,
            ack_delay: Duration::from_micros(50),
            initial_rtt: Duration::from_millis(5),
            min_probe: Duration::from_micros(500),
            max_probe: Duration::from_millis(200),
            dead_after: Duration::from_secs(10),
            congestion: Some(Congestion::default()),
        }
    }
}

/// Why parameters cannot be used.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// An acknowledgement would not cover all the numbers that may be under way.
    #[error(
        "a window of {window} and a reorder distance of {reorder} need {} numbers; \
         an acknowledgement tells of {ACK_SPAN}", u64::from(*window) + u64::from(*reorder)
    )]
    Window {
        /// [`Params::window`].
        window: u32,
        /// [`Params::reorder`].
        reorder: u32,
    },
    /// A parameter is 0, so nothing could ever be sent or acknowledged.
    #[error("{0} must not be 0")]
    Zero(&'static str),
    /// The end of a range is before its start.
    #[error("{0} is below {1}")]
    Below(&'static str, &'static str),
    /// Not a fraction between 0 and 1.
    #[error("{0} is {1}, not between 0 and 1")]
    Fraction(&'static str, f64),
}

impl Params {
    /// Returns the parameters if they can be used.
    pub(crate) fn checked(self) -> Result<Self, ParamsError> {
        let zeros = [
            ("window", self.window == 0),
            ("ack_every", self.ack_every == 0),
            ("min_probe", self.min_probe.is_zero()),
            ("dead_after", self.dead_after.is_zero()),
        ];
        if let Some((name, _)) = zeros.into_iter().find(|(_, zero)| *zero) {
            return Err(ParamsError::Zero(name));
        }
        if u64::from(self.window) + u64::from(self.reorder) > u64::from(ACK_SPAN) {
            return Err(ParamsError::Window { window: self.window, reorder: self.reorder });
        }
        if self.max_probe < self.min_probe {
            return Err(ParamsError::Below("max_probe", "min_probe"));
        }
        self.congestion.map_or(Ok(()), |congestion| congestion.check())?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_cannot_work_are_refused() {
        let refused = |change: fn(&mut Params)| {
            let mut params = Params::default();
            change(&mut params);
            params.checked().unwrap_err()
        };
        assert_eq!(refused(|p| p.window = 0), ParamsError::Zero("window"));
        assert_eq!(refused(|p| p.ack_every = 0), ParamsError::Zero("ack_every"));
        let error = refused(|p| (p.window, p.reorder) = (200, 57));
        assert_eq!(error, ParamsError::Window { window: 200, reorder: 57 });
        assert!(error.to_string().contains("need 257 numbers"), "{error}");
        refused(|p| p.reorder = u32::MAX);
        refused(|p| p.max_probe = Duration::ZERO);
        refused(|p| p.congestion = Some(Congestion { floor_bytes: 0, ..Congestion::default() }));
        Params { window: 256, ..Params::default() }.checked().unwrap();
    }
}
