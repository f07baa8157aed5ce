//! Many communicators, threads and processes.

use std::thread;

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::MAX_REQUESTS;

use crate::{
    memory,
    net::{Comm, Part, Side},
    rank::{Network, Rank, Registration, until},
};

const COMMS: usize = 1000;

pub(super) fn thousand(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let mut comms = Vec::new();
    for made in 0..COMMS {
        if made % 100 == 0 {
            rank.step(format!("{made} connections"))?;
        }
        let comm = rank.one_way(&started, 0, 1);
        comms.push(comm.with_context(|| format!("connection {made}"))?);
    }
    rank.step("a message on each")?;
    for (number, comm) in comms.iter().enumerate() {
        let mut room = Registration::new(&started, *comm, 100)?;
        if comm.side == Side::Send {
            room.memory.fill(number as u64);
        }
        started.pass(*comm, room.all())?;
        let different = memory::difference(room.memory.slice(), number as u64);
        ensure!(different.is_none(), "connection {number} has another one's bytes");
        room.end(&started)?;
    }
    rank.meet()?;
    rank.step("close")?;
    for comm in comms {
        started.net.close(comm)?;
    }
    rank.finish(started)?;
    Ok(format!("{COMMS} connections"))
}

pub(super) fn threads(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let second = Network { context: started.net.init(2)?, ..started.clone() };
    let mut uses = Vec::new();
    for at in 0..4 {
        let of = if at % 2 == 0 { &started } else { &second };
        uses.push((of.clone(), rank.one_way(of, at % 2, 1 - at % 2)?, at as u64));
    }
    rank.step("four threads")?;
    thread::scope(|scope| {
        let running: Vec<_> = uses
            .iter()
            .cloned()
            .map(|(started, comm, seed)| scope.spawn(move || talk(&started, comm, seed)))
            .collect();
        for thread in running {
            thread.join().ok().context("a thread of the check")??;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    rank.step("a communicator that moves")?;
    let (of, comm, _) = uses[0].clone();
    for seed in 0..20 {
        let of = of.clone();
        let moved = thread::spawn(move || once(&of, comm, 5000, seed));
        moved.join().ok().context("a thread of the check")??;
    }
    rank.meet()?;
    for (of, comm, _) in uses {
        of.net.close(comm)?;
    }
    second.net.finalize(second.context)?;
    rank.finish(started)?;
    Ok("4 x 100 messages, 20 more from a thread each".into())
}

fn talk(started: &Network, comm: Comm, seed: u64) -> Result<()> {
    for number in 0..100 {
        let bytes = [8, 1000, 70_000][number as usize % 3];
        once(started, comm, bytes, seed * 1000 + number)?;
    }
    Ok(())
}

/// Passes one message and looks at its bytes.
fn once(started: &Network, comm: Comm, bytes: usize, seed: u64) -> Result<()> {
    let mut room = Registration::new(started, comm, bytes)?;
    if comm.side == Side::Send {
        room.memory.fill(seed);
    }
    started.pass(comm, room.all())?;
    ensure!(memory::difference(room.memory.slice(), seed).is_none(), "wrong bytes");
    room.end(started)
}

/// The connections to the next rank and from the previous one.
fn neighbours(rank: &mut Rank, started: &Network) -> Result<[Comm; 2]> {
    let ranks = rank.job.ranks;
    let (next, previous) = ((rank.job.rank + 1) % ranks, (rank.job.rank + ranks - 1) % ranks);
    let (handle, listen) = started.net.listen(started.context, 0)?;
    rank.tell(previous, &handle)?;
    let mut theirs = rank.hear_handle(next)?;
    let (mut send, mut recv) = (None, None);
    until("connect and accept", || {
        if send.is_none() {
            send = started.net.connect(started.context, 0, &mut theirs)?;
        }
        if recv.is_none() {
            recv = started.net.accept(listen)?;
        }
        Ok((send.is_some() && recv.is_some()).then_some(()))
    })?;
    started.net.close_listen(listen)?;
    Ok([send.context("a connect")?, recv.context("an accept")?])
}

pub(super) fn ring(rank: &mut Rank) -> Result<String> {
    const BYTES: usize = 8000;
    const ROUNDS: u64 = 10;
    let started = rank.start()?;
    let [send, recv] = neighbours(rank, &started)?;
    let mut out = Registration::new(&started, send, MAX_REQUESTS * BYTES)?;
    let mut into = Registration::new(&started, recv, MAX_REQUESTS * BYTES)?;
    let from = (rank.job.rank + rank.job.ranks - 1) % rank.job.ranks;
    for round in 0..ROUNDS {
        rank.step(format!("round {round}"))?;
        out.memory.fill(rank.job.rank as u64 + round * 100);
        let mut requests = Vec::new();
        for at in 0..MAX_REQUESTS {
            requests.push(started.recv(recv, into.part(at * BYTES, BYTES))?);
            requests.push(started.send(send, out.part(at * BYTES, BYTES))?);
        }
        until("tests", || {
            let mut at = 0;
            while at < requests.len() {
                match started.net.test::<1>(requests[at])? {
                    Some(_) => drop(requests.remove(at)),
                    None => at += 1,
                }
            }
            Ok(requests.is_empty().then_some(()))
        })?;
        if let Some(flush) = started.net.iflush(recv, into.all())? {
            until("test of a flush", || started.net.test::<0>(flush))?;
        }
        let different = memory::difference(into.memory.slice(), from as u64 + round * 100);
        ensure!(different.is_none(), "byte {different:?} is wrong");
    }
    out.end(&started)?;
    into.end(&started)?;
    rank.meet()?;
    started.net.close(send)?;
    started.net.close(recv)?;
    rank.finish(started)?;
    Ok(format!("{ROUNDS} rounds of {MAX_REQUESTS} requests each way"))
}

/// As NCCL's bootstrap over a network (`NCCL_OOB_NET_ENABLE`): an all-gather around the ring.
pub(super) fn bootstrap(rank: &mut Rank) -> Result<String> {
    const BYTES: usize = 200;
    let started = rank.start()?;
    let [send, recv] = neighbours(rank, &started)?;
    let ranks = rank.job.ranks;
    let mut heap = vec![0_u8; ranks * BYTES];
    memory::fill(&mut heap[rank.job.rank * BYTES..][..BYTES], rank.job.rank as u64);
    let bytes = heap.len();
    let [out, into] = [send, recv].map(|comm| started.net.register(comm, heap.as_mut_ptr(), bytes));
    let (out, into) = (out?, into?);
    let base = heap.as_mut_ptr();
    // SAFETY: each is a rank's part of the heap.
    let part = |of: usize, registration| unsafe {
        Part { at: base.add(of * BYTES), bytes: BYTES, registration }
    };
    for step in 0..ranks - 1 {
        let mine = (rank.job.rank + ranks - step) % ranks;
        let theirs = (mine + ranks - 1) % ranks;
        let requests =
            [started.send(send, part(mine, out))?, started.recv(recv, part(theirs, into))?];
        for request in requests {
            until("test without sizes", || started.net.test::<0>(request))?;
        }
    }
    for (of, bytes) in heap.chunks(BYTES).enumerate() {
        ensure!(memory::difference(bytes, of as u64).is_none(), "the part of rank {of} is wrong");
    }
    started.net.deregister(send, out)?;
    started.net.deregister(recv, into)?;
    rank.meet()?;
    started.net.close(send)?;
    started.net.close(recv)?;
    rank.finish(started)?;
    Ok(format!("an all-gather of {ranks} processes"))
}
