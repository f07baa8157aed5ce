//! A test's changes to the window of the first of two ranks: it holds back rows and flags that the
//! second has sent.

use std::{
    ops::Range,
    thread::sleep,
    time::{Duration, Instant},
};

use uccl_ep::{cuda, places::SLOTS};

use super::Gpu;

/// Constants of the kernels: the flags of a call from a rank, the tagged words before all flags, and the
/// difference of both from one call to the next.
const CHUNKS: usize = 2048;
const TAGGED_WORDS: usize = 1 + 8192;
pub(super) const CALL: u64 = 1 << 22;
const RANKS: usize = 2;
/// Far longer than the kernels need for a chunk that they do not wait for.
const WHILE: Duration = Duration::from_millis(150);
/// Far longer than a rank takes.
const LIMIT: Duration = Duration::from_secs(50);

pub(super) struct Window<'a> {
    gpu: &'a Gpu,
    /// The address of its pool, behind the flags.
    pool: u64,
}

/// Rows and flags that are held back.
pub(super) struct HeldBack {
    rows: (u64, Vec<u8>),
    flags: (u64, Vec<u64>),
}

/// Reads words until they are as expected, and returns them.
fn when(read: impl Fn() -> Vec<u64>, is_there: impl Fn(&[u64]) -> bool) -> Vec<u64> {
    let began = Instant::now();
    loop {
        let found = read();
        if is_there(&found) {
            return found;
        }
        assert!(began.elapsed() < LIMIT, "the second rank has not come after {LIMIT:?}");
        sleep(Duration::from_millis(1));
    }
}

/// Bytes from the first word of a call from the second rank to the end of such words. A rank has
/// `words` of them for each call.
fn words_behind(call: usize, words: usize) -> u64 {
    let nth = call % SLOTS * RANKS + 1;
    ((SLOTS * RANKS - nth) * words * size_of::<u64>()) as u64
}

impl<'a> Window<'a> {
    pub(super) fn of(group: &cuda::Group, gpu: &'a Gpu) -> Self {
        Self { gpu, pool: group.pool_address() }
    }

    /// The first flag of a call from the second rank.
    fn flags_of(&self, call: usize) -> u64 {
        self.pool - words_behind(call, CHUNKS)
    }

    /// Changes the value of a tagged word of a call from the second rank, after it has come.
    pub(super) fn change_tagged_word(&self, call: usize, nth: usize, value: u64) {
        let flags = (SLOTS * RANKS * CHUNKS * size_of::<u64>()) as u64;
        let at =
            self.pool - flags - words_behind(call, TAGGED_WORDS) + (nth * size_of::<u64>()) as u64;
        let call = call as u64;
        when(|| self.gpu.download(at, 1), |words| words[0] / CALL == call);
        self.gpu.write(at, &[call * CALL + value]);
    }

    /// Reads the flags of a call and a range of the pool, once all of `flags` have come.
    pub(super) fn hold(&self, call: usize, flags: &[usize], rows: Range<usize>) -> HeldBack {
        let all = when(
            || self.gpu.download(self.flags_of(call), CHUNKS),
            |all| flags.iter().all(|flag| all[*flag] / CALL == call as u64),
        );
        let address = self.pool + rows.start as u64;
        HeldBack {
            rows: (address, self.gpu.download(address, rows.len())),
            flags: (self.flags_of(call), all),
        }
    }

    /// Changes some flags.
    pub(super) fn change(&self, held: &HeldBack, flags: &[usize], change: impl Fn(u64) -> u64) {
        let mut changed = held.flags.1.clone();
        flags.iter().for_each(|flag| changed[*flag] = change(changed[*flag]));
        self.gpu.write(held.flags.0, &changed);
    }

    /// Replaces some flags with those of an earlier call, and the rows with other bytes.
    pub(super) fn hide(&self, held: &HeldBack, flags: &[usize]) {
        self.change(held, flags, |flag| flag - CALL);
        self.gpu.write(held.rows.0, &vec![0x3fu8; held.rows.1.len()]);
    }

    /// Puts the rows and their flags back, after a while.
    pub(super) fn restore(&self, held: &HeldBack) {
        sleep(WHILE);
        self.gpu.write(held.rows.0, &held.rows.1);
        self.gpu.write(held.flags.0, &held.flags.1);
    }
}
