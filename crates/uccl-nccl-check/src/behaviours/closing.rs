//! Close with requests in flight.

use std::{
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::MAX_REQUESTS;

use crate::{
    message::Fate,
    net::{Comm, Completion, Side},
    rank::{Network, Rank, Registration},
};

const ROUNDS: usize = 10;
const BYTES: usize = 512 << 10;
/// NCCL's abort waits for all closes.
const LIMIT: Duration = Duration::from_secs(5);
/// Time in which a late byte would come.
const LATE: Duration = Duration::from_millis(20);

/// A communicator with its memory.
struct Use {
    comm: Comm,
    room: Registration,
}

pub(super) fn alive(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    for threads in [1, 4] {
        for round in 0..ROUNDS {
            rank.step(format!("round {round}, {threads} threads"))?;
            let uses = open(rank, &started, threads)?;
            // One side closes while the other one still works, in turns.
            if round % 2 == rank.job.rank % 2 {
                sleep(Duration::from_millis(3));
            }
            close_all(&started, uses)?;
            rank.meet()?;
        }
    }
    rank.finish(started)?;
    Ok(format!("{ROUNDS} rounds with 1 thread and with 4"))
}

/// The second of three ranks is killed; afterwards the third one can be reached.
pub(super) fn dead(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let said = "a killed peer, and a new one afterwards".to_owned();
    if rank.job.rank == 1 {
        let _uses = open(rank, &started, 4)?;
        rank.tell(0, b"ready")?;
        sleep(crate::rank::PATIENCE);
        return Ok(said);
    }
    if rank.is_first() {
        let uses = open(rank, &started, 4)?;
        ensure!(rank.hear(1)? == b"ready", "the victim is ready");
        rank.have(Fate::Killed, 1)?;
        close_all(&started, uses)?;
        rank.tell(2, b"next")?;
    } else {
        ensure!(rank.hear(0)? == b"next", "the victim is dead");
    }
    let comm = rank.one_way(&started, 0, 2)?;
    let room = Registration::new(&started, comm, 1000)?;
    started.pass(comm, room.all())?;
    room.end(&started)?;
    let other = 2 - rank.job.rank;
    rank.tell(other, b"done")?;
    ensure!(rank.hear(other)? == b"done", "the other rank is done");
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok(said)
}

pub(super) fn stopped(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let uses = open(rank, &started, 4)?;
    if rank.is_first() {
        ensure!(rank.hear(1)? == b"ready", "the peer is ready");
        rank.have(Fate::Stopped, 1)?;
        close_all(&started, uses)?;
        rank.have(Fate::Continued, 1)?;
        rank.tell(1, b"closed")?;
    } else {
        rank.tell(0, b"ready")?;
        ensure!(rank.hear(0)? == b"closed", "the peer has closed");
        close_all(&started, uses)?;
    }
    rank.finish(started)?;
    Ok("a stopped peer, 4 threads".into())
}

/// Two connections, one each way, for each thread, with as much in flight as the plugin takes.
fn open(rank: &mut Rank, started: &Network, threads: usize) -> Result<Vec<Use>> {
    let mut uses = Vec::new();
    for at in 0..threads * 2 {
        let comm = rank.one_way(started, at % 2, 1 - at % 2)?;
        let room = Registration::new(started, comm, MAX_REQUESTS * BYTES)?;
        uses.push(Use { comm, room });
    }
    for one in &uses {
        one.post(started)?;
    }
    // Nobody closes while the other one posts.
    let peer = rank.peer();
    rank.tell(peer, b"posted")?;
    ensure!(rank.hear(peer)? == b"posted", "the peer has posted");
    Ok(uses)
}

impl Use {
    fn post(&self, started: &Network) -> Result<()> {
        let mut first = None;
        for at in 0..MAX_REQUESTS {
            let part = self.room.part(at * BYTES, BYTES);
            let request = match self.comm.side {
                Side::Send => started.net.isend(self.comm, part, 0)?,
                Side::Recv => started.net.irecv(self.comm, &[part], &[0], Completion::Needed)?,
            };
            first = first.or(request);
        }
        // Something moves.
        if let Some(request) = first {
            for _ in 0..10 {
                if started.net.test::<1>(request)?.is_some() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// As NCCL's abort: registrations first, then the communicator, then the memory.
    fn close(self, started: &Network) -> Result<()> {
        let start = Instant::now();
        self.room.end(started)?;
        started.net.close(self.comm)?;
        self.room.memory.seal()?;
        let took = start.elapsed();
        ensure!(took < LIMIT, "close took {took:?} with requests in flight");
        sleep(LATE);
        Ok(())
    }
}

/// Closes all, each pair by a thread of its own.
fn close_all(started: &Network, uses: Vec<Use>) -> Result<()> {
    thread::scope(|scope| {
        let mut running = Vec::new();
        let mut uses = uses.into_iter();
        while let Some(one) = uses.next() {
            let (other, started) = (uses.next(), started.clone());
            running.push(scope.spawn(move || {
                one.close(&started)?;
                other.map_or(Ok(()), |other| other.close(&started))
            }));
        }
        for thread in running {
            thread.join().ok().context("a thread of the check")??;
        }
        Ok(())
    })
}
