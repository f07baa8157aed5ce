//! A link between two hosts that is cut.

use std::{
    collections::VecDeque,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::faults::error_of;
use crate::{
    log, memory,
    message::Fate,
    net::{Comm, Completion, Pointer, Side},
    rank::{Network, Rank, Registration},
};

/// The most bytes of a message, and those of every other one, which is under way in the kernel
/// alone when the link is cut.
const BYTES: usize = 1 << 20;
const SMALL: usize = 1000;
const MESSAGES: usize = 64;
/// Messages in flight.
const DEPTH: usize = 8;
/// The message at which the link is cut.
const CUT_AT: usize = 16;
const PAUSE: Duration = Duration::from_millis(1500);
/// Time for all messages, the wait for the link among it.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn cut(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let mut room = Registration::new(&started, comm, DEPTH * BYTES)?;
    let (mut posted, mut open) = (0, VecDeque::<Pointer>::new());
    let (start, mut mended) = (Instant::now(), None);
    while posted < MESSAGES || !open.is_empty() {
        ensure!(start.elapsed() < PATIENCE, "{posted} messages within {PATIENCE:?}");
        if let Some(first) = open.front()
            && started.net.test::<1>(*first)?.is_some()
        {
            open.pop_front();
            look(&mut room, comm, posted - open.len() - 1)?;
        }
        if posted < MESSAGES && open.len() < DEPTH {
            if let Some(request) = post(&started, comm, &mut room, posted)? {
                open.push_back(request);
                posted += 1;
            }
        } else {
            thread::yield_now();
        }
        if rank.is_first() && posted == CUT_AT && mended.is_none() {
            rank.have(Fate::Cut, 0)?;
            let end = Instant::now() + PAUSE;
            while Instant::now() < end {
                if let Some(first) = open.front()
                    && started.net.test::<1>(*first)?.is_some()
                {
                    open.pop_front();
                }
                thread::yield_now();
            }
            rank.have(Fate::Joined, 0)?;
            mended = Some(Instant::now());
        }
    }
    let after = mended.map_or(Duration::ZERO, |mended| mended.elapsed());
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(format!("cut for {PAUSE:?}; the rest came within {:.1} s", after.as_secs_f64()))
}

fn post(
    started: &Network,
    comm: Comm,
    room: &mut Registration,
    number: usize,
) -> Result<Option<Pointer>> {
    let (from, bytes) = (number % DEPTH * BYTES, length(number));
    match comm.side {
        Side::Send => {
            memory::fill(room.memory.part(from, bytes), number as u64);
            started.net.isend(comm, room.part(from, bytes), 0)
        }
        Side::Recv => started.net.irecv(comm, &[room.part(from, bytes)], &[0], Completion::Needed),
    }
}

fn length(number: usize) -> usize {
    if number.is_multiple_of(2) { BYTES } else { SMALL }
}

fn look(room: &mut Registration, comm: Comm, number: usize) -> Result<()> {
    let from = number % DEPTH * BYTES;
    if comm.side == Side::Recv {
        let part = room.memory.part(from, length(number));
        let different = memory::difference(part, number as u64);
        ensure!(different.is_none(), "message {number}: byte {different:?} is wrong");
    }
    Ok(())
}

pub(super) fn cut_for_long(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let room = Registration::new(&started, comm, 8 * BYTES)?;
    started.pass(comm, room.part(0, 1000))?;
    let small_comm = rank.one_way(&started, 0, 1)?;
    let small_room = Registration::new(&started, small_comm, SMALL)?;
    rank.meet()?;
    if rank.is_first() {
        rank.have(Fate::Cut, 0)?;
    }
    rank.meet()?;
    let start = Instant::now();
    error_of(rank, &started, comm, &room, None)?;
    let took = start.elapsed();
    error_of(rank, &started, small_comm, &small_room, None)?;
    for (comm, room) in [(comm, room), (small_comm, small_room)] {
        room.end(&started)?;
        started.net.close(comm)?;
    }
    rank.meet()?;
    rank.finish(started)?;
    let line = log::last_warning().unwrap_or_default();
    Ok(format!("an error after {:.1} s: {line}", took.as_secs_f64()))
}
