//! TCP streams of the plugin's that end under it.

use std::{
    fs,
    os::fd::RawFd,
    sync::atomic::Ordering::Acquire,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::{Group, Plugin, Room},
    net::Pointer,
    rank::{NotApplicable, PATIENCE, Rank},
    rma::{Move, Signal},
};

const ROUNDS: usize = 6;
const PUTS: usize = 300;
const BYTES: usize = 16 << 10;
const LATE: Duration = Duration::from_millis(100);

/// The first rank ends one of its streams while it puts and adds: either the plugin makes up for
/// it, or it tells of the loss; no signal comes twice, and none of a put that has ended is missing.
pub(crate) fn streams(rank: &mut Rank) -> Result<String> {
    let (mut survived, mut told) = (0, 0);
    for round in 0..ROUNDS {
        rank.step(format!("round {round}"))?;
        let plugin = Plugin::start(rank, 1)?;
        let mut group = plugin.join(rank, &[0, 1], 1)?;
        let (words, room) = (group.register(64)?, group.register(PUTS * BYTES)?);
        rank.meet()?;
        let outcome = match rank.is_first() {
            true => {
                let outcome = put_all(&group, &words, &room, round);
                let said = match &outcome {
                    Ok(Put { ended, has_failed }) => format!("{ended} {has_failed}"),
                    Err(_) => String::new(),
                };
                rank.tell(1, said.as_bytes())?;
                outcome?
            }
            false => look(rank, &group, &words)?,
        };
        match outcome.has_failed {
            true => told += 1,
            false => survived += 1,
        }
        rank.meet()?;
        group.close(&[&words, &room])?;
        plugin.finish(rank)?;
    }
    Ok(format!("{survived} rounds went on, {told} failed; no signal came twice"))
}

/// The puts of a round: how many have ended, and whether the plugin told of a loss.
struct Put {
    ended: usize,
    has_failed: bool,
}

fn put_all(group: &Group, words: &Room, room: &Room, round: usize) -> Result<Put> {
    let mut requests: Vec<Pointer> = Vec::new();
    let mut put = Put { ended: 0, has_failed: false };
    for number in 0..PUTS {
        if number == PUTS / 3 {
            end_stream(round)?;
        }
        let at = room.at(number * BYTES);
        let moved = Move { context: 0, from: at, to: at, bytes: BYTES, rank: 1 };
        let change = Signal { at: words.at(0), value: 1, change: signal::ADD };
        match group.put_signal(moved, change) {
            Ok(request) => requests.push(request),
            Err(_) => break,
        }
    }
    let end = Instant::now() + PATIENCE;
    while let Some(request) = requests.first() {
        match group.test(*request) {
            Ok(true) => {
                requests.remove(0);
                put.ended += 1;
            }
            Ok(false) => thread::yield_now(),
            Err(_) => {
                put.has_failed = true;
                break;
            }
        }
        ensure!(Instant::now() < end, "a put neither ends nor fails without a stream");
    }
    put.has_failed |= put.ended < PUTS;
    Ok(put)
}

fn look(rank: &mut Rank, group: &Group, words: &Room) -> Result<Put> {
    let said = String::from_utf8(rank.hear(0)?)?;
    let Some((ended, has_failed)) = said.split_once(' ') else {
        // It says why itself.
        return Err(NotApplicable("the first rank has not ended a stream".into()).into());
    };
    let put = Put { ended: ended.parse()?, has_failed: has_failed.parse()? };
    sleep(LATE);
    let word = words.word(0).load(Acquire) as usize;
    ensure!(word >= put.ended, "{} puts have ended, and {word} signals are there", put.ended);
    ensure!(word <= PUTS, "{word} signals of {PUTS} puts");
    if !put.has_failed {
        group.check().context("the first rank knows of no failure")?;
    }
    Ok(put)
}

/// Ends one of this process's TCP streams, by its number.
fn end_stream(number: usize) -> Result<()> {
    let mut streams = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").context("/proc/self/fd")? {
        let fd: RawFd = entry?.file_name().to_string_lossy().parse()?;
        if is_stream(fd) {
            streams.push(fd);
        }
    }
    streams.sort_unstable();
    if streams.is_empty() {
        return Err(NotApplicable("the plugin has no TCP stream".into()).into());
    }
    // SAFETY: takes a number; the plugin sees the end of the stream, as that of a lost one.
    let ended = unsafe { libc::shutdown(streams[number % streams.len()], libc::SHUT_RDWR) };
    ensure!(ended == 0, "a stream cannot be ended");
    Ok(())
}

/// Whether a descriptor is a TCP stream to a peer.
fn is_stream(fd: RawFd) -> bool {
    // SAFETY: an address of zeros is one; it has room for every kind.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the address and its length outlive the call.
    let asked = unsafe { libc::getpeername(fd, (&raw mut address).cast(), &mut length) };
    let families = [libc::AF_INET, libc::AF_INET6];
    asked == 0 && families.contains(&libc::c_int::from(address.ss_family))
}
