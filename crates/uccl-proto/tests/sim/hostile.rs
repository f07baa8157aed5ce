//! A peer that sends arbitrary messages.

use fastrand::Rng;
use uccl_proto::{Event, Violation, asked::CopyEnd, incoming::EarlySend, notifications::NextStep};
use uccl_wire::{
    frame::Status,
    message::{
        self, Answer, AskPiece, Direction, MAX_ASKED_PIECES, MAX_ASKS, Message, Place, Range,
        Source, Verdict,
    },
    signal::Change,
};

use crate::end::{Copy, End, Operation, Signal};

/// Messages a seed, if the connection lives for so long.
const MESSAGES: u64 = 150;

/// Runs one schedule. Returns its number of steps.
pub(crate) fn run(seed: u64) -> u64 {
    let mut rng = Rng::with_seed(seed);
    let mut victim = End::new(rng.usize(1..4));
    for step in 0..MESSAGES {
        begin(&mut victim, &mut rng);
        let bytes = message(&victim, &mut rng, step);
        if let Err(why) = hear(&mut victim, &mut rng, &bytes) {
            // Every reason has a text.
            assert!(!why.to_string().is_empty());
            let closed = victim.session.close();
            let open = victim.sends.iter().filter(|send| send.ended.is_none()).count();
            assert_eq!(closed.sends.len(), open, "a send that the peer has not answered is lost");
            return step;
        }
    }
    MESSAGES
}

/// The victim has sends, receives and asks of its own that the peer may answer.
fn begin(victim: &mut End, rng: &mut Rng) {
    match rng.u8(..6) {
        5 => {
            let ranges = [Range { addr: rng.u64(..), len: rng.u64(..) }];
            let id = victim.look_ups.len() as u64;
            let look_ups = &mut victim.session.look_ups;
            if look_ups.send(ranges.into_iter(), id, &mut Vec::new()).is_ok() {
                victim.look_ups.push(false);
            }
        }
        4 => {
            let signal = Some(Signal { is_applied: false, answer: None });
            let id = victim.operations.len() as u64;
            let (lane, attempts) = (0, 1);
            let (is_orphan, has_ended) = (false, false);
            victim.operations.push(Operation { lane, attempts, is_orphan, has_ended, signal });
            drop(victim.operation_ended(id));
        }
        0 => drop(victim.send(vec![rng.u32(..100); rng.usize(..3)], rng.bool())),
        1 => {
            if let Some((receive, arrived)) = victim.receive(vec![64; rng.usize(..3)]) {
                let (EarlySend::Eager { seq, .. } | EarlySend::Rendezvous { seq, .. }) = arrived;
                victim.receives[receive as usize].met = Some(seq);
                victim.received(receive, Verdict::Received);
            }
        }
        2 => drop(victim.notify(rng.usize(..100_000))),
        _ => {
            let pieces = [AskPiece { owner: place(rng), asker: place(rng), len: 1 }];
            let id = victim.asks.len() as u64;
            if victim.session.asks.admits(1) {
                let asks = &mut victim.session.asks;
                asks.ask(Direction::FromOwner, pieces.into_iter(), id, &mut Vec::new());
                victim.asks.push(None);
            }
        }
    }
}

fn hear(victim: &mut End, rng: &mut Rng, bytes: &[u8]) -> Result<(), Violation> {
    let Some(whole) = victim.session.assemble(bytes)? else { return Ok(()) };
    let (message, mut out) = (Message::decode(&whole)?, Vec::new());
    match victim.session.hear(message, &mut out)? {
        Event::Nothing | Event::EndReceive(_) | Event::Note { .. } | Event::LaneDown { .. } => {}
        Event::Received { receive, seq, .. } | Event::Fetch { receive, seq, .. } => {
            victim.receives[receive as usize].met = Some(seq);
            if rng.bool() {
                victim.received(receive, Verdict::Received);
            }
        }
        Event::SendEnded { send, verdict } => victim.send_ended(send, verdict),
        Event::NotifEnded { notif, is_delivered } => victim.notif_ended(notif, is_delivered),
        Event::AskEnded { ask, answer } => {
            assert_eq!(victim.asks[ask as usize].replace(answer), None, "ask {ask} ends twice");
        }
        Event::Signal { id, .. } => {
            // A victim that does not answer stands for one with busy memory.
            assert_eq!(id, victim.signals_heard + 1, "out of turn, or twice");
            victim.signals_heard = id;
            if rng.bool() {
                victim.session.signals.answer(id, Status::Ok, &mut out);
            }
        }
        Event::SignalEnded { signal, status } => victim.signal_ended(signal, status),
        Event::LookUp { id, ranges } => {
            let regions =
                ranges.iter().map(|Range { addr, len }| Source { addr, len, key: 1, slot: 1 });
            victim.session.look_ups.answer(id, Status::Ok, regions, &mut out);
        }
        Event::LookUpEnded { look_up, .. } => {
            let ended = &mut victim.look_ups[look_up as usize];
            assert!(!std::mem::replace(ended, true), "look-up {look_up} ends twice");
        }
        Event::Notified => {
            while let NextStep::Deliver(_) = victim.session.notifications.next(&mut out) {}
        }
        Event::Copy { id, pieces, .. } => {
            let slots = pieces.iter().map(|piece| piece.owner.slot).collect();
            assert!(victim.copies.insert(id, Copy { slots, is_fenced: false }).is_none());
            let pieces: usize = victim.copies.values().map(|copy| copy.slots.len()).sum();
            assert!(victim.copies.len() <= MAX_ASKS && pieces <= MAX_ASKED_PIECES);
            victim.session.asked.begun(id, id);
        }
        Event::EndCopy(id) => {
            victim.copies.remove(&id).expect("it is under way");
            victim.session.asked.ended(id, CopyEnd::Fenced, &mut out);
        }
    }
    Ok(())
}

