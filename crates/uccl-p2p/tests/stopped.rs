//! A peer of this host that is stopped in the middle of an access to our memory: a transfer of its
//! own, or a copy that we asked for.

#[path = "support/loopback.rs"]
mod loopback;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use uccl_p2p::{
    Config, Endpoint, Error, Iov, MrId, NoInterrupt, Op, Request, Status, Transport,
    wire::advert::Advert,
};

use self::loopback::on_loopback;

const LEN: usize = 32 << 20;
/// Longer than anything takes that has to happen: an endpoint here gives a silent peer up early.
const FAR: Option<Duration> = Some(Duration::from_secs(20));
/// Bytes that transfers move, and that callers fill memory with once it is theirs.
const SENT: u8 = 7;
const OURS: u8 = 0xa5;
const ROLE: &str = "UCCL_TEST_WRITE_TO";
const OWNER: &str = "UCCL_TEST_OWNER";

fn endpoint() -> Endpoint {
    endpoint_with(true)
}

fn endpoint_with(ask_owners: bool) -> Endpoint {
    Endpoint::new(Config {
        transport: Transport::Local,
        num_cpus: 1,
        timeout: Duration::from_millis(500),
        ask_owners,
        ..on_loopback()
    })
    .expect("an endpoint")
}

fn register(ep: &Endpoint, memory: &mut [u8]) -> MrId {
    // SAFETY: the memory outlives the endpoint.
    unsafe { ep.register(memory.as_mut_ptr() as usize, memory.len()) }.expect("registered")
}

/// The other process: writes to an advert for ever. It is a test, so that the test binary can start
/// it.
#[test]
fn second_process() {
    let Ok(target) = std::env::var(ROLE) else { return };
    let (addr, advert) = target.split_once(' ').expect("an address and an advert");
    let adverts = [read_hex(advert)];
    let mut memory = vec![SENT; LEN];
    let ep = endpoint_with(false);
    let mr = register(&ep, &mut memory);
    let conn = ep.connect(addr.parse().expect("an address"), FAR, &mut NoInterrupt);
    let conn = conn.expect("connected");
    let iovs = [Iov { mr, ptr: memory.as_ptr() as usize, len: LEN }];
    let op = Op::Write;
    let request = Request::new(conn, op, &iovs, &adverts);
    println!("\nwriting");
    while ep.run(&request, &mut NoInterrupt).is_ok() {}
}

/// The other process: owns memory, and makes the copies that its peer asks for. Only bytes that
/// were sent may arrive.
#[test]
fn owner_process() {
    if std::env::var(OWNER).is_err() {
        return;
    }
    let mut memory = vec![SENT; LEN];
    let ep = endpoint();
    let mr = register(&ep, &mut memory);
    let advert = ep.advertise(mr, memory.as_ptr() as usize, LEN).expect("advertised");
    println!("\nat {} {}", ep.addr(), hex(&advert));
    let conn = ep.accept(None, &mut NoInterrupt).expect("accepted").conn;
    while ep.check_connection(conn).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    ep.close().expect("closed");
    assert!(
        memory.iter().all(|byte| *byte == SENT),
        "the caller's bytes of after the end have come"
    );
    // The harness's output has no reader.
    std::process::exit(0);
}

fn hex(advert: &Advert) -> String {
    advert.encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_hex(advert: &str) -> Advert {
    let bytes: Vec<u8> = (0..advert.len() / 2)
        .map(|i| u8::from_str_radix(&advert[2 * i..2 * i + 2], 16).expect("hex"))
        .collect();
    Advert::decode(&bytes).expect("an advert")
}

struct Writer(Child);

impl Writer {
    fn start(target: &str) -> Self {
        Self::start_as("second_process", (ROLE, target), "writing").0
    }

    /// Starts a test of this file as another process; returns the text behind `word` in its output.
    fn start_as(test: &str, env: (&str, &str), word: &str) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args([test, "--exact", "--nocapture"])
            .env(env.0, env.1)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let said =
            lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix(word)?.into()));
        (Self(child), said.expect("what it says"))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call; the child is not reaped yet, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }

    /// Waits for the process's end, which has to be a success.
    fn end(mut self) {
        let status = self.0.wait().expect("it is ours");
        assert!(status.success(), "{status}");
    }

    /// Stops the process; none of its threads runs when this returns.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: as above; the status is ours.
        let pid = unsafe { libc::waitpid(self.0.id() as i32, &raw mut status, libc::WUNTRACED) };
        assert!(pid as u32 == self.0.id() && libc::WIFSTOPPED(status));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One round. Returns whether the writer was stopped during an access, which the deregistration
/// reports.
fn round() -> bool {
    let mut memory = vec![0; LEN];
    let ep = endpoint();
    let mr = register(&ep, &mut memory);
    let advert = ep.advertise(mr, memory.as_ptr() as usize, LEN).expect("advertised");
    let writer = Writer::start(&format!("{} {}", ep.addr(), hex(&advert)));
    let conn = ep.accept(None, &mut NoInterrupt).expect("accepted").conn;
    std::thread::sleep(Duration::from_millis(50));
    writer.stop();
    let silent = ep.run_notif(conn, b"there?", None, &mut NoInterrupt);
    assert!(matches!(&silent, Err(Error::ConnectionLost { .. })), "{silent:?}");
    let stuck = match ep.deregister(mr) {
        Ok(()) => false,
        Err(e) => {
            assert!(e.to_string().contains("may still touch"), "{e}");
            true
        }
    };
    // The writer continues, learns that it was given up, and ends its side: then no process touches
    // the memory.
    writer.signal(libc::SIGCONT);
    let mut other = vec![0; 4096];
    let mr = register(&ep, &mut other);
    ep.deregister(mr).expect("nobody touches it");
    stuck
}

