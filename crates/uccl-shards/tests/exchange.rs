//! Publishers and readers of one process.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use uccl_p2p::{Config, Endpoint, NoInterrupt, Transport};
use uccl_shards::{
    Error, FanOut, Manifest, Mark, Options, Party, Publisher, Reader, Shard, Span, plan::area::Area,
};

/// Longer than anything takes that has to happen.
const FAR: Option<Duration> = Some(Duration::from_secs(30));
const BOTH: [Transport; 2] = [Transport::Tcp, Transport::Local];

fn endpoint(transport: Transport) -> Endpoint {
    let bind = Some([127, 0, 0, 1].into());
    Endpoint::new(Config { bind, port: Some(0), transport, ..Config::default() }).expect("one")
}

/// Memory that peers read while its owner writes it, so that every access is volatile.
struct Memory(Vec<u8>);

impl Memory {
    fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    fn span(&self) -> Span {
        Span { ptr: self.0.as_ptr() as usize, len: self.0.len() }
    }

    fn at(&self, at: usize) -> *mut u8 {
        assert!(at < self.0.len());
        // SAFETY: inside the vector.
        unsafe { self.0.as_ptr().cast_mut().add(at) }
    }

    fn set(&self, at: usize, byte: u8) {
        // SAFETY: the vector is only accessed by volatile operations and by the engine.
        unsafe { self.at(at).write_volatile(byte) };
    }

    fn get(&self, at: usize) -> u8 {
        // SAFETY: as for `set`.
        unsafe { self.at(at).read_volatile() }
    }

    fn fill(&self, byte: u8) {
        (0..self.0.len()).for_each(|at| self.set(at, byte));
    }

    fn all(&self, byte: u8) -> bool {
        (0..self.0.len()).all(|at| self.get(at) == byte)
    }
}

/// Elements of one byte of the tensor `w`, which has this shape.
fn shard(memory: &Memory, shape: [u64; 2], offsets: [u64; 2], sizes: [u64; 2]) -> Shard {
    Shard {
        name: "w".into(),
        dtype: "uint8".into(),
        element_bytes: 1,
        shape: shape.to_vec(),
        area: Area { offsets: offsets.to_vec(), sizes: sizes.to_vec() },
        ptr: memory.span().ptr,
        memory: memory.span(),
    }
}

fn publisher(endpoint: &Endpoint, shards: &[Shard]) -> Publisher {
    // SAFETY: each test closes the endpoint, or ends, before it frees the memory.
    unsafe { Publisher::new(endpoint, shards) }.expect("registered")
}

fn reader(endpoint: &Endpoint, shards: &[Shard]) -> Reader {
    // SAFETY: each test closes the endpoint, or ends, before it frees the memory.
    unsafe { Reader::new(endpoint, shards) }.expect("registered")
}

fn party(publishers: &[&Publisher], readers: &[&Reader]) -> Party {
    let through = |manifest: Manifest| {
        Manifest::decode(&manifest.encode().expect("text")).expect("what was encoded")
    };
    Party {
        sources: publishers.iter().map(|p| through(p.manifest().expect("open"))).collect(),
        targets: readers.iter().map(|r| through(r.manifest().expect("open"))).collect(),
        // Ranks of one process are on one host, where the choice is to have no tree.
        options: Options { fan_out: FanOut::AtMost(4), ..Options::default() },
    }
}

fn join(publishers: &[&Publisher], readers: &[&Reader]) {
    let party = party(publishers, readers);
    for (index, publisher) in publishers.iter().enumerate() {
        publisher.join(&party, index).expect("a plan");
    }
    for (index, reader) in readers.iter().enumerate() {
        reader.join(&party, index).expect("a plan");
    }
}

fn close(endpoints: &[Endpoint]) {
    endpoints.iter().for_each(|endpoint| endpoint.close().expect("closed"));
}

