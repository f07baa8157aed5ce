//! One end: a session and its driver. The driver has no memory to move: each of its actions takes
//! some time and is recorded.

use std::collections::{BTreeMap, BTreeSet};

use uccl_proto::{
    Handles, Session, incoming::EarlySend, lanes::OrphanStep, outgoing::SendProtocol,
};
use uccl_wire::{
    frame::Status,
    message::{Answer, Place, Source, Verdict},
    signal::Change,
};

/// Handles are the numbers under which the records are found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sim;

impl Handles for Sim {
    type Send = u64;
    type Notif = u64;
    type Signal = u64;
    type LookUp = u64;
    type Receive = u64;
    type Ask = u64;
    type PeerCopy = u64;
    type Operation = u64;
}

/// A send of ours.
pub(crate) struct Send {
    pub(crate) seq: u64,
    pub(crate) is_wanted_back: bool,
    pub(crate) ended: Option<Verdict>,
}

/// A receive of ours.
pub(crate) struct Receive {
    /// The room of each iov, in bytes.
    pub(crate) room: Vec<u32>,
    pub(crate) met: Option<u64>,
    pub(crate) ended: Option<Verdict>,
    /// The peer has cancelled the send that is being fetched.
    pub(crate) is_fenced: bool,
}

/// A notification of ours.
pub(crate) struct Notif {
    pub(crate) len: usize,
    pub(crate) ended: Option<bool>,
}

/// A copy that we make for the peer.
pub(crate) struct Copy {
    pub(crate) slots: Vec<u32>,
    pub(crate) is_fenced: bool,
}

/// An operation of ours on one of the lanes that can be lost.
pub(crate) struct Operation {
    pub(crate) lane: usize,
    /// How often it was posted.
    pub(crate) attempts: u32,
    /// Its lane has reported its death.
    pub(crate) is_orphan: bool,
    pub(crate) has_ended: bool,
    /// The signal to send at the operation's end, if it carries one.
    pub(crate) signal: Option<Signal>,
}

/// A signal that an operation carries: its number goes to the peer, and a word there is added to.
pub(crate) struct Signal {
    pub(crate) is_applied: bool,
    pub(crate) answer: Option<Status>,
}

/// Words of each end that signals add to.
pub(crate) const WORDS: usize = 4;

/// The state of our end of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LaneState {
    Alive,
    /// It is not used any more, and will be killed.
    Lost,
    Dead,
}

pub(crate) struct End {
    pub(crate) session: Session<Sim>,
    pub(crate) sends: Vec<Send>,
    pub(crate) receives: Vec<Receive>,
    pub(crate) notifs: Vec<Notif>,
    /// Answers to asks.
    pub(crate) asks: Vec<Option<Answer>>,
    pub(crate) copies: BTreeMap<u64, Copy>,
    pub(crate) operations: Vec<Operation>,
    /// Words that the peer's signals add to.
    pub(crate) words: [u64; WORDS],
    pub(crate) lanes: Vec<LaneState>,
    /// Keys with which the peer reaches memory of ours.
    pub(crate) keys: BTreeSet<u64>,
    /// The last pair of a receive and a send that met.
    pub(crate) last_met: Option<(u64, u64)>,
    /// Notifications of the peer that were delivered, by their place among all.
    pub(crate) delivered: u64,
    pub(crate) heard_ms: u64,
    /// Look-ups of ours, and whether the peer has answered.
    pub(crate) look_ups: Vec<bool>,
    /// The last of the peer's signals that a hostile peer had this end apply.
    pub(crate) signals_heard: u64,
}

/// Keys of sends and of notifications are apart.
const NOTIFS: u64 = 1 << 32;

pub(crate) fn bytes_of(send: u64, lens: &[u32]) -> Vec<u8> {
    vec![send as u8; lens.iter().map(|len| *len as usize).sum()]
}

impl End {
    pub(crate) fn new(lanes: usize) -> Self {
        Self {
            session: Session::new(lanes),
            sends: Vec::new(),
            receives: Vec::new(),
            notifs: Vec::new(),
            asks: Vec::new(),
            copies: BTreeMap::new(),
            operations: Vec::new(),
            words: [0; WORDS],
            lanes: vec![LaneState::Alive; lanes],
            keys: BTreeSet::new(),
            last_met: None,
            delivered: 0,
            heard_ms: 0,
            look_ups: Vec::new(),
            signals_heard: 0,
        }
    }

    /// Begins a send: its message, or none if there is no room for more.
    pub(crate) fn send(&mut self, lens: Vec<u32>, is_readable: bool) -> Option<Vec<u8>> {
        let (id, mut message) = (self.sends.len() as u64, Vec::new());
        let len: usize = lens.iter().map(|len| *len as usize).sum();
        let outgoing = &mut self.session.outgoing;
        let seq = match outgoing.admit_send(len, lens.len(), is_readable).ok()? {
            SendProtocol::Eager => {
                let seq = outgoing.eager_send(lens.iter().copied(), id, &mut message);
                message.extend(bytes_of(id, &lens));
                seq
            }
            SendProtocol::Rendezvous => {
                self.keys.insert(id);
                let source = |len: &u32| Source { addr: 0, len: (*len).into(), key: id, slot: 0 };
                outgoing.rendezvous_send(lens.iter().map(source), id, &mut message)
            }
        };
        self.sends.push(Send { seq, is_wanted_back: false, ended: None });
        Some(message)
    }

