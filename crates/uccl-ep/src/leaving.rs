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
    leaving.retain(|(group, block)| !group.is_read(block));
    let excess = leaving.len().saturating_sub(KEPT);
    leaving.drain(..excess);
}
