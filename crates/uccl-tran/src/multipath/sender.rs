//! The sender: which chunk goes out over which path, and what becomes of it.

mod losses;
mod timeouts;

use std::collections::VecDeque;

use super::{
    Attempt, Demand, Load, MultipathEvent, MultipathParams, PathAck, PathAckError, Techniques,
    chunks::ChunkTable,
    path::{Arrival, PROBE, Path, PathAttempt, PathLife},
};
use crate::{
    ParamsError,
    choice::{Candidates, PathState},
    control::AckSample,
};

/// The sending end of many paths.
#[derive(Debug)]
pub struct MultipathSender {
    params: MultipathParams,
    techniques: Techniques,
    chunks: ChunkTable,
    paths: Vec<Path>,
    /// The paths as [`crate::choice::PathChoice`] sees them.
    states: Vec<PathState>,
    /// Paths over which a probe is due.
    probes: VecDeque<u16>,
    events: VecDeque<MultipathEvent>,
    /// Bytes under way over all paths.
    in_flight: u64,
    /// Bytes that were sent since the beginning, repeats included.
    spent: u64,
    /// The wish that the receiver was told last, and when.
    announced: Option<(u64, u64)>,
    least_rtt_ns: u64,
    /// When the next chunk may go out, by the algorithm's rate.
    pace_ns: u64,
    /// No timeout is due before this.
    due_ns: u64,
    /// When anything was last heard over any path.
    heard_ns: u64,
    round_ns: u64,
    undone: u64,
    /// Whether the algorithm was told of the silence of all paths.
    is_silent: bool,
    /// Kept for their memory.
    came: Vec<Arrival>,
    lost: Vec<(u64, PathAttempt)>,
    forgotten: Vec<u32>,
}

impl MultipathSender {
    /// Makes the sending end. All its paths are open.
    ///
    /// # Errors
    /// When the parameters cannot be used.
    pub fn new(
        params: MultipathParams,
        techniques: Techniques,
        now_ns: u64,
    ) -> Result<Self, ParamsError> {
        let params = params.checked()?;
        let paths: Vec<_> =
            (0..params.paths).map(|_| Path::new(params.initial_rtt_ns, now_ns)).collect();
        let fresh = PathState { can_take: true, ..PathState::default() };
        Ok(Self {
            params,
            techniques,
            chunks: ChunkTable::new(params.chunk_len, params.most_open),
            states: vec![fresh; paths.len()],
            paths,
            probes: VecDeque::new(),
            events: VecDeque::new(),
            in_flight: 0,
            spent: 0,
            announced: None,
            least_rtt_ns: u64::MAX,
            pace_ns: now_ns,
            due_ns: u64::MAX,
            heard_ns: now_ns,
            round_ns: now_ns,
            undone: 0,
            is_silent: false,
            came: Vec::new(),
            lost: Vec::new(),
            forgotten: Vec::new(),
        })
    }

    /// Takes a message of so many bytes, and returns its number.
    pub fn push(&mut self, now_ns: u64, total: u64) -> u64 {
        if self.chunks.is_idle() {
            // A silence without a message proves nothing.
            self.heard_ns = now_ns;
            let up = self.paths.iter_mut().filter(|path| path.life == PathLife::Up);
            up.for_each(|path| path.wake(now_ns));
            (0..self.paths.len()).for_each(|path| self.refresh(path));
            self.due_ns = now_ns;
        }
        self.chunks.push(total)
    }

    /// Sends nothing of the message any more. [`MultipathEvent::Cancelled`] follows when no attempt
    /// of it is under way; where repeats are harmless the receiver's fence is what counts.
    pub fn cancel(&mut self, message: u64) {
        let event = self.chunks.cancel(message);
        self.events.extend(event);
    }

