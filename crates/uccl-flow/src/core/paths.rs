//! The pair of addresses that each stream goes over.

/// The pause after the first failure of a pair, in microseconds. It doubles with each further one.
const PAUSE_US: u64 = 100_000;
/// The longest pause of a pair that has answered, and of one that has not.
const MOST_PAUSE_US: u64 = 100_000;
const MOST_STRANGE_PAUSE_US: u64 = 5_000_000;
/// One stream tries other pairs than its own when none has been open for this time.
const LOST_US: u64 = 2_000_000;
/// That stream. The others stay where they were, or links that come back one after the other would
/// leave all streams on the first one.
const SCOUT: usize = 0;

/// The state of a pair of addresses.
#[derive(Clone, Copy, Default, Debug)]
struct Path {
    /// Streams that are open over it, or being opened.
    streams: usize,
    has_answered: bool,
    /// Failures since it last answered.
    failures: u32,
    /// It is tried again then.
    again_us: u64,
}

/// The pair of a stream.
#[derive(Clone, Copy, Default, Debug)]
struct StreamPath {
    /// The one that it was first open over. It is opened there again.
    home: Option<usize>,
    current: Option<usize>,
    is_open: bool,
}

/// Chooses the pair of addresses for each stream of a bundle: all that answer get as many. A
/// stream waits for its pair, which may be cut off, while others are open, so that each link has
/// its streams again as soon as it is back.
pub(crate) struct Paths {
    paths: Vec<Path>,
    /// Pairs from here on are tried only when none before answers.
    spare: usize,
    streams: Vec<StreamPath>,
    /// When a stream was last open.
    open_us: u64,
}

impl Paths {
    pub(crate) fn new(paths: usize, spare: usize, streams: usize) -> Self {
        Self {
            paths: vec![Path::default(); paths],
            spare,
            streams: vec![StreamPath::default(); streams],
            open_us: 0,
        }
    }

    /// The pair over which a stream is to be opened; `None` if it should wait.
    /// [`Paths::on_open`] or [`Paths::on_end`] follows.
    pub(crate) fn choose(&mut self, stream: usize, now_us: u64) -> Option<usize> {
        let is_any_open = self.streams.iter().any(|stream| stream.is_open);
        if is_any_open {
            self.open_us = now_us;
        }
        let home = self.streams[stream].home;
        let path = match home {
            Some(home) if stream != SCOUT || now_us < self.open_us + LOST_US => {
                Some(home).filter(|home| self.paths[*home].again_us <= now_us)
            }
            Some(_) => self.least_failed(now_us),
            None => self.best(now_us),
        }?;
        self.paths[path].streams += 1;
        self.streams[stream].current = Some(path);
        Some(path)
    }

    /// The stream is open.
    pub(crate) fn on_open(&mut self, stream: usize) {
        let own = &mut self.streams[stream];
        own.is_open = true;
        own.home = own.home.or(own.current);
        if let Some(path) = own.current.and_then(|at| self.paths.get_mut(at)) {
            (path.has_answered, path.failures, path.again_us) = (true, 0, 0);
        }
    }

    /// The stream has ended, or could not be opened.
    pub(crate) fn on_end(&mut self, stream: usize, now_us: u64) {
        let own = &mut self.streams[stream];
        let was_open = std::mem::take(&mut own.is_open);
        let Some(path) = own.current.take().and_then(|at| self.paths.get_mut(at)) else { return };
        path.streams = path.streams.saturating_sub(1);
        if was_open {
            self.open_us = now_us;
            return;
        }
        let most = if path.has_answered { MOST_PAUSE_US } else { MOST_STRANGE_PAUSE_US };
        path.again_us = now_us + (PAUSE_US << path.failures.min(10)).min(most);
        path.failures += 1;
    }

    /// The pair with the fewest failures, when all have been closed for long.
    fn least_failed(&self, now_us: u64) -> Option<usize> {
        let due = (0..self.paths.len()).filter(|at| self.paths[*at].again_us <= now_us);
        due.min_by_key(|at| self.paths[*at].failures)
    }

