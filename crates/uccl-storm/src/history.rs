//! What this process did last, and how it says that a promise was broken.

use std::{
    collections::VecDeque,
    io::Write,
    process,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use parking_lot::Mutex;

use crate::{clock, word::Word};

/// How many lines are kept.
const KEPT: usize = 600;

static LINES: Mutex<VecDeque<(u64, String)>> = Mutex::new(VecDeque::new());
static BROKEN: AtomicBool = AtomicBool::new(false);

pub(crate) fn note(what: String) {
    let mut lines = LINES.lock();
    if lines.len() == KEPT {
        lines.pop_front();
    }
    lines.push_back((clock::shared_ns(), what));
}

/// Says a word to the driver, which may pass it on.
pub(crate) fn say(word: &Word) {
    let mut out = std::io::stdout().lock();
    // A driver that is gone takes this process along.
    if writeln!(out, "{}", word.line()).and_then(|()| out.flush()).is_err() {
        process::exit(4);
    }
}

/// Says what this process did.
pub(crate) fn tell() {
    for (at_ns, what) in std::mem::take(&mut *LINES.lock()) {
        say(&Word::Told { at_ns, what });
    }
}

/// A promise was broken: the storm is over. The first thread to find out tells.
pub(crate) fn broken(what: String) -> ! {
    if BROKEN.swap(true, SeqCst) {
        loop {
            std::thread::park();
        }
    }
    note(format!("BROKEN: {what}"));
    say(&Word::Broken { what });
    tell();
    process::exit(3)
}
