//! Operations of a group of one rank.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::{
    allocations,
    rma::{engine::Engine, joining},
    settings::Settings,
};

/// A group of one rank, and a region of its own.
struct Alone {
    coll: Arc<Coll>,
    /// The engine changes them.
    words: Box<[AtomicU64; 4]>,
    local: Iov,
}

impl Alone {
    fn new(timeout: Duration) -> Self {
        let settings = Settings::from_env().expect("settings");
        let settings = Settings { timeout, ..settings };
        let engine = Arc::new(Engine::new(&settings).expect("an endpoint"));
        let (group, handle) = joining::listen(&engine, 0).expect("a listener");
        joining::join(&group, &[handle], 0).expect("a group of one");
        let (coll, words) = (Coll::new(group), Box::<[AtomicU64; 4]>::default());
        // SAFETY: the words outlive the group.
        let region = unsafe { coll.group.register(words.as_ptr() as usize, 32) };
        let region = region.expect("registered");
        let local = Iov { mr: region.mr, ptr: region.base, len: 8 };
        Self { coll, words, local }
    }

    /// A put of the first word to the second, with a signal at the third, in the rank's region
    /// of this number.
    fn put(&self, region: usize) -> Operation {
        let signal = Some(SignalPlace { region, offset: 16, change: Change::Add(1) });
        let (local, remote) = (Some(self.local), (region, 8));
        Operation { context: 0, rank: 0, op: Op::Write, local, remote, signal }
    }

    /// Begins an operation; the allocations that it took.
    fn begin(&self, operation: Operation) -> (&Ticket, usize) {
        let before = allocations::count();
        let ticket = self.coll.begin(operation).expect("begun");
        let allocated = allocations::count() - before;
        // SAFETY: the group keeps the ticket.
        (unsafe { &*ticket }, allocated)
    }

    fn end(&self, ticket: &Ticket) -> Result<(), Fault> {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            match self.coll.test(ticket) {
                Ok(false) if Instant::now() < until => thread::yield_now(),
                Ok(is_done) => {
                    assert!(is_done, "nothing happens");
                    return Ok(());
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Ends all; the signals that have come.
    fn close(self) -> u64 {
        self.coll.close();
        self.coll.group.engine.endpoint.close().expect("closed");
        self.words[2].load(Ordering::SeqCst)
    }
}

#[test]
fn a_put_does_not_wait_for_ever_for_a_region() {
    let alone = Alone::new(Duration::from_secs(3));
    let put = alone.put(5);
    let (ticket, _) = alone.begin(put);
    let said = alone.end(ticket).expect_err("nobody has that region").to_string();
    assert!(said.contains("region 5 was not registered"), "{said}");
    assert!(alone.coll.begin(put).is_err(), "the group has failed");
    alone.close();
}

#[test]
fn a_put_allocates_for_its_transfer_alone() {
    let alone = Alone::new(Duration::from_secs(20));
    let put = alone.put(0);
    let mut counts = [(); 201].map(|()| {
        let (ticket, allocated) = alone.begin(put);
        alone.end(ticket).expect("well");
        allocated
    });
    counts.sort_unstable();
    // The engine's transfer and its operation. A few puts come where a list of its grows.
    assert!(counts[100] <= 2, "{counts:?} allocations");
    assert_eq!(alone.close(), 201, "signals");
}

#[test]
fn operations_that_wait_allocate_nothing() {
    let alone = Alone::new(Duration::from_secs(20));
    let put = alone.put(1);
    let tickets = [(); 8].map(|()| alone.begin(put).0);
    let look = || {
        let before = allocations::count();
        for ticket in tickets.iter().cycle().take(100) {
            assert!(!alone.coll.test(ticket).expect("it waits"));
        }
        allocations::count() - before
    };
    // Messages of the connection come at first, too.
    let counts = [(); 8].map(|()| look());
    assert!(counts.contains(&0), "{counts:?} allocations");
    let at = alone.words.as_ptr() as usize;
    // SAFETY: the words outlive the group.
    unsafe { alone.coll.group.register(at, 32) }.expect("registered");
    tickets.into_iter().for_each(|ticket| alone.end(ticket).expect("well"));
    assert_eq!(alone.close(), 8, "signals");
}
