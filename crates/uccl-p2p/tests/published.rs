//! Regions that are published and named by address, over each link that this machine has.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use uccl_p2p::{
    AddressPiece, AddressRequest, Config, ConnId, Endpoint, Error, Iov, MrId, NoInterrupt, Op,
    Outcome, Request, Status, Transport,
};

struct Pair {
    a: Endpoint,
    b: Endpoint,
    to_b: ConnId,
}

fn config(transport: Transport) -> Config {
    let bind = Some([127, 0, 0, 1].into());
    Config { bind, port: Some(0), transport, num_cpus: 2, ..Config::default() }
}

fn pair_of(change: [&dyn Fn(&mut Config); 2]) -> Pair {
    let [a, b] = change.map(|change| {
        let mut config = config(Transport::Auto);
        change(&mut config);
        Endpoint::new(config).expect("an endpoint")
    });
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    b.accept(None, &mut NoInterrupt).expect("accepted");
    Pair { a, b, to_b }
}

fn register(ep: &Endpoint, memory: &mut [u8]) -> MrId {
    // SAFETY: the tests keep their memory until their endpoints are closed.
    unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) }.expect("registered")
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(167) >> 4) as u8 ^ i as u8 ^ seed).collect()
}

/// Both ends publish.
fn pairs() -> Vec<(&'static str, Pair)> {
    let of = |transport, cma: bool, streams| {
        let change = move |config: &mut Config| {
            (config.transport, config.cma, config.publish) = (transport, cma, true);
            config.tcp_streams = streams;
        };
        pair_of([&change, &change])
    };
    vec![
        ("local", of(Transport::Local, true, 0)),
        ("shm", of(Transport::Local, false, 0)),
        ("tcp", of(Transport::Tcp, true, 1)),
        ("tcp x3", of(Transport::Tcp, true, 3)),
        ("fifo", of(Transport::Fifo, true, 0)),
    ]
}

fn tcp() -> Pair {
    let change = |config: &mut Config| {
        (config.transport, config.publish) = (Transport::Tcp, true);
    };
    pair_of([&change, &change])
}

fn piece(local: &[u8], remote: &[u8]) -> AddressPiece {
    let (local, remote, len) = (local.as_ptr() as usize, remote.as_ptr() as u64, local.len());
    AddressPiece { local, remote, len }
}

fn run(ep: &Endpoint, conn: ConnId, op: Op, pieces: &[AddressPiece]) -> Result<Outcome, Error> {
    let request = AddressRequest { conn, op, pieces, timeout: None };
    ep.run_by_address(&request, &mut NoInterrupt)
}

fn is_unpublished(result: &Result<Outcome, Error>) -> bool {
    matches!(result, Err(Error::NotPublished { .. }))
}

