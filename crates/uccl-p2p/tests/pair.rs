//! Two endpoints in one process, over each link that this machine has.

mod support;

use std::time::{Duration, Instant};

use uccl_p2p::{
    Config, Endpoint, Error, Op, Transport, Uninterrupted,
    device::{MemoryKind, Place, Topology},
};

use self::support::{Pair, advert, config, iov, pair_of, path, pattern, register, request};

fn pair_with(change: impl Fn(&mut Config)) -> Pair {
    pair_of([&change, &change])
}

/// One pair a link: memory to memory, shared-memory stream, one TCP stream, three checksummed ones; and
/// with all copies made by the owner of the memory, as for a GPU's.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    vec![
        ("local", pair_with(|config| config.transport = Transport::Local)),
        ("shm", pair_with(|config| (config.transport, config.cma) = (Transport::Local, false))),
        ("tcp", pair_with(|config| config.transport = Transport::Tcp)),
        (
            "tcp x3",
            pair_with(|config| {
                config.transport = Transport::Tcp;
                config.tcp_streams = 3;
                config.checksum = uccl_p2p::Checksum::On;
            }),
        ),
        (
            "local, asked",
            pair_with(|config| {
                (config.transport, config.always_ask_owners) = (Transport::Local, true);
            }),
        ),
        (
            "shm, asked",
            pair_with(|config| {
                (config.transport, config.cma) = (Transport::Local, false);
                config.always_ask_owners = true;
            }),
        ),
        (
            "tcp x3, asked",
            pair_with(|config| {
                (config.transport, config.tcp_streams) = (Transport::Tcp, 3);
                config.always_ask_owners = true;
            }),
        ),
    ]
}

#[test]
fn the_path_is_the_links() {
    for (link, p) in pairs() {
        let path = path(&p.a, p.to_b, &p.b);
        let kind = link.split([' ', ',']).next().expect("a word");
        // The kernel may forbid copies between processes.
        let known: &[&str] = if kind == "local" { &["cma", "shm"] } else { &[kind] };
        assert!(known.contains(&path), "{link}: {path}");
    }
}

#[test]
fn memory_from_alloc_is_mapped() {
    let p = pair_with(|config| (config.transport, config.cma) = (Transport::Local, false));
    let (from, to) = (p.a.alloc(1 << 20).expect("memory"), p.b.alloc(1 << 20).expect("memory"));
    // SAFETY: nobody else looks at the memory while it is written here.
    let (from, to) = unsafe {
        let from = std::slice::from_raw_parts_mut(from.as_ptr(), from.len());
        (from, std::slice::from_raw_parts_mut(to.as_ptr(), to.len()))
    };
    from.copy_from_slice(&pattern(1 << 20, 7));
    let (here, there) = (register(&p.a, from), register(&p.b, to));
    let adverts = [advert(&p.b, there, to)];
    let done =
        p.a.run(&request(p.to_b, Op::Write, &[iov(here, from)], &adverts), &mut Uninterrupted);
    done.expect("written");
    assert!(from == to);
}

#[test]
fn nobody_answers() {
    let ep = Endpoint::new(config(Transport::Auto)).expect("an endpoint");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = silent.local_addr().expect("its address");
    let limit = Some(Duration::from_millis(200));
    let failed = ep.connect(addr, limit, &mut Uninterrupted);
    assert!(matches!(failed, Err(Error::Connect { .. })), "{failed:?}");
    drop(silent);
    let failed = ep.connect(addr, limit, &mut Uninterrupted);
    assert!(matches!(failed, Err(Error::Connect { .. })), "{failed:?}");
}

#[test]
fn the_key_must_be_the_same() {
    let with = |psk: Option<&[u8]>| {
        let psk = psk.map(<[u8]>::to_vec);
        Endpoint::new(Config { psk, ..config(Transport::Auto) }).expect("an endpoint")
    };
    let keyed = with(Some(b"0123456789abcdef"));
    for wrong in [None, Some(&b"another key here"[..])] {
        let other = with(wrong);
        for (from, to) in [(&other, &keyed), (&keyed, &other)] {
            let refused = from.connect(to.addr(), None, &mut Uninterrupted);
            assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
        }
    }
    let right = with(Some(b"0123456789abcdef"));
    right.connect(keyed.addr(), None, &mut Uninterrupted).expect("the same key");
}

