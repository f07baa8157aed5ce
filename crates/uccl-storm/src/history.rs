//! The latest actions of this process, and the report of a broken promise.

use std::{
    collections::VecDeque,
    io::Write,
    process,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use parking_lot::Mutex;

use crate::{clock, control::ControlMessage};

/// The most lines that are kept.
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

/// Sends a message to the driver, which may forward it to the peer.
pub(crate) fn say(message: &ControlMessage) {
    let mut out = std::io::stdout().lock();
    // This process ends when its driver is gone.
    if writeln!(out, "{}", message.line()).and_then(|()| out.flush()).is_err() {
        process::exit(4);
    }
}

/// Sends the kept lines to the driver.
pub(crate) fn tell() {
    for (at_ns, what) in std::mem::take(&mut *LINES.lock()) {
        say(&ControlMessage::Told { at_ns, what });
    }
}

/// Reports a broken promise and ends the process. Only the first thread that gets here reports.
pub(crate) fn broken(what: String) -> ! {
    if BROKEN.swap(true, SeqCst) {
        loop {
            std::thread::park();
        }
    }
    note(format!("BROKEN: {what}"));
    say(&ControlMessage::Broken { what });
    tell();
    process::exit(3)
}