fn place(rng: &mut Rng) -> Place {
    Place { addr: rng.u64(..), key: rng.u64(..), slot: rng.u32(..4) }
}

/// The number of an open item, or now and then any number.
fn number(open: impl Iterator<Item = u64>, rng: &mut Rng) -> u64 {
    let open: Vec<_> = open.collect();
    let any = rng.u64(..20);
    if rng.u8(..) < 4 { any } else { rng.choice(open).unwrap_or(any) }
}

/// Encodes a message: mostly well-formed, and mostly about an item that exists.
fn message(victim: &End, rng: &mut Rng, step: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let sends = victim.sends.iter().filter(|send| send.ended.is_none()).map(|send| send.seq);
    let notifs = (1..).zip(&victim.notifs).filter(|(_, notif)| notif.ended.is_none());
    let asks = (1..).zip(&victim.asks).filter(|(_, answer)| answer.is_none());
    let is_open = |operation: &Operation| {
        operation.signal.as_ref().is_some_and(|signal| signal.answer.is_none())
    };
    let signals = (1..).zip(&victim.operations).filter(|(_, operation)| is_open(operation));
    let look_ups = (1..).zip(&victim.look_ups).filter(|(_, ended)| !**ended);
    // Mostly, an answer to an item that is not open is replaced by a note to the first lane.
    let mut kind = rng.u8(..18);
    let id = match kind {
        2 => number(sends, rng),
        6 => number(notifs.map(|(id, _)| id), rng),
        8 => number(asks.map(|(id, _)| id), rng),
        9 => number(victim.copies.keys().copied(), rng),
        14 => number(std::iter::once(victim.signals_heard + 1), rng),
        15 => number(signals.map(|(id, _)| id), rng),
        17 => number(look_ups.map(|(id, _)| id), rng),
        _ => step + 1,
    };
    let is_known = match kind {
        2 => victim.sends.iter().any(|send| send.seq == id && send.ended.is_none()),
        6 => victim
            .notifs
            .get((id as usize).wrapping_sub(1))
            .is_some_and(|notif| notif.ended.is_none()),
        8 => victim.asks.get((id as usize).wrapping_sub(1)).is_some_and(Option::is_none),
        14 => id == victim.signals_heard + 1,
        15 => victim.operations.get((id as usize).wrapping_sub(1)).is_some_and(is_open),
        17 => victim.look_ups.get((id as usize).wrapping_sub(1)).is_some_and(|ended| !ended),
        10 | 12 => false,
        _ => true,
    };
    if !is_known && rng.u8(..) > 10 {
        kind = 13;
    }
    let source = Source { addr: rng.u64(..), len: rng.u64(..1 << 20), key: id, slot: 1 };
    match kind {
        0 => {
            let len = rng.u32(..200);
            message::eager_head(id, [len].into_iter(), &mut out);
            out.extend(vec![1; len as usize]);
        }
        1 => message::rts(id, vec![source; rng.usize(..4)].into_iter(), &mut out),
        2 => message::fin(id, Verdict::Truncated { capacity: rng.u64(..) }, &mut out),
        3 => message::send_cancel(id, &mut out),
        4 => {
            message::notif_head(id, &mut out);
            out.extend(vec![2; rng.usize(..1000)]);
        }
        5 => message::notif_rts(id, source, &mut out),
        6 => message::notif_ack(id, rng.bool(), &mut out),
        7 => {
            let pieces: Vec<_> = (0..rng.usize(..5))
                .map(|_| AskPiece { owner: place(rng), asker: place(rng), len: 1 })
                .collect();
            message::ask(id, Direction::ToOwner, pieces.into_iter(), &mut out);
        }
        8 => message::answer(id, Answer::Declined, &mut out),
        9 => message::ask_cancel(id, &mut out),
        10 => message::lane_down(rng.u16(..4), &mut out),
        11 => message::link_head(rng.u16(..5), &mut out),
        12 => out.extend((0..rng.usize(..64)).map(|_| rng.u8(..))),
        14 => message::signal(id, place(rng), Change::Add(rng.u64(..)), &mut out),
        15 => message::signal_ack(id, Status::Denied, &mut out),
        16 => {
            let range = Range { addr: rng.u64(..), len: rng.u64(..) };
            message::look_up(id, vec![range; rng.usize(..4)].into_iter(), &mut out);
        }
        17 => {
            let regions = vec![source; rng.usize(..4)].into_iter();
            message::look_up_answer(id, Status::Ok, regions, &mut out);
        }
        _ => message::link_head(0, &mut out),
    }
    // Damaged, cut, or a fragment.
    match rng.u8(..) {
        0 if !out.is_empty() => {
            let at = rng.usize(..out.len());
            out[at] = rng.u8(..);
        }
        1 => out.truncate(rng.usize(..=out.len())),
        2 if out.len() > 1 => out[1] = message::MORE,
        _ => {}
    }
    out
}
