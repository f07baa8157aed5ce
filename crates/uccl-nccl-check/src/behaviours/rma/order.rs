//! Signals come behind all earlier puts of their context, whatever else is under way.

use std::{collections::VecDeque, sync::atomic::Ordering::Acquire, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::rma::signal;

use crate::{
    group::{Group, Plugin, Room},
    memory,
    net::Pointer,
    rank::Rank,
    rma::{Move, Signal},
};

const CONTEXTS: usize = 8;
/// Messages of each rank to each other one, and itself, over each context.
const MESSAGES: usize = 12;
/// A message is put in two parts, the long one first.
const BYTES: usize = 24 << 10;
const LONG: usize = 20 << 10;
/// Messages of a rank that are under way.
const DEPTH: usize = 16;
const LATE: Duration = Duration::from_millis(50);

/// A rank's memory: a word for each rank and context, memory for all messages, and messages that
/// are under way.
struct Memory {
    words: Room,
    target: Room,
    source: Room,
}

/// A message: of a rank, over a context, and its number there.
#[derive(Clone, Copy)]
struct Message {
    of: usize,
    context: usize,
    number: usize,
}

impl Message {
    fn queue(self) -> usize {
        self.of * CONTEXTS + self.context
    }

    fn place(self) -> usize {
        (self.queue() * MESSAGES + self.number) * BYTES
    }

    fn seed(self, to: usize) -> u64 {
        (self.place() * 8 + to) as u64
    }
}

/// A message that is under way: its place in the source, and its requests.
struct Flight {
    slot: usize,
    requests: Vec<Pointer>,
}

pub(crate) fn order(rank: &mut Rank) -> Result<String> {
    let plugin = Plugin::start(rank, 1)?;
    let members: Vec<usize> = (0..rank.job.ranks).collect();
    let mut group = plugin.join(rank, &members, CONTEXTS as i32)?;
    let queues = group.ranks * CONTEXTS;
    let mut room = Memory {
        words: group.register(queues * 8)?,
        target: group.register(queues * MESSAGES * BYTES)?,
        source: group.register(DEPTH * BYTES)?,
    };
    rank.meet()?;
    let mut random = fastrand::Rng::with_seed(group.rank as u64);
    let mut left: Vec<(usize, usize)> = (0..group.ranks)
        .flat_map(|to| (0..CONTEXTS).flat_map(move |context| [(to, context); MESSAGES]))
        .collect();
    random.shuffle(&mut left);
    let (mut sent, mut seen) = (vec![0; queues], vec![0; queues]);
    let (mut flights, mut free) = (VecDeque::<Flight>::new(), (0..DEPTH).collect::<Vec<_>>());
    while let Some((to, context)) = left.pop() {
        while free.is_empty() {
            land(&group, &mut flights, &mut free)?;
            look(&group, &mut room, &mut seen)?;
        }
        let number = sent[to * CONTEXTS + context];
        sent[to * CONTEXTS + context] += 1;
        let message = Message { of: group.rank, context, number };
        let slot = free.pop().context("a free place")?;
        let requests = send(&group, &mut room, (message, to), slot, random.bool())?;
        flights.push_back(Flight { slot, requests });
    }
    rank.step("the last messages")?;
    group.until("the last messages", || {
        land(&group, &mut flights, &mut free)?;
        look(&group, &mut room, &mut seen)?;
        Ok(flights.is_empty() && seen.iter().all(|count| *count == MESSAGES))
    })?;
    rank.meet()?;
    thread::sleep(LATE);
    look(&group, &mut room, &mut seen)?;
    ensure!(seen.iter().all(|count| *count == MESSAGES), "a signal came twice");
    rank.meet()?;
    group.close(&[&room.words, &room.target, &room.source])?;
    plugin.finish(rank)?;
    Ok(format!("{} messages of each rank", queues * MESSAGES))
}

/// Puts a message in two parts; the signal goes with the second one, or by itself.
fn send(
    group: &Group,
    room: &mut Memory,
    (message, to): (Message, usize),
    slot: usize,
    is_apart: bool,
) -> Result<Vec<Pointer>> {
    memory::fill(room.source.memory.part(slot * BYTES, BYTES), message.seed(to));
    let context = message.context as i32;
    let part = |from: usize, bytes: usize| Move {
        context,
        from: room.source.at(slot * BYTES + from),
        to: room.target.at(message.place() + from),
        bytes,
        rank: to,
    };
    let at = room.words.at(message.queue() * 8);
    let signal = Signal { at, value: 1, change: signal::ADD };
    let mut requests = vec![group.put(part(0, LONG))?];
    match is_apart {
        true => {
            requests.push(group.put(part(LONG, BYTES - LONG))?);
            requests.push(group.signal(context, to, signal)?);
        }
        false => requests.push(group.put_signal(part(LONG, BYTES - LONG), signal)?),
    }
    Ok(requests)
}

/// Tests the messages that are under way.
fn land(group: &Group, flights: &mut VecDeque<Flight>, free: &mut Vec<usize>) -> Result<()> {
    for _ in 0..flights.len() {
        let Some(mut flight) = flights.pop_front() else { break };
        let mut open = Vec::new();
        for request in flight.requests.drain(..) {
            if !group.test(request)? {
                open.push(request);
            }
        }
        flight.requests = open;
        match flight.requests.is_empty() {
            true => free.push(flight.slot),
            false => flights.push_back(flight),
        }
    }
    thread::yield_now();
    Ok(())
}

/// Looks at the bytes of the messages whose signals have come.
fn look(group: &Group, room: &mut Memory, seen: &mut [usize]) -> Result<()> {
    for (queue, seen) in seen.iter_mut().enumerate() {
        let (of, context) = (queue / CONTEXTS, queue % CONTEXTS);
        let count = room.words.word(queue * 8).load(Acquire) as usize;
        ensure!(count <= MESSAGES, "rank {of}, context {context}: {count} signals");
        for number in *seen..count {
            let message = Message { of, context, number };
            let bytes = room.target.memory.part(message.place(), BYTES);
            let wrong = memory::difference(bytes, message.seed(group.rank));
            ensure!(
                wrong.is_none(),
                "rank {of}, context {context}, message {number}: its signal is there, and byte \
                 {wrong:?} is wrong"
            );
        }
        *seen = count;
    }
    Ok(())
}