#[test]
fn a_region_tells_its_kind_and_the_nic_nearest_to_it() {
    let Pair { a, .. } = pair_with(|_| {});
    let mut memory = vec![1_u8; 8192];
    let mr = register(&a, &mut memory);
    let info = a.region_info(mr).expect("a region");
    assert_eq!((info.addr, info.len), (memory.as_ptr() as usize, memory.len()));
    assert_eq!(info.kind, MemoryKind::Host);
    let machine = Topology::of_this_machine().expect("a topology");
    if let Some(node) = info.numa_node {
        assert!(machine.numa_nodes.iter().any(|known| known.id == node), "{info:?}");
    }
    let gpu = machine.gpu_address(a.config().gpu_index).map(Place::Device);
    let place = info.numa_node.map(Place::Node).or(gpu).unwrap_or(Place::Host);
    assert_eq!(info.nic, machine.nearest_nic(place));
    a.deregister(mr).expect("registered");
    assert!(matches!(a.region_info(mr), Err(Error::UnknownRegion(_))));
}

#[test]
fn workers_run_anywhere_where_affinity_is_switched_off() {
    let Pair { a, b, .. } = pair_with(|config| config.numa_affinity = false);
    assert_eq!((a.worker_cpus(), b.worker_cpus()), (None, None));
}

#[test]
fn what_has_moved_is_counted_whichever_way_it_took() {
    for (link, p) in pairs() {
        let mut ours = vec![1; 1 << 20];
        let mut theirs = vec![2; 1 << 20];
        let (here, there) = (register(&p.a, &mut ours), register(&p.b, &mut theirs));
        let advert = [advert(&p.b, there, &theirs)];
        let before = p.a.stats().expect("ours");
        // The first is made on the spot where that is possible.
        for len in [64, 1 << 20] {
            for op in [Op::Write, Op::Read] {
                let piece = [iov(here, &ours[..len])];
                let done = p.a.run(&request(p.to_b, op, &piece, &advert), &mut Uninterrupted);
                done.expect("it moves");
            }
        }
        p.a.run_notif(p.to_b, b"told", None, &mut Uninterrupted).expect("told");
        let moved = (1 << 20) + 64;
        let counts = || {
            let now = p.a.stats().expect("ours");
            [
                now.transfers_posted - before.transfers_posted,
                now.transfers_done - before.transfers_done,
                now.bytes_sent - before.bytes_sent,
                now.bytes_received - before.bytes_received,
                now.notifs_sent - before.notifs_sent,
            ]
        };
        // Whoever ended the last one may still be counting it.
        let begun = Instant::now();
        while counts() != [5, 5, moved, moved, 1] {
            let counts = counts();
            assert!(begun.elapsed() < Duration::from_secs(20), "{link}: {counts:?}");
            std::thread::yield_now();
        }
    }
}

/// Who has been told may close at once: the sender hears that its message has arrived, and not that the peer is gone.
#[test]
fn a_notification_that_was_taken_has_arrived() {
    for transport in [Transport::Local, Transport::Tcp] {
        for len in [3, 100_000].repeat(30) {
            let p = pair_with(|config| config.transport = transport);
            let b = p.b.clone();
            let told = std::thread::spawn(move || {
                let taken = b.wait_notifs(Some(Duration::from_secs(20)), &mut Uninterrupted);
                b.close().expect("closed");
                taken.expect("an endpoint").len()
            });
            // Until it sleeps, and a worker delivers.
            std::thread::sleep(Duration::from_millis(2));
            let sent = p.a.run_notif(p.to_b, vec![7; len], None, &mut Uninterrupted);
            assert!(sent.is_ok(), "{transport:?} {len}: {sent:?}");
            assert_eq!(told.join().expect("no panic"), 1);
        }
    }
}
