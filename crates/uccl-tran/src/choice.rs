//! Path choice: the path that the next chunk takes.
//!
//! A path is an entropy value: a queue pair, a UDP source port, a stream. The network hashes it to
//! a route. Each technique is a file and an implementation of [`PathChoice`].

mod marked;
mod recycled;
mod round_robin;
#[cfg(test)]
mod tests;
mod two_choices;

use std::fmt::Debug;

pub use marked::MarkAvoidance;
pub use recycled::RecycledEntropies;
pub use round_robin::RoundRobin;
pub use two_choices::TwoChoices;

/// The sender's view of a path.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct PathState {
    /// Whether it may take a chunk: it is up, answers, and has room.
    pub can_take: bool,
    /// Its smoothed round trip in nanoseconds; 0 before the first sample.
    pub rtt_ns: u64,
    /// Bytes under way over it.
    pub in_flight_bytes: u64,
}

/// All paths, of which one is to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// The paths by number.
    pub paths: &'a [PathState],
    /// The path over which this chunk was lost, if it was; any other is better.
    pub avoid: Option<usize>,
}

impl Candidates<'_> {
    /// Whether the path may take this chunk.
    #[must_use]
    pub fn can_take(&self, path: usize) -> bool {
        self.avoid != Some(path) && self.paths.get(path).is_some_and(|state| state.can_take)
    }

    /// The first path from `from` on, around the end, that may take this chunk.
    #[must_use]
    pub fn next_from(&self, from: usize) -> Option<usize> {
        let count = self.paths.len();
        (0..count).map(|step| (from + step) % count).find(|path| self.can_take(*path))
    }
}

/// A technique of choosing paths.
pub trait PathChoice: Debug + Send {
    /// The path for a chunk; `None` if no path may take it.
    fn choose(&mut self, candidates: &Candidates<'_>) -> Option<usize>;

    /// A chunk has come over the path. `is_marked` means that a queue on its way marked it (ECN).
    fn on_ack(&mut self, _path: usize, _is_marked: bool) {}

    /// A chunk was lost over the path.
    fn on_loss(&mut self, _path: usize) {}
}

/// Names of the techniques, as settings and `uccl sim` have them.
pub const CHOICE_NAMES: [&str; 4] = ["round-robin", "two-choices", "skip-marked", "recycled"];

/// The technique of this name for so many paths. `seed` is for those that draw.
#[must_use]
pub fn choice_named(name: &str, paths: usize, seed: u64) -> Option<Box<dyn PathChoice>> {
    Some(match name {
        "round-robin" => Box::new(RoundRobin::default()),
        "two-choices" => Box::new(TwoChoices::new(seed)),
        "skip-marked" => Box::new(MarkAvoidance::new(paths)),
        "recycled" => Box::new(RecycledEntropies::new(paths)),
        _ => return None,
    })
}
