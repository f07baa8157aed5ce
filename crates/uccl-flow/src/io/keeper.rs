//! The thread that keeps flows' own streams alive: it sees that one has ended or stands still, and
//! opens another in its place. It also keeps a flow that was closed until the peer has its
//! messages.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::epoll::EventFlags;
use uccl_wire::flow::{FlowHello, Purpose, Status};

use super::Poller;
use crate::{
    attempt::Introduction,
    bundle::Answer,
    core::{Step, Watch, WatchParams, WatchView},
    keep::KeptFlow,
    outlet::SendState,
    race::{Race, Winner},
    shared::FlowsState,
    socket,
};

/// The time between two looks at flows that are as they should be, and at others.
const CALM: Duration = Duration::from_millis(100);
const HASTE: Duration = Duration::from_millis(5);
/// The longest time for which the end of the process's flows waits for messages of closed ones.
const LINGER: Duration = Duration::from_secs(1);
/// The peer's host says so often that nobody listens there before the process is taken for dead.
const REFUSALS: usize = 3;

const ASK_US: u64 = 200_000;
const DEAD_US: u64 = 1_000_000;

pub(crate) struct Keeper {
    shared: Arc<FlowsState>,
    poller: Poller,
    flows: Vec<WatchedFlow>,
    begun: Instant,
}

struct WatchedFlow {
    kept: KeptFlow,
    watch: Watch,
    /// Attempts to open another stream.
    race: Option<Race>,
    is_closed: bool,
}

impl Keeper {
    pub(crate) fn new(shared: Arc<FlowsState>) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&shared.keeping.waker, 0, EventFlags::IN)?;
        Ok(Self { shared, poller, flows: Vec::new(), begun: Instant::now() })
    }

    /// Keeps streams alive until the flows end.
    ///
    /// # Errors
    /// When the system does not let it wait.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        let mut stopped = None;
        loop {
            self.shared.keeping.waker.clear();
            let now_us = self.begun.elapsed().as_micros() as u64 + 1;
            for kept in self.shared.keeping.take() {
                let watch = Watch::new(params(&self.shared), now_us);
                self.flows.push(WatchedFlow { kept, watch, race: None, is_closed: false });
            }
            let shared = &self.shared;
            self.flows.retain_mut(|flow| {
                let stays = flow.step(shared, now_us);
                if !stays {
                    flow.kept.bundle.release(flow.kept.name.flow);
                }
                stays
            });
            if self.shared.keeping.is_stopped() {
                let since = *stopped.get_or_insert_with(Instant::now);
                if self.flows.is_empty() || since.elapsed() > LINGER {
                    break;
                }
            }
            ready.clear();
            self.poller.wait(self.timeout(), &mut ready)?;
        }
        self.flows.iter().for_each(|flow| flow.kept.bundle.release(flow.kept.name.flow));
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        let is_hasty = self.flows.iter().any(|flow| flow.race.is_some() || flow.is_closed);
        match () {
            () if self.flows.is_empty() => None,
            () if is_hasty => Some(HASTE),
            () => Some(CALM),
        }
    }
}

fn params(shared: &FlowsState) -> WatchParams {
    let limit_us = shared.settings.limit.as_micros() as u64;
    WatchParams { ask_us: ASK_US.min(limit_us / 4), dead_us: DEAD_US, limit_us }
}

impl WatchedFlow {
    /// Time has passed. False when there is nothing left to do for the flow.
    fn step(&mut self, shared: &FlowsState, now_us: u64) -> bool {
        let Some(view) = self.look(now_us) else { return false };
        match self.watch.on_time(view, now_us) {
            Step::Rest => {}
            Step::Ask => self.ask(),
            Step::Replace => self.kept.state.lock().own.lose("it stood still for a second"),
            Step::Fail => {
                self.fail(shared.settings.limit);
                return !self.is_closed;
            }
        }
        let is_down = view.has_work && !self.kept.state.lock().own.is_up();
        if !is_down {
            self.race = None;
            return true;
        }
        self.reopen(shared, now_us)
    }

