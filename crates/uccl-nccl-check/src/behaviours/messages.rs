//! Bytes of messages of all sizes.

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    log, memory,
    net::{Comm, Pointer},
    rank::{Network, PATIENCE, Rank, Registration, until},
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

const SIZES: [usize; 22] = [
    0,
    1,
    8,
    127,
    128,
    129,
    4 * KIB - 1,
    4 * KIB,
    4 * KIB + 1,
    32 * KIB - 1,
    32 * KIB,
    32 * KIB + 1,
    64 * KIB - 1,
    64 * KIB,
    64 * KIB + 1,
    128 * KIB - 1,
    128 * KIB,
    128 * KIB + 1,
    512 * KIB,
    MIB,
    4 * MIB + 3,
    64 * MIB,
];

/// Bytes that a longer receive has behind those of the message.
const BEYOND: usize = 64;

pub(super) fn sizes(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let longest = SIZES.iter().max().copied().unwrap_or_default();
    let mut room = Registration::new(&started, comm, longest + BEYOND + 1)?;
    let mut messages = 0;
    for bytes in SIZES {
        // An odd address too, but the longest is long enough once.
        for from in [0, 1].into_iter().take(if bytes == longest { 1 } else { 2 }) {
            rank.step(format!("{bytes} bytes at an offset of {from}"))?;
            let seed = (bytes * 2 + from) as u64;
            message(&started, comm, &mut room, (from, bytes), seed)
                .with_context(|| format!("{bytes} bytes at an offset of {from}"))?;
            messages += 1;
        }
    }
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(format!("{messages} messages"))
}

fn message(
    started: &Network,
    comm: Comm,
    room: &mut Registration,
    (from, bytes): (usize, usize),
    seed: u64,
) -> Result<()> {
    if comm.side == crate::net::Side::Send {
        memory::fill(&mut room.memory.slice()[from..from + bytes], seed);
        started.pass(comm, room.part(from, bytes))?;
        return Ok(());
    }
    let whole = from..from + bytes + BEYOND;
    room.memory.slice()[whole.clone()].fill(0xA5);
    let received = started.pass(comm, room.part(from, whole.len()))?;
    ensure!(usize::try_from(received) == Ok(bytes), "test tells of {received} bytes");
    let slice = &room.memory.slice()[whole];
    if let Some(at) = memory::difference(&slice[..bytes], seed) {
        bail!("byte {at} is wrong");
    }
    ensure!(slice[bytes..].iter().all(|byte| *byte == 0xA5), "bytes behind the message changed");
    Ok(())
}

pub(super) fn too_long(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    for (sent, room) in [(2000, 1000), (MIB, MIB - 1)] {
        rank.step(format!("{sent} bytes for a receive of {room}"))?;
        let comm = rank.one_way(&started, 0, 1)?;
        let bytes = if rank.is_first() { sent } else { room };
        let memory = Registration::new(&started, comm, bytes)?;
        let request = started.post(comm, memory.all())?;
        if rank.is_first() {
            // The sender may have sent it all by then, or hear of the failure.
            let _either = end_of(&started, request, || false);
            rank.meet()?;
        } else {
            let failed = fails(&started, request)?;
            ensure!(failed, "a receive of {room} bytes took a message of {sent}");
            ensure!(log::last_warning().is_some(), "nothing was logged at WARN");
            rank.meet()?;
        }
        memory.end(&started)?;
        started.net.close(comm)?;
    }
    rank.finish(started)?;
    Ok("short and long messages".into())
}

/// Whether a request ends with an error.
fn fails(started: &Network, request: Pointer) -> Result<bool> {
    let mut failed = false;
    until("test", || match started.net.test::<1>(request) {
        Ok(done) => Ok(done.map(drop)),
        Err(_) => {
            failed = true;
            Ok(Some(()))
        }
    })?;
    Ok(failed)
}

/// Waits for a request until it ends in any way, a second at most.
fn end_of(started: &Network, request: Pointer, mut stop: impl FnMut() -> bool) -> Result<()> {
    let end = std::time::Instant::now() + PATIENCE / 30;
    while std::time::Instant::now() < end && !stop() {
        if started.net.test::<1>(request)?.is_some() {
            return Ok(());
        }
        std::thread::yield_now();
    }
    Ok(())
}
