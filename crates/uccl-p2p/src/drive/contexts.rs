//! The order of the unfinished writes of each context of each connection: which of them a strong
//! signal follows.
//!
//! A write takes its place when it enters the list of transfers, under that list's lock. A strong
//! signal follows only writes that have their places already. So no two transfers can wait for each
//! other, regardless of the threads that post them.
//!
//! It follows the last unfinished strong signal, which stands for all that was before it, and the
//! writes after that one. So each write is followed by one strong signal, however many are
//! outstanding.

use std::collections::{BTreeSet, HashMap};

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// The contexts of a connection in which a write has failed: they have no strong signals any more.
#[derive(Default)]
pub(crate) struct FailedContexts(Mutex<BTreeSet<u32>>);

impl FailedContexts {
    /// Notes that a write of a context has failed.
    pub(super) fn note(&self, context: u32) {
        self.0.lock().insert(context);
    }

    /// Refuses a strong signal if a write of its context has failed.
    pub(crate) fn check(&self, context: u32) -> Result<()> {
        match self.0.lock().contains(&context) {
            true => Err(Error::ContextFailed { context }),
            false => Ok(()),
        }
    }

    /// Keeps failures from being noted.
    #[cfg(test)]
    pub(super) fn lock(&self) -> impl Drop {
        self.0.lock()
    }
}

/// The scope of strong signals: a connection, by its address, and a context.
pub(super) type Scope = (usize, u32);

/// The unfinished writes of all scopes. They are named by their places in the list of transfers.
#[derive(Default)]
pub(super) struct Contexts {
    newest: HashMap<Scope, u32>,
    /// By place in the list of transfers. Places where no unfinished write is mean nothing.
    links: Vec<Link>,
}

#[derive(Clone, Copy, Default)]
struct Link {
    earlier: Option<u32>,
    later: Option<u32>,
    is_strong: bool,
}

impl Contexts {
    /// Adds the newest write of a scope.
    pub(super) fn push(&mut self, scope: Scope, at: u32, is_strong: bool) {
        let earlier = self.newest.insert(scope, at);
        if self.links.len() <= at as usize {
            self.links.resize(at as usize + 1, Link::default());
        }
        if let Some(earlier) = earlier {
            self.link(earlier).later = Some(at);
        }
        *self.link(at) = Link { earlier, later: None, is_strong };
    }

    /// Takes out a write that has ended.
    pub(super) fn remove(&mut self, scope: Scope, at: u32) {
        let Link { earlier, later, .. } = *self.link(at);
        if let Some(earlier) = earlier {
            self.link(earlier).later = later;
        }
        match (later, earlier) {
            (Some(later), _) => self.link(later).earlier = earlier,
            (None, Some(earlier)) => _ = self.newest.insert(scope, earlier),
            (None, None) => _ = self.newest.remove(&scope),
        }
    }

    /// The writes that a strong signal at this place follows, the latest first.
    pub(super) fn followed_by(&self, at: u32) -> impl Iterator<Item = u32> {
        let mut next = self.links[at as usize].earlier;
        std::iter::from_fn(move || {
            let at = next?;
            let Link { earlier, is_strong, .. } = self.links[at as usize];
            next = earlier.filter(|_| !is_strong);
            Some(at)
        })
    }

    fn link(&mut self, at: u32) -> &mut Link {
        &mut self.links[at as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCOPE: Scope = (0, 0);

    fn followed(contexts: &Contexts, at: u32) -> Vec<u32> {
        contexts.followed_by(at).collect()
    }

    #[test]
    fn a_strong_signal_follows_all_writes_back_to_the_last_strong_one() {
        let mut contexts = Contexts::default();
        for (at, is_strong) in [(7, false), (2, true), (5, false), (3, false), (9, true), (4, true)]
        {
            contexts.push(SCOPE, at, is_strong);
        }
        assert_eq!(followed(&contexts, 2), [7], "and nothing that came later");
        assert_eq!(followed(&contexts, 9), [3, 5, 2]);
        assert_eq!(followed(&contexts, 4), [9]);
        contexts.remove(SCOPE, 9);
        contexts.remove(SCOPE, 5);
        assert_eq!(followed(&contexts, 4), [3, 2]);
        contexts.push((0, 1), 9, true);
        contexts.push((1, 0), 5, true);
        assert!(followed(&contexts, 9).is_empty() && followed(&contexts, 5).is_empty());
    }

    /// Compared with a list of all writes, in order.
    #[test]
    fn the_order_is_kept_in_any_order_of_ends() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut contexts = Contexts::default();
        let mut all: Vec<(Scope, u32, bool)> = Vec::new();
        let mut free: Vec<u32> = (0..40).collect();
        for _ in 0..20_000 {
            let ends = !all.is_empty() && (free.is_empty() || rng.bool());
            if ends {
                let (scope, at, _) = all.remove(rng.usize(0..all.len()));
                contexts.remove(scope, at);
                free.push(at);
                continue;
            }
            let scope = (rng.usize(0..2), rng.u32(0..2));
            let at = free.swap_remove(rng.usize(0..free.len()));
            let is_strong = rng.u32(0..4) == 0;
            let mut expected = Vec::new();
            for (_, at, is_strong) in all.iter().rev().filter(|(of, ..)| *of == scope) {
                expected.push(*at);
                if *is_strong {
                    break;
                }
            }
            contexts.push(scope, at, is_strong);
            all.push((scope, at, is_strong));
            assert_eq!(followed(&contexts, at), expected);
        }
        all.drain(..).for_each(|(scope, at, _)| contexts.remove(scope, at));
        assert!(contexts.newest.is_empty());
    }
}