#[test]
fn published_memory_is_read_and_written_by_address() {
    for (link, p) in pairs() {
        for len in [1, 4096, 3 << 20] {
            let (mut from, mut to) = (pattern(len, 1), vec![0; len]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            p.b.publish(there).expect("it may");
            p.b.publish(there).expect("again");
            let outcome = run(&p.a, p.to_b, Op::Write, &[piece(&from, &to)]).expect(link);
            assert_eq!(outcome.bytes, len as u64, "{link}");
            assert!(to == from, "{link}: the bytes of {len}");
            from.fill(0);
            run(&p.a, p.to_b, Op::Read, &[piece(&from, &to)]).expect(link);
            assert!(to == from, "{link}: the bytes of {len}");
            p.a.deregister(here).expect("unused");
            p.b.deregister(there).expect("unused");
        }
    }
}

#[test]
fn nothing_is_published_that_was_not_published() {
    for publishes in [false, true] {
        let asked = |config: &mut Config| {
            (config.transport, config.publish) = (Transport::Tcp, publishes);
        };
        let asker = |config: &mut Config| config.transport = Transport::Tcp;
        let p = pair_of([&asker, &asked]);
        let (mut from, mut to) = (pattern(64, 1), vec![0; 64]);
        let (_, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let write = || run(&p.a, p.to_b, Op::Write, &[piece(&from, &to)]);
        let refused = write();
        assert!(is_unpublished(&refused), "{refused:?}");
        let addr = to.as_ptr() as u64;
        let look = || p.a.look_up(p.to_b, addr, 64, None, &mut NoInterrupt);
        assert!(matches!(look(), Err(Error::NotPublished { .. })));
        match publishes {
            true => {
                p.b.publish(there).expect("it may");
                write().expect("it is published now");
                assert_eq!(look().expect("found").len(), 1);
            }
            false => {
                let refused = p.b.publish(there).expect_err("the endpoint does not").to_string();
                assert!(refused.contains("UCCL_P2P_PUBLISH"), "{refused}");
                assert!(is_unpublished(&write()));
                assert!(to.iter().all(|byte| *byte == 0));
            }
        }
        p.a.check_connection(p.to_b).expect("it lives");
    }
}

#[test]
fn a_range_may_span_regions_and_no_gap() {
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(300, 3), vec![0; 300]);
        for range in [0..100, 100..300] {
            register(&p.a, &mut from[range]);
        }
        let regions: Vec<_> = [0..150, 150..200, 210..300]
            .into_iter()
            .map(|range| register(&p.b, &mut to[range]))
            .collect();
        regions.iter().for_each(|mr| p.b.publish(*mr).expect("it may"));
        run(&p.a, p.to_b, Op::Write, &[piece(&from[20..190], &to[20..190])]).expect(link);
        assert_eq!(to[20..190], from[20..190], "{link}");
        let adverts =
            p.a.look_up(p.to_b, to[20..].as_ptr() as u64, 170, None, &mut NoInterrupt).expect(link);
        let lens: Vec<_> = adverts.iter().map(|advert| advert.len).collect();
        assert_eq!(lens, [130, 40], "{link}");
        for range in [190..220, 200..205, 290..300] {
            let past = piece(&from[range.clone()], &to[range.start..]);
            let past = AddressPiece { len: range.len() + usize::from(range.end == 300), ..past };
            let refused = run(&p.a, p.to_b, Op::Read, &[past]);
            // Past the end, memory is registered on neither side.
            assert!(
                is_unpublished(&refused) || matches!(refused, Err(Error::Invalid(_))),
                "{link} {range:?}: {refused:?}"
            );
        }
        assert_eq!(from, pattern(300, 3), "{link}: nothing was read");
    }
}

#[test]
fn a_stale_key_is_refused_and_fetched_anew() {
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(4096, 1), vec![0; 4096]);
        register(&p.a, &mut from);
        let there = register(&p.b, &mut to);
        p.b.publish(there).expect("it may");
        let write = |range: std::ops::Range<usize>, to: &[u8]| {
            run(&p.a, p.to_b, Op::Write, &[piece(&from[range.clone()], &to[range])])
        };
        write(0..4096, &to).expect(link);
        // It ends.
        p.b.deregister(there).expect("unused");
        to.fill(0);
        let refused = write(0..4096, &to);
        assert!(is_unpublished(&refused), "{link}: {refused:?}");
        // Other memory takes its slot, and other regions its addresses: none of them is published.
        let mut other = vec![0; 4096];
        let [elsewhere, again] = [register(&p.b, &mut other), register(&p.b, &mut to)];
        let refused = write(0..4096, &to);
        assert!(is_unpublished(&refused), "{link}: {refused:?}");
        assert!(to.iter().chain(&other).all(|byte| *byte == 0), "{link}: it was written to");
        // It is published again, and found without the caller's doing.
        p.b.publish(again).expect("it may");
        write(0..4096, &to).expect(link);
        assert!(to == from, "{link}");
        // In two halves now; the key of the whole is stale.
        p.b.deregister(again).expect("unused");
        to.fill(0);
        let (low, high) = to.split_at_mut(2048);
        for half in [register(&p.b, low), register(&p.b, high)] {
            p.b.publish(half).expect("it may");
        }
        write(1000..3000, &to).expect(link);
        assert_eq!(to[1000..3000], from[1000..3000], "{link}");
        assert!(other.iter().all(|byte| *byte == 0), "{link}: other memory was written to");
        p.b.deregister(elsewhere).expect("unused");
    }
}