#[test]
fn memory_that_a_stopped_peer_may_touch_is_not_given_back() {
    // In some rounds it is stopped between two accesses.
    assert!((0..10).any(|_| round()), "a peer that was given up is not watched");
}

/// The state after a round in which an owner made copies and was disturbed.
struct AskedRound {
    owner: Writer,
    ep: Endpoint,
    memory: Vec<u8>,
    mr: MrId,
    /// Whether a transfer reported that its memory may still be touched.
    is_told: bool,
}

impl AskedRound {
    /// Has an owner make long copies, and sends it a signal in the middle.
    fn run(op: Op, signal: impl FnOnce(&Writer)) -> Self {
        let (owner, said) = Writer::start_as("owner_process", (OWNER, "1"), "at ");
        let (addr, advert) = said.split_once(' ').expect("an address and an advert");
        let ep = endpoint();
        let mut memory = vec![if op == Op::Write { SENT } else { 0 }; LEN];
        let mr = register(&ep, &mut memory);
        let conn = ep.connect(addr.parse().expect("an address"), FAR, &mut NoInterrupt);
        let iovs = [Iov { mr, ptr: memory.as_ptr() as usize, len: LEN }];
        let adverts = [read_hex(advert)];
        let request = Request::new(conn.expect("connected"), op, &iovs, &adverts);
        ep.run(&request, &mut NoInterrupt).expect("copied");
        assert!(memory.iter().all(|byte| *byte == SENT));
        let posted: Vec<_> = (0..20).map(|_| ep.post(&request).expect("posted")).collect();
        std::thread::sleep(Duration::from_millis(5));
        signal(&owner);
        let mut is_told = false;
        for transfer in posted {
            let ended = ep.wait(transfer, None, &mut NoInterrupt).expect("it is known");
            is_told |= matches!(ended, Status::Failed(Error::StillTouched { .. }));
            assert!(
                matches!(
                    ended,
                    Status::Done(_)
                        | Status::Failed(Error::ConnectionLost { .. } | Error::StillTouched { .. })
                ),
                "{ended:?}"
            );
        }
        Self { owner, ep, memory, mr, is_told }
    }
}

/// One round. Returns whether the owner was stopped during an access, which the deregistration
/// reports.
fn asked_round(op: Op) -> bool {
    let AskedRound { owner, ep, mut memory, mr, is_told } = AskedRound::run(op, Writer::stop);
    if !is_told {
        // Without such a report the memory is the caller's.
        memory.fill(OURS);
    }
    // The region's keys are revoked, but the owner may be in the middle of a copy with one of them.
    let stuck = match ep.deregister(mr) {
        Ok(()) => false,
        Err(e) => {
            assert!(e.to_string().contains("may still touch"), "{e}");
            true
        }
    };
    assert_eq!(
        stuck, is_told,
        "a transfer ends when its memory is not touched any more, or says so"
    );
    owner.signal(libc::SIGCONT);
    if stuck {
        ep.deregister(mr).expect("it has let go");
    }
    let mr = register(&ep, &mut memory);
    ep.deregister(mr).expect("nobody touches it");
    assert!(is_told || memory.iter().all(|byte| *byte == OURS), "a byte landed after the end");
    owner.end();
    stuck
}

#[test]
fn memory_that_a_stopped_owner_may_write_is_not_given_back() {
    // In some rounds it is stopped between two accesses.
    assert!((0..10).any(|_| asked_round(Op::Read)), "an owner that was given up is not watched");
}

#[test]
fn memory_that_a_stopped_owner_may_read_is_not_given_back() {
    assert!((0..10).any(|_| asked_round(Op::Write)), "an owner that was given up is not watched");
}

#[test]
fn an_owner_that_dies_touches_nothing_any_more() {
    for _ in 0..3 {
        let round = AskedRound::run(Op::Read, |owner| owner.signal(libc::SIGKILL));
        round.ep.deregister(round.mr).expect("nobody touches it");
    }
}

/// A caller that only polls keeps workers off the connection, and never sleeps on its socket. It
/// notices the peer's death all the same, without a timeout.
#[test]
fn a_killed_peer_is_noticed_by_a_caller_that_polls() {
    let (owner, said) = Writer::start_as("owner_process", (OWNER, "1"), "at ");
    let (addr, _) = said.split_once(' ').expect("an address and an advert");
    let ep = Endpoint::new(Config {
        transport: Transport::Local,
        timeout: Duration::ZERO,
        ..on_loopback()
    })
    .expect("an endpoint");
    let mut memory = vec![0; 4096];
    let mr = register(&ep, &mut memory);
    let conn = ep.connect(addr.parse().expect("an address"), None, &mut NoInterrupt);
    let iovs = [Iov { mr, ptr: memory.as_ptr() as usize, len: memory.len() }];
    let request = Request::new(conn.expect("connected"), Op::Recv, &iovs, &[]);
    let transfer = ep.post(&request).expect("posted");
    assert!(matches!(ep.poll(transfer), Ok(Status::Pending)));
    owner.signal(libc::SIGKILL);
    let started = std::time::Instant::now();
    let ended = loop {
        match ep.poll(transfer).expect("known") {
            Status::Pending => assert!(started.elapsed() < Duration::from_secs(30), "unnoticed"),
            ended => break ended,
        }
    };
    assert!(matches!(ended, Status::Failed(Error::ConnectionLost { .. })), "{ended:?}");
}
