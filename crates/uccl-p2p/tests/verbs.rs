//! The engine over RDMA verbs: what every link must do, and what becomes of transfers when rails are cut.
//!
//! Runs where RDMA devices are. `RDMA_VM_DEVS` and `RDMA_VM_PEER_DEVS` name the two ends of each cable, as in the
//! guests of `cargo xtask guest`; without them, each end uses every device.

mod support;

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, Error, Op, Transport, Uninterrupted};

use self::support::{Pair, advert, iov, pair_of, pattern, register, request};

/// The devices of one end, as many as are wanted.
fn devices(variable: &str, count: usize) -> Vec<String> {
    let named = env::var(variable).unwrap_or_default();
    named.split(',').filter(|name| !name.is_empty()).take(count).map(str::to_owned).collect()
}

/// Two endpoints over so many cables; says why not, where there is no device.
fn joined(rails: usize, change: impl Fn(&mut Config)) -> Option<Pair> {
    let possible = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut d| d.next().is_some());
    if !possible {
        eprintln!("skipped: this machine has no RDMA device");
        return None;
    }
    let end = |variable: &'static str| {
        let names = devices(variable, rails).join(",");
        let change = &change;
        move |config: &mut Config| {
            config.transport = Transport::Verbs;
            // Guests share their processors with whatever else the machine does.
            config.transfer_timeout = Duration::from_secs(60);
            if !names.is_empty() {
                config.set("UCCL_P2P_RDMA_DEV", &names).expect("names of devices");
            }
            change(config);
        }
    };
    Some(pair_of([&end("RDMA_VM_DEVS"), &end("RDMA_VM_PEER_DEVS")]))
}

fn set(config: &mut Config, name: &str, value: &str) {
    config.set(name, value).expect("a setting");
}

/// One rail and two; and writes over unreliable connections.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    let pairs = [
        ("verbs", joined(1, |_| {})),
        ("verbs x2", joined(2, |config| set(config, "UCCL_P2P_RDMA_QPS", "3"))),
        ("verbs UC", joined(1, |config| set(config, "UCCL_RCMODE", "0"))),
    ];
    pairs.into_iter().filter_map(|(name, pair)| Some((name, pair?))).collect()
}

#[test]
fn the_path_is_rdma() {
    for (link, p) in pairs() {
        let mut memory = vec![0; 4096];
        let there = register(&p.b, &mut memory);
        let path = p.a.path(p.to_b, &advert(&p.b, there, &memory)).expect("a connection");
        assert_eq!(path, "verbs", "{link}");
        let info = p.a.connection(p.to_b).expect("a connection");
        assert_eq!(info.lanes, if link == "verbs x2" { 2 } else { 1 }, "{link}: {info:?}");
    }
}

/// Memory of two sides, moved to and fro.
struct Moved {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Moved {
    fn new(len: usize) -> Self {
        Self { from: pattern(len, 9), to: vec![0; len] }
    }

    /// Writes all of it, `meanwhile` something happens, and the bytes are right.
    fn write(&mut self, p: &Pair, meanwhile: impl FnOnce()) -> Result<(), Error> {
        self.to.fill(0);
        let (here, there) = (register(&p.a, &mut self.from), register(&p.b, &mut self.to));
        let (iovs, adverts) = ([iov(here, &self.from)], [advert(&p.b, there, &self.to)]);
        let id = p.a.post(&request(p.to_b, Op::Write, &iovs, &adverts))?;
        meanwhile();
        let ended = support::finish(&p.a, id);
        p.a.deregister(here).expect("unused");
        p.b.deregister(there).expect("unused");
        ended?;
        assert!(self.from == self.to, "other bytes arrived");
        Ok(())
    }
}

/// The network interface at our end of a cable of the guest's; none elsewhere.
fn cable(rail: usize) -> Option<String> {
    let name = devices("RDMA_VM_DEVS", rail + 1).get(rail)?.replace("rxe", "rail");
    std::path::Path::new("/sys/class/net").join(&name).exists().then_some(name)
}

fn link(cable: &str, state: &str) {
    let done = Command::new("ip").args(["link", "set", cable, state]).status();
    assert!(done.expect("iproute2").success(), "{cable} is not set {state}");
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} never happens");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rail_that_is_cut_hands_its_work_to_the_other_and_comes_back() {
    let Some(cable) = cable(1) else {
        eprintln!("skipped: no cable that may be cut (run it with cargo xtask guest --rails 2)");
        return;
    };
    let Some(p) = joined(2, |config| set(config, "UCCL_P2P_RDMA_TIMEOUT", "10")) else { return };
    let rails = || p.a.connection(p.to_b).expect("a connection").lanes;
    let mut memory = Moved::new(4 << 20);
    for _ in 0..5 {
        until("the return of the rail", || rails() == 2);
        memory.write(&p, || link(&cable, "down")).expect("the other takes over");
        // What nobody uses is not missed.
        until("the loss of the rail", || {
            memory.write(&p, || {}).expect("one is enough");
            rails() == 1
        });
        link(&cable, "up");
    }
    until("the return of the rail", || rails() == 2);
    memory.write(&p, || {}).expect("both are used");
}

#[test]
fn without_devices_a_connection_says_what_is_missing() {
    let only = |config: &mut Config| {
        config.transport = Transport::Verbs;
        set(config, "UCCL_IBV_SO", "/nonexistent/libibverbs.so");
    };
    let ends = [0; 2].map(|_| {
        let mut config = support::config(Transport::Auto);
        only(&mut config);
        uccl_p2p::Endpoint::new(config).expect("an endpoint needs no library")
    });
    let refused = ends[0].connect(ends[1].addr(), None, &mut Uninterrupted);
    let why = refused.expect_err("there are no rails").to_string();
    assert!(why.contains("/nonexistent/libibverbs.so"), "{why}");
}
