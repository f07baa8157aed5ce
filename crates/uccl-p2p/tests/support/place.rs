//! The place of an endpoint: our network namespace, or one of its own at the other end of a cable.

use std::{env, fs::File, net::IpAddr, os::fd::AsFd, time::Duration};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The variable that names the file of the other end's network namespace, in the guests of
/// `cargo xtask guest --apart`.
const PEER_NETNS: &str = "RDMA_VM_PEER_NETNS";

/// A network namespace, and the address that an endpoint there is bound to.
pub(crate) struct Place {
    pub(crate) ip: IpAddr,
    /// `None`: our own namespace.
    netns: Option<File>,
}

impl Place {
    /// The places of the first endpoint and the second: apart if [`PEER_NETNS`] is set; otherwise
    /// both here, on the loopback interface.
    pub(crate) fn both() -> [Self; 2] {
        let Ok(file) = env::var(PEER_NETNS) else {
            return [(); 2].map(|()| Self { ip: [127, 0, 0, 1].into(), netns: None });
        };
        let there = File::open(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
        [
            Self { ip: first_address("RDMA_VM_ADDRS"), netns: None },
            Self { ip: first_address("RDMA_VM_PEER_ADDRS"), netns: Some(there) },
        ]
    }

    /// Runs a closure there: directly, or in a thread of the other namespace. Threads that it
    /// starts are there as well.
    pub(crate) fn run<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let Some(netns) = &self.netns else { return what() };
        let there = || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(netns.as_fd(), kind).expect("the right to change namespaces");
            what()
        };
        std::thread::scope(|scope| scope.spawn(there).join()).expect("no panic there")
    }
}

/// The time that an end waits for the other, which `UCCL_TEST_PATIENCE` sets in seconds. Guests
/// share their processors with the machine's other work, and some lose packets.
pub(crate) fn patience() -> Duration {
    let is_guest = env::var_os(PEER_NETNS).is_some();
    let seconds = env::var("UCCL_TEST_PATIENCE").map(|seconds| seconds.parse().expect("a number"));
    Duration::from_secs(seconds.unwrap_or(if is_guest { 20 } else { 5 }))
}

fn first_address(variable: &str) -> IpAddr {
    let addresses = env::var(variable).unwrap_or_default();
    let first = addresses.split(',').next().unwrap_or_default();
    first.parse().unwrap_or_else(|e| panic!("{variable}={addresses}: {e}"))
}
