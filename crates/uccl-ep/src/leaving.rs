//! Blocks that their rank needs no more, while peers may yet read them.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{Block, Group};

/// Blocks that are kept at most. The oldest goes first, if its peers never say that they have read it.
const KEPT: usize = 16;

static LEAVING: Mutex<Vec<(Arc<Group>, Arc<Block>)>> = Mutex::new(Vec::new());

/// Lets go of a block. It stays until its peers have read it, also when its group is dropped: a peer that ends a combine
/// later maps the block only then. What can go is looked for when the next block is let go.
pub fn let_go(group: Arc<Group>, block: Arc<Block>) {
    let mut leaving = LEAVING.lock();
    leaving.push((group, block));
    let (kept, mut gone): (Vec<_>, Vec<_>) =
        leaving.drain(..).partition(|(group, block)| !group.is_read(block));
    *leaving = kept;
    let excess = leaving.len().saturating_sub(KEPT);
    gone.extend(leaving.drain(..excess));
    drop(leaving);
    // The end of a group may wait for its peers, so nobody waits for it here.
    drop(gone);
}
