//! Whether a rail's writes go over unreliable queue pairs (UC).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use uccl_fabric::rail::RailError;

/// Whether a rail that is configured for such queue pairs can use them.
pub(crate) struct UcSupport {
    rail: String,
    is_given_up: AtomicBool,
}

impl UcSupport {
    pub(crate) fn new(rail: &str) -> Self {
        Self { rail: rail.to_owned(), is_given_up: AtomicBool::new(false) }
    }

    /// Whether new channels may have such queue pairs.
    pub(crate) fn holds(&self) -> bool {
        !self.is_given_up.load(Relaxed)
    }

    /// Takes the result of making such queue pairs. If it failed because the device has none, the
    /// rail does not try again. If it failed for a reason that may pass, only this channel does
    /// without them.
    pub(crate) fn made<T>(&self, made: Result<T, RailError>) -> Option<T> {
        let why = match made {
            Ok(made) => return Some(made),
            Err(why) => why,
        };
        if is_lasting(&why) {
            self.give_up(why);
        } else {
            tracing::warn!(
                "{}: writes of a channel go over reliable queue pairs (RC): {why}",
                self.rail
            );
        }
        None
    }

    /// New channels of this rail no longer use them.
    pub(crate) fn give_up(&self, why: impl std::fmt::Display) {
        if !self.is_given_up.swap(true, Relaxed) {
            let rail = &self.rail;
            tracing::warn!(
                "{rail} cannot be used with UCCL_RCMODE=0, from now on its writes go over reliable queue pairs (RC): {why}"
            );
        }
    }
}

/// Whether this error means that the device has no such queue pairs.
fn is_lasting(why: &RailError) -> bool {
    match why {
        // Drivers also answer EINVAL for a kind of queue pair that they do not know.
        RailError::Os { errno, .. } => {
            matches!(*errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPROTONOSUPPORT)
        }
        // The device's queue pairs of this kind lack a capability that we need.
        RailError::Provider { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_has_none_is_not_asked_again() {
        let failed = |errno| Err::<(), _>(RailError::os("ibv_create_qp", errno));
        let gone = Err::<(), _>(RailError::Gone("it was removed".into()));
        let trust = UcSupport::new("rxe0:1");
        for passing in [failed(libc::ENOMEM), failed(libc::EAGAIN), failed(libc::EIO), gone] {
            assert_eq!(trust.made(passing), None);
            assert!(trust.holds());
        }
        assert_eq!(trust.made(Ok(7)), Some(7));
        for errno in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL] {
            let trust = UcSupport::new("rxe0:1");
            assert_eq!(trust.made(failed(errno)), None);
            assert!(!trust.holds(), "{errno}");
        }
    }

    #[test]
    fn support_that_is_given_up_stays_so() {
        let trust = UcSupport::new("rxe0:1");
        assert!(trust.holds());
        trust.give_up("packets overtake each other");
        trust.give_up("once more");
        assert!(!trust.holds());
    }
}
