//! Strong signals wait for the writes before them: they follow these, and are told of their ends.

use std::{cell::RefCell, collections::VecDeque, sync::Arc};

use crate::{
    drive::core::connection::{
        Connection,
        transfer::{Follower, Transfer},
        transfers::Earlier,
    },
    error::{Error, Result},
};

/// Followers to tell, and whether the transfer that each followed has failed.
type TellQueue = VecDeque<(Arc<Follower>, bool)>;

thread_local! {
    /// The followers that this thread has yet to tell; `None` while it tells none.
    static TO_TELL: RefCell<Option<TellQueue>> = const { RefCell::new(None) };
}

/// Ends this thread's telling, also where that panics: followers of later transfers must be told.
struct TellGuard;

impl Drop for TellGuard {
    fn drop(&mut self) {
        TO_TELL.set(None);
    }
}

/// Tells followers that a transfer has ended. A follower that ends by that may have followers of
/// its own: this thread tells them one after the other instead of by recursion, because each may be
/// the first of thousands.
pub(super) fn tell_all(followers: Vec<Arc<Follower>>, failed: bool) {
    if followers.is_empty() {
        return;
    }
    let followers = followers.into_iter().map(|follower| (follower, failed));
    let is_telling = TO_TELL.with_borrow_mut(|to_tell| match to_tell {
        Some(to_tell) => {
            to_tell.extend(followers);
            true
        }
        None => {
            *to_tell = Some(followers.collect());
            false
        }
    });
    if is_telling {
        return;
    }
    let _ends = TellGuard;
    let next = || TO_TELL.with_borrow_mut(|to_tell| to_tell.as_mut()?.pop_front());
    while let Some((follower, failed)) = next() {
        follower.tell(failed);
    }
}

impl Follower {
    /// Called when the other transfer has ended, or when this one stops waiting for it.
    pub(super) fn tell(&self, failed: bool) {
        if !self.begin_telling() {
            return;
        }
        if failed {
            self.transfer.note_error(Error::ContextFailed { context: self.transfer.context });
        }
        self.transfer.op_ended();
    }
}

impl Transfer {
    /// Makes `other` wait until this transfer ends.
    pub(crate) fn lead(&self, other: &Arc<Self>) {
        let Some(follower) = other.begin_following() else { return };
        if let Some(has_failed) = self.add_follower(&follower) {
            follower.tell(has_failed);
        }
    }

    /// Stops waiting for other transfers.
    pub(crate) fn stop_following(&self) {
        self.take_following().iter().for_each(|follower| follower.tell(false));
    }
}

impl Connection {
    /// Makes a strong signal wait for the writes that were posted before it in its context, or for
    /// the strong signals that stand for them.
    ///
    /// # Errors
    /// A write of its context has failed.
    pub(crate) fn follow(&self, transfer: &Arc<Transfer>, earlier: Earlier) -> Result<()> {
        // Before the check below: a failing write is noted as failed before anybody can see that it
        // has ended.
        earlier.iter().for_each(|earlier| earlier.lead(transfer));
        self.failed_contexts.check(transfer.context)
    }
}
