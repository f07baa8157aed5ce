//! Groups with threads of one process as their ranks.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use uccl_collective::{Buffer, Group, GroupRequest};
use uccl_p2p::{Config, Endpoint, NoInterrupt, Transport};

/// Longer than anything takes that has to happen.
pub(crate) const FAR: Duration = Duration::from_secs(40);

/// An endpoint of a host: each has an address of its own.
pub(crate) fn endpoint(transport: Transport, host: u8) -> Endpoint {
    let bind = Some([127, 0, 0, host].into());
    let config = Config { bind, port: Some(0), num_cpus: 1, transport, ..Config::default() };
    Endpoint::new(Config { timeout: Duration::from_secs(20), transfer_timeout: FAR, ..config })
        .expect("an endpoint")
}

/// A rank's memory, which the engine reads and writes behind the compiler's back.
pub(crate) struct Memory(Arc<Mutex<Box<[u8]>>>);

impl Memory {
    pub(crate) fn filled(len: usize, byte: impl Fn(usize) -> u8) -> Self {
        Self(Arc::new(Mutex::new((0..len).map(byte).collect())))
    }

    pub(crate) fn buffer(&self) -> Buffer {
        let len = self.0.lock().expect("whole").len();
        self.part(0, len)
    }

    pub(crate) fn part(&self, at: usize, len: usize) -> Buffer {
        let ptr = self.0.lock().expect("whole")[at..].as_mut_ptr() as usize;
        // SAFETY: the box lives as long as the Arc, and tests look at it after the call's end.
        unsafe { Buffer::new(ptr, len, Arc::clone(&self.0) as _) }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().expect("whole").to_vec()
    }
}

/// The byte at `at` that rank `from` sends to rank `to`.
pub(crate) fn byte(from: usize, to: usize, at: usize) -> u8 {
    (from * 31 + to * 7 + at) as u8
}

/// Runs a function on each rank of a group on these hosts, one for each rank.
pub(crate) fn on_hosts(
    transport: Transport,
    hosts: &[u8],
    run: impl Fn(Endpoint, Group) + Send + Sync,
) {
    let (ranks, all) = (hosts.len(), hosts.iter());
    let ends: Vec<_> = all.map(|host| endpoint(transport, *host)).collect();
    let cards: Vec<_> = ends.iter().map(|end| Group::card(end).to_vec()).collect();
    thread::scope(|scope| {
        for (rank, end) in ends.into_iter().enumerate() {
            let (cards, run) = (&cards, &run);
            scope.spawn(move || {
                let endpoint = &end;
                let request =
                    GroupRequest { endpoint, rank, cards, timeout: FAR, needs_registration: false };
                let group = Group::join(&request, &mut NoInterrupt).expect("joined");
                assert_eq!((group.rank(), group.ranks()), (rank, ranks));
                run(end, group);
            });
        }
    });
}

pub(crate) fn done(work: uccl_collective::Result<Arc<uccl_collective::Work>>) {
    let ended = work.expect("begun").wait(Some(FAR), &mut NoInterrupt).expect("well");
    assert!(ended, "it has not ended");
}
