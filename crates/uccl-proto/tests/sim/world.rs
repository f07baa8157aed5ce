//! Two ends, the messages between them, and a schedule.

use std::{cmp::Reverse, collections::BinaryHeap};

use fastrand::Rng;
use uccl_proto::{
    Event,
    asked::{CopyEnd, Slots},
    incoming::EarlySend,
    limits::EAGER_MAX,
    liveness::LaneVerdict,
    notifications::NextStep,
};
use uccl_wire::{
    frame::Status,
    message::{Answer, AskPiece, Direction, Message, Place, Verdict},
    signal::Change,
};

use crate::end::{Copy, End, LaneState, Operation, Signal, WORDS, bytes_of};

/// Steps that begin a new item.
const BEGINNINGS: u32 = 200;
const TIMEOUT_MS: u64 = 1000;
/// The longest time of one event.
const SLOWEST_MS: u64 = 20;

#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happening {
    /// A message arrives.
    Message { to: usize, bytes: Vec<u8> },
    /// The data of a send has been fetched.
    Fetched { at: usize, receive: u64, key: u64, verdict: Verdicts },
    /// The payload of a notification has been fetched.
    NotifFetched { at: usize, id: u64, key: u64 },
    /// A copy for the peer has ended.
    Copied { at: usize, id: u64 },
    /// An attempt at an operation reaches the peer, if the lane is alive.
    Lands { of: usize, operation: u64, attempt: u32 },
    /// A lane is killed by a thread that makes progress.
    EndLane { at: usize, lane: usize },
    /// A user takes notifications.
    Take { at: usize },
    /// A sign of life arrives.
    Heard { at: usize },
}

/// [`Verdict`], with an order.
type Verdicts = (u8, u64);

fn code(verdict: Verdict) -> Verdicts {
    match verdict {
        Verdict::Received => (0, 0),
        Verdict::Truncated { capacity } => (1, capacity),
        Verdict::Cancelled => (2, 0),
        Verdict::Failed => (3, 0),
    }
}

fn verdict((code, capacity): Verdicts) -> Verdict {
    match code {
        0 => Verdict::Received,
        1 => Verdict::Truncated { capacity },
        2 => Verdict::Cancelled,
        _ => Verdict::Failed,
    }
}

