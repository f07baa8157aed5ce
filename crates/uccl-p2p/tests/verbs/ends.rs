//! The two ends of a connection over RDMA, and writes between them.

use std::{
    env,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, ConnId, Endpoint, Error, Op, Status, TransferId, Transport};

use crate::support::{Pair, advert, finish, iov, pair_of, path, pattern, register, request};

/// The first `count` devices of one end.
pub(crate) fn devices(variable: &str, count: usize) -> Vec<String> {
    let named = env::var(variable).unwrap_or_default();
    named.split(',').filter(|name| !name.is_empty()).take(count).map(str::to_owned).collect()
}

pub(crate) fn set(config: &mut Config, name: &str, value: &str) {
    config.set(name, value).expect("a setting");
}

/// Has an end use these devices, or all if none is named.
pub(crate) fn over(config: &mut Config, devices: &[String]) {
    config.transport = Transport::Verbs;
    // Guests share their processors with the machine's other work.
    config.transfer_timeout = Duration::from_secs(60);
    if !devices.is_empty() {
        set(config, "UCCL_P2P_RDMA_DEV", &devices.join(","));
    }
}

/// Whether this machine has RDMA devices; prints a line if not.
pub(crate) fn possible() -> bool {
    let there = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut d| d.next().is_some());
    if !there {
        eprintln!("skipped: this machine has no RDMA device");
    }
    there
}

/// Two endpoints over `rails` cables. Prints a line and returns `None` if there is no device.
pub(crate) fn joined(rails: usize, change: impl Fn(&mut Config)) -> Option<Pair> {
    let of = |variable| devices(variable, rails);
    possible().then(|| joined_over([of("RDMA_VM_DEVS"), of("RDMA_VM_PEER_DEVS")], change))
}

/// Two endpoints over the devices of each.
pub(crate) fn joined_over(devices: [Vec<String>; 2], change: impl Fn(&mut Config)) -> Pair {
    let [a, b] = devices.map(|devices| {
        let change = &change;
        move |config: &mut Config| {
            over(config, &devices);
            change(config);
        }
    });
    pair_of([&a, &b])
}

/// The direction of a write between the ends of a pair.
#[derive(Clone, Copy)]
pub(crate) struct Way<'a> {
    pub(crate) from: &'a Endpoint,
    pub(crate) to: &'a Endpoint,
    pub(crate) conn: ConnId,
}

/// The direction from the end that connected.
pub(crate) fn there(p: &Pair) -> Way<'_> {
    Way { from: &p.a, to: &p.b, conn: p.to_b }
}

/// The direction from the end that accepted.
pub(crate) fn back(p: &Pair) -> Way<'_> {
    Way { from: &p.b, to: &p.a, conn: p.to_a }
}

impl Way<'_> {
    /// The number of rails that work.
    pub(crate) fn rails(&self) -> usize {
        let lanes = self.from.connection(self.conn).expect("a connection").lanes;
        // Without rails, `lanes` is the number of streams.
        if lanes == 1 && path(self.from, self.conn, self.to) != "verbs" { 0 } else { lanes }
    }

    pub(crate) fn is_pending(&self, id: TransferId) -> bool {
        matches!(self.from.poll(id), Ok(Status::Pending))
    }
}

/// Memory of the two ends.
pub(crate) struct EndMemory {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl EndMemory {
    pub(crate) fn new(len: usize) -> Self {
        Self { from: pattern(len, 9), to: vec![0; len] }
    }

    /// Writes the whole memory, calls `meanwhile` after the post, and checks the bytes.
    pub(crate) fn write(
        &mut self,
        way: Way<'_>,
        meanwhile: impl FnOnce(TransferId),
    ) -> Result<(), Error> {
        self.to.fill(0);
        let (here, there) = (register(way.from, &mut self.from), register(way.to, &mut self.to));
        let (iovs, adverts) = ([iov(here, &self.from)], [advert(way.to, there, &self.to)]);
        let id = way.from.post(&request(way.conn, Op::Write, &iovs, &adverts))?;
        meanwhile(id);
        let ended = finish(way.from, id);
        way.from.deregister(here).expect("unused");
        way.to.deregister(there).expect("unused");
        ended?;
        assert!(self.from == self.to, "other bytes arrived");
        Ok(())
    }
}

pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} never happens");
        std::thread::sleep(Duration::from_millis(2));
    }
}
