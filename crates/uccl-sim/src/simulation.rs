//! The simulation: events, and the ends that they reach.

mod ends;
mod summary;

use fastrand::Rng;
use uccl_tran::{
    choice::{CHOICE_NAMES, choice_named},
    control::{CONTROL_NAMES, LinkFacts, control_named},
    multipath::{Attempt, Demand, PathAck, Techniques},
    recovery::{LOSS_NAMES, loss_named},
};

use crate::{
    background::{self, BackgroundFlow},
    event_queue::EventQueue,
    host::{Flow, Host},
    port::{Fate, Parcel, Port},
    report::{DepthRecord, Drops, Report},
    scenario::{Scenario, ScenarioError},
    topology::{self, Route, Topology},
};

/// The content of a packet.
#[derive(Clone, Copy, Debug)]
enum Payload {
    Attempt(Attempt),
    Ack(PathAck),
    Demand(Demand),
    Credit(u64),
    Background,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    payload: Payload,
    route: Route,
    flow: u32,
    parcel: Parcel,
    /// The link of its route on which it is.
    hop: u8,
    /// [`crate::host::PathRoutes::epoch`] of its path.
    epoch: u8,
    is_marked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A packet has come to the end of a link.
    Hop(u32),
    /// A flow's timer fires.
    Timer(u32),
    /// A host's port has room.
    Port(u16),
    /// A host may grant credits.
    Grants(u16),
    /// A flow begins.
    Begin(u32),
    /// The next packet of the background is due.
    Background(u16),
}

/// The facts from which a flow's techniques are made.
#[derive(Clone, Copy, Debug)]
pub struct FlowContext {
    /// The flow, counted from 0.
    pub flow: usize,
    /// Its group: flows take the groups in turns.
    pub group: usize,
    /// The properties of the network.
    pub link: LinkFacts,
    /// Paths of the flow.
    pub paths: u16,
    /// A seed of its own.
    pub seed: u64,
}

/// How far a simulation is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Messages that have come.
    pub completions: usize,
    /// All messages.
    pub messages: usize,
    /// The virtual time, in nanoseconds.
    pub now_ns: u64,
}

/// Events between two calls of a simulation's user.
const PROGRESS_EVENTS: u64 = 1 << 16;

/// A simulation that has not run yet.
#[derive(Debug)]
pub struct Simulation {
    scenario: Scenario,
    groups: Vec<String>,
    rng: Rng,
    queue: EventQueue<Event>,
    ports: Vec<Port>,
    packets: Vec<Packet>,
    free: Vec<u32>,
    hosts: Vec<Host>,
    flows: Vec<Flow>,
    background: Vec<BackgroundFlow>,
    now_ns: u64,
    completions: usize,
    depths: DepthRecord,
    marked: u64,
    drops: Drops,
    sent: u64,
    events: u64,
}

impl Simulation {
    /// Makes a simulation. `groups` names the groups of flows, and `make` makes the techniques of
    /// each flow.
    ///
    /// # Errors
    /// When the scenario cannot be simulated.
    pub fn new(
        scenario: &Scenario,
        groups: &[String],
        make: &mut dyn FnMut(&FlowContext) -> Techniques,
    ) -> Result<Self, ScenarioError> {
        scenario.check()?;
        let mut rng = Rng::with_seed(scenario.seed);
        let hosts = scenario.topology.hosts();
        let per_leaf = match scenario.topology {
            Topology::OneSwitch { hosts } => hosts,
            Topology::LeafSpine { hosts_per_leaf, .. } => hosts_per_leaf,
        };
        let plans = scenario.pattern.flows(hosts, per_leaf, &mut rng);
        let link = scenario.link_facts();
        let mut flows = Vec::with_capacity(plans.len());
        for (flow, plan) in plans.into_iter().enumerate() {
            let group = flow % groups.len().max(1);
            let seed = rng.u64(..);
            let techniques = make(&FlowContext { flow, group, link, paths: scenario.paths, seed });
            flows.push(Flow::new(scenario, plan, group, techniques, &mut rng)?);
        }
        let background = background::flows(scenario, &mut rng);
        Ok(Self {
            scenario: *scenario,
            groups: groups.to_vec(),
            queue: EventQueue::default(),
            ports: topology::ports(&scenario.topology, &scenario.links),
            packets: Vec::new(),
            free: Vec::new(),
            hosts: (0..hosts).map(|_| Host::new(scenario)).collect(),
            flows,
            background,
            rng,
            now_ns: 0,
            completions: 0,
            depths: DepthRecord::default(),
            marked: 0,
            drops: Drops::default(),
            sent: 0,
            events: 0,
        })
    }

    /// Makes a simulation in which all flows have the techniques of these names.
    ///
    /// # Errors
    /// When the scenario cannot be simulated, or a name is unknown.
    pub fn named(
        scenario: &Scenario,
        choice: &str,
        loss: &str,
        control: &str,
    ) -> Result<Self, ScenarioError> {
        let names = [(choice.to_owned(), loss.to_owned(), control.to_owned())];
        Self::of_names(scenario, &names)
    }

