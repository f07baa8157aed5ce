//! Puts, signals and gets, one at a time.

use std::{sync::atomic::Ordering::Release, thread::sleep, time::Duration};

use anyhow::{Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::{Group, Plugin, Room},
    memory,
    rank::Rank,
    rma::{Move, Signal},
};

const SIZES: [usize; 11] =
    [1, 8, 127, 4095, 4096, 4097, 32 << 10, (64 << 10) + 1, 128 << 10, 1 << 20, 16 << 20];
const LONGEST: usize = 16 << 20;
/// Bytes before the first one that is moved: addresses are odd.
const ODD: usize = 3;
/// Time in which a second change of a word would come.
const LATE: Duration = Duration::from_millis(50);

/// The memory of a rank: words that signals change, memory that is put to, and memory to put from.
struct Memory {
    words: Room,
    target: Room,
    source: Room,
}

impl Memory {
    fn new(group: &Group) -> Result<Self> {
        let words = group.register(64)?;
        let (target, source) = (group.register(LONGEST + 8)?, group.register(LONGEST + 8)?);
        Ok(Self { words, target, source })
    }

    fn all(&self) -> [&Room; 3] {
        [&self.words, &self.target, &self.source]
    }

    fn signal(&self, word: usize, value: u64, change: u32) -> Signal {
        Signal { at: self.words.at(word * 8), value, change }
    }
}

pub(crate) fn put(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    let mut room = Memory::new(&group)?;
    let (me, peer) = (group.rank, 1 - group.rank);
    for (number, bytes) in SIZES.into_iter().enumerate() {
        rank.step(format!("{bytes} bytes"))?;
        let (seed, theirs) = ((number * 2 + me) as u64, (number * 2 + peer) as u64);
        memory::fill(room.source.memory.part(ODD, bytes), seed);
        rank.meet()?;
        let (from, to) = (room.source.at(ODD), room.target.at(ODD));
        let moved = Move { context: 0, from, to, bytes, rank: peer };
        let request = group.put_signal(moved, room.signal(me, 1, signal::ADD))?;
        group.wait_word(&room.words, peer * 8, number as u64 + 1)?;
        let wrong = memory::difference(room.target.memory.part(ODD, bytes), theirs);
        ensure!(wrong.is_none(), "{bytes} bytes: the signal is there, and byte {wrong:?} is wrong");
        group.wait(request)?;
        let beside = room.target.memory.part(0, ODD);
        ensure!(beside == [0; ODD], "{bytes} bytes: something came before the first");
        let beside = room.target.memory.part(ODD + bytes, 1);
        ensure!(beside == [0], "{bytes} bytes: something came behind the last");
    }
    rank.meet()?;
    group.close(&room.all())?;
    plugin.finish(rank)?;
    Ok(format!("{} sizes each way", SIZES.len()))
}

pub(crate) fn signals(rank: &mut Rank) -> Result<String> {
    const TIMES: u64 = 100;
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 2)?;
    let mut room = Memory::new(&group)?;
    let (me, peer) = (group.rank, 1 - group.rank);
    rank.meet()?;
    // To itself, with bytes.
    memory::fill(room.source.memory.part(0, 1000), 7);
    let (from, to) = (room.source.at(0), room.target.at(ODD));
    let own = Move { context: 1, from, to, bytes: 1000, rank: me };
    let request = group.put_signal(own, room.signal(2, 9, signal::INCREMENT))?;
    group.wait_word(&room.words, 16, 1)?;
    let wrong = memory::difference(room.target.memory.part(ODD, 1000), 7);
    ensure!(wrong.is_none(), "byte {wrong:?} of a put to itself is wrong");
    group.wait(request)?;
    // Alone, both kinds, over two contexts.
    let mut requests = Vec::new();
    for number in 0..TIMES {
        let context = (number % 2) as i32;
        let increment = room.signal(me, 5, signal::INCREMENT);
        requests.push(group.signal(context, peer, increment)?);
        requests.push(group.signal(context, peer, room.signal(me, 1000, signal::ADD))?);
    }
    for request in requests {
        group.wait(request)?;
    }
    group.wait_word(&room.words, peer * 8, TIMES * 1001)?;
    sleep(LATE);
    group.wait_word(&room.words, peer * 8, TIMES * 1001)?;
    // The owner sets the word to zero between two signals.
    rank.meet()?;
    room.words.word(peer * 8).store(0, Release);
    rank.meet()?;
    let request = group.signal(0, peer, room.signal(me, 7, signal::ADD))?;
    group.wait(request)?;
    group.wait_word(&room.words, peer * 8, 7)?;
    rank.meet()?;
    group.close(&room.all())?;
    plugin.finish(rank)?;
    Ok(format!("{} signals each way, one to itself, one after zero", TIMES * 2))
}

pub(crate) fn get(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    let mut room = Memory::new(&group)?;
    let (me, peer) = (group.rank, 1 - group.rank);
    for (number, bytes) in SIZES.into_iter().enumerate() {
        rank.step(format!("{bytes} bytes"))?;
        memory::fill(room.source.memory.part(ODD, bytes), (number * 2 + me) as u64);
        rank.meet()?;
        for (from, seed) in [(peer, number * 2 + peer), (me, number * 2 + me)] {
            let (source, to) = (room.source.at(ODD), room.target.at(ODD + 1));
            let moved = Move { context: 0, from: source, to, bytes, rank: from };
            group.wait(group.get(moved)?)?;
            if let Some(flush) = group.flush(0, room.target.mr)? {
                group.wait(flush)?;
            }
            let wrong = memory::difference(room.target.memory.part(ODD + 1, bytes), seed as u64);
            ensure!(wrong.is_none(), "{bytes} bytes of rank {from}: byte {wrong:?} is wrong");
        }
        rank.meet()?;
    }
    group.close(&room.all())?;
    plugin.finish(rank)?;
    Ok(format!("{} sizes each way, and from itself", SIZES.len()))
}