    /// The next chunk or probe, which the caller sends at once. Call this until it returns none.
    pub fn next(&mut self, now_ns: u64) -> Option<Attempt> {
        if let Some(probe) = self.next_probe(now_ns) {
            return Some(probe);
        }
        let next = self.chunks.peek()?;
        if now_ns < self.pace_ns {
            self.due_ns = self.due_ns.min(self.pace_ns);
            return None;
        }
        if !self.techniques.control.allows(self.in_flight, next.len.into()) {
            return None;
        }
        let path = self.choose(next.lost_on.map(usize::from))?;
        let (slot, chunk) = self.chunks.take()?;
        let number = self.paths[path].push(slot, chunk.len, now_ns);
        self.in_flight += u64::from(chunk.len);
        self.spent += u64::from(chunk.len);
        self.techniques.control.on_send(now_ns, chunk.len.into());
        if let Some(rate) = self.techniques.control.bytes_per_s() {
            let pause_ns = (f64::from(chunk.len) / rate * 1e9) as u64;
            self.pace_ns = self.pace_ns.max(now_ns) + pause_ns;
        }
        self.due_ns = self.due_ns.min(self.probe_at_ns(path));
        self.refresh(path);
        Some(self.attempt(path, number, Load::Chunk(chunk), now_ns))
    }

    /// The wish of a sender that has chunks and no credits, if the receiver should hear of it now.
    pub fn poll_demand(&mut self, now_ns: u64) -> Option<Demand> {
        let known_bytes = self.techniques.control.granted_bytes()?;
        let is_stalled = known_bytes <= self.spent && self.chunks.backlog_bytes() > 0;
        if !is_stalled {
            return None;
        }
        let wanted_bytes = self.wanted_bytes();
        let patience_ns = self.params.tail_probe.after_ns(4 * self.params.initial_rtt_ns, 0, 0, 0);
        let told = self.announced.filter(|(wanted, _)| *wanted == wanted_bytes);
        if let Some((_, at_ns)) = told.filter(|(_, at_ns)| now_ns < at_ns + patience_ns) {
            self.due_ns = self.due_ns.min(at_ns + patience_ns);
            return None;
        }
        self.due_ns = self.due_ns.min(now_ns + patience_ns);
        self.announced = Some((wanted_bytes, now_ns));
        Some(Demand { wanted_bytes, known_bytes })
    }

    /// The receiver has granted so many bytes since the beginning.
    pub fn on_credit(&mut self, now_ns: u64, granted_bytes: u64) {
        if let Some((_, at)) = &mut self.announced {
            *at = now_ns;
        }
        self.techniques.control.on_credit(granted_bytes);
    }

    /// Takes an acknowledgement. One without news changes nothing.
    ///
    /// # Errors
    /// When it covers numbers that were not sent. Then it has changed nothing.
    pub fn on_ack(&mut self, now_ns: u64, ack: &PathAck) -> Result<(), PathAckError> {
        let (at, in_flight) = (usize::from(ack.path), self.in_flight);
        let Some(path) = self.paths.get_mut(at) else {
            return Err(PathAckError::NoPath { path: ack.path, paths: self.params.paths });
        };
        self.came.clear();
        let news = path.acknowledge(now_ns, ack, &mut self.came)?;
        if self.came.is_empty() {
            return Ok(());
        }
        (self.heard_ns, self.is_silent) = (now_ns, false);
        self.least_rtt_ns = self.least_rtt_ns.min(path.rtt.least_ns);
        let count = self.came.len() as u64;
        let bytes = self.settle(now_ns);
        self.techniques.control.on_ack(&AckSample {
            now_ns,
            bytes,
            marked_bytes: bytes * u64::from(news.marked) / count.max(1),
            rtt_ns: news.rtt_ns,
            least_rtt_ns: self.least_rtt_ns,
            in_flight_bytes: in_flight,
        });
        for nth in 0..count {
            self.techniques.choice.on_ack(at, nth < u64::from(news.marked));
        }
        self.find_losses(at, now_ns);
        self.refresh(at);
        if now_ns.saturating_sub(self.round_ns) > self.paths[at].rtt.smoothed_ns {
            self.round_ns = now_ns;
            self.techniques.loss.on_round();
        }
        Ok(())
    }

