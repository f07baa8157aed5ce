//! Memory that was given back by a deregistration, a close or a drop is its owner's: no byte of a
//! peer lands there, even if the peer was stopped in the middle of a write.
//!
//! `UCCL_TEST_ROUNDS` is the number of rounds of each case, `UCCL_TEST_MIB` the size of a write.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::{BufRead, BufReader, Lines},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use uccl_p2p::{
    Config, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, SharedBuf, Transport,
    wire::advert::Advert,
};

use self::loopback::on_loopback;

const ROLE: &str = "UCCL_TEST_WRITE_TO";
/// Lines that the peer prints.
const WRITING: &str = "writing";
const FORBIDDEN: &str = "the kernel forbids it";
/// Bytes that the peer writes, and that the owner writes once the memory is its own.
const THEIRS: u8 = 7;
const OURS: u8 = 0xa5;

fn number(variable: &str, or: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(or)
}

fn len() -> usize {
    number("UCCL_TEST_MIB", 16) << 20
}

/// The path on which the peer reaches the memory.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Link {
    Cma,
    Mapped,
    Rings,
}

const LINKS: [Link; 3] = [Link::Cma, Link::Mapped, Link::Rings];

impl Link {
    fn path(self) -> &'static str {
        match self {
            Self::Cma => "cma",
            Self::Mapped => "mapped",
            Self::Rings => "shm",
        }
    }
}

fn endpoint(link: Link, timeout: Duration) -> Endpoint {
    Endpoint::new(Config {
        transport: Transport::Local,
        num_cpus: 1,
        cma: link == Link::Cma,
        timeout,
        ..on_loopback()
    })
    .expect("an endpoint")
}

fn register(ep: &Endpoint, memory: &mut [u8]) -> MrId {
    // SAFETY: the memory outlives the endpoint.
    unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) }.expect("registered")
}

