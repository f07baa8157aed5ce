//! The ends of flows: arrivals there, and sends from there.

use uccl_tran::multipath::{ChunkVerdict, Load, MultipathEvent};

use super::{Event, Packet, Parcel, Payload, Simulation};
use crate::scenario::{CONTROL_LEN, HEADER_LEN};

/// Chunks that wait at a host's port. A sender chooses late: no more than these have a path.
const PORT_CHUNKS: u64 = 2;

impl Simulation {
    /// A packet has arrived.
    pub(super) fn arrive(&mut self, packet: &Packet) {
        self.marked += u64::from(packet.is_marked);
        let (at, now_ns) = (packet.flow as usize, self.now_ns);
        match packet.payload {
            Payload::Attempt(_) => self.on_attempt(at, packet),
            Payload::Ack(ack) => {
                // An acknowledgement of a number that was not sent is impossible here.
                let result = self.flows[at].sender.on_ack(now_ns, &ack);
                debug_assert!(result.is_ok(), "{result:?}");
                self.act(at);
            }
            Payload::Demand(demand) => {
                let host = self.flows[at].plan.to;
                let pacer = &mut self.hosts[usize::from(host)].pacer;
                pacer.on_demand(at as u64, demand.wanted_bytes, Some(demand.known_bytes));
                self.on_grants(host);
            }
            Payload::Credit(granted_bytes) => {
                self.flows[at].sender.on_credit(now_ns, granted_bytes);
                self.act(at);
            }
            Payload::Background => {}
        }
    }

    fn on_attempt(&mut self, at: usize, packet: &Packet) {
        let Payload::Attempt(attempt) = packet.payload else { return };
        let (now_ns, flow) = (self.now_ns, &mut self.flows[at]);
        if packet.epoch != flow.paths[usize::from(attempt.path)].epoch {
            return;
        }
        let verdict = flow.receiver.on_attempt(now_ns, &attempt, packet.is_marked);
        debug_assert!(!matches!(verdict, ChunkVerdict::Wrong(_) | ChunkVerdict::TooLong { .. }));
        while let Some(message) = flow.receiver.poll_ended() {
            let begun_ns = flow.begun_ns.get(message as usize).copied().unwrap_or(0);
            flow.times_ns.push(now_ns - begun_ns);
            flow.last_ns = now_ns;
            self.completions += 1;
        }
        self.acknowledge(at);
        let host = self.flows[at].plan.to;
        let pacer = &mut self.hosts[usize::from(host)].pacer;
        if attempt.wanted_bytes > 0 {
            pacer.on_demand(at as u64, attempt.wanted_bytes, None);
            self.on_grants(host);
        }
        self.set_timer(at);
    }

    /// Sends the acknowledgements that are due.
    fn acknowledge(&mut self, at: usize) {
        while let Some(ack) = self.flows[at].receiver.poll_ack(self.now_ns) {
            let path = self.flows[at].paths[usize::from(ack.path)];
            self.send(control(at, Payload::Ack(ack), path.back));
        }
    }

    pub(super) fn on_timer(&mut self, at: usize) {
        let (now_ns, flow) = (self.now_ns, &mut self.flows[at]);
        if flow.timer_ns.is_none_or(|timer_ns| timer_ns > now_ns) {
            return;
        }
        flow.timer_ns = None;
        flow.sender.on_timeout(now_ns);
        self.acknowledge(at);
        self.act(at);
    }

    /// Sets a timer, unless one fires early enough.
    fn set_timer(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        let times = [flow.sender.next_timeout_ns(), flow.receiver.next_timeout_ns()];
        let Some(next_ns) = times.into_iter().flatten().min() else { return };
        let next_ns = next_ns.max(self.now_ns + 1);
        if flow.timer_ns.is_none_or(|timer_ns| next_ns < timer_ns) {
            flow.timer_ns = Some(next_ns);
            self.queue.push(next_ns, Event::Timer(at as u32));
        }
    }

    /// Handles a sender's events, and has it send.
    fn act(&mut self, at: usize) {
        while let Some(event) = self.flows[at].sender.poll() {
            match event {
                MultipathEvent::Sent { .. } => {
                    self.flows[at].sent += 1;
                    self.push_messages(at);
                }
                MultipathEvent::PathDead { path } => self.replace_path(at, path),
                MultipathEvent::Cancelled { .. } => {}
            }
        }
        self.make_ready(at);
    }