    /// The next event. Call this until it returns none.
    pub fn poll(&mut self) -> Option<MultipathEvent> {
        self.events.pop_front()
    }

    /// Nothing of the path can arrive any more: its queue pair has been torn down. Its chunks go
    /// over others. Where the network places chunks, [`MultipathSender::on_ack`] must have taken
    /// the receiver's [`last_ack`](super::MultipathReceiver::last_ack) of the path, which came
    /// another way: else a chunk that has come is placed again, perhaps after its message has
    /// ended.
    pub fn close_path(&mut self, now_ns: u64, path: u16) {
        let at = usize::from(path);
        let Some(own) = self.paths.get_mut(at).filter(|path| path.life != PathLife::Closed) else {
            return;
        };
        for (slot, len, was_under_way) in own.close() {
            if was_under_way {
                self.in_flight -= u64::from(len);
                let event = self.chunks.on_loss(slot, path);
                self.events.extend(event);
            }
            self.chunks.forget(slot);
        }
        self.techniques.choice.on_loss(at);
        self.refresh(at);
        self.due_ns = self.due_ns.min(now_ns);
    }

    /// The path is there again. It must have been closed.
    pub fn open_path(&mut self, now_ns: u64, path: u16) {
        let at = usize::from(path);
        let initial_rtt_ns = self.params.initial_rtt_ns;
        if let Some(own) = self.paths.get_mut(at).filter(|path| path.life == PathLife::Closed) {
            own.open(initial_rtt_ns, now_ns);
            self.refresh(at);
        }
    }

    /// Whether all messages have ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.chunks.is_idle()
    }

    /// Bytes under way.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight
    }

    /// Chunks that were sent more than once.
    #[must_use]
    pub fn repeats(&self) -> u64 {
        self.chunks.repeats()
    }

    /// Attempts that were taken for lost and have come.
    #[must_use]
    pub fn undone(&self) -> u64 {
        self.undone
    }

    /// The paths as they are now.
    #[must_use]
    pub fn paths(&self) -> &[PathState] {
        &self.states
    }

    /// The path of the next chunk: another than that over which it was lost, if any has room.
    fn choose(&mut self, avoid: Option<usize>) -> Option<usize> {
        let chosen = self.techniques.choice.choose(&Candidates { paths: &self.states, avoid });
        match (chosen, avoid) {
            (None, Some(_)) => {
                self.techniques.choice.choose(&Candidates { paths: &self.states, avoid: None })
            }
            _ => chosen,
        }
    }

    fn attempt(&mut self, path: usize, number: u32, load: Load, now_ns: u64) -> Attempt {
        let mut wanted_bytes = 0;
        if self.techniques.control.granted_bytes().is_some() {
            wanted_bytes = self.wanted_bytes();
            self.announced = Some((wanted_bytes, now_ns));
        }
        Attempt { path: path as u16, number, load, wanted_bytes }
    }

    fn wanted_bytes(&self) -> u64 {
        self.spent + self.chunks.backlog_bytes()
    }

    /// Ends the attempts that have come. Returns the bytes of chunks among them.
    fn settle(&mut self, now_ns: u64) -> u64 {
        let (mut bytes, mut is_undone) = (0, false);
        for arrival in &self.came {
            if arrival.slot == PROBE {
                continue;
            }
            bytes += u64::from(arrival.len);
            if arrival.was_lost {
                is_undone = true;
                self.undone += 1;
            } else {
                self.in_flight -= u64::from(arrival.len);
            }
            let event = self.chunks.on_come(arrival.slot, !arrival.was_lost);
            self.events.extend(event);
        }
        if is_undone {
            self.techniques.loss.on_undo(now_ns);
            self.techniques.control.on_undo(now_ns);
        }
        bytes
    }

    fn refresh(&mut self, at: usize) {
        let (path, state) = (&self.paths[at], &mut self.states[at]);
        state.can_take = path.can_take();
        state.rtt_ns = if path.rtt.is_measured { path.rtt.smoothed_ns } else { 0 };
        state.in_flight_bytes = path.bytes;
    }
}
