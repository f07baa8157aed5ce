//! The protocols LL and LL128: GPUs look at the bytes themselves.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    memory,
    net::{Comm, Completion},
    rank::{Network, Rank, Registration, until},
};

const LINES: usize = 4096;
const BYTES: usize = LINES * 8;
const ROUNDS: u32 = 100;

pub(super) fn preset(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let mut room = Registration::new(&started, comm, BYTES)?;
    for seed in 0..20 {
        if rank.is_first() {
            room.memory.fill(seed);
            started.pass(comm, room.all())?;
        } else {
            let parts = [room.all()];
            let request =
                until("irecv", || started.net.irecv(comm, &parts, &[0], Completion::Optional))?;
            // The completion may come before the bytes: these end the wait.
            until("test", || started.net.test::<1>(request))?;
            until("the bytes", || {
                let different = memory::difference(room.memory.slice(), seed);
                Ok(different.is_none().then_some(()))
            })?;
        }
        rank.meet()?;
    }
    // A receive that no send comes for ends with its communicator.
    if !rank.is_first() {
        let parts = [room.all()];
        until("irecv", || started.net.irecv(comm, &parts, &[0], Completion::Optional))?;
    }
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    room.memory.seal()?;
    rank.meet()?;
    rank.finish(started)?;
    Ok("20 receives, and one left open at close".into())
}

/// The 32 bits of data that go with a flag.
fn data(flag: u32, line: usize) -> u32 {
    (flag ^ 0x9E37_79B9).wrapping_mul(line as u32 * 2 + 1)
}

fn line(flag: u32, at: usize) -> u64 {
    u64::from(flag) << 32 | u64::from(data(flag, at))
}

pub(super) fn flags(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let room = Registration::new(&started, comm, BYTES)?;
    // SAFETY: the room is aligned to 8 bytes, since its length is a multiple of them and it ends
    // with a page; it outlives the lines, and is read by atomic loads alone.
    let lines: &[AtomicU64] = unsafe { std::slice::from_raw_parts(room.all().at.cast(), LINES) };
    write(lines, 0);
    rank.meet()?;
    let looks = match rank.is_first() {
        true => send_all(&started, comm, &room, lines).map(|()| 0),
        false => receive_all(&started, comm, &room, lines),
    }?;
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    rank.tell(rank.peer(), &u64::to_ne_bytes(looks))?;
    let other = rank.hear(rank.peer())?;
    let other = u64::from_ne_bytes(other.try_into().ok().context("a count")?);
    Ok(format!("{ROUNDS} messages, looked at {} times while they landed", looks.max(other)))
}

fn write(lines: &[AtomicU64], flag: u32) {
    for (at, word) in lines.iter().enumerate() {
        word.store(line(flag, at), Relaxed);
    }
}

fn send_all(started: &Network, comm: Comm, room: &Registration, lines: &[AtomicU64]) -> Result<()> {
    for flag in 1..=ROUNDS {
        write(lines, flag);
        started.pass(comm, room.all())?;
    }
    Ok(())
}

/// Receives, while another thread looks at the lines.
fn receive_all(
    started: &Network,
    comm: Comm,
    room: &Registration,
    lines: &[AtomicU64],
) -> Result<u64> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let looker = scope.spawn(|| look(lines, &is_over));
        let received = receive(started, comm, room, lines);
        is_over.store(true, Relaxed);
        let looks = looker.join().ok().context("a thread of the check")?;
        received?;
        looks
    })
}

fn receive(started: &Network, comm: Comm, room: &Registration, lines: &[AtomicU64]) -> Result<()> {
    for flag in 1..=ROUNDS {
        let parts = [room.all()];
        let request =
            until("irecv", || started.net.irecv(comm, &parts, &[0], Completion::Optional))?;
        until("test", || started.net.test::<1>(request))?;
        until("the lines", || {
            let all =
                lines.iter().enumerate().all(|(at, word)| word.load(Relaxed) == line(flag, at));
            Ok(all.then_some(()))
        })?;
    }
    Ok(())
}

fn look(lines: &[AtomicU64], is_over: &AtomicBool) -> Result<u64> {
    let mut looks = 0;
    // At least once, after the last message too.
    let mut is_last = false;
    while !is_last {
        is_last = is_over.load(Relaxed);
        for (at, word) in lines.iter().enumerate() {
            let seen = word.load(Relaxed);
            let flag = (seen >> 32) as u32;
            // The next message's data may be there already: a GPU takes a line for its flag.
            if ![flag, flag.wrapping_add(1)].map(|flag| data(flag, at)).contains(&(seen as u32)) {
                bail!("line {at} has flag {flag} and data {:#x}: the flag came first", seen as u32);
            }
        }
        looks += 1;
    }
    Ok(looks)
}
