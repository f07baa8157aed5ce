//! Signals alone, behind long puts.

use anyhow::{Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::Plugin,
    memory,
    rank::Rank,
    rma::{Move, Signal},
};

const ROUNDS: u64 = 20;
const BYTES: usize = 6 << 20;

/// A signal without bytes of its own stands for the long put before it: NCCL sends those of
/// windows apart from their puts.
pub(crate) fn strong(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    let (words, mut target) = (group.register(64)?, group.register(BYTES)?);
    let mut source = group.register(BYTES)?;
    let (me, peer) = (group.rank, 1 - group.rank);
    for round in 1..=ROUNDS {
        rank.step(format!("round {round}"))?;
        source.memory.fill(round * 2 + me as u64);
        rank.meet()?;
        let put =
            Move { context: 0, from: source.at(0), to: target.at(0), bytes: BYTES, rank: peer };
        let change = Signal { at: words.at(me * 8), value: 1, change: signal::INCREMENT };
        let requests = [group.put(put)?, group.signal(0, peer, change)?];
        group.wait_word(&words, peer * 8, round)?;
        let wrong = memory::difference(target.memory.slice(), round * 2 + peer as u64);
        ensure!(wrong.is_none(), "round {round}: the signal is there, and byte {wrong:?} is wrong");
        for request in requests {
            group.wait(request)?;
        }
        rank.meet()?;
    }
    group.close(&[&words, &target, &source])?;
    plugin.finish(rank)?;
    Ok(format!("{ROUNDS} long puts each way"))
}
