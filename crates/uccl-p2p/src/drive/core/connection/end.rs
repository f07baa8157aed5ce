//! How far the end of a connection has come.

use std::sync::atomic::{AtomicBool, Ordering::*};

use parking_lot::Mutex;

use crate::error::Error;

/// The end of a connection: its reason, and its two steps.
#[derive(Default)]
pub(in crate::drive) struct End {
    reason: Mutex<Option<Error>>,
    /// The connection has failed or was closed; its lanes may still touch memory.
    has_begun: AtomicBool,
    /// No lane touches memory any more.
    is_over: AtomicBool,
}

impl End {
    /// Begins the end for this reason; false if it has begun before.
    pub(in crate::drive) fn begin(&self, reason: &Error) -> bool {
        {
            let mut first = self.reason.lock();
            if first.is_some() {
                return false;
            }
            *first = Some(reason.clone());
        }
        self.has_begun.store(true, Release);
        true
    }

    /// Notes that no lane touches memory any more.
    pub(in crate::drive) fn complete(&self) {
        self.is_over.store(true, SeqCst);
    }

    pub(in crate::drive) fn has_begun(&self) -> bool {
        self.has_begun.load(Acquire)
    }

    pub(in crate::drive) fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    /// Why the connection ends, once the end has begun.
    pub(in crate::drive) fn reason(&self) -> Option<Error> {
        self.reason.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_begins_once_and_keeps_its_first_reason() {
        let end = End::default();
        assert!(!end.has_begun() && end.reason().is_none());
        assert!(end.begin(&Error::Interrupted) && !end.begin(&Error::Closed));
        assert!(end.has_begun() && !end.is_over());
        end.complete();
        assert!(end.is_over());
        assert!(matches!(end.reason(), Some(Error::Interrupted)), "the first stays");
    }
}
