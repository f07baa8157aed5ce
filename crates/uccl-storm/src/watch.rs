//! Calls under watch: each must return within its time limit.

use std::{fs, time::Duration};

use parking_lot::Mutex;

use crate::{clock, history};

/// Time that a call may take beyond its deadlines, as machines are busy.
pub(crate) const SLACK: Duration = Duration::from_secs(20);

struct Call {
    thread: i32,
    name: &'static str,
    until: Duration,
}

static CALLS: Mutex<Vec<Call>> = Mutex::new(Vec::new());

fn thread_id() -> i32 {
    // SAFETY: a plain system call.
    unsafe { libc::gettid() }
}

/// Makes a call that must return within its own `limit` and some slack.
pub(crate) fn call<T>(name: &'static str, limit: Duration, call: impl FnOnce() -> T) -> T {
    let thread = thread_id();
    CALLS.lock().push(Call { thread, name, until: clock::active() + limit + SLACK });
    let result = call();
    CALLS.lock().retain(|call| call.thread != thread);
    result
}

/// Reports a call that hangs.
pub(crate) fn look() {
    let now = clock::active();
    let late =
        CALLS.lock().iter().find(|call| call.until < now).map(|call| (call.thread, call.name));
    if let Some((thread, name)) = late {
        history::broken(format!(
            "{name} does not return, on thread {thread}; threads:\n{}",
            threads()
        ));
    }
}

/// The state of each thread, as the kernel reports it.
fn threads() -> String {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return String::new() };
    let read = |path| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let lines = tasks.flatten().map(|task| {
        let of = |what| read(task.path().join(what));
        format!("  {} {} {} {}", task.file_name().display(), of("comm"), of("wchan"), of("syscall"))
    });
    lines.collect::<Vec<_>>().join("\n")
}
