//! Ranks that do not come, or die, and a link that is cut.

use std::{
    sync::atomic::Ordering::Acquire,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::{Group, Plugin, exchange, place},
    log, memory,
    message::Fate,
    rank::{PATIENCE, Rank},
    rma::{Move, Signal},
};

const BYTES: usize = 32 << 20;
const PAUSE: Duration = Duration::from_millis(1500);
/// Signals while the link is cut.
const SIGNALS: usize = 400;

/// The third process is a group's first rank: once it does not come, once it dies before it does.
pub(crate) fn join(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let limit = Duration::from_secs(rank.job.silence_s);
    let members = [2, 0, 1];
    for fate in ["absent", "killed"] {
        rank.step(format!("the first rank is {fate}"))?;
        let listener = plugin.listen()?;
        let mut handles = exchange(rank, &members, &listener.handle)?;
        if rank.job.rank == 2 {
            ensure!(rank.hear(0)? == b"seen" && rank.hear(1)? == b"seen", "it has been seen");
            continue;
        }
        if fate == "killed" {
            if rank.is_first() {
                rank.tell(2, b"seen")?;
                rank.have(Fate::Killed, 2)?;
                rank.tell(1, b"dead")?;
            } else {
                rank.tell(2, b"seen")?;
                ensure!(rank.hear(0)? == b"dead", "the victim is dead");
            }
        }
        let (begun, own) = (Instant::now(), place(rank, &members)?);
        let joined = plugin.connect(&listener, &mut handles, own);
        let took = begun.elapsed();
        ensure!(took < limit, "connect took {took:?} without a rank");
        if let Ok(coll) = joined {
            // A plugin may see it later.
            let mut group = plugin.group(coll, (own, members.len()), 1)?;
            group.wait_error(limit, None)?;
            group.close(&[])?;
        }
        ensure!(log::last_warning().is_some(), "an error, and nothing was logged at WARN");
        if fate == "absent" {
            rank.tell(2, b"seen")?;
        }
    }
    if rank.job.rank == 2 {
        sleep(PATIENCE);
    }
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    rank_of_two_meets(rank)?;
    group.close(&[])?;
    plugin.finish(rank)?;
    Ok("a rank that does not come, one that dies, then a group of the others".into())
}

/// The first two of three processes meet.
fn rank_of_two_meets(rank: &mut Rank) -> Result<()> {
    let other = 1 - rank.job.rank;
    rank.tell(other, b"here")?;
    ensure!(rank.hear(other)? == b"here", "the other rank is here");
    Ok(())
}

/// The first process survives the deaths of two others, one while nothing is under way and one
/// while puts are, and then joins the fourth.
pub(crate) fn killed(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let said = "idle, in a put, then a new group".to_owned();
    if let victim @ 1..=2 = rank.job.rank {
        let group = plugin.join(rank, &[0, victim], 1)?;
        let _room = group.register(BYTES)?;
        rank.tell(0, b"ready")?;
        sleep(PATIENCE * 4);
        return Ok(said);
    }
    if rank.is_first() {
        for victim in [1, 2] {
            rank.step(format!("the death of {victim}"))?;
            survive(rank, &plugin, victim).with_context(|| format!("victim {victim}"))?;
        }
        rank.tell(3, b"next")?;
    } else {
        ensure!(rank.hear(0)? == b"next", "the victims are dead");
    }
    rank.step("a new group")?;
    let mut group = plugin.join(rank, &[0, 3], 1)?;
    let words = group.register(64)?;
    let other = 3 - rank.job.rank;
    for step in [b"one", b"two"] {
        rank.tell(other, step)?;
        ensure!(rank.hear(other)? == step, "the other rank is at another step");
        let value = Signal { at: words.at(0), value: 1, change: signal::ADD };
        group.wait(group.signal(0, 1 - group.rank, value)?)?;
    }
    group.wait_word(&words, 0, 2)?;
    rank.tell(other, b"done")?;
    ensure!(rank.hear(other)? == b"done", "the other rank is done");
    group.close(&[&words])?;
    plugin.finish(rank)?;
    Ok(said)
}

fn survive(rank: &mut Rank, plugin: &Plugin, victim: usize) -> Result<()> {
    drop(log::warnings());
    let mut group = plugin.join(rank, &[0, victim], 1)?;
    let room = group.register(BYTES)?;
    ensure!(rank.hear(victim)? == b"ready", "the victim is ready");
    let request = match victim {
        1 => None,
        _ => {
            rank.have(Fate::Stopped, victim)?;
            let (from, to) = (room.at(0), room.at(0));
            Some(group.put(Move { context: 0, from, to, bytes: BYTES, rank: 1 })?)
        }
    };
    rank.have(Fate::Killed, victim)?;
    group.wait_error(Duration::from_secs(rank.job.silence_s), request)?;
    ensure!(log::last_warning().is_some(), "an error, and nothing was logged at WARN");
    group.close(&[&room])
}

/// Rank 0 puts and adds while its link is cut.
pub(crate) fn cut(rank: &mut Rank) -> Result<String> {
    const EACH: usize = 8000;
    let plugin = Plugin::start(rank, 1)?;
    let mut group = plugin.join(rank, &[0, 1], 1)?;
    let (words, mut room) = (group.register(64)?, group.register(SIGNALS * EACH)?);
    let seed = |number: usize| number as u64;
    if rank.is_first() {
        for number in 0..SIGNALS {
            memory::fill(room.memory.part(number * EACH, EACH), seed(number));
        }
    }
    rank.meet()?;
    if rank.is_first() {
        let mut requests = Vec::new();
        for number in 0..SIGNALS {
            if number == SIGNALS / 4 {
                rank.have(Fate::Cut, 0)?;
            }
            let at = room.at(number * EACH);
            let put = Move { context: 0, from: at, to: at, bytes: EACH, rank: 1 };
            let signal = Signal { at: words.at(0), value: 1, change: signal::INCREMENT };
            requests.push(group.put_signal(put, signal)?);
        }
        sleep(PAUSE);
        rank.have(Fate::Joined, 0)?;
        for request in requests {
            group.wait(request)?;
        }
    } else {
        receive(
            &group,
            SIGNALS,
            |seen| {
                let number = seen - 1;
                let bytes = room.memory.part(number * EACH, EACH);
                let wrong = memory::difference(bytes, seed(number));
                ensure!(wrong.is_none(), "signal {seen}: byte {wrong:?} is wrong");
                Ok(())
            },
            || words.word(0).load(Acquire) as usize,
        )?;
    }
    rank.meet()?;
    let count = words.word(0).load(Acquire);
    let wanted = if rank.is_first() { 0 } else { SIGNALS as u64 };
    ensure!(count == wanted, "the word is {count} at the end, and should be {wanted}");
    group.close(&[&words, &room])?;
    plugin.finish(rank)?;
    Ok(format!("{SIGNALS} puts with signals, cut for {PAUSE:?}"))
}

/// Looks at each signal's bytes until all have come.
fn receive(
    group: &Group,
    count: usize,
    mut look: impl FnMut(usize) -> Result<()>,
    word: impl Fn() -> usize,
) -> Result<()> {
    let mut seen = 0;
    group.until("the signals", || {
        let now = word();
        ensure!(now <= count, "{now} signals, and {count} were sent");
        while seen < now {
            seen += 1;
            look(seen)?;
        }
        Ok(seen == count)
    })
}
