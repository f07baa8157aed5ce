//! Where an endpoint is: with us, or at the other end of a cable, in a network namespace of its own.

use std::{env, fs::File, net::IpAddr, os::fd::AsFd, time::Duration};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The variable that names the file of the other end's network namespace, in the guests of `cargo xtask guest --apart`.
const PEER_NETNS: &str = "RDMA_VM_PEER_NETNS";

/// A network namespace, and the address that an endpoint there is bound to.
pub(crate) struct Place {
    pub(crate) ip: IpAddr,
    /// `None`: the one that we are in.
    netns: Option<File>,
}

impl Place {
    /// Of the first endpoint and the second: apart where [`PEER_NETNS`] is set; else both here, on the loopback
    /// interface.
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

    /// What a thread there says to this. Threads that it starts are there as well.
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

/// How long an end waits for the other. Guests share their processors with whatever else the machine does, and some lose
/// packets.
pub(crate) fn patience() -> Duration {
    Duration::from_secs(if env::var_os(PEER_NETNS).is_some() { 20 } else { 5 })
}

fn first_address(variable: &str) -> IpAddr {
    let addresses = env::var(variable).unwrap_or_default();
    let first = addresses.split(',').next().unwrap_or_default();
    first.parse().unwrap_or_else(|e| panic!("{variable}={addresses}: {e}"))
}