#[test]
fn a_transfer_that_was_posted_ends_when_it_is_asked() {
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(1 << 20, 1), vec![0; 1 << 20]);
        register(&p.a, &mut from);
        let there = register(&p.b, &mut to);
        let pieces = [piece(&from, &to)];
        let request =
            AddressRequest { conn: p.to_b, op: Op::Write, pieces: &pieces, timeout: None };
        let unpublished = p.a.post_by_address(&request).expect(link);
        let ended = unpublished.wait(None, &mut NoInterrupt).expect(link);
        assert!(matches!(ended, Status::Failed(Error::NotPublished { .. })), "{link} {ended:?}");
        p.b.publish(there).expect("it may");
        for round in 0..2 {
            let posted = p.a.post_by_address(&request).expect(link);
            let ended = loop {
                match posted.poll().expect(link) {
                    Status::Pending => thread::yield_now(),
                    ended => break ended,
                }
            };
            assert!(matches!(ended, Status::Done(o) if o.bytes == 1 << 20), "{link} {ended:?}");
            assert!(to == from, "{link}");
            to.fill(0);
            if round == 0 {
                // The next one begins with a stale key.
                p.b.deregister(there).expect("unused");
                p.b.publish(register(&p.b, &mut to)).expect("it may");
            }
        }
        let cancelled = p.a.post_by_address(&request).expect(link);
        let ended = cancelled.cancel().expect(link);
        assert!(!matches!(ended, Status::Pending), "{link}");
        let again = cancelled.poll().expect(link);
        assert_eq!(
            matches!(ended, Status::Done(_)),
            matches!(again, Status::Done(_)),
            "{link}: {ended:?}, {again:?}"
        );
    }
}

#[test]
fn a_region_is_looked_up_once() {
    let p = tcp();
    let (mut from, mut to) = (pattern(64, 1), vec![0; 64]);
    register(&p.a, &mut from);
    p.b.publish(register(&p.b, &mut to)).expect("it may");
    // Ids tell how many transfers there were.
    let count = || p.a.send_notif(p.to_b, b"", None).expect("sent").0 >> 32;
    let write = || run(&p.a, p.to_b, Op::Write, &[piece(&from, &to)]).expect("written");
    let begun = count();
    write();
    let first = count();
    write();
    let second = count();
    assert_eq!(first - begun, 3, "a look-up, a write, a notification");
    assert_eq!(second - first, 2, "a write, a notification");
}

/// An ended region covers its successors in the list of the asker's.
#[test]
fn a_look_up_tells_of_the_regions_that_there_are() {
    let p = tcp();
    let mut to = vec![0; 64];
    let there = register(&p.b, &mut to);
    p.b.publish(there).expect("it may");
    let addr = to.as_ptr() as u64;
    let find = |at: u64, len: u64| {
        p.a.look_up(p.to_b, addr + at, len, None, &mut NoInterrupt).expect("published")
    };
    let old = find(0, 64);
    p.b.deregister(there).expect("unused");
    let (low, high) = to.split_at_mut(32);
    for half in [register(&p.b, low), register(&p.b, high)] {
        p.b.publish(half).expect("it may");
    }
    let new = find(0, 64);
    assert_eq!((old.len(), new.len()), (1, 2));
    assert!(new.iter().all(|advert| advert.key != old[0].key), "a stale key");
    assert_eq!(find(40, 8)[0].key, new[1].key);
}

/// One request names as many regions as an inference engine has blocks.
#[test]
fn thousands_of_regions_are_found() {
    const REGIONS: usize = 10_000;
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(REGIONS * 16, 1), vec![0; REGIONS * 16]);
        register(&p.a, &mut from);
        for (at, region) in to.chunks_mut(8).enumerate() {
            // Every second one is published: no two lie side by side.
            let mr = register(&p.b, region);
            if at % 2 == 0 {
                p.b.publish(mr).expect("it may");
            }
        }
        let pieces: Vec<_> =
            from.chunks(16).zip(to.chunks(16)).map(|(from, to)| piece(&from[..8], to)).collect();
        let outcome = run(&p.a, p.to_b, Op::Write, &pieces).expect(link);
        assert_eq!(outcome.bytes, REGIONS as u64 * 8, "{link}");
        for (from, to) in from.chunks(16).zip(to.chunks(16)) {
            assert_eq!((&to[..8], &to[8..]), (&from[..8], &[0; 8][..]), "{link}");
        }
    }
}

