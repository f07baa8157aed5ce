//! Honest peers connect while strangers flood the listener, and the endpoint keeps little state of
//! these.
//!
//! `UCCL_TEST_STRANGERS` is the number of seconds (1 if it is not set). The times are printed and
//! not checked:
//! `UCCL_TEST_STRANGERS=10 cargo test --release -p uccl-p2p --test strangers -- --nocapture`.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    collections::VecDeque,
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, Endpoint, NoInterrupt, Transport};

use self::loopback::on_loopback;

/// Connections a second.
const RATE: u32 = 1000;
/// The number of connections that the strangers hold open.
const HELD: usize = 400;
/// More memory than a bounded number of strangers takes.
const FAR: usize = 256 << 20;

fn endpoint(psk: Option<&[u8]>) -> Endpoint {
    let config =
        Config { transport: Transport::Tcp, psk: psk.map(<[u8]>::to_vec), ..on_loopback() };
    Endpoint::new(config).expect("an endpoint")
}

/// Opens [`RATE`] connections a second, and sends nothing. Returns their number.
fn flood(to: SocketAddr, time: Duration, is_over: &AtomicBool) -> usize {
    let (begun, mut held, mut opened) = (Instant::now(), VecDeque::new(), 0);
    while begun.elapsed() < time {
        if let Ok(tcp) = TcpStream::connect(to) {
            held.push_back(tcp);
            opened += 1;
        }
        if held.len() > HELD {
            held.pop_front();
        }
        let due = Duration::from_secs(1) / RATE * opened as u32;
        thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    is_over.store(true, Relaxed);
    opened
}

fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel tells");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("it is there");
    let number = line.trim_start_matches(':').trim().split(' ').next();
    number.and_then(|n| n.parse().ok()).expect("a number")
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the kernel tells").count()
}

#[test]
fn honest_peers_connect_beside_a_flood() {
    let seconds = std::env::var("UCCL_TEST_STRANGERS").ok().and_then(|s| s.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(1));
    for psk in [None, Some(&b"a secret of sixteen"[..])] {
        let (target, honest) = (endpoint(psk), endpoint(psk));
        target.start_passive_accept().expect("a new one");
        let (before, is_over) = (status("VmRSS"), AtomicBool::new(false));
        let (opened, mut times, most) = thread::scope(|scope| {
            let strangers = scope.spawn(|| flood(target.addr(), time, &is_over));
            let (mut times, mut most) = (Vec::new(), 0);
            while !is_over.load(Relaxed) {
                let begun = Instant::now();
                let conn = honest.connect(target.addr(), None, &mut NoInterrupt);
                times.push(begun.elapsed());
                honest.disconnect(conn.expect("connected")).expect("it was there");
                most = most.max(descriptors());
                thread::sleep(Duration::from_millis(10));
            }
            (strangers.join().expect("it ended"), times, most)
        });
        times.sort_unstable();
        let grown = status("VmRSS").saturating_sub(before) << 10;
        println!(
            "{} key: {opened} strangers in {time:?}; {} honest peers connected, median {:?}, longest {:?}; \
             {} KiB more are resident, at most {most} descriptors open",
            if psk.is_some() { "with a" } else { "without" },
            times.len(),
            times[times.len() / 2],
            times[times.len() - 1],
            grown >> 10,
        );
        assert!(grown < FAR, "{grown} bytes are kept of strangers");
    }
}
