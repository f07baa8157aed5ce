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
struct DroppedBlock {
    group: Arc<Group>,
    block: Arc<Block>,
    until: Instant,
}

/// Blocks that peers may still read, and the thread that checks them while there are any.
#[derive(Default)]
struct DroppedBlocks {
    blocks: Vec<DroppedBlock>,
    has_thread: bool,
    thread: Option<JoinHandle<()>>,
}

static DROPPED: Mutex<DroppedBlocks> =
    Mutex::new(DroppedBlocks { blocks: Vec::new(), has_thread: false, thread: None });

/// Drops a block once its peers have read it, even if its group is dropped: a peer that ends a
/// combine later maps the block only then. A peer that does not read it within the group's timeout
/// has given up on the combine.
pub fn release_block(group: Arc<Group>, block: Arc<Block>) {
    let until = Instant::now() + group.timeout();
    let mut dropped = DROPPED.lock();
    dropped.blocks.push(DroppedBlock { group, block, until });
    let released = dropped.take_released();
    let is_needed = !dropped.blocks.is_empty() && !dropped.has_thread;
    let ended = if is_needed { dropped.thread.take() } else { None };
    if is_needed {
        let thread = thread::Builder::new().name("uccl-ep-blocks".into()).spawn(check_blocks);
        // Without a thread, the next dropped block has all blocks checked.
        (dropped.has_thread, dropped.thread) = (thread.is_ok(), thread.ok());
    }
    drop(dropped);
    // The thread has announced its end. A panic of it has been reported.
    ended.into_iter().for_each(|thread| drop(thread.join()));
    // The end of a group may wait for its peers, so it happens without the lock.
    drop(released);
}

impl DroppedBlocks {
    /// The blocks that no peer reads any more, and those beyond the limit.
    fn take_released(&mut self) -> Vec<DroppedBlock> {
        let now = Instant::now();
        let is_kept = |one: &DroppedBlock| !one.group.is_read(&one.block) && now < one.until;
        let (kept, mut released): (Vec<_>, Vec<_>) =
            mem::take(&mut self.blocks).into_iter().partition(is_kept);
        self.blocks = kept;
        let excess = self.blocks.len().saturating_sub(KEPT);
        released.extend(self.blocks.drain(..excess));
        released
    }
}

/// Checks the blocks until there are none.
fn check_blocks() {
    let [mut nap, longest] = NAPS;
    loop {
        thread::sleep(nap);
        nap = longest.min(2 * nap);
        let mut dropped = DROPPED.lock();
        if dropped.blocks.is_empty() {
            dropped.has_thread = false;
            return;
        }
        let released = dropped.take_released();
        drop(dropped);
        // The end of a group may wait for its peers.
        drop(released);
    }
}