pub(crate) struct World {
    rng: Rng,
    now: u64,
    steps: u64,
    ends: [End; 2],
    queue: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    /// When the last message to each end arrives: the first lane keeps their order.
    last_due: [u64; 2],
    /// The faults of this world: lost lanes, cancels, revoked regions.
    loses_lanes: bool,
    cancels: bool,
    revokes: bool,
    /// Sends and notifications are long, for messages, and users are slow to take them.
    is_heavy: bool,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let lanes = rng.usize(1..5);
        Self {
            ends: [End::new(lanes), End::new(lanes)],
            loses_lanes: rng.bool(),
            cancels: rng.bool(),
            revokes: rng.bool(),
            is_heavy: rng.u8(..) < 6,
            rng,
            now: 1,
            steps: 0,
            queue: BinaryHeap::new(),
            last_due: [0; 2],
        }
    }

    /// Runs the schedule to its end. Returns its number of steps.
    pub(crate) fn run(mut self) -> u64 {
        let mut begun = 0;
        let beginnings = if self.is_heavy { 5 * BEGINNINGS } else { BEGINNINGS };
        while begun < beginnings {
            // Begins items in bursts, with time between them.
            if self.queue.is_empty() || self.rng.u8(..) < 110 {
                self.begin();
                begun += 1;
            } else {
                self.next();
            }
            self.look();
            self.steps += 1;
        }
        // Items that can end do so by themselves; the rest when they are cancelled.
        self.settle();
        self.check_meetings();
        self.call_all_off();
        self.settle();
        self.check_ended();
        self.check_words();
        self.close();
        self.steps
    }

    fn settle(&mut self) {
        for at in 0..2 {
            self.later(Happening::Take { at });
        }
        while self.next() {
            self.look();
            self.steps += 1;
        }
    }

    fn later(&mut self, happening: Happening) {
        let due = self.now + self.rng.u64(..SLOWEST_MS);
        self.queue.push(Reverse((due, self.steps, happening)));
    }

    /// Sends a message from one end, unless it is empty.
    fn say(&mut self, from: usize, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let to = 1 - from;
        let due = self.last_due[to].max(self.now + self.rng.u64(..SLOWEST_MS));
        self.last_due[to] = due;
        // Messages to one end are counted, so that those that come at one time keep their order.
        self.steps += 1;
        self.queue.push(Reverse((due, self.steps, Happening::Message { to, bytes })));
    }

    fn next(&mut self) -> bool {
        let Some(Reverse((due, _, happening))) = self.queue.pop() else { return false };
        self.now = self.now.max(due);
        match happening {
            Happening::Message { to, bytes } => self.hear(to, &bytes),
            Happening::Fetched { at, receive, key, verdict: found } => {
                assert!(self.ends[1 - at].keys.contains(&key), "the key ended before its use");
                let is_fenced = self.ends[at].receives[receive as usize].is_fenced;
                // Cancelled data may have come all the same.
                let is_cut = is_fenced && self.rng.bool();
                let found = if is_cut { Verdict::Cancelled } else { verdict(found) };
                let answer = self.ends[at].received(receive, found);
                self.say(at, answer);
            }
            Happening::NotifFetched { at, id, key } => {
                assert!(self.ends[1 - at].keys.contains(&key), "the key ended before its use");
                let is_here = self.rng.u8(..) > 20;
                let mut out = Vec::new();
                assert!(self.ends[at].session.notifications.fetched(id, is_here, &mut out));
                self.say(at, out);
                self.deliver(at, is_here);
                self.take(at);
            }
            Happening::Copied { at, id } => self.end_copy(at, id),
            Happening::Lands { of, operation, attempt } => self.land(of, operation, attempt),
            Happening::EndLane { at, lane } => self.end_lane(at, lane),
            Happening::Take { at } => self.take(at),
            Happening::Heard { at } => self.ends[at].heard_ms = self.now,
        }
        true
    }

    /// Begins a random item, or a random fault.
    fn begin(&mut self) {
        let at = self.rng.usize(..2);
        match self.rng.u8(..20) {
            0..5 => self.begin_send(at),
            5..10 if !self.is_heavy || self.rng.u8(..) < 40 => self.begin_receive(at),
            10..13 => self.begin_notif(at),
            13..15 => self.begin_ask(at),
            15..17 => self.begin_operation(at),
            17 if self.cancels => self.call_off(at),
            18 if self.revokes => self.revoke(at),
            19 if self.loses_lanes => {
                let lanes = self.ends[at].lanes.len();
                let lane = self.rng.usize(..lanes);
                if lane > 0 {
                    self.lose_lane(at, lane);
                }
            }
            _ => {}
        }
    }

    fn len(&mut self) -> u32 {
        match self.rng.u8(..) {
            _ if self.is_heavy => EAGER_MAX as u32,
            0..200 => self.rng.u32(..64),
            200..250 => EAGER_MAX as u32 + self.rng.u32(1..1000),
            _ => EAGER_MAX as u32 / 2,
        }
    }

    fn begin_send(&mut self, at: usize) {
        let iovs = if self.is_heavy { 1 } else { self.rng.usize(..3) };
        let lens = (0..iovs).map(|_| self.len()).collect();
        let is_readable = self.rng.u8(..) > 10;
        if let Some(message) = self.ends[at].send(lens, is_readable) {
            self.say(at, message);
        }
    }

    fn begin_receive(&mut self, at: usize) {
        // Mostly room for the longest iov of a send.
        let iovs = self.rng.usize(..3);
        let room = if self.rng.u8(..) < 30 { self.rng.u32(..40) } else { 64 << 10 };
        match self.ends[at].receive(vec![room; iovs]) {
            None => {}
            Some((receive, EarlySend::Eager { seq, lens, data })) => {
                self.take_eager(at, receive, seq, &lens, &data);
            }
            Some((receive, EarlySend::Rendezvous { seq, sources })) => {
                self.fetch(at, receive, seq, &sources);
            }
        }
    }

    fn take_eager(&mut self, at: usize, receive: u64, seq: u64, lens: &[u32], data: &[u8]) {
        let send = self.sent_as(1 - at, seq);
        assert!(data == bytes_of(send, lens), "the bytes of another send");
        self.ends[at].met(receive, seq);
        let lens: Vec<_> = lens.iter().copied().map(u64::from).collect();
        let found = self.ends[at].verdict(receive, &lens);
        let answer = self.ends[at].received(receive, found);
        self.say(at, answer);
    }

    fn fetch(&mut self, at: usize, receive: u64, seq: u64, sources: &[uccl_wire::message::Source]) {
        let key = self.sent_as(1 - at, seq);
        assert!(sources.iter().all(|source| source.key == key), "the keys of another send");
        self.ends[at].met(receive, seq);
        let lens: Vec<_> = sources.iter().map(|source| source.len).collect();
        let verdict = code(self.ends[at].verdict(receive, &lens));
        self.later(Happening::Fetched { at, receive, key, verdict });
    }

    /// The send that an end numbered `seq`.
    fn sent_as(&self, end: usize, seq: u64) -> u64 {
        let sends = &self.ends[end].sends;
        sends.iter().position(|send| send.seq == seq).expect("it was sent") as u64
    }

    fn begin_notif(&mut self, at: usize) {
        let len = self.len() as usize;
        if let Some(message) = self.ends[at].notify(len) {
            self.say(at, message);
        }
    }

    /// A user takes delivered notifications, which makes room for waiting ones.
    fn take(&mut self, at: usize) {
        loop {
            let mut out = Vec::new();
            match self.ends[at].session.notifications.next(&mut out) {
                NextStep::Deliver(payload) => {
                    self.say(at, out);
                    let id = self.ends[at].delivered;
                    assert!(payload.iter().all(|byte| *byte == id as u8), "another's payload");
                    assert_eq!(payload.len(), self.ends[1 - at].notifs[id as usize].len);
                    self.deliver(at, true);
                }
                NextStep::Fetch { id, source } => {
                    return self.later(Happening::NotifFetched { at, id, key: source.key });
                }
                NextStep::Nothing => return,
            }
        }
    }

    /// Counts a notification as delivered, or as dropped without its payload.
    fn deliver(&mut self, at: usize, _is_here: bool) {
        let id = self.ends[at].delivered;
        assert_eq!(self.ends[1 - at].notifs[id as usize].ended, None, "told before it was so");
        self.ends[at].delivered += 1;
    }

    fn begin_ask(&mut self, at: usize) {
        let count = self.rng.usize(1..4);
        let place = |slot| Place { addr: 0, key: 0, slot };
        let slots: Vec<_> = (0..count).map(|_| self.rng.u32(..6)).collect();
        let pieces =
            slots.iter().map(|slot| AskPiece { owner: place(*slot), asker: place(0), len: 1 });
        let end = &mut self.ends[at];
        if !end.session.asks.admits(count) {
            return;
        }
        let mut out = Vec::new();
        end.session.asks.ask(Direction::ToOwner, pieces, end.asks.len() as u64, &mut out);
        end.asks.push(None);
        self.say(at, out);
    }

    fn end_copy(&mut self, at: usize, id: u64) {
        let Some(copy) = self.ends[at].copies.remove(&id) else { return };
        let end = match self.rng.u8(..) {
            _ if copy.is_fenced => CopyEnd::Fenced,
            0..10 => CopyEnd::Failed,
            _ => CopyEnd::Copied,
        };
        let mut out = Vec::new();
        self.ends[at].session.asked.ended(id, end, &mut out);
        assert!(!out.is_empty(), "copy {id} is not answered");
        self.say(at, out);
    }

    /// A user deregisters a region.
    fn revoke(&mut self, at: usize) {
        let slot = self.rng.u32(..6);
        let end = &mut self.ends[at];
        let about = end.copies.iter().filter(|(_, copy)| copy.slots.contains(&slot));
        let running: Vec<_> = about.map(|(id, _)| *id).collect();
        match end.session.asked.revoke(slot) {
            None => assert!(running.is_empty(), "{running:?} go on in a region that has ended"),
            Some(to_end) => {
                assert_eq!(to_end.iter().copied().collect::<Vec<_>>(), running);
                for id in to_end {
                    let copy = end.copies.get_mut(&id);
                    copy.expect("it is under way").is_fenced = true;
                }
            }
        }
    }

    fn begin_operation(&mut self, of: usize) {
        let id = self.ends[of].operations.len() as u64;
        let is_signalled = self.rng.bool();
        self.ends[of].operations.push(Operation {
            lane: 0,
            attempts: 0,
            is_orphan: false,
            has_ended: false,
            signal: is_signalled.then_some(Signal { is_applied: false, answer: None }),
        });
        self.post(of, id);
    }

    /// Posts an operation, for the first time or once more.
    fn post(&mut self, of: usize, id: u64) {
        let lane = self.ends[of].living(&mut self.rng);
        let operation = &mut self.ends[of].operations[id as usize];
        operation.lane = lane;
        operation.is_orphan = false;
        operation.attempts += 1;
        let attempt = operation.attempts;
        self.later(Happening::Lands { of, operation: id, attempt });
    }

    fn land(&mut self, of: usize, id: u64, attempt: u32) {
        let Operation { lane, attempts, is_orphan, .. } = self.ends[of].operations[id as usize];
        let is_latest = attempt == attempts;
        if self.ends[1 - of].lanes[lane] == LaneState::Dead && is_latest {
            // The peer's end takes nothing any more: the poster's end learns of it by the loss of
            // its lane.
            return self.lose_lane(of, lane);
        }
        if !is_latest {
            return;
        }
        // It lands: our end hears of it, unless that end is dead or has made the operation an
        // orphan.
        if self.ends[of].lanes[lane] != LaneState::Dead && !is_orphan {
            let signal = self.ends[of].operation_ended(id);
            self.say(of, signal);
        }
    }

    /// An end notes that a lane is of no more use; a thread that makes progress kills it.
    fn lose_lane(&mut self, at: usize, lane: usize) {
        if self.ends[at].lanes[lane] == LaneState::Alive && lane > 0 {
            self.ends[at].lanes[lane] = LaneState::Lost;
            self.later(Happening::EndLane { at, lane });
            // Some operations fail at once: of a read, more may come in until our end is dead.
            let mut failed = self.on_lane(at, lane);
            failed.truncate(self.rng.usize(..=failed.len()));
            self.orphan(at, failed);
        }
    }

    /// The operations that a lane has.
    fn on_lane(&self, at: usize, lane: usize) -> Vec<u64> {
        let operations = (0..).zip(&self.ends[at].operations);
        let here = operations.filter(|(_, op)| op.lane == lane && !op.has_ended && !op.is_orphan);
        here.map(|(id, _)| id).collect()
    }

    fn end_lane(&mut self, at: usize, lane: usize) {
        assert_eq!(self.ends[at].lanes[lane], LaneState::Lost);
        self.ends[at].lanes[lane] = LaneState::Dead;
        let mut on_lane = self.on_lane(at, lane);
        // Some operations end with the kill, others are reported a moment later.
        let late = on_lane.split_off(self.rng.usize(..=on_lane.len()));
        self.orphan(at, on_lane);
        let (mut out, now) = (Vec::new(), self.now);
        let orphans = self.ends[at].session.lanes.our_end_died(lane as u16, now, &mut out);
        self.say(at, out);
        self.post_again(at, lane, orphans.unwrap_or_default());
        self.orphan(at, late);
    }

    fn orphan(&mut self, at: usize, operations: Vec<u64>) {
        for id in operations {
            let lane = self.ends[at].operations[id as usize].lane;
            if self.ends[at].orphaned(id) {
                self.post_again(at, lane, vec![id]);
            }
        }
    }

    fn post_again(&mut self, of: usize, lane: usize, operations: Vec<u64>) {
        for id in operations {
            // Else the first attempt may land after the second.
            let ends = [&self.ends[of], &self.ends[1 - of]].map(|end| end.lanes[lane]);
            assert_eq!(ends, [LaneState::Dead; 2], "operation {id} is posted again too early");
            self.post(of, id);
        }
    }

    fn hear(&mut self, to: usize, bytes: &[u8]) {
        self.ends[to].heard_ms = self.now;
        let message = Message::decode(bytes).expect("an honest peer's");
        let mut out = Vec::new();
        let event = self.ends[to].session.hear(message, &mut out).expect("an honest peer's");
        self.say(to, out);
        match event {
            Event::Nothing => {}
            Event::Received { receive, seq, lens, data } => {
                let lens: Vec<_> = lens.iter().collect();
                self.take_eager(to, receive, seq, &lens, data);
            }
            Event::Fetch { receive, seq, sources } => {
                let sources: Vec<_> = sources.iter().collect();
                self.fetch(to, receive, seq, &sources);
            }
            Event::EndReceive(receive) => {
                self.ends[to].receives[receive as usize].is_fenced = true;
            }
            Event::SendEnded { send, verdict } => self.send_ended(to, send, verdict),
            Event::NotifEnded { notif, is_delivered } => {
                assert!(self.ends[1 - to].delivered > notif, "told before it was so");
                self.ends[to].notif_ended(notif, is_delivered);
            }
            Event::Signal { id, word, change } => self.apply(to, id, word, change),
            Event::SignalEnded { signal, status } => {
                let operation = &self.ends[to].operations[signal as usize];
                let is_applied = operation.signal.as_ref().is_some_and(|signal| signal.is_applied);
                assert_eq!(status == Status::Ok, is_applied, "signal {signal}");
                self.ends[to].signal_ended(signal, status);
            }
            // A slow user lets them wait.
            Event::Notified if !self.is_heavy && self.rng.bool() => self.take(to),
            Event::Notified if !self.is_heavy => self.later(Happening::Take { at: to }),
            Event::Notified => {}
            Event::AskEnded { ask, answer } => {
                let ended = &mut self.ends[to].asks[ask as usize];
                assert_eq!(ended.replace(answer), None, "ask {ask} ends twice");
            }
            Event::Copy { id, pieces, .. } => {
                let slots: Vec<_> = pieces.iter().map(|piece| piece.owner.slot).collect();
                self.begin_copy(to, id, slots);
            }
            Event::EndCopy(id) => {
                if let Some(copy) = self.ends[to].copies.get_mut(&id) {
                    copy.is_fenced = true;
                }
            }
            Event::LaneDown { lane, orphans } => {
                self.lose_lane(to, lane);
                self.post_again(to, lane, orphans.unwrap_or_default());
            }
            Event::Note { .. } => panic!("nobody sends notes"),
            Event::LookUp { .. } | Event::LookUpEnded { .. } => panic!("nobody looks up"),
        }
    }

    fn send_ended(&mut self, at: usize, id: u64, verdict: Verdict) {
        let send = &self.ends[at].sends[id as usize];
        let (seq, is_wanted_back) = (send.seq, send.is_wanted_back);
        let mut receives = self.ends[1 - at].receives.iter();
        let receive = receives.find(|receive| receive.met == Some(seq));
        // Both sides get the same verdict; where there was no receive, the sender had cancelled.
        match receive {
            Some(receive) => assert_eq!(receive.ended, Some(verdict), "send {id}"),
            None => assert!(verdict == Verdict::Cancelled && is_wanted_back, "send {id}"),
        }
        self.ends[at].send_ended(id, verdict);
    }

    /// Changes a word for the peer's operation, unless its region has been revoked.
    fn apply(&mut self, at: usize, id: u64, word: Place, change: Change) {
        let Change::Add(value) = change else { panic!("all are additions") };
        let operation = &mut self.ends[1 - at].operations[(value - 1) as usize];
        assert!(operation.has_ended, "a signal stands for bytes that are not there");
        let signal = operation.signal.as_mut().expect("it carries one");
        assert!(!signal.is_applied, "a signal is applied twice");
        let status = if self.rng.u8(..) < 10 { Status::UnknownKey } else { Status::Ok };
        if status == Status::Ok {
            signal.is_applied = true;
            let word = &mut self.ends[at].words[word.addr as usize];
            *word = change.of(*word);
        }
        let mut out = Vec::new();
        self.ends[at].session.signals.answer(id, status, &mut out);
        self.say(at, out);
    }

    /// Each word is the sum of the signals that were applied to it, and each signal was answered.
    fn check_words(&self) {
        for at in 0..2 {
            let mut words = [0; WORDS];
            for (id, operation) in (0..).zip(&self.ends[1 - at].operations) {
                let Some(signal) = &operation.signal else { continue };
                assert!(signal.answer.is_some(), "a signal was not answered");
                if signal.is_applied {
                    words[id as usize % WORDS] += id + 1;
                }
            }
            assert_eq!(self.ends[at].words, words);
        }
    }

    fn begin_copy(&mut self, at: usize, id: u64, slots: Vec<u32>) {
        if self.rng.u8(..) < 10 {
            let mut out = Vec::new();
            self.ends[at].session.asked.answer(id, Answer::Declined, &mut out);
            return self.say(at, out);
        }
        // A key of a part stands for the region as well.
        let region = Slots::from_elem(slots[0] + 100, 1);
        assert!(self.ends[at].session.asked.add(id, region));
        self.ends[at].session.asked.begun(id, id);
        self.ends[at].copies.insert(id, Copy { slots, is_fenced: false });
        self.later(Happening::Copied { at, id });
    }

    /// A user cancels a random item.
    fn call_off(&mut self, at: usize) {
        match self.rng.u8(..3) {
            0 if !self.ends[at].sends.is_empty() => {
                let id = self.rng.usize(..self.ends[at].sends.len());
                self.want_back(at, id);
            }
            1 if !self.ends[at].receives.is_empty() => {
                let id = self.rng.usize(..self.ends[at].receives.len());
                self.withdraw(at, id as u64);
            }
            2 if !self.ends[at].asks.is_empty() => {
                let id = self.rng.u64(..self.ends[at].asks.len() as u64);
                self.withdraw_ask(at, id);
            }
            _ => {}
        }
    }

    fn want_back(&mut self, at: usize, id: usize) {
        let end = &mut self.ends[at];
        let send = &mut end.sends[id];
        let is_first = !std::mem::replace(&mut send.is_wanted_back, true);
        let mut out = Vec::new();
        let is_said = end.session.outgoing.cancel_send(send.seq, &mut out);
        assert_eq!(is_said, is_first && send.ended.is_none());
        if is_said {
            self.say(at, out);
        }
    }

    fn withdraw(&mut self, at: usize, id: u64) {
        let end = &mut self.ends[at];
        let withdrawn = end.session.incoming.withdraw(|receive| *receive == id);
        let receive = &mut end.receives[id as usize];
        let waits = receive.met.is_none() && receive.ended.is_none();
        assert_eq!(withdrawn, waits.then_some(id));
        if waits {
            receive.ended = Some(Verdict::Cancelled);
        }
    }

    fn withdraw_ask(&mut self, at: usize, id: u64) {
        let mut out = Vec::new();
        if self.ends[at].session.asks.withdraw_one(|ask| *ask == id, &mut out) {
            assert_eq!(self.ends[at].asks[id as usize], None);
        }
        self.say(at, out);
    }

    /// After each step: a peer that answers is not given up.
    fn look(&mut self) {
        for at in 0..2 {
            let (now, end) = (self.now, &mut self.ends[at]);
            match end.session.liveness.look(0, now, end.heard_ms, TIMEOUT_MS) {
                LaneVerdict::Fine => {}
                LaneVerdict::Ping => self.later(Happening::Heard { at }),
                LaneVerdict::Silent(ms) => panic!("a peer that answers is given up after {ms} ms"),
            }
        }
    }

    /// Nothing is on its way: no receive and no send wait for each other, and those that met did so
    /// in order.
    fn check_meetings(&self) {
        for at in 0..2 {
            let (end, peer) = (&self.ends[at], &self.ends[1 - at]);
            let waits =
                |receive: &crate::end::Receive| receive.met.is_none() && receive.ended.is_none();
            let receives = end.receives.iter().position(waits);
            let sends = peer.sends.iter().position(|send| send.ended.is_none());
            assert!(receives.is_none() || sends.is_none(), "they wait for each other");
            if let Some((receive, seq)) = end.last_met {
                assert!(receives.is_none_or(|first| first as u64 > receive), "passed over");
                assert!(sends.is_none_or(|first| peer.sends[first].seq > seq), "passed over");
            }
            let owed = end.session.lanes.owed_since_ms();
            assert_eq!(owed, None, "the peer has killed its ends of lanes");
        }
    }

    fn call_all_off(&mut self) {
        for at in 0..2 {
            for id in 0..self.ends[at].sends.len() {
                if self.ends[at].sends[id].ended.is_none() {
                    self.want_back(at, id);
                }
            }
            for id in 0..self.ends[at].receives.len() as u64 {
                self.withdraw(at, id);
            }
        }
    }

    fn check_ended(&self) {
        for end in &self.ends {
            assert!(end.sends.iter().all(|send| send.ended.is_some()), "a send did not end");
            assert!(end.receives.iter().all(|receive| receive.ended.is_some()), "nor a receive");
            assert!(end.notifs.iter().all(|notif| notif.ended.is_some()), "nor a notification");
            assert!(end.asks.iter().all(Option::is_some), "nor an ask");
            assert!(end.operations.iter().all(|operation| operation.has_ended), "nor an operation");
            assert!(end.copies.is_empty() && end.keys.is_empty(), "something is left");
            assert_eq!(end.session.outgoing.eager_bytes(), 0);
        }
    }

    /// Closing a session returns its unanswered items.
    fn close(&mut self) {
        for _ in 0..40 {
            self.begin();
        }
        for end in &mut self.ends {
            let closed = end.session.close();
            let open = end.sends.iter().enumerate().filter(|(_, send)| send.ended.is_none());
            assert_eq!(closed.sends, open.map(|(id, _)| id as u64).collect::<Vec<_>>());
            let open = end.notifs.iter().enumerate().filter(|(_, notif)| notif.ended.is_none());
            assert_eq!(closed.notifs, open.map(|(id, _)| id as u64).collect::<Vec<_>>());
            let open = (0..).zip(&end.operations).filter(|(_, operation)| {
                let signal = operation.signal.as_ref().filter(|_| operation.has_ended);
                signal.is_some_and(|signal| signal.answer.is_none())
            });
            assert_eq!(closed.signals, open.map(|(id, _)| id).collect::<Vec<_>>());
            let open = end.asks.iter().enumerate().filter(|(_, answer)| answer.is_none());
            assert_eq!(closed.asks, open.map(|(id, _)| id as u64).collect::<Vec<_>>());
            assert!(end.session.is_closed());
        }
        // Messages that are still under way have no effect.
        for Reverse((_, _, happening)) in std::mem::take(&mut self.queue) {
            if let Happening::Message { to, bytes } = happening {
                let message = Message::decode(&bytes).expect("an honest peer's");
                let event = self.ends[to].session.hear(message, &mut Vec::new());
                assert_eq!(event, Ok(Event::Nothing));
            }
        }
    }
}