#[test]
fn rows_become_columns() {
    const ROWS: u64 = 16;
    const COLUMNS: u64 = 10;
    for transport in BOTH {
        let ends: Vec<Endpoint> = (0..4).map(|_| endpoint(transport)).collect();
        let memories: Vec<Memory> = (0..4).map(|_| Memory::new(80)).collect();
        let shape = [ROWS, COLUMNS];
        let rows = |i: usize| shard(&memories[i], shape, [i as u64 * 8, 0], [8, COLUMNS]);
        let columns = |i: usize| shard(&memories[2 + i], shape, [0, i as u64 * 5], [ROWS, 5]);
        let publishers = [0, 1].map(|i| publisher(&ends[i], &[rows(i)]));
        let readers = [0, 1].map(|i| reader(&ends[2 + i], &[columns(i)]));
        join(&publishers.each_ref(), &readers.each_ref());
        for version in 1..4 {
            for (i, publisher) in publishers.iter().enumerate() {
                publisher.begin();
                (0..80).for_each(|at| memories[i].set(at, (i * 80 + at) as u8 ^ version as u8));
                publisher.publish(version).expect("a new version");
            }
            for (i, reader) in readers.iter().enumerate() {
                let fetched = reader.fetch(version, FAR, &mut NoInterrupt).expect("all is there");
                assert_eq!((fetched.version, fetched.bytes, fetched.retries), (version, 80, 0));
                assert_eq!(reader.mark(), Mark::whole(version));
                for at in 0..80 {
                    let (row, column) = (at / 5, i * 5 + at % 5);
                    let expected = (row * COLUMNS as usize + column) as u8 ^ version as u8;
                    assert_eq!(memories[2 + i].get(at), expected);
                }
            }
            for publisher in &publishers {
                publisher.wait_taken(version, FAR, &mut NoInterrupt).expect("both have it");
            }
        }
        close(&ends);
    }
}

#[test]
fn a_version_arrives_whole_while_its_source_changes() {
    const LEN: usize = 1 << 20;
    const FETCHES: u32 = 10;
    for transport in BOTH {
        let ends = [endpoint(transport), endpoint(transport)];
        let (from, to) = (Memory::new(LEN), Memory::new(LEN));
        let part = |memory: &Memory| shard(memory, [LEN as u64, 1], [0, 0], [LEN as u64, 1]);
        let publisher = publisher(&ends[0], &[part(&from)]);
        let reader = reader(&ends[1], &[part(&to)]);
        join(&[&publisher], &[&reader]);
        let (is_over, fetches) = (AtomicBool::new(false), AtomicU32::new(0));
        let retries = thread::scope(|scope| {
            scope.spawn(|| {
                let (mut fetched, mut pause) = (0, Duration::ZERO);
                for version in 1.. {
                    publisher.begin();
                    from.fill(version as u8);
                    publisher.publish(version).expect("a new version");
                    if is_over.load(SeqCst) {
                        break;
                    }
                    // A version lasts longer than the one before, until a fetch gets through: the
                    // short ones interrupt fetches on every machine, and one is long enough.
                    let now = fetches.load(SeqCst);
                    pause = match fetched == now {
                        true => pause * 3 / 2 + Duration::from_millis(1),
                        false => pause / 4,
                    };
                    fetched = now;
                    thread::sleep(pause);
                }
            });
            let mut retries = 0;
            for _ in 0..FETCHES {
                let fetched = reader.fetch(1, FAR, &mut NoInterrupt).expect("a whole version");
                assert!(to.all(fetched.version as u8), "version {}", fetched.version);
                retries += fetched.retries;
                fetches.fetch_add(1, SeqCst);
            }
            is_over.store(true, SeqCst);
            retries
        });
        println!("{transport:?}: {retries} retries");
        close(&ends);
    }
}

