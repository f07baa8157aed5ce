//! A worker: a thread with buffers of its own, which does one random action after the other.

mod completion;
mod grants;
mod moves;
mod send_recvs;

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering::SeqCst, mpsc::Receiver},
    time::Duration,
};

use uccl_p2p::{Error, MrId};

use self::{grants::Grant, moves::Move, send_recvs::SendRecv};
use super::{
    EndArgs, fork,
    world::{SharedState, World},
};
use crate::{
    buffer::{Arena, Buffer, Use},
    clock,
    control::ControlMessage,
    history,
    pattern::Pattern,
    watch,
};

/// Bytes of a worker's memory.
pub(crate) const ARENA_LEN: usize = 40 << 20;
/// Upper bounds of the buffers' sizes in bytes. Few buffers are large.
const SIZES: [usize; 14] = [
    1,
    64,
    4096,
    4096,
    10_000,
    65_536,
    100_000,
    300_000,
    600_000,
    1 << 20,
    2 << 20,
    3 << 20,
    4 << 20,
    6 << 20,
];
/// About one action in this many is a disconnect.
const DISCONNECTS: u32 = 1500;
const FORKS: u32 = 1500;

pub(crate) struct Worker {
    number: usize,
    shared: Arc<SharedState>,
    world: Arc<World>,
    rng: fastrand::Rng,
    messages: Receiver<ControlMessage>,
    buffers: Vec<Buffer>,
    /// Memory of the peer that this worker may use.
    grants: Vec<Grant>,
    moves: Vec<Move>,
    send_recvs: Vec<SendRecv>,
    does: EndArgs,
}

