//! Connects and accepts.

use std::{
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    net::{Comm, Pointer},
    rank::{Network, Rank, Registration, until},
};

/// How long one side is alone.
const ALONE: Duration = Duration::from_millis(200);
const PEERS: usize = 64;
const ROUNDS: usize = 10;

pub(super) fn connect(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    rank.step("connect before accept")?;
    connect_first(rank, &started)?;
    rank.step("accept before connect")?;
    accept_first(rank, &started)?;
    rank.step("a copied handle")?;
    copied_handle(rank, &started)?;
    rank.meet()?;
    rank.finish(started)?;
    Ok("both orders, a copied handle".into())
}

/// The listener sleeps, while the connector goes on calling.
fn connect_first(rank: &mut Rank, started: &Network) -> Result<()> {
    let comm = if rank.is_first() {
        let mut handle = rank.hear_handle(1)?;
        let (end, mut made) = (Instant::now() + ALONE, None);
        while made.is_none() && Instant::now() < end {
            made = started.net.connect(started.context, 0, &mut handle)?;
        }
        match made {
            Some(comm) => comm,
            None => started.connect(&mut handle)?,
        }
    } else {
        let (handle, listen) = started.net.listen(started.context, 0)?;
        rank.tell(0, &handle)?;
        sleep(ALONE);
        let comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        comm
    };
    try_out(rank, started, comm)
}

/// The listener calls accept before anybody knows its handle.
fn accept_first(rank: &mut Rank, started: &Network) -> Result<()> {
    let comm = if rank.is_first() {
        let mut handle = rank.hear_handle(1)?;
        started.connect(&mut handle)?
    } else {
        let (handle, listen) = started.net.listen(started.context, 0)?;
        let end = Instant::now() + ALONE;
        while Instant::now() < end {
            let early = started.net.accept(listen)?;
            ensure!(early.is_none(), "accept has a peer before anybody knows the handle");
        }
        rank.tell(0, &handle)?;
        let comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        comm
    };
    try_out(rank, started, comm)
}

/// The handle is at another address than the one that `listen` wrote.
fn copied_handle(rank: &mut Rank, started: &Network) -> Result<()> {
    let comm = if rank.is_first() {
        let handle = rank.hear_handle(1)?;
        let mut copy = Box::new(handle);
        let comm = started.connect(&mut copy)?;
        copy.fill(0xFF);
        comm
    } else {
        let (mut handle, listen) = started.net.listen(started.context, 0)?;
        rank.tell(0, &handle)?;
        handle.fill(0xFF);
        let comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        comm
    };
    try_out(rank, started, comm)
}

/// Passes a message, and closes.
fn try_out(rank: &mut Rank, started: &Network, comm: Comm) -> Result<()> {
    let mut memory = Registration::new(started, comm, 1000)?;
    if rank.is_first() {
        memory.memory.fill(7);
    }
    started.pass(comm, memory.all())?;
    let different = crate::memory::difference(memory.memory.slice(), 7);
    ensure!(different.is_none(), "wrong bytes over a new connection");
    memory.end(started)?;
    rank.meet()?;
    started.net.close(comm)
}

pub(super) fn peers(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comms = if rank.is_first() {
        let handles: Result<Vec<_>> = (0..PEERS).map(|_| rank.hear_handle(1)).collect();
        let mut handles = handles?;
        all("connects", |at| started.net.connect(started.context, 0, &mut handles[at]))?
    } else {
        let mut listens: Vec<Pointer> = Vec::new();
        for _ in 0..PEERS {
            let (handle, listen) = started.net.listen(started.context, 0)?;
            rank.tell(0, &handle)?;
            listens.push(listen);
        }
        let comms = all("accepts", |at| started.net.accept(listens[at]))?;
        for listen in listens {
            started.net.close_listen(listen)?;
        }
        comms
    };
    for (number, comm) in comms.iter().enumerate() {
        let mut memory = Registration::new(&started, *comm, 8)?;
        if rank.is_first() {
            memory.memory.slice().copy_from_slice(&(number as u64).to_ne_bytes());
        }
        started.pass(*comm, memory.all())?;
        ensure!(
            memory.memory.slice() == (number as u64).to_ne_bytes(),
            "listener {number} has another one's peer"
        );
        memory.end(&started)?;
    }
    rank.meet()?;
    for comm in comms {
        started.net.close(comm)?;
    }
    rank.finish(started)?;
    Ok(format!("{PEERS} at once"))
}

/// Calls each of the peers' functions until it has a communicator.
fn all(name: &str, mut call: impl FnMut(usize) -> Result<Option<Comm>>) -> Result<Vec<Comm>> {
    let mut comms = [None; PEERS];
    until(name, || {
        for (at, comm) in comms.iter_mut().enumerate() {
            if comm.is_none() {
                *comm = call(at)?;
            }
        }
        Ok(comms.iter().all(Option::is_some).then_some(()))
    })?;
    Ok(comms.into_iter().flatten().collect())
}

pub(super) fn listener(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    for threads in [1, 4] {
        rank.step(format!("{threads} threads"))?;
        let ends = listens_or_handles(rank, &started, threads)?;
        thread::scope(|scope| {
            let running: Vec<_> = ends
                .into_iter()
                .map(|end| {
                    let started = started.clone();
                    scope.spawn(move || end.use_it(&started))
                })
                .collect();
            for thread in running {
                thread.join().ok().context("a thread of the check")??;
            }
            Ok::<_, anyhow::Error>(())
        })?;
        rank.meet()?;
    }
    rank.finish(started)?;
    Ok(format!("{ROUNDS} connects a listener, 1 and 4 threads"))
}

/// One side of a listener that is used again and again.
enum End {
    Listen(Pointer),
    Connect(crate::net::Handle),
}

fn listens_or_handles(rank: &mut Rank, started: &Network, count: usize) -> Result<Vec<End>> {
    let mut ends = Vec::new();
    for _ in 0..count {
        if rank.is_first() {
            ends.push(End::Connect(rank.hear_handle(1)?));
        } else {
            let (handle, listen) = started.net.listen(started.context, 0)?;
            rank.tell(0, &handle)?;
            ends.push(End::Listen(listen));
        }
    }
    Ok(ends)
}

impl End {
    fn use_it(self, started: &Network) -> Result<()> {
        for _ in 0..ROUNDS {
            let comm = match &self {
                Self::Listen(listen) => started.accept(*listen)?,
                // Each connect begins with the listener's own handle.
                Self::Connect(handle) => started.connect(&mut handle.clone())?,
            };
            let memory = Registration::new(started, comm, 100)?;
            started.pass(comm, memory.all())?;
            memory.end(started)?;
            started.net.close(comm)?;
        }
        match self {
            Self::Listen(listen) => started.net.close_listen(listen),
            Self::Connect(_) => Ok(()),
        }
    }
}
