//! Two ends of a channel in one process, and memory to move between them.

use std::time::{Duration, Instant};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::OpKind,
    mem::Span,
    rail::{Channel, Rail, RailError, Registration, Request, RequestEnd},
    region::Rights,
};

/// How long anything may take before the test has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory that is registered until it is dropped. Peers write it, so it is reached by its address.
pub(crate) struct Memory {
    pub(crate) registration: Box<dyn Registration>,
    addr: *mut u8,
    len: usize,
}

impl Memory {
    pub(crate) fn new(rail: &dyn Rail, len: usize, fill: impl Fn(usize) -> u8) -> Self {
        Self::with_rights(rail, len, fill, Rights::ALL)
    }

    /// Memory for which peers have these rights.
    pub(crate) fn with_rights(
        rail: &dyn Rail,
        len: usize,
        fill: impl Fn(usize) -> u8,
        rights: Rights,
    ) -> Self {
        let bytes: Box<[u8]> = (0..len).map(fill).collect();
        let addr = Box::into_raw(bytes).cast::<u8>();
        let span = Span { addr: addr as usize, len };
        let registration =
            rail.register(span, MemoryKind::Host, rights).expect("it can be registered");
        Self { registration, addr, len }
    }

    pub(crate) fn span(&self) -> Span {
        Span { addr: self.addr as usize, len: self.len }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: the memory lives as long as this. The tests look at it when nothing is under way.
        unsafe { std::slice::from_raw_parts(self.addr, self.len) }.to_vec()
    }

    pub(crate) fn clear(&self) {
        // SAFETY: as for `bytes`.
        unsafe { self.addr.write_bytes(0, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.registration.end().expect("it lets go");
        let bytes = std::ptr::slice_from_raw_parts_mut(self.addr, self.len);
        // SAFETY: it was made of a box of this length, and its registration has ended. The requests
        // that use it have ended, or their channel was dropped.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

pub(crate) fn pattern(at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ at as u8
}

/// Two ends of a channel.
pub(crate) struct Pair {
    pub(crate) a: Box<dyn Channel>,
    pub(crate) b: Box<dyn Channel>,
    pub(crate) ended: Vec<RequestEnd>,
}

impl Pair {
    /// Joins two rails. `failed` attempts have come before.
    pub(crate) fn over(rail_a: &dyn Rail, rail_b: &dyn Rail, failed: u32) -> Self {
        let mut a = rail_a.open_first(failed).expect("an end");
        let mut b = rail_b.open().expect("an end");
        b.connect(a.address()).expect("b joins a");
        a.connect(b.address()).expect("a joins b");
        Self { a, b, ended: Vec::new() }
    }

    /// A request of `a` for all memory of `b`.
    pub(crate) fn request(&mut self, kind: OpKind, ours: &Memory, theirs: &Memory) -> Request {
        let key = self.b.export_now(&*theirs.registration).expect("a key");
        Request {
            kind,
            local: ours.span(),
            local_key: ours.registration.local_key(),
            remote_addr: key.base,
            remote_key: self.a.import(&key.key).expect("our own key"),
            tag: 1,
        }
    }

    /// Posts a request from `a`, and polls both ends until it has ended.
    pub(crate) fn run(&mut self, request: Request) -> RequestEnd {
        // SAFETY: the callers keep their memory until this has returned, or the channels are
        // dropped.
        assert_eq!(unsafe { self.a.post(&[request]) }.expect("it lives"), 1);
        self.until("a request ends", |pair| !pair.ended.is_empty());
        self.ended.remove(0)
    }

    pub(crate) fn poll(&mut self) -> Result<(), RailError> {
        self.a.poll(&mut self.ended)?;
        self.b.poll(&mut Vec::new())
    }

    /// Polls both ends until this is so.
    pub(crate) fn until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            self.poll().expect("both ends live");
            assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} until {what}");
            std::thread::yield_now();
        }
    }
}
