//! Blocks that their rank has dropped, while peers may still read them.

use std::{
    mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_device::DemandThread;

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
    thread: DemandThread,
}

static DROPPED: Mutex<DroppedBlocks> =
    Mutex::new(DroppedBlocks { blocks: Vec::new(), thread: DemandThread::new() });

/// Drops a block once its peers have read it, even if its group is dropped: a peer that ends a
/// combine later maps the block only then. A peer that does not read it within the group's timeout
/// has given up on the combine.
pub fn release_block(group: Arc<Group>, block: Arc<Block>) {
    let until = Instant::now() + group.timeout();
    let mut dropped = DROPPED.lock();
    dropped.blocks.push(DroppedBlock { group, block, until });
    let released = dropped.take_released();
    if !dropped.blocks.is_empty() {
        // Without a thread, the next dropped block has all blocks checked.
        let _ = dropped.thread.start("uccl-ep-blocks", check_blocks);
    }
    drop(dropped);
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
            return dropped.thread.leave();
        }
        let released = dropped.take_released();
        drop(dropped);
        // The end of a group may wait for its peers.
        drop(released);
    }
}
