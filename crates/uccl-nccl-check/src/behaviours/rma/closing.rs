//! Close with operations under way.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use uccl_nccl_abi::{MAX_REQUESTS, rma::signal};

use crate::{
    group::{Group, Plugin, Room},
    message::Fate,
    rank::{PATIENCE, Rank},
    rma::{Move, Signal},
};

const ROUNDS: usize = 10;
const BYTES: usize = 256 << 10;
/// NCCL's abort waits for all closes.
const LIMIT: Duration = Duration::from_secs(5);
/// Time in which a late byte would come.
const LATE: Duration = Duration::from_millis(20);

/// A group with its memory: words, memory that is put to, and memory to put from.
struct Use {
    group: Group,
    rooms: [Room; 3],
}

pub(crate) fn close(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    for round in 0..ROUNDS {
        rank.step(format!("round {round}"))?;
        let used = open(rank, &plugin, [0, 1])?;
        // One side closes while the other one still works, in turns.
        if round % 2 == rank.job.rank {
            sleep(Duration::from_millis(3));
        }
        used.close()?;
        rank.meet()?;
    }
    plugin.finish(rank)?;
    Ok(format!("{ROUNDS} rounds"))
}

/// The second of three ranks is killed; afterwards the third one can be reached.
pub(crate) fn close_dead(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let said = "a killed rank, and a new one afterwards".to_owned();
    if rank.job.rank == 1 {
        let _used = open(rank, &plugin, [0, 1])?;
        sleep(PATIENCE);
        return Ok(said);
    }
    if rank.is_first() {
        let used = open(rank, &plugin, [0, 1])?;
        rank.have(Fate::Killed, 1)?;
        used.close()?;
        rank.tell(2, b"next")?;
    } else {
        ensure!(rank.hear(0)? == b"next", "the victim is dead");
    }
    open(rank, &plugin, [0, 2])?.close()?;
    plugin.finish(rank)?;
    Ok(said)
}

pub(crate) fn close_stopped(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let used = open(rank, &plugin, [0, 1])?;
    if rank.is_first() {
        rank.have(Fate::Stopped, 1)?;
        let closed = used.close();
        rank.have(Fate::Continued, 1)?;
        closed?;
        rank.tell(1, b"closed")?;
    } else {
        ensure!(rank.hear(0)? == b"closed", "the peer has closed");
        used.close()?;
    }
    plugin.finish(rank)?;
    Ok("a stopped rank".into())
}

/// A group of two with as much under way as NCCL would have.
fn open(rank: &mut Rank, plugin: &Plugin, members: [usize; 2]) -> Result<Use> {
    let group = plugin.join(rank, &members, 2)?;
    let rooms =
        [group.register(64)?, group.register(MAX_REQUESTS * BYTES)?, group.register(BYTES)?];
    let used = Use { group, rooms };
    let peer = members[1 - used.group.rank];
    // Nobody posts before the other one has registered, nobody closes while the other one posts.
    for step in [b"registered", b"all posted"] {
        rank.tell(peer, step)?;
        ensure!(rank.hear(peer)? == step, "the peer is at another step");
        if step == b"registered" {
            used.post()?;
        }
    }
    Ok(used)
}

impl Use {
    fn post(&self) -> Result<()> {
        let [words, target, source] = &self.rooms;
        let rank = 1 - self.group.rank;
        for at in 0..MAX_REQUESTS {
            let (from, to) = (source.at(0), target.at(at * BYTES));
            let put = Move { context: (at % 2) as i32, from, to, bytes: BYTES, rank };
            let signal = Signal { at: words.at(0), value: 1, change: signal::ADD };
            self.group.put_signal(put, signal)?;
        }
        Ok(())
    }

    /// As NCCL's abort: contexts first, then registrations, then the group, then the memory.
    fn close(mut self) -> Result<()> {
        let start = Instant::now();
        let [words, target, source] = &self.rooms;
        self.group.close(&[words, target, source])?;
        for room in &self.rooms {
            room.memory.seal()?;
        }
        let took = start.elapsed();
        ensure!(took < LIMIT, "close took {took:?} with operations under way");
        sleep(LATE);
        Ok(())
    }
}