#[test]
fn a_version_in_the_making_is_not_read() {
    let ends = [endpoint(Transport::Tcp), endpoint(Transport::Tcp)];
    let (from, to) = (Memory::new(64), Memory::new(64));
    let part = |memory: &Memory| shard(memory, [64, 1], [0, 0], [64, 1]);
    let publisher = publisher(&ends[0], &[part(&from)]);
    let reader = reader(&ends[1], &[part(&to)]);
    let early = reader.fetch(1, FAR, &mut NoInterrupt).expect_err("no plan");
    assert!(matches!(early, Error::Invalid(_)), "{early}");
    join(&[&publisher], &[&reader]);
    publisher.publish(1).expect("the first version");
    assert!(matches!(publisher.publish(1), Err(Error::Invalid(_))), "a version comes once");
    publisher.begin();
    let soon = Some(Duration::from_millis(50));
    let late = reader.fetch(1, soon, &mut NoInterrupt).expect_err("it is not published");
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    assert!(!reader.mark().is_whole() && to.all(0), "no byte has come");
    publisher.publish(2).expect("the next version");
    let next = reader.fetch(3, soon, &mut NoInterrupt).expect_err("there is only version 2");
    assert!(matches!(next, Error::Timeout { .. }), "{next}");
    assert_eq!(reader.fetch(1, FAR, &mut NoInterrupt).expect("version 2").version, 2);
    let none = publisher.wait_taken(3, soon, &mut NoInterrupt).expect_err("nobody has it");
    assert_eq!(none.to_string(), "50ms passed: target 0 has not taken version 3");
    close(&ends);
}

#[test]
fn readers_pass_bytes_on() {
    const LEN: usize = 1 << 20;
    const READERS: usize = 5;
    let ends: Vec<Endpoint> = (0..=READERS).map(|_| endpoint(Transport::Tcp)).collect();
    let memories: Vec<Memory> = (0..=READERS).map(|_| Memory::new(LEN)).collect();
    let part = |i: usize| shard(&memories[i], [LEN as u64, 1], [0, 0], [LEN as u64, 1]);
    let publisher = publisher(&ends[0], &[part(0)]);
    let readers: Vec<Reader> = (1..=READERS).map(|i| reader(&ends[i], &[part(i)])).collect();
    join(&[&publisher], &readers.iter().collect::<Vec<_>>());
    for version in 1..4_u64 {
        publisher.begin();
        memories[0].fill(version as u8);
        publisher.publish(version).expect("a new version");
        thread::scope(|scope| {
            for (reader, memory) in readers.iter().zip(&memories[1..]) {
                scope.spawn(move || {
                    reader.fetch(version, FAR, &mut NoInterrupt).expect("a whole version");
                    assert!(memory.all(version as u8));
                    reader.wait_taken(version, FAR, &mut NoInterrupt).expect("all have it");
                });
            }
        });
        publisher.wait_taken(version, FAR, &mut NoInterrupt).expect("all have it");
    }
    // A target whose memory changes is not read from.
    readers[0].begin();
    assert_eq!(readers[0].mark().version(), 3);
    assert!(!readers[0].mark().is_whole());
    let soon = Some(Duration::from_millis(100));
    let mut waiting = readers[1..].iter().map(|reader| reader.fetch(3, soon, &mut NoInterrupt));
    let is_late = |fetch: Result<_, _>| matches!(fetch, Err(Error::Timeout { .. }));
    assert!(waiting.any(is_late));
    let read: u64 = ends[1..].iter().map(|end| end.stats().expect("open").bytes_received).sum();
    assert!(read >= 3 * (READERS * LEN) as u64);
    close(&ends);
}