    /// Makes a simulation in which flows take these techniques in turns: choice of the path, loss,
    /// control.
    ///
    /// # Errors
    /// When the scenario cannot be simulated, or a name is unknown.
    pub fn of_names(
        scenario: &Scenario,
        names: &[(String, String, String)],
    ) -> Result<Self, ScenarioError> {
        let link = scenario.link_facts();
        for (choice, loss, control) in names {
            known("path choice", choice, &CHOICE_NAMES, choice_named(choice, 1, 0).is_some())?;
            known("loss detection", loss, &LOSS_NAMES, loss_named(loss).is_some())?;
            let has_control = control_named(control, &link).is_some();
            known("congestion control", control, &CONTROL_NAMES, has_control)?;
        }
        let groups: Vec<_> = names
            .iter()
            .map(|(choice, loss, control)| format!("{control}, {choice}, {loss}"))
            .collect();
        // All names are known by now.
        let mut make = |context: &FlowContext| {
            let (choice, loss, control) = &names[context.group];
            let names = [choice, loss, control].map(String::as_str);
            Techniques::named(names, &context.link, context.paths, context.seed).unwrap_or_default()
        };
        Self::new(scenario, &groups, &mut make)
    }

    /// Runs until all messages have come, or until the scenario's limit. `watch` is called now and
    /// then.
    pub fn run(self, mut watch: impl FnMut(&Progress)) -> Report {
        self.run_watched(&mut watch)
    }

    /// Not generic, so that it is compiled here, where it is optimized.
    fn run_watched(mut self, watch: &mut dyn FnMut(&Progress)) -> Report {
        self.begin();
        let messages = self.flows.len() * self.scenario.messages as usize;
        while self.completions < messages
            && let Some((at_ns, event)) = self.queue.pop()
            && at_ns <= self.scenario.limit_ns
        {
            self.now_ns = at_ns;
            self.events += 1;
            if self.events.is_multiple_of(PROGRESS_EVENTS) {
                watch(&Progress { completions: self.completions, messages, now_ns: at_ns });
            }
            self.on_event(event);
        }
        self.report(messages)
    }

    fn begin(&mut self) {
        for flow in 0..self.flows.len() as u32 {
            let at_ns = self.rng.u64(0..=self.scenario.jitter_ns);
            self.queue.push(at_ns, Event::Begin(flow));
        }
        for nth in 0..self.background.len() {
            let at_ns = self.rng.u64(0..self.background[nth].interval_ns);
            self.queue.push(at_ns, Event::Background(nth as u16));
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Hop(packet) => self.on_hop(packet),
            Event::Timer(flow) => self.on_timer(flow as usize),
            Event::Port(host) => {
                self.hosts[usize::from(host)].is_port_awaited = false;
                self.pump(host);
            }
            Event::Grants(host) => self.on_grants(host),
            Event::Begin(flow) => self.push_messages(flow as usize),
            Event::Background(nth) => self.on_background(nth),
        }
    }

    /// A packet has come to the end of a link: it goes on, or it has arrived.
    fn on_hop(&mut self, at: u32) {
        let packet = &mut self.packets[at as usize];
        packet.hop += 1;
        if packet.hop < packet.route.len {
            self.enqueue(at);
            return;
        }
        let packet = *packet;
        self.free.push(at);
        self.arrive(&packet);
    }

    /// Sends a packet.
    fn send(&mut self, packet: Packet) {
        self.sent += 1;
        let at = match self.free.pop() {
            Some(at) => {
                self.packets[at as usize] = packet;
                at
            }
            None => {
                self.packets.push(packet);
                self.packets.len() as u32 - 1
            }
        };
        self.enqueue(at);
    }

    /// Gives a packet to the next port of its route.
    fn enqueue(&mut self, at: u32) {
        let packet = &mut self.packets[at as usize];
        let port = &mut self.ports[usize::from(packet.route.ports[usize::from(packet.hop)])];
        let fate = port.take(self.now_ns, packet.parcel, &mut self.rng);
        if packet.hop > 0 && !packet.parcel.is_control {
            self.depths.record(self.now_ns, port.depth);
        }
        match fate {
            Fate::Arrives { at_ns, is_marked } => {
                packet.is_marked |= is_marked;
                self.queue.push(at_ns, Event::Hop(at));
                return;
            }
            Fate::Full => self.drops.full += 1,
            Fate::Lost => self.drops.lost += 1,
        }
        self.free.push(at);
    }

    fn on_background(&mut self, nth: u16) {
        let flow = self.background[usize::from(nth)];
        self.queue.push(self.now_ns + flow.interval_ns, Event::Background(nth));
        self.send(Packet {
            payload: Payload::Background,
            route: flow.route,
            flow: u32::MAX,
            parcel: Parcel { bytes: flow.bytes, is_control: false },
            hop: 0,
            epoch: 0,
            is_marked: false,
        });
    }
}

/// Refuses an unknown name.
fn known(
    kind: &'static str,
    name: &str,
    names: &[&str],
    is_known: bool,
) -> Result<(), ScenarioError> {
    match is_known {
        true => Ok(()),
        false => Err(ScenarioError::Name { kind, name: name.to_owned(), known: names.join(", ") }),
    }
}