/// While peers write by address, the owner registers and ends regions of the same memory.
#[test]
fn regions_come_and_go_under_writers() {
    let p = tcp();
    let (mut from, mut steady, mut shaky) = (pattern(4096, 1), vec![0; 4096], vec![0; 4096]);
    register(&p.a, &mut from);
    p.b.publish(register(&p.b, &mut steady)).expect("it may");
    let done = AtomicBool::new(false);
    let (addr, len) = (shaky.as_mut_ptr() as usize, shaky.len());
    thread::scope(|scope| {
        let churn = scope.spawn(|| {
            for _ in 0..300 {
                // SAFETY: it stays until both endpoints are dropped.
                let mr = unsafe { p.b.register(addr, len) }.expect("registered");
                p.b.publish(mr).expect("it may");
                thread::yield_now();
                p.b.deregister(mr).expect("unused");
            }
            done.store(true, Relaxed);
        });
        let writers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut written = 0;
                    while !done.load(Relaxed) {
                        run(&p.a, p.to_b, Op::Write, &[piece(&from, &steady)]).expect("steady");
                        let shaken = [AddressPiece {
                            local: from.as_ptr() as usize,
                            remote: addr as u64,
                            len,
                        }];
                        match run(&p.a, p.to_b, Op::Write, &shaken) {
                            Ok(_) => written += 1,
                            Err(Error::NotPublished { .. } | Error::RemoteAccess { .. }) => {}
                            Err(e) => panic!("{e}"),
                        }
                    }
                    written
                })
            })
            .collect();
        churn.join().expect("no panic");
        writers.into_iter().for_each(|writer| _ = writer.join().expect("no panic"));
    });
    assert_eq!(steady, from);
    p.a.check_connection(p.to_b).expect("it lives");
}

#[test]
fn a_request_that_makes_no_sense_is_refused() {
    let p = tcp();
    let (mut from, mut to) = (pattern(64, 1), vec![0; 64]);
    register(&p.a, &mut from);
    p.b.publish(register(&p.b, &mut to)).expect("it may");
    let good = piece(&from, &to);
    let elsewhere = [0_u8; 64];
    for (op, bad) in [
        (Op::Send, good),
        (Op::Write, AddressPiece { local: elsewhere.as_ptr() as usize, ..good }),
        (Op::Write, AddressPiece { len: usize::MAX, ..good }),
        (Op::Write, AddressPiece { remote: u64::MAX, ..good }),
    ] {
        let refused = run(&p.a, p.to_b, op, &[bad]);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    assert_eq!(run(&p.a, p.to_b, Op::Write, &[]).expect("nothing to do").bytes, 0);
    let empty = AddressPiece { len: 0, ..good };
    assert_eq!(run(&p.a, p.to_b, Op::Write, &[empty]).expect("nothing to do").bytes, 0);
    run(&p.a, p.to_b, Op::Write, &[good, empty]).expect("it is sound");
    assert_eq!(to, from);
}

/// Published memory is behind the secret: without it there is no connection on which to ask.
#[test]
fn a_secret_keeps_strangers_from_asking() {
    let secret = |config: &mut Config| {
        (config.transport, config.publish) = (Transport::Tcp, true);
        config.psk = Some(b"0123456789abcdef".to_vec());
    };
    let p = pair_of([&secret, &secret]);
    let (mut from, mut to) = (pattern(64, 1), vec![0; 64]);
    register(&p.a, &mut from);
    p.b.publish(register(&p.b, &mut to)).expect("it may");
    run(&p.a, p.to_b, Op::Write, &[piece(&from, &to)]).expect("both know it");
    assert_eq!(to, from);
    let stranger = Endpoint::new(Config { publish: true, ..config(Transport::Tcp) });
    let stranger = stranger.expect("an endpoint");
    let refused = stranger.reach(p.b.addr(), Some(Duration::from_secs(20)), &mut NoInterrupt);
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn an_advert_that_was_looked_up_is_as_any_other() {
    let p = tcp();
    let (mut from, mut to) = (pattern(64, 1), vec![0; 64]);
    let here = register(&p.a, &mut from);
    p.b.publish(register(&p.b, &mut to)).expect("it may");
    let found = p.a.look_up(p.to_b, to.as_ptr() as u64, 64, None, &mut NoInterrupt);
    let adverts = found.expect("found");
    let iovs = [Iov { mr: here, ptr: from.as_ptr() as usize, len: from.len() }];
    let write = Request::new(p.to_b, Op::Write, &iovs, &adverts);
    p.a.run(&write, &mut NoInterrupt).expect("written");
    assert_eq!(to, from);
}
