//! The kernels' report of a failed call, and the error that it becomes.

use std::time::Duration;

use uccl_device::cuda::{Context, GpuError, PinnedBuffer};

use super::params::{PUSH, ROOM, Status, state};
use crate::shared::{
    error::{Error, Phase},
    header::KINDS,
    protocol::{Mark, MissingMark},
    rank_set::{MAX_RANKS, place_of},
};

/// Words of host memory that a rank's kernels write to when a call fails.
pub(super) struct Reports {
    memory: PinnedBuffer,
}

impl Reports {
    pub(super) fn new(context: &'static Context) -> Result<Self, GpuError> {
        Ok(Self { memory: PinnedBuffer::new(context, size_of::<Status>())? })
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    fn place(&self) -> *mut Status {
        self.memory.as_ptr().cast()
    }

    /// Tells kernels of a rank that is gone. One thread at a time does it.
    pub(super) fn set_lost(&self, rank: usize) {
        let (word, bit) = place_of(rank);
        // SAFETY: as below; GPUs only read these words, and no other thread writes them. A group
        // has no rank beyond the set.
        unsafe {
            let word = &raw mut (*self.place()).lost.words[word];
            word.write_volatile(word.read_volatile() | 1 << bit);
        }
    }

    /// Forgets the report, the lost ranks and the end of waits. No kernel runs, and no thread
    /// watches.
    pub(super) fn reset(&self) {
        // SAFETY: the memory is that long and page-aligned, and all-zero bytes are a report.
        unsafe { self.place().write_volatile(std::mem::zeroed()) };
    }

    /// Ends all kernels that wait.
    pub(super) fn poison(&self) {
        // SAFETY: the memory is that long and page-aligned; GPUs only read this word.
        unsafe { (&raw mut (*self.place()).poison).write_volatile(1) };
    }

    /// The report, if a call has failed.
    pub(super) fn read(&self) -> Option<Status> {
        // SAFETY: as above. The state is written once, after all else.
        let state = unsafe { (&raw const (*self.place()).state).read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        // SAFETY: any bytes are valid, and no kernel writes any more.
        (state != 0).then(|| unsafe { self.place().read_volatile() })
    }
}

/// The sizes of a dispatch that ranks must agree on.
pub(super) const DISPATCH_AGREED: [&str; 5] =
    ["bytes of payload", "words of scales", "top-k", "experts", "slots"];
/// The same for a combine.
pub(super) const COMBINE_AGREED: [&str; 5] =
    ["bytes of a row", "weights of a row", "rows of a token", "slots", "packed rows"];

/// The fault word of a rank that began no call because it has too many tokens, in place of a call's
/// number.
pub(super) const TOO_MANY: u64 = u64::MAX;

impl Status {
    /// Converts the report into the error of the CPU's calls. `loss` returns the reason if a rank
    /// is gone.
    pub(super) fn to_error(self, rank: usize, loss: impl Fn(usize) -> Option<String>) -> Error {
        let is_combine = self.phase == 2;
        let phase = if is_combine { Phase::Combine } else { Phase::Dispatch };
        let peer = self.late.iter().next().unwrap_or(MAX_RANKS - 1);
        let (expected, seen) = (self.expected[peer], self.seen[peer]);
        match self.state {
            state::OVERDUE if self.detail == PUSH => {
                let waited = Duration::from_nanos(self.waited_ns);
                let why = format!(
                    "cannot be told: this rank's proxy has taken {seen} of {expected} commands, and no more in {waited:?}"
                );
                Error::PeerLost { phase, rank, peer, why }
            }
            state::LOST => {
                let why = loss(peer).unwrap_or_else(|| "is lost".to_owned());
                Error::PeerLost { phase, rank, peer, why }
            }
            state::OVERDUE => {
                let what = if self.detail == ROOM { "room" } else { "data" };
                let awaited = |peer| MissingMark {
                    peer,
                    owner: peer,
                    what,
                    expected: Mark::of_word(self.expected[peer]),
                    seen: Mark::of_word(self.seen[peer]),
                };
                let awaited = self.late.iter().map(awaited).collect();
                let waited = Duration::from_nanos(self.waited_ns);
                Error::Overdue { phase, rank, awaited, waited }
            }
            state::GAVE_UP => {
                let gave_up = match seen {
                    TOO_MANY => "has more tokens than the call says or the buffer has any room \
                                 for, so all ranks need other arguments (num_worst_tokens, \
                                 num_max_tokens_per_rank) or a larger buffer"
                        .to_owned(),
                    _ => format!("gave up on call {seen}"),
                };
                // A rank that gave up has most likely lost one that this rank is about to lose too.
                let lost = (0..MAX_RANKS).filter(|other| *other != peer);
                match lost.filter_map(|other| Some((other, loss(other)?))).next() {
                    Some((lost, why)) => {
                        let why = format!("{why}; rank {peer} {gave_up}");
                        Error::PeerLost { phase, rank, peer: lost, why }
                    }
                    None => Error::PeerLost { phase, rank, peer, why: gave_up },
                }
            }
            state::POISONED => Error::Interrupted,
            state::DISAGREE => {
                let names = if is_combine { COMBINE_AGREED } else { DISPATCH_AGREED };
                let what = match self.detail.checked_sub(1) {
                    None => KINDS,
                    Some(at) if at as usize == names.len() + 1 => "tokens",
                    Some(at) => names.get(at as usize).copied().unwrap_or("tokens for this rank"),
                };
                Error::Disagree { phase, rank, peer, what, theirs: seen, ours: expected }
            }
            state::STALE => Error::invalid(format!(
                "combine on rank {rank}: its dispatch was call {seen}, before ranks came or went, \
                 and the first call since then is {expected}; dispatch again"
            )),
            state::NO_ROOM => Error::invalid(match phase {
                Phase::Combine => {
                    format!("{seen} rows are given, and the handle tells of {expected}")
                }
                _ => format!("{expected} rows arrive, and there is room for {seen}"),
            }),
            _ => Error::invalid(format!("choice {seen} of token {expected} is no expert")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::rank_set::RankSet;

    fn report(state: u32) -> Status {
        let (mut expected, mut seen) = ([0; MAX_RANKS], [0; MAX_RANKS]);
        expected[2] = Mark { call: 9, round: 0, is_last: true }.to_word();
        (expected[3], seen[3]) = (9, 8);
        let ranks: &[usize] = if state == state::OVERDUE { &[2, 3] } else { &[3] };
        let late = ranks.iter().copied().collect();
        // The third agreed word, or ROOM.
        let what = if state == state::DISAGREE { 3 } else { 1 };
        let (poison, call, waited_ns, lost) = (0, 9, 5, RankSet::EMPTY);
        Status {
            poison,
            state,
            phase: 1,
            detail: what,
            call,
            late,
            waited_ns,
            lost,
            expected,
            seen,
        }
    }

    #[test]
    fn reports_of_kernels_are_the_errors_of_the_cpu() {
        let why = |rank: usize| (rank == 3).then(|| "has ended".to_owned());
        let said = |state| report(state).to_error(1, why).to_string();
        let late = "rank 2: room of call 9 round 0 expected, nothing seen; rank 3: room of call 0";
        assert!(said(state::OVERDUE).contains(late), "{}", said(state::OVERDUE));
        assert_eq!(said(state::GAVE_UP), "dispatch on rank 1: rank 3 gave up on call 8");
        let mut too_many = report(state::GAVE_UP);
        too_many.seen[3] = TOO_MANY;
        let too_many = too_many.to_error(1, |_| None).to_string();
        assert!(too_many.contains("rank 3 has more tokens than the call says"), "{too_many}");
        assert_eq!(said(state::DISAGREE), "dispatch on rank 1: rank 3 has top-k 8, this rank 9");
        assert!(said(state::WRONG_CHOICE).starts_with("choice 8 of token 9"));
        assert_eq!(said(state::NO_ROOM), "9 rows arrive, and there is room for 8");
        assert!(said(state::STALE).contains("was call 8") && said(state::STALE).contains("is 9"));
        assert_eq!(said(state::POISONED), "interrupted");
        assert_eq!(said(state::LOST), "dispatch on rank 1: rank 3 has ended");
        let other = |rank: usize| (rank == 5).then(|| "has ended".to_owned());
        let both = report(state::GAVE_UP).to_error(1, other).to_string();
        assert_eq!(both, "dispatch on rank 1: rank 5 has ended; rank 3 gave up on call 8");
        let stuck = Status { detail: PUSH, late: RankSet::of(3), ..report(state::OVERDUE) };
        let stuck = stuck.to_error(1, |_| None).to_string();
        assert!(
            stuck.contains("rank 3 cannot be told: this rank's proxy has taken 8 of 9 commands")
        );
    }
}