    pub(crate) fn send_ended(&mut self, id: u64, verdict: Verdict) {
        let send = &mut self.sends[id as usize];
        assert_eq!(send.ended.replace(verdict), None, "send {id} ends twice");
        self.keys.remove(&id);
    }

    /// Begins a receive. Returns the send that it met, if one was there.
    pub(crate) fn receive(&mut self, room: Vec<u32>) -> Option<(u64, EarlySend)> {
        let id = self.receives.len() as u64;
        self.receives.push(Receive { room, met: None, ended: None, is_fenced: false });
        self.session.incoming.receive(id)
    }

    /// A receive and a send have met, in order.
    pub(crate) fn met(&mut self, receive: u64, seq: u64) {
        if let Some((last, last_seq)) = self.last_met.replace((receive, seq)) {
            assert!(last < receive && last_seq < seq, "receive {receive} and send {seq}: order");
        }
        let receive = &mut self.receives[receive as usize];
        assert_eq!((receive.met.replace(seq), receive.ended), (None, None));
    }

    /// The driver's verdict on a send and the receive that it met.
    pub(crate) fn verdict(&self, receive: u64, lens: &[u64]) -> Verdict {
        let room = &self.receives[receive as usize].room;
        if room.len() != lens.len() {
            return Verdict::Failed;
        }
        let short = room.iter().zip(lens).find(|(room, len)| **len > u64::from(**room));
        short.map_or(Verdict::Received, |(room, _)| Verdict::Truncated { capacity: (*room).into() })
    }

    /// A receive has ended; its answer for the peer.
    pub(crate) fn received(&mut self, id: u64, verdict: Verdict) -> Vec<u8> {
        let receive = &mut self.receives[id as usize];
        assert_eq!(receive.ended.replace(verdict), None, "receive {id} ends twice");
        let mut message = Vec::new();
        let seq = receive.met.expect("it has met a send");
        self.session.incoming.finish(seq, verdict, &mut message);
        message
    }

    /// Begins a notification: its message, or none if there is no room for more.
    pub(crate) fn notify(&mut self, len: usize) -> Option<Vec<u8>> {
        let (id, mut message) = (self.notifs.len() as u64, Vec::new());
        let outgoing = &mut self.session.outgoing;
        match outgoing.admit_notif(len).ok()? {
            SendProtocol::Eager => {
                outgoing.eager_notif(len, id, &mut message);
                message.extend(vec![id as u8; len]);
            }
            SendProtocol::Rendezvous => {
                let key = NOTIFS | id;
                self.keys.insert(key);
                let source = Source { addr: 0, len: len as u64, key, slot: 0 };
                outgoing.rendezvous_notif(source, id, &mut message);
            }
        }
        self.notifs.push(Notif { len, ended: None });
        Some(message)
    }

    pub(crate) fn notif_ended(&mut self, id: u64, is_delivered: bool) {
        let notif = &mut self.notifs[id as usize];
        assert_eq!(notif.ended.replace(is_delivered), None, "notification {id} ends twice");
        self.keys.remove(&(NOTIFS | id));
    }

    /// An operation has ended: its signal, if it carries one.
    pub(crate) fn operation_ended(&mut self, id: u64) -> Vec<u8> {
        let operation = &mut self.operations[id as usize];
        assert!(!std::mem::replace(&mut operation.has_ended, true), "operation {id} ends twice");
        let mut message = Vec::new();
        if operation.signal.is_some() {
            // The peer of the simulation finds the operation by the value.
            let word = Place { addr: id % WORDS as u64, key: id, slot: 0 };
            let sent = self.session.signals.send(word, Change::Add(id + 1), id, &mut message);
            sent.expect("there is room");
        }
        message
    }

    /// The peer has answered the signal of an operation.
    pub(crate) fn signal_ended(&mut self, id: u64, status: Status) {
        let signal = self.operations[id as usize].signal.as_mut().expect("it carries one");
        assert_eq!(signal.answer.replace(status), None, "signal {id} ends twice");
    }

    /// A lane that takes operations.
    pub(crate) fn living(&self, rng: &mut fastrand::Rng) -> usize {
        let alive = (1..self.lanes.len()).filter(|lane| self.lanes[*lane] == LaneState::Alive);
        let alive: Vec<_> = alive.collect();
        rng.choice(alive).unwrap_or(0)
    }

    /// Marks an operation as an orphan: its lane is dead here. Returns whether to post it now.
    pub(crate) fn orphaned(&mut self, id: u64) -> bool {
        let operation = &mut self.operations[id as usize];
        assert!(!std::mem::replace(&mut operation.is_orphan, true), "it is told once");
        match self.session.lanes.orphaned(operation.lane, id) {
            OrphanStep::Post(_) => true,
            OrphanStep::Waits => false,
            OrphanStep::End(_) => panic!("the connection lives"),
        }
    }
}
