//! Two endpoints in one process, over each link that this machine has.

mod support;

use std::{
    sync::atomic::{AtomicU64, Ordering::Acquire},
    time::{Duration, Instant},
};

use uccl_p2p::{
    Change, Config, Endpoint, Error, NoInterrupt, Op, Request, Signal, Transport, TryOutcome,
    device::{MemoryKind, Place, Topology},
    wire::advert::Advert,
};

use self::support::{
    Pair, advert, advert_word, config, finish, iov, pair_of, path, pattern, register,
    register_words, request,
};

fn pair_with(change: impl Fn(&mut Config)) -> Pair {
    pair_of([&change, &change])
}

/// A pair for each link: memory to memory, a shared-memory stream, one TCP stream, a FIFO, three
/// checksummed TCP streams; and links on which the memory's owner makes all copies, as for a GPU's.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    vec![
        ("local", pair_with(|config| config.transport = Transport::Local)),
        ("shm", pair_with(|config| (config.transport, config.cma) = (Transport::Local, false))),
        ("tcp", pair_with(|config| config.transport = Transport::Tcp)),
        ("fifo", pair_with(|config| config.transport = Transport::Fifo)),
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
                (config.transport, config.ask_owners) = (Transport::Local, true);
            }),
        ),
        (
            "shm, asked",
            pair_with(|config| {
                (config.transport, config.cma) = (Transport::Local, false);
                config.ask_owners = true;
            }),
        ),
        (
            "tcp x3, asked",
            pair_with(|config| {
                (config.transport, config.tcp_streams) = (Transport::Tcp, 3);
                config.ask_owners = true;
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

/// The writer changes a mapped word by itself, without its owner's help.
#[test]
fn a_signal_to_mapped_memory_is_applied_by_its_writer() {
    let p = pair_with(|config| (config.transport, config.cma) = (Transport::Local, false));
    let (from, to) = (p.a.alloc(4096).expect("memory"), p.b.alloc(4096).expect("memory"));
    // SAFETY: aligned, zeroed, and there until the end of the test.
    let of_b = unsafe { std::slice::from_raw_parts(to.as_ptr().cast::<AtomicU64>(), 512) };
    // SAFETY: no other code accesses the memory.
    let from = unsafe { std::slice::from_raw_parts_mut(from.as_ptr(), from.len()) };
    from.fill(7);
    let (here, there) = (register(&p.a, from), register_words(&p.b, of_b));
    let (last, word) = (&of_b[510], &of_b[511]);
    let (iovs, adverts) = ([iov(here, &from[..8])], [advert_word(&p.b, there, last)]);
    let advert = advert_word(&p.b, there, word);
    until_mapped(&p, &[advert]);
    let change = |change| Some(Signal { advert, change, strong: true });
    let write = request(p.to_b, Op::Write, &iovs, &adverts);
    for signal in [change(Change::Add(2)), change(Change::Set(9)), change(Change::Add(1))] {
        let tried = p.a.try_run(&Request { signal, ..write }).expect("written");
        assert!(matches!(tried, TryOutcome::Done(_)), "the owner was asked");
    }
    assert_eq!((last.load(Acquire), word.load(Acquire)), (0x0707_0707_0707_0707, 10));
    let forged = Advert { key: advert.key ^ 1, ..advert };
    let signal = Some(Signal { advert: forged, change: Change::Set(1), strong: false });
    let refused = p.a.run(&Request { signal, ..write }, &mut NoInterrupt);
    assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{refused:?}");
    assert_eq!(word.load(Acquire), 10);
    for (ep, mr) in [(&p.a, here), (&p.b, there)] {
        ep.deregister(mr).expect("unused");
    }
}

/// A mapped word could be changed at once, but the signal stands for a write that is still being
/// copied.
#[test]
fn a_strong_signal_to_mapped_memory_waits_for_a_long_write() {
    const LEN: usize = 48 << 20;
    let p = pair_with(|config| config.transport = Transport::Local);
    let (from, to) = (p.a.alloc(LEN).expect("memory"), p.b.alloc(LEN).expect("memory"));
    let words = p.b.alloc(4096).expect("memory");
    // SAFETY: aligned, zeroed, and there until the end of the test.
    let words = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<AtomicU64>(), 512) };
    // SAFETY: no other code accesses the memory while a transfer has it.
    let (from, to) = unsafe {
        let from = std::slice::from_raw_parts_mut(from.as_ptr(), LEN);
        (from, std::slice::from_raw_parts_mut(to.as_ptr(), LEN))
    };
    let (here, there) = (register(&p.a, from), register(&p.b, to));
    let of_words = register_words(&p.b, words);
    let (data, word) =
        (advert_word(&p.b, of_words, &words[0]), advert_word(&p.b, of_words, &words[9]));
    until_mapped(&p, &[advert(&p.b, there, to), word]);
    for round in 1..=8_u8 {
        from.fill(round);
        let (iovs, adverts) = ([iov(here, from)], [advert(&p.b, there, to)]);
        let long = Request { context: 5, ..request(p.to_b, Op::Write, &iovs, &adverts) };
        let long = p.a.post(&long).expect("posted");
        let signal = Some(Signal { advert: word, change: Change::Add(1), strong: true });
        let (iovs, adverts) = ([iov(here, &from[..8])], [data]);
        let short = request(p.to_b, Op::Write, &iovs, &adverts);
        let done = p.a.run(&Request { context: 5, signal, ..short }, &mut NoInterrupt);
        done.expect("signalled");
        assert_eq!(words[9].load(Acquire), u64::from(round));
        assert!(to.iter().all(|byte| *byte == round), "the signal came before the bytes");
        finish(&p.a, long).expect("written");
    }
}

#[test]
fn a_signalled_write_for_which_there_is_no_room_has_moved_nothing() {
    for (link, p) in pairs().into_iter().take(2) {
        let (mut from, mut to, mut room) = (pattern(64, 3), vec![0; 64], vec![0; 64]);
        let word = [AtomicU64::new(0)];
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let (into, of_word) = (register(&p.a, &mut room), register_words(&p.b, &word));
        let (iovs, adverts) = ([iov(here, &from)], [advert(&p.b, there, &to)]);
        let change = Change::Add(1);
        let signal =
            Some(Signal { advert: advert_word(&p.b, of_word, &word[0]), change, strong: false });
        let write = Request { signal, ..request(p.to_b, Op::Write, &iovs, &adverts) };
        let targets = [iov(into, &room)];
        let recv = request(p.to_b, Op::Recv, &targets, &[]);
        let first = p.a.post(&recv).expect("there is room");
        while p.a.post(&recv).is_ok() {}
        let refused = p.a.run(&write, &mut NoInterrupt);
        assert!(matches!(refused, Err(Error::Full { .. })), "{link}: {refused:?}");
        assert!(to.iter().all(|byte| *byte == 0) && word[0].load(Acquire) == 0, "{link}");
        p.a.cancel(first).expect("known");
        p.a.run(&write, &mut NoInterrupt).expect("there is room again");
        assert!(to == from && word[0].load(Acquire) == 1, "{link}");
        p.a.disconnect(p.to_b).expect("it was there");
    }
}

/// Waits until a worker has mapped the memory that the owner offers.
fn until_mapped(p: &Pair, adverts: &[Advert]) {
    let begun = Instant::now();
    while !adverts.iter().all(|advert| p.a.path(p.to_b, advert).expect("a path") == "mapped") {
        assert!(begun.elapsed() < Duration::from_secs(20), "the memory is not mapped");
        std::thread::yield_now();
    }
}

#[test]
fn memory_from_alloc_is_mapped() {
    let p = pair_with(|config| (config.transport, config.cma) = (Transport::Local, false));
    let (from, to) = (p.a.alloc(1 << 20).expect("memory"), p.b.alloc(1 << 20).expect("memory"));
    // SAFETY: no other code accesses the memory while it is written here.
    let (from, to) = unsafe {
        let from = std::slice::from_raw_parts_mut(from.as_ptr(), from.len());
        (from, std::slice::from_raw_parts_mut(to.as_ptr(), to.len()))
    };
    from.copy_from_slice(&pattern(1 << 20, 7));
    let (here, there) = (register(&p.a, from), register(&p.b, to));
    let adverts = [advert(&p.b, there, to)];
    let done = p.a.run(&request(p.to_b, Op::Write, &[iov(here, from)], &adverts), &mut NoInterrupt);
    done.expect("written");
    assert!(from == to);
}

#[test]
fn nobody_answers() {
    let ep = Endpoint::new(config(Transport::Auto)).expect("an endpoint");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = silent.local_addr().expect("its address");
    let limit = Some(Duration::from_millis(200));
    let failed = ep.connect(addr, limit, &mut NoInterrupt);
    assert!(matches!(failed, Err(Error::Connect { .. })), "{failed:?}");
    drop(silent);
    let failed = ep.connect(addr, limit, &mut NoInterrupt);
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
            let refused = from.connect(to.addr(), None, &mut NoInterrupt);
            assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
        }
    }
    let right = with(Some(b"0123456789abcdef"));
    right.connect(keyed.addr(), None, &mut NoInterrupt).expect("the same key");
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
fn bytes_that_moved_are_counted_on_every_path() {
    for (link, p) in pairs() {
        let mut ours = vec![1; 1 << 20];
        let mut theirs = vec![2; 1 << 20];
        let (here, there) = (register(&p.a, &mut ours), register(&p.b, &mut theirs));
        let advert = [advert(&p.b, there, &theirs)];
        let before = p.a.stats().expect("ours");
        // The caller itself moves the short ones where that is possible.
        for len in [64, 1 << 20] {
            for op in [Op::Write, Op::Read] {
                let piece = [iov(here, &ours[..len])];
                let done = p.a.run(&request(p.to_b, op, &piece, &advert), &mut NoInterrupt);
                done.expect("it moves");
            }
        }
        p.a.run_notif(p.to_b, b"told", None, &mut NoInterrupt).expect("told");
        let word = [AtomicU64::new(0)];
        let words = register_words(&p.b, &word);
        let change = Change::Add(1);
        let signal = Signal { advert: advert_word(&p.b, words, &word[0]), change, strong: false };
        let piece = [iov(here, &ours[..64])];
        let write = request(p.to_b, Op::Write, &piece, &advert);
        p.a.run(&Request { signal: Some(signal), ..write }, &mut NoInterrupt).expect("written");
        let received = (1 << 20) + 64;
        let sent = received + 64;
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
        // The thread that ended the last transfer may still be counting it.
        let begun = Instant::now();
        while counts() != [6, 6, sent, received, 1] {
            let counts = counts();
            assert!(begun.elapsed() < Duration::from_secs(20), "{link}: {counts:?}");
            std::thread::yield_now();
        }
    }
}

/// A receiver may close as soon as it has a notification: the sender learns that its message has
/// arrived, and not that the peer is gone.
#[test]
fn a_notification_that_was_taken_has_arrived() {
    for transport in [Transport::Local, Transport::Tcp] {
        for len in [3, 100_000].repeat(30) {
            let p = pair_with(|config| config.transport = transport);
            let b = p.b.clone();
            let told = std::thread::spawn(move || {
                let taken = b.wait_notifs(Some(Duration::from_secs(20)), &mut NoInterrupt);
                b.close().expect("closed");
                taken.expect("an endpoint").len()
            });
            // Until the receiver sleeps, and a worker delivers.
            std::thread::sleep(Duration::from_millis(2));
            let sent = p.a.run_notif(p.to_b, vec![7; len], None, &mut NoInterrupt);
            assert!(sent.is_ok(), "{transport:?} {len}: {sent:?}");
            assert_eq!(told.join().expect("no panic"), 1);
        }
    }
}
