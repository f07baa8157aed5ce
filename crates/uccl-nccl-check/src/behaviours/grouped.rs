//! Receives in groups, which match by tags.

use anyhow::{Result, bail, ensure};

use crate::{
    log, memory,
    net::{Comm, Completion, Part},
    rank::{Network, NotApplicable, Rank, Registration, until},
};

const BYTES: usize = 70_000;

pub(super) fn grouped(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let most = usize::try_from(started.properties.max_recvs).unwrap_or(1);
    let comm = rank.one_way(&started, 0, 1)?;
    let said = if most > 1 {
        for count in (1..=most).rev() {
            rank.step(format!("{count} in a group"))?;
            group(rank, &started, comm, count)?;
        }
        Ok(format!("groups of 1 to {most}"))
    } else {
        refused(rank, &started, comm)
    };
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    said
}

/// Receives a group; the sends come in another order, with other sizes.
fn group(rank: &mut Rank, started: &Network, comm: Comm, count: usize) -> Result<()> {
    let mut room = Registration::new(started, comm, count * BYTES)?;
    let tags: Vec<i32> = (0..count as i32).map(|at| 100 + at).collect();
    let bytes = |at: usize| if at.is_multiple_of(2) { BYTES - at } else { 10 + at };
    if rank.is_first() {
        let mut requests = Vec::new();
        for at in (0..count).rev() {
            memory::fill(&mut room.memory.slice()[at * BYTES..][..bytes(at)], at as u64);
            let part = room.part(at * BYTES, bytes(at));
            requests.push(until("isend", || started.net.isend(comm, part, tags[at]))?);
        }
        for request in requests {
            started.wait(request)?;
        }
    } else {
        let parts: Vec<Part> = (0..count).map(|at| room.part(at * BYTES, BYTES)).collect();
        let request =
            until("irecv", || started.net.irecv(comm, &parts, &tags, Completion::Needed))?;
        let sizes = until("test", || started.net.test::<8>(request))?;
        for at in 0..count {
            ensure!(usize::try_from(sizes[at]) == Ok(bytes(at)), "sizes of a group: {sizes:?}");
            let slice = &room.memory.slice()[at * BYTES..][..bytes(at)];
            let different = memory::difference(slice, at as u64);
            ensure!(different.is_none(), "tag {}: byte {different:?} is wrong", tags[at]);
        }
    }
    room.end(started)?;
    rank.meet()
}

/// A plugin that takes no groups says so.
fn refused(rank: &mut Rank, started: &Network, comm: Comm) -> Result<String> {
    if !rank.is_first() {
        let room = Registration::new(started, comm, 200)?;
        let parts = [room.part(0, 100), room.part(100, 100)];
        match started.net.irecv(comm, &parts, &[0, 1], Completion::Needed) {
            Err(_) => ensure!(log::last_warning().is_some(), "nothing was logged at WARN"),
            Ok(None) => {}
            Ok(Some(_)) => bail!("maxRecvs is 1, and a group of 2 was taken"),
        }
        room.end(started)?;
    }
    Err(NotApplicable("maxRecvs is 1; a group of 2 was refused".into()).into())
}
