//! The conformance suite over RDMA verbs, and transfers that lose rails, devices and peers.
//!
//! Runs where RDMA devices are. `RDMA_VM_DEVS` and `RDMA_VM_PEER_DEVS` name the two ends of each
//! cable, as in the guests of `cargo xtask guest`; without them, each end uses every device.

mod cables;
mod cut;
mod ends;
mod peers;
mod removed;
#[path = "../support/mod.rs"]
mod support;
mod usage;

use uccl_p2p::{Config, Error, Iov, NoInterrupt, Op, Request, Transport};
use uccl_wire::advert::Advert;

use self::{
    ends::{joined, set},
    support::{Pair, path},
};

/// Pairs with one rail, with two, and with writes over unreliable connections.
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
        assert_eq!(path(&p.a, p.to_b, &p.b), "verbs", "{link}");
        let info = p.a.connection(p.to_b).expect("a connection");
        assert_eq!(info.lanes, if link == "verbs x2" { 2 } else { 1 }, "{link}: {info:?}");
    }
}

#[test]
fn without_devices_a_connection_names_the_missing_library() {
    let only = |config: &mut Config| {
        config.transport = Transport::Verbs;
        set(config, "UCCL_IBV_SO", "/nonexistent/libibverbs.so");
    };
    let ends = [0; 2].map(|_| {
        let mut config = support::config(Transport::Auto);
        only(&mut config);
        uccl_p2p::Endpoint::new(config).expect("an endpoint needs no library")
    });
    let refused = ends[0].connect(ends[1].addr(), None, &mut NoInterrupt);
    let why = refused.expect_err("there are no rails").to_string();
    assert!(why.contains("/nonexistent/libibverbs.so"), "{why}");
}

/// Short data goes along with its request, which the process copies. The device has the pages
/// still.
#[test]
fn a_short_write_of_memory_that_is_not_mapped_ends() {
    const LEN: usize = 4096;
    for (link, p) in pairs() {
        let (private, rw) =
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: new memory, here and below of this test.
        let [ours, theirs] = [(); 2].map(|()| unsafe {
            libc::mmap(std::ptr::null_mut(), LEN, rw, private, -1, 0) as usize
        });
        assert!([ours, theirs].iter().all(|at| *at != libc::MAP_FAILED as usize));
        // SAFETY: the memory stays.
        let (mr, theirs_mr) = unsafe {
            (
                p.a.register(ours, LEN).expect("registered"),
                p.b.register(theirs, LEN).expect("registered"),
            )
        };
        let advert = p.b.advertise(theirs_mr, theirs, LEN).expect("inside");
        let write = |len| {
            let adverts = [Advert { len: len as u64, ..advert }];
            let iovs = [Iov { mr, ptr: ours, len }];
            let request = Request::new(p.to_b, Op::Write, &iovs, &adverts);
            p.a.run(&request, &mut NoInterrupt)
        };
        let protect = |how| {
            // SAFETY: the page of this test.
            assert_eq!(unsafe { libc::mprotect(ours as *mut _, LEN, how) }, 0);
        };
        write(LEN).expect("all is well");
        for len in [1, 8, 32, 200] {
            protect(libc::PROT_NONE);
            // With the old bytes of the pages, or with our own error.
            let ended = write(len);
            assert!(matches!(ended, Ok(_) | Err(Error::LocalMemory(_))), "{link} {len}: {ended:?}");
            protect(rw);
            write(len).expect("it is there again");
        }
    }
}