#[test]
fn no_byte_lands_after_an_abort() {
    const LEN: usize = 24 << 20;
    for transport in BOTH {
        let ends = [endpoint(transport), endpoint(transport)];
        let (from, to) = (Memory::new(LEN), Memory::new(LEN));
        let part = |memory: &Memory| shard(memory, [LEN as u64, 1], [0, 0], [LEN as u64, 1]);
        let publisher = publisher(&ends[0], &[part(&from)]);
        let reader = reader(&ends[1], &[part(&to)]);
        join(&[&publisher], &[&reader]);
        publisher.publish(1).expect("the first version");
        reader.fetch(1, FAR, &mut NoInterrupt).expect("the first version");
        publisher.begin();
        from.fill(7);
        publisher.publish(2).expect("the second version");
        thread::scope(|scope| {
            let fetch = scope.spawn(|| reader.fetch(2, FAR, &mut NoInterrupt));
            // The first byte has landed, and most have not.
            let begun = Instant::now();
            while to.get(0) == 0 && begun.elapsed() < Duration::from_secs(20) {
                thread::yield_now();
            }
            reader.abort();
            let last = to.get(LEN - 1);
            match fetch.join().expect("no panic") {
                Err(Error::Aborted) => assert!(!reader.mark().is_whole()),
                // It was over first.
                Ok(fetched) => assert_eq!(fetched.version, 2),
                Err(e) => panic!("{e}"),
            }
            thread::sleep(Duration::from_millis(50));
            assert_eq!(to.get(LEN - 1), last, "bytes landed after the abort");
        });
        let again = reader.fetch(2, FAR, &mut NoInterrupt).expect("an abort ends one fetch");
        assert!(again.version == 2 && to.all(7));
        close(&ends);
    }
}

#[test]
fn a_lost_publisher_fails_the_fetch() {
    let ends = [endpoint(Transport::Tcp), endpoint(Transport::Tcp)];
    let (from, to) = (Memory::new(64), Memory::new(64));
    let part = |memory: &Memory| shard(memory, [64, 1], [0, 0], [64, 1]);
    let publisher = publisher(&ends[0], &[part(&from)]);
    let reader = reader(&ends[1], &[part(&to)]);
    join(&[&publisher], &[&reader]);
    publisher.publish(1).expect("the first version");
    reader.fetch(1, FAR, &mut NoInterrupt).expect("the first version");
    publisher.close().expect("nobody reads");
    let refused = reader.fetch(1, FAR, &mut NoInterrupt).expect_err("its regions have ended");
    assert!(matches!(refused, Error::Engine(_)), "{refused}");
    ends[0].close().expect("closed");
    let lost = reader.fetch(1, FAR, &mut NoInterrupt).expect_err("the publisher is gone");
    assert!(matches!(lost, Error::Engine(_)), "{lost}");
    close(&ends);
}

#[test]
fn ranks_that_are_not_alike_are_refused() {
    let ends = [endpoint(Transport::Tcp), endpoint(Transport::Tcp)];
    let (from, to) = (Memory::new(64), Memory::new(64));
    let part = |memory: &Memory| shard(memory, [64, 1], [0, 0], [64, 1]);
    let publisher = publisher(&ends[0], &[part(&from)]);
    let other = Shard { dtype: "int8".into(), ..part(&to) };
    let reader = reader(&ends[1], &[other]);
    let both = party(&[&publisher], &[&reader]);
    let different = reader.join(&both, 0).expect_err("another type");
    assert_eq!(different.to_string(), "w has uint8[64, 1] at one rank and int8[64, 1] at another");
    assert!(matches!(reader.join(&both, 1), Err(Error::Invalid(_))), "there is one target");
    for bytes in [&b"{}"[..], b"", b"{\"format\":1}", b"\xff"] {
        assert!(matches!(Manifest::decode(bytes), Err(Error::Manifest(_))));
    }
    let text = String::from_utf8(both.sources[0].encode().expect("text")).expect("text");
    let newer = text.replace("\"format\":2", "\"format\":3");
    let refused = Manifest::decode(newer.as_bytes()).expect_err("another format");
    assert_eq!(
        refused.to_string(),
        "not a manifest of weights: its format is 3, this library reads 2"
    );
    close(&ends);
}
