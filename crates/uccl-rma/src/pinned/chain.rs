//! One device's registrations of a piece of memory: the first, and another one each time that the
//! device was lost and opened again.

use std::{iter::successors, sync::OnceLock};

use uccl_fabric::rail::{RailError, Registration};

/// A registration, or the reason why there is none, and those that came after it. Earlier ones
/// stay, as requests may name them.
pub(super) struct Chain {
    made: Result<Box<dyn Registration>, RailError>,
    next: OnceLock<Box<Self>>,
}

impl Chain {
    pub(super) fn new(made: Result<Box<dyn Registration>, RailError>) -> Self {
        Self { made, next: OnceLock::new() }
    }

    fn links(&self) -> impl Iterator<Item = &Self> {
        successors(Some(self), |link| link.next.get().map(|next| &**next))
    }

    /// The latest.
    pub(super) fn now(&self) -> Option<&dyn Registration> {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        last.made.as_deref().ok()
    }

    /// All that were made.
    pub(super) fn all(&self) -> impl Iterator<Item = &dyn Registration> {
        self.links().filter_map(|link| link.made.as_deref().ok())
    }

    /// Adds the latest. One thread at a time may do so.
    pub(super) fn renew(&self, made: Result<Box<dyn Registration>, RailError>) {
        if let Some(last) = self.links().last() {
            // Nobody else adds one.
            let _ = last.next.set(Box::new(Self::new(made)));
        }
    }
}
