//! A forked child: it inherits its parent's endpoint and must leave the parent's state alone.

use std::{sync::Arc, time::Duration};

use super::world::World;
use crate::{clock, history, watch};

/// Seconds after which an alarm kills a hanging child.
const LIMIT_S: u32 = 15;

/// Forks. The child uses the endpoint at random and exits.
pub(crate) fn fork(world: &Arc<World>, seed: u64) {
    // SAFETY: the child makes only calls that must work in a forked child, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    match child {
        0 => be_child(world, seed),
        -1 => {}
        child => {
            watch::call("a forked child", Duration::from_secs(LIMIT_S.into()), || await_end(child))
        }
    }
}

fn be_child(world: &Arc<World>, seed: u64) -> ! {
    // SAFETY: a plain system call.
    unsafe { libc::alarm(LIMIT_S) };
    match seed % 4 {
        0 => {}
        1 => drop(world.ep.close()),
        2 => drop(world.ep.clone()),
        _ => {
            let _ = world.ep.take_notifs();
            for conn in world.conns.try_lock().map(|conns| conns.clone()).unwrap_or_default() {
                let _ = world.ep.disconnect(conn);
            }
        }
    }
    // SAFETY: `_exit` runs no destructors and no exit handlers; the child needs none.
    unsafe { libc::_exit(0) }
}

fn await_end(child: i32) {
    let began = clock::active();
    let mut status = 0;
    loop {
        // SAFETY: `child` is a child of this process, and `status` is a local.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if ended == child {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if !(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0) {
        let took = clock::active() - began;
        history::broken(format!("a forked child ended with status {status:#x} after {took:?}"));
    }
}