impl Worker {
    pub(crate) fn new(
        number: usize,
        shared: &Arc<SharedState>,
        does: &EndArgs,
        mut arena: Arena,
        messages: Receiver<ControlMessage>,
        seed: u64,
    ) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let buffers = SIZES
            .iter()
            .map(|most| {
                Buffer::new(&mut arena, rng.usize(most / 2 + 1..=*most), rng.usize(1..9000))
            })
            .collect();
        let shared = Arc::clone(shared);
        let world = shared.world();
        let mut worker = Self {
            number,
            shared,
            world,
            rng,
            messages,
            buffers,
            grants: vec![],
            moves: vec![],
            send_recvs: vec![],
            does: does.clone(),
        };
        (0..worker.buffers.len()).for_each(|buffer| worker.guard_all(buffer, "new"));
        worker
    }

    pub(crate) fn run(mut self) {
        while !self.shared.is_ending() {
            self.turn();
        }
        self.end();
        self.shared.workers_ended.fetch_add(1, SeqCst);
    }

    fn note(&self, what: impl AsRef<str>) {
        history::note(format!("h{} {}", self.number, what.as_ref()));
    }

    fn turn(&mut self) {
        self.follow_world();
        while let Ok(message) = self.messages.try_recv() {
            self.hear(message);
        }
        match self.rng.u32(0..100) {
            0..12 => self.register(),
            12..22 => self.grant(),
            22..58 => self.begin_move(),
            58..66 => self.send_or_receive(),
            66..70 => self.notify(),
            70..74 => self.deregister(),
            74..80 => self.give_back(),
            80..84 => self.cancel(),
            84..94 => self.wait(),
            _ => self.rarely(),
        }
        self.look();
        if self.rng.u32(0..4) == 0 {
            let buffer = self.rng.usize(0..self.buffers.len());
            self.check(buffer, "at rest");
        }
    }

    fn rarely(&mut self) {
        if self.rng.u32(0..DISCONNECTS / 20) == 0 && self.does.does("disconnect") {
            self.disconnect();
        } else if self.rng.u32(0..FORKS / 20) == 0 && self.does.does("fork") {
            let seed = self.rng.u64(..);
            self.note("fork");
            fork::fork(&self.world, seed);
        } else if self.rng.u32(0..4) == 0 {
            std::thread::sleep(Duration::from_millis(self.rng.u64(0..5)));
        }
    }

    fn disconnect(&mut self) {
        let Some(conn) = self.world.conn(&mut self.rng) else { return };
        self.note(format!("disconnect {conn} ..."));
        self.world.conns.lock().retain(|known| *known != conn);
        let ep = &self.world.ep;
        let ended = watch::call("disconnect", ep.config().timeout, || ep.disconnect(conn));
        self.note(format!("disconnect {conn}: {ended:?}"));
        // The connection's transfers have failed, and their memory is this worker's again.
        for i in 0..self.moves.len() {
            if self.moves[i].conn == conn && self.moves[i].is_pending(&self.world) {
                history::broken(format!("unfinished after {conn} was ended: {:?}", self.moves[i]));
            }
        }
    }

    /// The active time by which an operation with this timeout must have ended.
    fn until(&self, timeout: Option<Duration>) -> Duration {
        let config = self.world.ep.config();
        let timeout = timeout.unwrap_or(config.transfer_timeout);
        clock::active() + timeout + config.timeout + watch::SLACK
    }

    /// A random buffer that satisfies `fits`, if there is one.
    fn some_buffer(&mut self, fits: impl Fn(&Buffer) -> bool) -> Option<usize> {
        let fitting: Vec<_> = (0..self.buffers.len()).filter(|i| fits(&self.buffers[*i])).collect();
        (!fitting.is_empty()).then(|| fitting[self.rng.usize(0..fitting.len())])
    }

    fn check(&self, buffer: usize, when: &str) {
        let buffer = &self.buffers[buffer];
        if buffer.held != Use::Kept {
            buffer.check(0..buffer.len, when);
        }
    }

    /// Fills a range with a guard: nobody may write it from now on.
    fn guard(&mut self, buffer: usize, range: Range<usize>) {
        let stamp = self.shared.stamp();
        self.buffers[buffer].fill(range, Pattern::guard(stamp));
    }

    fn guard_all(&mut self, buffer: usize, why: &str) {
        let len = self.buffers[buffer].len;
        self.guard(buffer, 0..len);
        self.buffers[buffer].last = format!("{why} at {}", clock::shared_ns());
    }

    fn register(&mut self) {
        let Some(i) = self.some_buffer(|buffer| buffer.held == Use::Mine) else { return };
        self.check(i, "before it is registered");
        let buffer = &self.buffers[i];
        // SAFETY: the buffer lies in the arena, which is never freed.
        let registered = watch::call("register", Duration::ZERO, || unsafe {
            self.world.ep.register(buffer.addr, buffer.len)
        });
        match registered {
            Ok(mr) => {
                self.note(format!("register {:#x} + {:#x}: {mr}", buffer.addr, buffer.len));
                self.buffers[i].held = Use::Registered(mr);
            }
            Err(Error::Closed) => {}
            Err(e) => history::broken(format!("memory cannot be registered: {e}")),
        }
    }

    fn deregister(&mut self) {
        let Some(i) = self.some_buffer(|buffer| buffer.held.mr().is_some()) else { return };
        let Some(mr) = self.buffers[i].held.mr() else { return };
        self.deregister_buffer(i, mr);
    }

    fn deregister_buffer(&mut self, i: usize, mr: MrId) {
        self.note(format!("deregister {mr} ({:?}) ...", self.buffers[i].held));
        let ep = &self.world.ep;
        let ended = watch::call("deregister", ep.config().timeout, || ep.deregister(mr));
        self.note(format!("deregister {mr}: {ended:?}"));
        let flying = matches!(self.buffers[i].held, Use::Flying(_));
        match ended {
            Ok(()) => {
                if flying {
                    self.end_all_that_use(i);
                }
                self.is_mine_again(i, "deregistered");
            }
            Err(Error::Invalid(_)) if flying => {}
            // The endpoint is being closed.
            Err(Error::UnknownRegion(_) | Error::Closed) if self.is_going() => {}
            Err(Error::StillTouched { .. }) if !flying => self.keep(i),
            Err(e) => {
                history::broken(format!("{mr} was not deregistered: {e}; {:?}", self.buffers[i]))
            }
        }
    }

    /// Takes a buffer out of use: a call could not rule out that somebody still writes it.
    fn keep(&mut self, i: usize) {
        self.buffers[i].held = Use::Kept;
        self.shared.counts.kept.fetch_add(1, SeqCst);
    }

    /// Whether the endpoint is closed or being closed.
    fn is_going(&self) -> bool {
        matches!(self.world.ep.advertise_all(&[]), Err(Error::Closed))
    }

    fn is_mine_again(&mut self, i: usize, why: &str) {
        if let Use::Granted(_, id) = self.buffers[i].held {
            history::say(&ControlMessage::Revoked { worker: self.number, id });
            self.buffers[i].check_is_data(why);
        } else {
            self.check(i, why);
        }
        self.buffers[i].held = Use::Mine;
        self.guard_all(i, why);
    }

    /// After the endpoint was closed, takes its buffers back and continues with its successor.
    fn follow_world(&mut self) {
        if !self.world.is_closed() {
            return;
        }
        self.end_all("closed");
        for i in 0..self.buffers.len() {
            match self.buffers[i].held.mr() {
                Some(mr) if self.world.kept.lock().contains(&mr) => self.keep(i),
                Some(_) => self.is_mine_again(i, "closed"),
                None => {}
            }
        }
        self.world = self.shared.world();
    }

    /// Ends all operations and takes all buffers back.
    fn end(&mut self) {
        self.note("ending");
        self.follow_world();
        while !(self.moves.is_empty() && self.send_recvs.is_empty()) {
            self.cancel();
            self.look();
        }
        for i in 0..self.buffers.len() {
            if let Some(mr) = self.buffers[i].held.mr() {
                self.deregister_buffer(i, mr);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        (0..self.buffers.len()).for_each(|i| self.check(i, "at the end"));
    }
}
