//! Peers that die or stop.

use std::{
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    log, memory,
    message::Fate,
    net::{Comm, Pointer, Side},
    rank::{Network, PATIENCE, Rank, Registration},
};

const BYTES: usize = 4 << 20;
const PAUSE: Duration = Duration::from_millis(700);

/// The survivor's activity when its peer dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Connect,
    Idle,
    Receive,
    Send,
}

const PHASES: [Phase; 4] = [Phase::Connect, Phase::Idle, Phase::Receive, Phase::Send];

/// Rank 0 survives the deaths of ranks 1 to 4, one in each phase, and then talks to rank 5.
pub(super) fn killed(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let said = format!("{} phases, then a new connection", PHASES.len());
    match rank.job.rank {
        0 => {
            for (victim, phase) in (1..).zip(PHASES) {
                rank.step(format!("{phase:?}"))?;
                survive(rank, &started, victim, phase).with_context(|| format!("{phase:?}"))?;
            }
            rank.tell(5, b"next")?;
        }
        5 => ensure!(rank.hear(0)? == b"next", "the victims are dead"),
        victim => {
            be_victim(rank, &started, PHASES[victim - 1])?;
            return Ok(said);
        }
    }
    rank.step("a new connection")?;
    let comm = rank.one_way(&started, 0, 5)?;
    let room = Registration::new(&started, comm, 1000)?;
    started.pass(comm, room.all())?;
    room.end(&started)?;
    let other = 5 - rank.job.rank;
    rank.tell(other, b"done")?;
    ensure!(rank.hear(other)? == b"done", "the other rank is done");
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(said)
}

fn be_victim(rank: &mut Rank, started: &Network, phase: Phase) -> Result<()> {
    ensure!(rank.hear(0)? == b"begin", "the survivor begins");
    let me = rank.job.rank;
    match phase {
        Phase::Connect => {
            let (handle, _listen) = started.net.listen(started.context, 0)?;
            rank.tell(0, &handle)?;
        }
        Phase::Receive => {
            rank.one_way(started, me, 0)?;
        }
        Phase::Idle | Phase::Send => {
            rank.one_way(started, 0, me)?;
        }
    }
    rank.tell(0, b"ready")?;
    sleep(PATIENCE * 4);
    Ok(())
}

fn survive(rank: &mut Rank, started: &Network, victim: usize, phase: Phase) -> Result<()> {
    drop(log::warnings());
    rank.tell(victim, b"begin")?;
    if phase == Phase::Connect {
        return survive_connect(rank, started, victim);
    }
    let comm = match phase {
        Phase::Receive => rank.one_way(started, victim, 0)?,
        _ => rank.one_way(started, 0, victim)?,
    };
    let room = Registration::new(started, comm, BYTES)?;
    ensure!(rank.hear(victim)? == b"ready", "the victim is ready");
    let before = match phase {
        Phase::Idle => None,
        _ => Some(started.post(comm, room.all())?),
    };
    rank.have(Fate::Killed, victim)?;
    error_of(rank, started, comm, &room, before)?;
    room.end(started)?;
    started.net.close(comm)
}

/// The victim dies before it accepts: the connect fails, or the first message.
fn survive_connect(rank: &mut Rank, started: &Network, victim: usize) -> Result<()> {
    let mut handle = rank.hear_handle(victim)?;
    ensure!(rank.hear(victim)? == b"ready", "the victim is ready");
    let early = started.net.connect(started.context, 0, &mut handle)?;
    rank.have(Fate::Killed, victim)?;
    let end = Instant::now() + PATIENCE + silence(rank);
    let mut made = early;
    while made.is_none() {
        match started.net.connect(started.context, 0, &mut handle) {
            Err(_) => return warned(),
            Ok(comm) => made = comm,
        }
        ensure!(Instant::now() < end, "the connect to a dead peer does not end");
        thread::yield_now();
    }
    let comm = made.context("a connect")?;
    let room = Registration::new(started, comm, BYTES)?;
    error_of(rank, started, comm, &room, None)?;
    room.end(started)?;
    started.net.close(comm)
}

fn silence(rank: &Rank) -> Duration {
    Duration::from_secs(rank.job.silence_s)
}

/// Waits for the error that a request must end with, in time and with a warning.
pub(super) fn error_of(
    rank: &Rank,
    started: &Network,
    comm: Comm,
    room: &Registration,
    posted: Option<Pointer>,
) -> Result<()> {
    let end = Instant::now() + silence(rank);
    let mut posted = posted;
    loop {
        let step = match posted {
            Some(request) => started.net.test::<1>(request).map(|done| match done {
                // A short message may have gone before: the next one will not.
                Some(_) => None,
                None => Some(request),
            }),
            None => match comm.side {
                Side::Send => started.net.isend(comm, room.all(), 0),
                Side::Recv => {
                    let needed = crate::net::Completion::Needed;
                    started.net.irecv(comm, &[room.all()], &[0], needed)
                }
            },
        };
        match step {
            Ok(request) => posted = request,
            Err(_) => return warned(),
        }
        if Instant::now() > end {
            bail!("no error within {:?} after the peer's end", silence(rank));
        }
        thread::yield_now();
    }
}

fn warned() -> Result<()> {
    ensure!(log::last_warning().is_some(), "an error, and nothing was logged at WARN");
    Ok(())
}

pub(super) fn paused(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 0, 1)?;
    let mut room = Registration::new(&started, comm, BYTES)?;
    if rank.is_first() {
        room.memory.fill(3);
        let request = started.send(comm, room.all())?;
        rank.have(Fate::Stopped, 1)?;
        let end = Instant::now() + PAUSE;
        let mut done = false;
        while Instant::now() < end && !done {
            done = started.net.test::<1>(request)?.is_some();
        }
        rank.have(Fate::Continued, 1)?;
        if !done {
            started.wait(request)?;
        }
    } else {
        started.pass(comm, room.all())?;
        ensure!(memory::difference(room.memory.slice(), 3).is_none(), "wrong bytes");
    }
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(format!("{PAUSE:?}"))
}

/// Rank 1 is stopped with a receive of rank 0 outstanding.
pub(super) fn stopped(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = rank.one_way(&started, 1, 0)?;
    let room = Registration::new(&started, comm, BYTES)?;
    if !rank.is_first() {
        rank.meet()?;
        ensure!(rank.hear(0)? == b"seen", "the peer has seen it");
        room.end(&started)?;
        started.net.close(comm)?;
        rank.finish(started)?;
        return Ok(String::new());
    }
    let request = started.recv(comm, room.all())?;
    rank.meet()?;
    rank.have(Fate::Stopped, 1)?;
    let start = Instant::now();
    let ended = error_of(rank, &started, comm, &room, Some(request));
    let took = start.elapsed();
    rank.have(Fate::Continued, 1)?;
    ended?;
    room.end(&started)?;
    started.net.close(comm)?;
    rank.tell(1, b"seen")?;
    rank.finish(started)?;
    let line = log::last_warning().unwrap_or_default();
    Ok(format!("an error after {:.1} s: {line}", took.as_secs_f64()))
}
