//! The kernel's descriptor table has its size before connections are made: while it grows, threads
//! that open a descriptor wait.

#[path = "support/loopback.rs"]
mod loopback;

use std::{fs, time::Duration};

use uccl_p2p::{Config, Endpoint, NoInterrupt, Transport};

use self::loopback::on_loopback;

/// The size of this process's descriptor table.
fn room() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux says");
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    size.expect("a line of it").trim().parse().expect("a number")
}

fn limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for a limit.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur
}

#[test]
fn connections_find_room_for_their_descriptors() {
    let config =
        || Config { transport: Transport::Tcp, timeout: Duration::from_secs(20), ..on_loopback() };
    let [a, b] = [(); 2].map(|()| Endpoint::new(config()).expect("an endpoint"));
    let before = room();
    // Enough for the descriptors of hundreds of connections.
    assert!(before >= limit().min(4096), "{before}");
    for _ in 0..100 {
        a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
        b.accept(None, &mut NoInterrupt).expect("accepted");
    }
    assert_eq!(room(), before);
}
