//! Whether a rail's writes go over queue pairs that are not reliable.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::rma::rail::RailError;

/// What is known of a rail that was told to use such queue pairs (UC).
pub(in crate::verbs) struct Trust {
    rail: String,
    is_given_up: AtomicBool,
}

impl Trust {
    pub(in crate::verbs) fn new(rail: &str) -> Self {
        Self { rail: rail.to_owned(), is_given_up: AtomicBool::new(false) }
    }

    /// Whether new channels may have them.
    pub(in crate::verbs) fn holds(&self) -> bool {
        !self.is_given_up.load(Relaxed)
    }

    /// What was made with such queue pairs, if it was. Some devices have none, and are not asked again. What else kept
    /// them from being made may pass: this channel does without them.
    pub(in crate::verbs) fn made<T>(&self, made: Result<T, RailError>) -> Option<T> {
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

    /// They are not used on this rail any more.
    pub(in crate::verbs) fn give_up(&self, why: impl std::fmt::Display) {
        if !self.is_given_up.swap(true, Relaxed) {
            let rail = &self.rail;
            tracing::warn!(
                "{rail} cannot be used with UCCL_RCMODE=0, from now on its writes go over reliable queue pairs (RC): {why}"
            );
        }
    }
}

/// Whether a device that fails so has no such queue pairs.
fn is_lasting(why: &RailError) -> bool {
    match why {
        // EINVAL is what drivers say of a kind that they do not know, too.
        RailError::Os { errno, .. } => {
            matches!(*errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPROTONOSUPPORT)
        }
        // What the device has is not enough.
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
        let trust = Trust::new("rxe0:1");
        for passing in [failed(libc::ENOMEM), failed(libc::EAGAIN), failed(libc::EIO), gone] {
            assert_eq!(trust.made(passing), None);
            assert!(trust.holds());
        }
        assert_eq!(trust.made(Ok(7)), Some(7));
        for errno in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL] {
            let trust = Trust::new("rxe0:1");
            assert_eq!(trust.made(failed(errno)), None);
            assert!(!trust.holds(), "{errno}");
        }
    }

    #[test]
    fn what_is_given_up_stays_so() {
        let trust = Trust::new("rxe0:1");
        assert!(trust.holds());
        trust.give_up("packets overtake each other");
        trust.give_up("once more");
        assert!(!trust.holds());
    }
}