    /// Another entropy takes the place of a path that is silent.
    fn replace_path(&mut self, at: usize, path: u16) {
        let flow = &mut self.flows[at];
        let place = usize::from(path);
        let epoch = flow.paths[place].epoch.wrapping_add(1);
        flow.paths[place] = flow.routes(&self.scenario, &mut self.rng, epoch);
        if let Some(ack) = flow.receiver.last_ack(self.now_ns, path) {
            let result = flow.sender.on_ack(self.now_ns, &ack);
            debug_assert!(result.is_ok(), "{result:?}");
        }
        flow.sender.close_path(self.now_ns, path);
        flow.sender.open_path(self.now_ns, path);
    }

    /// Pushes messages, as many as may be under way.
    pub(super) fn push_messages(&mut self, at: usize) {
        let (now_ns, flow) = (self.now_ns, &mut self.flows[at]);
        let scenario = &self.scenario;
        while flow.begun_ns.len() < scenario.messages as usize
            && flow.begun_ns.len() < (flow.sent + scenario.at_once.max(1)) as usize
        {
            flow.begun_ns.push(now_ns);
            flow.sender.push(now_ns, scenario.message_bytes);
        }
        self.make_ready(at);
    }

    fn make_ready(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        let host = flow.plan.from;
        if !std::mem::replace(&mut flow.is_ready, true) {
            self.hosts[usize::from(host)].ready.push_back(at as u32);
        }
        self.pump(host);
    }

    /// Sends chunks of a host's flows in turns, while its port has room.
    pub(super) fn pump(&mut self, host: u16) {
        let room = PORT_CHUNKS * u64::from(self.scenario.chunk_len + HEADER_LEN);
        while let Some(at) = self.hosts[usize::from(host)].ready.pop_front() {
            let at = at as usize;
            if self.ports[usize::from(host)].queued(self.now_ns) >= room {
                self.hosts[usize::from(host)].ready.push_front(at as u32);
                self.await_port(host, room);
                return;
            }
            if self.send_next(at) {
                self.hosts[usize::from(host)].ready.push_back(at as u32);
            } else {
                self.flows[at].is_ready = false;
                self.set_timer(at);
            }
        }
    }

    fn await_port(&mut self, host: u16, room: u64) {
        let own = &mut self.hosts[usize::from(host)];
        if !std::mem::replace(&mut own.is_port_awaited, true) {
            let at_ns = self.ports[usize::from(host)].drained_ns(room / 2);
            self.queue.push(at_ns.max(self.now_ns + 1), Event::Port(host));
        }
    }

    /// Sends the next chunk or probe of a flow. False if it has none now.
    fn send_next(&mut self, at: usize) -> bool {
        let (now_ns, flow) = (self.now_ns, &mut self.flows[at]);
        let Some(attempt) = flow.sender.next(now_ns) else {
            if let Some(demand) = flow.sender.poll_demand(now_ns) {
                let route = flow.paths[0].there;
                self.send(control(at, Payload::Demand(demand), route));
            }
            return false;
        };
        let path = flow.paths[usize::from(attempt.path)];
        let parcel = match attempt.load {
            Load::Chunk(chunk) => {
                flow.chunks += 1;
                Parcel { bytes: chunk.len + HEADER_LEN, is_control: false }
            }
            Load::Probe => Parcel { bytes: CONTROL_LEN, is_control: false },
        };
        self.send(Packet {
            payload: Payload::Attempt(attempt),
            route: path.there,
            flow: at as u32,
            parcel,
            hop: 0,
            epoch: path.epoch,
            is_marked: false,
        });
        true
    }

    /// Sends the grants that are due.
    pub(super) fn on_grants(&mut self, host: u16) {
        let (now_ns, place) = (self.now_ns, usize::from(host));
        while let Some(grant) = self.hosts[place].pacer.poll(now_ns) {
            let at = grant.flow as usize;
            let route = self.flows[at].paths[0].back;
            self.send(control(at, Payload::Credit(grant.granted_bytes), route));
        }
        let own = &mut self.hosts[place];
        own.grants_at_ns = own.grants_at_ns.filter(|at_ns| *at_ns > now_ns);
        if let Some(next_ns) = own.pacer.next_ns()
            && own.grants_at_ns.is_none()
        {
            own.grants_at_ns = Some(next_ns);
            self.queue.push(next_ns, Event::Grants(host));
        }
    }
}

fn control(at: usize, payload: Payload, route: crate::topology::Route) -> Packet {
    Packet {
        payload,
        route,
        flow: at as u32,
        parcel: Parcel { bytes: CONTROL_LEN, is_control: true },
        hop: 0,
        epoch: 0,
        is_marked: false,
    }
}