/// The other process: writes to an advert until its connection ends. It is a test, so that the test
/// binary can start it.
#[test]
fn second_process() {
    let Ok(target) = std::env::var(ROLE) else { return };
    let [link, addr, advert] = &target.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{target}")
    };
    let link = LINKS.into_iter().find(|known| format!("{known:?}") == *link).expect("a link");
    let bytes: Vec<u8> = (0..advert.len() / 2)
        .map(|i| u8::from_str_radix(&advert[2 * i..2 * i + 2], 16).expect("hex"))
        .collect();
    let adverts = [Advert::decode(&bytes).expect("an advert")];
    let mut memory = vec![THEIRS; len()];
    let ep = endpoint(link, Duration::from_secs(20));
    let mr = register(&ep, &mut memory);
    let conn = ep.connect(addr.parse().expect("an address"), None, &mut NoInterrupt);
    let iovs = [Iov { mr, ptr: memory.as_ptr() as usize, len: memory.len() }];
    let request = Request::new(conn.expect("connected"), Op::Write, &iovs, &adverts);
    let begun = Instant::now();
    while ep.path(request.conn, &adverts[0]).expect("connected") != link.path() {
        if begun.elapsed() > Duration::from_secs(5) {
            println!("\n{FORBIDDEN}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("\n{WRITING}");
    while ep.run(&request, &mut NoInterrupt).is_ok() {}
}

/// A handle of the other process.
struct Writer {
    process: Child,
    /// The rest of its output, which has to stay open.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Writer {
    /// Starts the process, and lets it reach the middle of a write; `None` if the link is not
    /// available.
    fn start(link: Link, ep: &Endpoint, advert: &Advert) -> Option<Self> {
        let hex: String = advert.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["second_process", "--exact", "--nocapture"])
            .env(ROLE, format!("{link:?} {} {hex}", ep.addr()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let said = lines.by_ref().map_while(Result::ok);
        let said = said.into_iter().find(|line| [WRITING, FORBIDDEN].contains(&line.as_str()));
        let writer = Self { process: child, _output: lines };
        if said.expect("it comes so far") == FORBIDDEN {
            eprintln!("skipped: {} is forbidden here", link.path());
            return None;
        }
        std::thread::sleep(Duration::from_micros(fastrand::u64(3_000..20_000)));
        Some(writer)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call; the child is not reaped yet, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }

    /// Stops the process; none of its threads runs when this returns.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: as above; the status is ours.
        let pid =
            unsafe { libc::waitpid(self.process.id() as i32, &raw mut status, libc::WUNTRACED) };
        assert!(pid as u32 == self.process.id() && libc::WIFSTOPPED(status));
    }

    /// Continues the process, and waits until it has noticed the end of its connection and exited.
    fn go_on(mut self) {
        self.signal(libc::SIGCONT);
        assert!(self.process.wait().expect("its end").success());
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Memory that a peer writes to: shared memory of an endpoint, or private memory.
enum Memory {
    Mapped(SharedBuf),
    Private(Vec<u8>),
}

impl Memory {
    fn new(link: Link, ep: &Endpoint) -> Self {
        match link {
            Link::Mapped => Self::Mapped(ep.alloc(len()).expect("memory")),
            Link::Cma | Link::Rings => Self::Private(vec![0; len()]),
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: the memory lives as long as the buffer, which is borrowed. The peer writes
            // there too, until it is known not to.
            Self::Mapped(buf) => unsafe { std::slice::from_raw_parts_mut(buf.as_ptr(), buf.len()) },
            Self::Private(bytes) => bytes,
        }
    }

    fn others(&mut self) -> usize {
        std::hint::black_box(self.bytes()).iter().filter(|byte| **byte != OURS).count()
    }
}

/// An endpoint with a peer that is stopped in the middle of a write to its memory.
struct StoppedWriter {
    ep: Endpoint,
    mr: MrId,
    memory: Memory,
    writer: Writer,
}

impl StoppedWriter {
    fn new(link: Link, timeout: Duration) -> Option<Self> {
        let ep = endpoint(link, timeout);
        let mut memory = Memory::new(link, &ep);
        let mr = register(&ep, memory.bytes());
        let (ptr, len) = (memory.bytes().as_ptr() as usize, memory.bytes().len());
        let advert = ep.advertise(mr, ptr, len).expect("advertised");
        let writer = Writer::start(link, &ep, &advert)?;
        writer.stop();
        Some(Self { ep, mr, memory, writer })
    }
}

/// A way to give memory back.
type GiveBack = fn(&Endpoint, MrId) -> Result<(), Error>;

const WAYS: [(&str, GiveBack); 2] =
    [("deregister", Endpoint::deregister), ("close", |ep, _| ep.close())];

/// One round with a peer that remains stopped. Returns whether the call reported that the peer may
/// still touch the memory.
fn stays_stopped(link: Link, (way, give_back): (&str, GiveBack)) -> bool {
    let Some(stopped) = StoppedWriter::new(link, Duration::from_millis(100)) else { return false };
    let StoppedWriter { ep, mr, mut memory, writer } = stopped;
    let given = give_back(&ep, mr);
    if let Err(e) = given {
        let named = matches!(&e, Error::StillTouched { regions, .. } if regions[..] == [mr]);
        assert!(named, "{link:?}, {way}: {e}");
        writer.go_on();
        // The same call waits once more, and by now the peer has released the memory.
        give_back(&ep, mr).unwrap_or_else(|e| panic!("{link:?}, {way}, again: {e}"));
        memory.bytes().fill(OURS);
        assert_eq!(memory.others(), 0);
        assert!(matches!(ep.deregister(mr), Err(Error::UnknownRegion(_))));
        return true;
    }
    memory.bytes().fill(OURS);
    writer.go_on();
    assert_eq!(memory.others(), 0, "{link:?}, {way}: so many bytes landed afterwards");
    false
}

/// One round with a peer that continues while the call waits for it.
fn goes_on(link: Link, way: &str, give_back: impl FnOnce(Endpoint, MrId)) {
    let Some(stopped) = StoppedWriter::new(link, Duration::from_secs(20)) else { return };
    let StoppedWriter { ep, mr, mut memory, writer } = stopped;
    let waking = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        writer.go_on();
    });
    let kept = (way != "drop").then(|| ep.clone());
    give_back(ep, mr);
    memory.bytes().fill(OURS);
    drop(kept);
    waking.join().expect("it ends");
    assert_eq!(memory.others(), 0, "{link:?}, {way}: so many bytes landed afterwards");
}

fn rounds() -> usize {
    number("UCCL_TEST_ROUNDS", 2)
}

#[test]
fn a_peer_that_stays_stopped_touches_nothing_that_was_given_back() {
    for link in LINKS {
        for way in WAYS {
            let stuck = (0..rounds()).filter(|_| stays_stopped(link, way)).count();
            println!("{link:?}, {}: {stuck} of {} rounds kept the memory", way.0, rounds());
        }
    }
}

#[test]
fn a_peer_that_goes_on_is_waited_for() {
    for link in LINKS {
        for _ in 0..rounds() {
            goes_on(link, "deregister", |ep, mr| ep.deregister(mr).expect("it lets go"));
            goes_on(link, "close", |ep, _| ep.close().expect("it lets go"));
            goes_on(link, "drop", |ep, _| drop(ep));
        }
    }
}