    /// The state of the stream; none if nothing is left to do.
    fn look(&mut self, now_us: u64) -> Option<WatchView> {
        let KeptFlow { state, bundle, name } = &self.kept;
        let mut state = state.lock();
        let idle = WatchView { confirmed: 0, has_work: false, is_up: true };
        match bundle.take_answer(name.flow) {
            None => {}
            Some(Answer::At { received, is_waiting }) => {
                // A receiver that waits for bytes of the ring waits for this side's user.
                let is_waiting = is_waiting && state.has_stream_work();
                self.watch.on_answer(is_waiting, now_us);
                if !state.own.confirm(received) {
                    state.own.lose("the peer confirms bytes that it cannot have");
                }
            }
            Some(Answer::Ended) => state.end_by_peer(&bundle.target.peer),
        }
        if state.is_closed() && !self.is_closed {
            self.is_closed = true;
            if state.own.is_closing() && state.has_work() {
                bundle.ask(name.flow, state.own.history().end());
            }
        }
        let is_over = !state.own.is_closing() || state.own.is_finished();
        if self.is_closed && is_over {
            return None;
        }
        if state.is_failed() && !self.is_closed {
            return Some(idle);
        }
        let has_work = state.has_work();
        if has_work {
            state.own.read();
            state.own.push();
        }
        let confirmed = state.confirmed();
        Some(WatchView { confirmed, has_work, is_up: state.own.is_up() })
    }

    fn ask(&self) {
        let sent = self.kept.state.lock().own.history().end();
        self.kept.bundle.ask(self.kept.name.flow, sent);
    }

    fn fail(&self, silent: Duration) {
        let mut state = self.kept.state.lock();
        let cause = match state.own.last_error() {
            "" => "the process does not answer".to_owned(),
            error => error.to_owned(),
        };
        state.lose(&self.kept.bundle.target.peer, cause, silent);
    }

    /// Goes on with opening another stream. False when there is nothing left to do.
    fn reopen(&mut self, shared: &FlowsState, now_us: u64) -> bool {
        let KeptFlow { state, bundle, name } = &self.kept;
        let target = &bundle.target;
        let hello = FlowHello {
            purpose: Purpose::Resume,
            key: target.key,
            instance: shared.instance,
            flow: name.flow,
            chunk_len: now_us,
        };
        let race = self.race.get_or_insert_with(|| {
            let cause = state.lock().own.last_error().to_owned();
            tracing::info!("a flow to {} loses its stream: {cause}", target.peer);
            Race::new(target.pairs.routes.clone())
        });
        let psk = shared.settings.psk.as_ref();
        let winner = race.step(&Introduction { hello, instance: target.peer.instance, psk });
        let mut state = state.lock();
        match winner {
            Some(winner) if winner.welcome.status == Status::Taken => {
                self.race = None;
                match take(&mut state, winner, shared) {
                    Ok(()) => self.watch.on_resumed(now_us),
                    Err(cause) => state.own.lose(&cause),
                }
            }
            Some(_) => {
                state.end_by_peer(&target.peer);
                return !self.is_closed;
            }
            None if race.refusals(name.to) >= REFUSALS => {
                let silent = Duration::from_micros(self.watch.silent_us(now_us));
                let cause = "its process is gone: connection refused".to_owned();
                state.lose(&target.peer, cause, silent);
                return !self.is_closed;
            }
            None => {}
        }
        true
    }
}

fn take(state: &mut SendState, winner: Winner, shared: &FlowsState) -> Result<(), String> {
    socket::tune(&winner.stream, shared.settings.limit).map_err(|error| error.to_string())?;
    let (from, received) = (winner.stream.local_addr(), winner.welcome.received);
    if !state.own.resume(winner.stream, received) {
        return Err("the peer confirms bytes that it cannot have".into());
    }
    tracing::info!("a flow to {} goes on over another stream, from {from:?}", winner.to);
    Ok(())
}
