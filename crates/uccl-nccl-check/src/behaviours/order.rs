//! The order of sends and receives, and the bound on requests in flight.

use std::{thread::sleep, time::Duration};

use anyhow::{Result, ensure};
use uccl_nccl_abi::MAX_REQUESTS;

use crate::{
    memory,
    net::{Comm, Completion, Pointer, Side},
    rank::{Network, Rank, Registration, until},
};

const LATE: Duration = Duration::from_millis(50);
/// More than may be in flight.
const MANY: usize = 100;
const BYTES: usize = 40_000;

pub(super) fn order(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let mut room = Registration::new(&started, comm, MAX_REQUESTS * BYTES)?;
    for (name, sends_first, late) in [
        ("receives first", false, Duration::ZERO),
        ("sends first", true, Duration::ZERO),
        ("receives late", true, LATE),
    ] {
        for count in [1, MAX_REQUESTS] {
            rank.step(format!("{count}: {name}"))?;
            let seed = count as u64 * 1000 + u64::from(sends_first);
            fill(&mut room, comm, count, seed);
            let is_mine_first = sends_first == (comm.side == Side::Send);
            if !is_mine_first {
                ensure!(rank.hear(rank.peer())? == b"posted", "the other rank has posted");
                sleep(late);
            }
            let requests = post(&started, comm, &room, count)?;
            if is_mine_first {
                rank.tell(rank.peer(), b"posted")?;
            }
            finish(&started, requests)?;
            check(&mut room, count, seed)?;
            rank.meet()?;
        }
    }
    room.end(&started)?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(format!("1 and {MAX_REQUESTS} requests in three orders"))
}

/// Posts without a test between; the plugin must take this many.
fn post(started: &Network, comm: Comm, room: &Registration, count: usize) -> Result<Vec<Pointer>> {
    (0..count).map(|at| started.post(comm, room.part(at * BYTES, BYTES))).collect()
}

fn fill(room: &mut Registration, comm: Comm, count: usize, seed: u64) {
    for (at, bytes) in room.memory.slice().chunks_mut(BYTES).take(count).enumerate() {
        match comm.side {
            Side::Send => memory::fill(bytes, seed + at as u64),
            Side::Recv => bytes.fill(0),
        }
    }
}

fn check(room: &mut Registration, count: usize, seed: u64) -> Result<()> {
    for (at, bytes) in room.memory.slice().chunks(BYTES).take(count).enumerate() {
        let different = memory::difference(bytes, seed + at as u64);
        ensure!(different.is_none(), "message {at}: byte {different:?} is wrong");
    }
    Ok(())
}

/// Tests the requests, the last one first, until all are done.
fn finish(started: &Network, mut requests: Vec<Pointer>) -> Result<()> {
    until("tests", || {
        for at in (0..requests.len()).rev() {
            if started.net.test::<1>(requests[at])?.is_some() {
                requests.remove(at);
            }
        }
        Ok(requests.is_empty().then_some(()))
    })
}

pub(super) fn backpressure(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let mut room = Registration::new(&started, comm, MANY * BYTES)?;
    fill(&mut room, comm, MANY, 1);
    let mut requests = Vec::new();
    // All that the plugin takes, while the other side has posted nothing.
    while requests.len() < MANY {
        let part = room.part(requests.len() * BYTES, BYTES);
        let posted = match comm.side {
            Side::Send => started.net.isend(comm, part, 0)?,
            Side::Recv => started.net.irecv(comm, &[part], &[0], Completion::Needed)?,
        };
        match posted {
            Some(request) => requests.push(request),
            None => break,
        }
        if !rank.is_first() {
            break;
        }
    }
    let taken = requests.len();
    rank.meet()?;
    // The rest, as room becomes free.
    let mut posted = taken;
    until("isend and irecv", || {
        let mut at = 0;
        while at < requests.len() {
            match started.net.test::<1>(requests[at])? {
                Some(_) => drop(requests.remove(at)),
                None => at += 1,
            }
        }
        if posted < MANY {
            let part = room.part(posted * BYTES, BYTES);
            let request = match comm.side {
                Side::Send => started.net.isend(comm, part, 0)?,
                Side::Recv => started.net.irecv(comm, &[part], &[0], Completion::Needed)?,
            };
            if let Some(request) = request {
                requests.push(request);
                posted += 1;
            }
        }
        Ok((posted == MANY && requests.is_empty()).then_some(()))
    })?;
    check(&mut room, MANY, 1)?;
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(format!("{taken} sends without a receive, {MANY} in all, none lost"))
}
