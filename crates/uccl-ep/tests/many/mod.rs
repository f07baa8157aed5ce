//! Groups with more ranks than a word has bits.

use uccl_ep::MAX_RANKS;

use super::*;

/// So many ranks, with room for the tokens of all.
fn many(count: usize) -> Ranks {
    Ranks { pool: 2 << 20, timeout: Duration::from_secs(60), ..Ranks::near(count) }
}

#[test]
fn many_ranks_give_back_a_multiple() {
    for ranks in [72, 130] {
        multiples(many(ranks), 3..4);
    }
}

#[test]
fn too_many_ranks_are_told_the_limit() {
    let ranks = many(MAX_RANKS + 1);
    let mut exchange = |_: Vec<u8>| -> Result<Vec<Option<Vec<u8>>>> { Ok(Vec::new()) };
    let why = Group::join(ranks.config(0), &mut exchange).err().map(|e| e.to_string());
    assert!(why.as_ref().is_some_and(|why| why.contains("a group has up to 512")), "{why:?}");
}
