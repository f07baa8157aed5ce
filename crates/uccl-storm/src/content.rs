//! The known content of a piece of memory, range by range.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::pattern::{Mismatch, Pattern};

/// A range that ends at `end` and begins at the end of the previous run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Run {
    end: usize,
    /// `None`: the bytes are unknown.
    pattern: Option<Pattern>,
}

/// The known content of a piece of memory, as consecutive runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Content {
    runs: Vec<Run>,
}

impl Content {
    pub(crate) fn new(len: usize, pattern: Option<Pattern>) -> Self {
        Self { runs: vec![Run { end: len, pattern }] }
    }

    pub(crate) fn len(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// Records that `range` holds `pattern` from now on.
    pub(crate) fn set(&mut self, range: Range<usize>, pattern: Option<Pattern>) {
        let old = std::mem::take(&mut self.runs);
        let mut begin = 0;
        let put = |runs: &mut Vec<Run>, range: Range<usize>, pattern| {
            if range.is_empty() {
                return;
            }
            match runs.last_mut() {
                Some(last) if last.pattern == pattern => last.end = range.end,
                _ => runs.push(Run { end: range.end, pattern }),
            }
        };
        let mut done = range.is_empty();
        for run in old {
            put(&mut self.runs, begin..run.end.min(range.start.max(begin)), run.pattern);
            if !done && range.start < run.end {
                put(&mut self.runs, range.clone(), pattern);
                done = true;
            }
            put(&mut self.runs, begin.max(range.end)..run.end, run.pattern);
            begin = run.end;
        }
    }

    /// The parts of a range with known content, each with its pattern.
    pub(crate) fn known(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Pattern)> {
        let mut begin = 0;
        self.runs.iter().filter_map(move |run| {
            let part = begin.max(range.start)..run.end.min(range.end);
            begin = run.end;
            run.pattern.filter(|_| !part.is_empty()).map(|pattern| (part, pattern))
        })
    }

    /// The mismatch of the first part that differs from the known content. The memory begins at
    /// `base`.
    ///
    /// # Safety
    /// The memory is this process's to read.
    pub(crate) unsafe fn compare(&self, base: usize, range: Range<usize>) -> Option<Mismatch> {
        // SAFETY: the caller guarantees that the memory is readable.
        self.known(range)
            .find_map(|(part, pattern)| unsafe { pattern.compare(base, part.start, part.len()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_that_is_set_is_known_and_the_rest_stays() {
        let mut rng = fastrand::Rng::with_seed(7);
        let patterns: Vec<_> =
            (0..5).map(|stamp| (stamp > 0).then(|| Pattern::data(stamp))).collect();
        for _ in 0..200 {
            let mut model = vec![patterns[1]; 40];
            let mut content = Content::new(40, patterns[1]);
            for _ in 0..20 {
                let begin = rng.usize(0..=40);
                let range = begin..rng.usize(begin..=40);
                let pattern = patterns[rng.usize(0..5)];
                model[range.clone()].fill(pattern);
                content.set(range, pattern);
                let mut known = vec![None; 40];
                content.known(0..40).for_each(|(part, pattern)| known[part].fill(Some(pattern)));
                assert_eq!(known, model);
                assert_eq!(content.len(), 40);
                assert!(content.known(7..9).all(|(part, _)| part.start >= 7 && part.end <= 9));
            }
        }
    }
}
