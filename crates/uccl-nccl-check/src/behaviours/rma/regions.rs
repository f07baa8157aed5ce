//! Registrations of the same memory, of parts of it, and beside operations.

use std::thread;

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::{Group, Plugin, Room},
    memory::{self, GuardedMemory},
    net::Pointer,
    rank::Rank,
    rma::{At, Move, Signal},
};

const BYTES: usize = 64 << 10;
const HALF: usize = BYTES / 2;
/// Registrations beside puts, and the puts.
const TIMES: usize = 50;

pub(crate) fn regions(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    let (words, source) = (group.register(64)?, group.register(BYTES)?);
    let mut target = GuardedMemory::new(BYTES)?;
    let coll = group.coll;
    let of = |bytes: usize| plugin.rma.register(coll, target.at(), bytes);
    let (first, second, part) = (of(BYTES)?, of(BYTES)?, of(HALF)?);
    rank.meet()?;
    let mut count = 0;
    let mut try_it = |rank: &mut Rank, group: &Group, mr: Pointer, bytes: usize| {
        count += 1;
        let done = pass(group, &words, &source, At { mr, offset: 0 }, (bytes, count));
        done.and_then(|()| rank.meet())
    };
    let mut sources = [(first, BYTES), (second, BYTES), (part, HALF)];
    for (mr, bytes) in sources {
        try_it(rank, &group, mr, bytes)?;
    }
    rank.step("one of two registrations of the same memory ends")?;
    plugin.rma.deregister(coll, second)?;
    sources[1] = sources[0];
    rank.meet()?;
    for (mr, bytes) in sources {
        try_it(rank, &group, mr, bytes)?;
    }
    rank.step("a part outlives the whole")?;
    plugin.rma.deregister(coll, first)?;
    rank.meet()?;
    try_it(rank, &group, part, HALF)?;
    rank.step("registrations beside puts")?;
    let rma = plugin.rma.clone();
    let beside = thread::spawn(move || {
        // The whole pointer, which may go from thread to thread.
        let coll = { coll };
        let memory = GuardedMemory::new(BYTES)?;
        for _ in 0..TIMES {
            let mr = rma.register(coll, memory.at(), BYTES)?;
            rma.deregister(coll, mr)?;
            let contexts = rma.create_context(coll, 1)?;
            rma.destroy_context(contexts)?;
        }
        anyhow::Ok(())
    });
    let mut passed = Ok(());
    for _ in 0..TIMES {
        passed = passed.and_then(|()| try_it(rank, &group, part, HALF));
    }
    beside.join().ok().context("a thread of the check")??;
    passed?;
    let own = target.part(0, HALF);
    ensure!(memory::difference(own, seed(count, 1 - group.rank)).is_none(), "wrong bytes");
    rank.meet()?;
    plugin.rma.deregister(coll, part)?;
    group.close(&[&words, &source])?;
    plugin.finish(rank)?;
    Ok(format!("twice, a part, {TIMES} beside puts"))
}

fn seed(number: u64, of: usize) -> u64 {
    number * 2 + of as u64
}

/// Puts to the other rank through a registration, and looks at the bytes that come.
fn pass(
    group: &Group,
    words: &Room,
    source: &Room,
    to: At,
    (bytes, number): (usize, u64),
) -> Result<()> {
    let (me, peer) = (group.rank, 1 - group.rank);
    // SAFETY: the room's memory; the last put from it has ended.
    let own = unsafe { std::slice::from_raw_parts_mut(source.memory.at(), bytes) };
    memory::fill(own, seed(number, me));
    let moved = Move { context: 0, from: source.at(0), to, bytes, rank: peer };
    let signal = Signal { at: words.at(me * 8), value: 1, change: signal::ADD };
    let request = group.put_signal(moved, signal)?;
    group.wait_word(words, peer * 8, number)?;
    group.wait(request)
}
