//! Blocks that their rank has dropped, while peers may still read them.

use std::{
    mem,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{blocks::Block, group::Group};

/// The most blocks that are kept. The oldest is dropped first, if its peers never report that they
/// have read it.
const KEPT: usize = 16;
/// The first and the longest pause of the thread between two checks of the blocks.
const NAPS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// A block, its group, and the time by which peers have given up on the call that reads it.
struct Leaving {
    group: Arc<Group>,
    block: Arc<Block>,
    until: Instant,
}

/// Blocks that peers may still read, and the thread that checks them while there are any.
#[derive(Default)]
struct Room {
    leaving: Vec<Leaving>,
    looks: bool,
    thread: Option<JoinHandle<()>>,
}

static ROOM: Mutex<Room> = Mutex::new(Room { leaving: Vec::new(), looks: false, thread: None });

/// Drops a block once its peers have read it, even if its group is dropped: a peer that ends a
/// combine later maps the block only then. A peer that does not read it within the group's timeout
/// has given up on the combine.
pub fn let_go(group: Arc<Group>, block: Arc<Block>) {
    let until = Instant::now() + group.timeout();
    let mut room = ROOM.lock();
    room.leaving.push(Leaving { group, block, until });
    let gone = room.take_gone();
    let is_needed = !room.leaving.is_empty() && !room.looks;
    let ended = if is_needed { room.thread.take() } else { None };
    if is_needed {
        let looks = thread::Builder::new().name("uccl-ep-blocks".into()).spawn(look_after);
        // Without a thread, the next dropped block has all blocks checked.
        (room.looks, room.thread) = (looks.is_ok(), looks.ok());
    }
    drop(room);
    // The thread has announced its end. A panic of it has been reported.
    ended.into_iter().for_each(|thread| drop(thread.join()));
    // The end of a group may wait for its peers, so it happens without the lock.
    drop(gone);
}

impl Room {
    /// The blocks that no peer reads any more, and those beyond the limit.
    fn take_gone(&mut self) -> Vec<Leaving> {
        let now = Instant::now();
        let is_kept = |one: &Leaving| !one.group.is_read(&one.block) && now < one.until;
        let (kept, mut gone): (Vec<_>, Vec<_>) =
            mem::take(&mut self.leaving).into_iter().partition(is_kept);
        self.leaving = kept;
        let excess = self.leaving.len().saturating_sub(KEPT);
        gone.extend(self.leaving.drain(..excess));
        gone
    }
}

/// Checks the blocks until there are none.
fn look_after() {
    let [mut nap, longest] = NAPS;
    loop {
        thread::sleep(nap);
        nap = longest.min(2 * nap);
        let mut room = ROOM.lock();
        if room.leaving.is_empty() {
            room.looks = false;
            return;
        }
        let gone = room.take_gone();
        drop(room);
        // The end of a group may wait for its peers.
        drop(gone);
    }
}