    /// The pair with the fewest streams of those that may answer.
    fn best(&self, now_us: u64) -> Option<usize> {
        let is_due = |at: &usize| self.paths[*at].again_us <= now_us;
        let is_hopeful = |at: &usize| {
            let path = &self.paths[*at];
            path.has_answered || path.failures == 0
        };
        let fewest = |range: std::ops::Range<usize>, only_hopeful: bool| {
            let due = range.filter(is_due).filter(|at| !only_hopeful || is_hopeful(at));
            due.min_by_key(|at| self.paths[*at].streams)
        };
        if (0..self.spare).any(|at| is_hopeful(&at)) {
            return fewest(0..self.spare, true);
        }
        fewest(self.spare..self.paths.len(), true).or_else(|| fewest(0..self.paths.len(), false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens all streams over pairs that answer.
    fn open_all(paths: &mut Paths, answers: impl Fn(usize) -> bool, from_us: u64) -> Vec<usize> {
        let mut found = vec![None; paths.streams.len()];
        for now_us in (from_us..from_us + 1_000_000).step_by(50_000) {
            for (stream, found) in found.iter_mut().enumerate().filter(|(_, one)| one.is_none()) {
                let Some(path) = paths.choose(stream, now_us) else { continue };
                if answers(path) {
                    paths.on_open(stream);
                    *found = Some(path);
                } else {
                    paths.on_end(stream, now_us);
                }
            }
        }
        found.into_iter().flatten().collect()
    }

    fn counts(paths: &Paths) -> Vec<usize> {
        paths.paths.iter().map(|path| path.streams).collect()
    }

    #[test]
    fn all_pairs_that_answer_get_as_many_streams() {
        let mut paths = Paths::new(6, 4, 8);
        assert_eq!(open_all(&mut paths, |path| path != 1, 0).len(), 8);
        assert_eq!(counts(&paths), [3, 0, 3, 2, 0, 0], "the spare ones get none");
    }

    #[test]
    fn spare_pairs_are_taken_when_no_other_answers() {
        let mut paths = Paths::new(6, 4, 2);
        assert_eq!(open_all(&mut paths, |path| path == 5, 0), [5, 5]);
    }

    #[test]
    fn a_stream_waits_for_its_own_pair_while_others_are_open() {
        let mut paths = Paths::new(2, 2, 4);
        open_all(&mut paths, |_| true, 0);
        let now_us = 2_000_000;
        for stream in [1, 3] {
            paths.on_end(stream, now_us);
        }
        for now_us in (now_us..now_us + 30_000_000).step_by(10_000) {
            for stream in [1, 3] {
                if let Some(path) = paths.choose(stream, now_us) {
                    assert_eq!(path, 1, "at {now_us} us");
                    paths.on_end(stream, now_us);
                }
            }
        }
        let now_us = now_us + 30_000_000;
        let due = (now_us..).step_by(10_000).find(|now_us| paths.choose(1, *now_us).is_some());
        assert!(due.is_some_and(|due| due <= now_us + MOST_PAUSE_US), "it is tried often");
        paths.on_open(1);
        assert!(paths.choose(3, now_us + MOST_PAUSE_US).is_some());
        paths.on_open(3);
        assert_eq!(counts(&paths), [2, 2]);
    }

    #[test]
    fn one_stream_takes_another_pair_when_all_have_been_closed_for_long() {
        let mut paths = Paths::new(2, 2, 2);
        open_all(&mut paths, |path| path == 0, 0);
        let now_us = 2_000_000;
        paths.on_end(0, now_us);
        paths.on_end(1, now_us);
        assert_eq!(paths.choose(0, now_us), Some(0), "its own, soon after the loss");
        paths.on_end(0, now_us);
        assert_eq!(open_all(&mut paths, |path| path == 1, now_us + LOST_US), [1]);
        let now_us = now_us + LOST_US + 1_000_000;
        assert_eq!(paths.choose(1, now_us), Some(0), "the other waits for its own");
    }
}
