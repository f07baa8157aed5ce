//! A peer that is killed, or that gives up its queue pairs, in mid-transfer.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use uccl_p2p::{
    Config, ConnId, Endpoint, Error, NoInterrupt, Op, Status, Transport, wire::advert::Advert,
};

use crate::{
    cables::Cable,
    ends::{EndMemory, Way, back, devices, joined, over, possible, set, there, until},
    support::{advert, config, finish, iov, pattern, place::Place, register, request},
    usage::Usage,
};

const LEN: usize = 32 << 20;
const ROLE: &str = "UCCL_TEST_OWNER";

fn endpoint(place: &Place, variable: &str) -> Endpoint {
    let mut config = Config { bind: Some(place.ip), ..config(Transport::Auto) };
    over(&mut config, &devices(variable, 2));
    place.run(|| Endpoint::new(config).expect("an endpoint"))
}

/// The other process: owns memory until it is killed. It is a test, so that the test binary can
/// start it.
#[test]
fn owner_process() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let mut memory = vec![0; LEN];
    let [_, place] = Place::both();
    let ep = endpoint(&place, "RDMA_VM_PEER_DEVS");
    let mr = register(&ep, &mut memory);
    let advert: Vec<_> =
        advert(&ep, mr, &memory).encode().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nat {} {}", ep.addr(), advert.concat());
    let conn = place.run(|| ep.accept(None, &mut NoInterrupt).expect("accepted").conn);
    until("the end of its peer", || ep.check_connection(conn).is_err());
}

struct Owner {
    process: Child,
    addr: std::net::SocketAddr,
    advert: Advert,
}

impl Owner {
    fn start() -> Self {
        let mut process = Command::new(env::current_exe().expect("our own path"))
            .args(["peers::owner_process", "--exact", "--nocapture"])
            .env(ROLE, "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(process.stdout.take().expect("its output")).lines();
        let said =
            lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("at ")?.to_owned()));
        let said = said.expect("what it says");
        let (addr, hex) = said.split_once(' ').expect("an address and an advert");
        let byte = |i: usize| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex");
        let bytes: Vec<_> = (0..hex.len() / 2).map(byte).collect();
        let advert = Advert::decode(&bytes).expect("an advert");
        Self { process, addr: addr.parse().expect("an address"), advert }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connect(ep: &Endpoint, owner: &Owner) -> ConnId {
    let conn = ep.connect(owner.addr, None, &mut NoInterrupt).expect("connected");
    let rails = || ep.connection(conn).expect("a connection").lanes;
    until("every rail", || rails() == devices("RDMA_VM_DEVS", 2).len().max(1));
    conn
}

#[test]
fn transfers_to_a_killed_process_fail_and_give_everything_back() {
    if !possible() {
        return;
    }
    let mut memory = pattern(LEN, 4);
    let [place, _] = Place::both();
    let ep = endpoint(&place, "RDMA_VM_DEVS");
    let mut usage = Vec::new();
    for op in [Op::Write, Op::Read, Op::Write, Op::Read] {
        let mut owner = Owner::start();
        let conn = connect(&ep, &owner);
        let mr = register(&ep, &mut memory);
        let (iovs, adverts) = ([iov(mr, &memory)], [owner.advert]);
        ep.run(&request(conn, op, &iovs, &adverts), &mut NoInterrupt).expect("it lives");
        let posted =
            [(); 4].map(|()| ep.post(&request(conn, op, &iovs, &adverts)).expect("posted"));
        std::thread::sleep(std::time::Duration::from_millis(20));
        owner.process.kill().expect("killed");
        for id in posted {
            let ended = finish(&ep, id);
            assert!(matches!(ended, Err(Error::ConnectionLost { .. })), "{op:?}: {ended:?}");
        }
        ep.deregister(mr).expect("nothing is on its way");
        drop(owner);
        until("the end of the connection", || ep.check_connection(conn).is_err());
        usage.push(Usage::now());
    }
    let [_, early, .., late] = usage.as_slice() else { unreachable!("four rounds") };
    eprintln!("early: {early}\nat the end: {late}");
    assert_eq!((early.files, &early.objects), (late.files, &late.objects));
    ep.close().expect("closed");
}

/// The numbers of all RC queue pairs.
fn queue_pairs() -> Vec<String> {
    let shown = Command::new("rdma").args(["resource", "show", "qp"]).output().expect("iproute2");
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let number = |line: &str| line.split(' ').take(4).collect::<Vec<_>>().join(" ");
    text.lines().filter(|line| line.contains("type RC")).map(number).collect()
}

/// The giver cancels a write that does not end at once, and destroys its queue pairs, while the
/// writer is in the middle of a write over them. Returns whether that happened: the cancelled write
/// may end in time.
fn given_up_by(giver: Way<'_>, writer: Way<'_>, cable: &Cable, rails: usize) -> bool {
    until("every rail", || writer.rails() == rails && giver.rails() == rails);
    let old = queue_pairs();
    let mut source = pattern(LEN, 5);
    let mut sink = vec![0; LEN];
    let (here, there) = (register(giver.from, &mut source), register(giver.to, &mut sink));
    let (iovs, adverts) = ([iov(here, &source)], [advert(giver.to, there, &sink)]);
    let give_up = |id| {
        let cancelled = giver.from.post(&request(giver.conn, Op::Write, &iovs, &adverts));
        let cancelled = cancelled.expect("posted");
        let before = cable.bytes();
        assert!(cable.until_used(before, writer, id), "it was too quick");
        let ended = giver.from.cancel(cancelled).expect("known");
        assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{ended:?}");
    };
    if let Err(e) = EndMemory::new(LEN).write(writer, give_up) {
        let theirs = giver.from.check_connection(giver.conn);
        panic!("it does not go another way: {e}; its peer says {theirs:?}");
    }
    giver.from.deregister(here).expect("nothing is on its way");
    giver.to.deregister(there).expect("nothing is on its way");
    until("new queue pairs", || writer.rails() == rails && giver.rails() == rails);
    let kept = queue_pairs().into_iter().filter(|name| old.contains(name)).count();
    kept < old.len()
}

#[test]
fn queue_pairs_that_the_peer_gives_up_in_mid_transfer() {
    for rails in [1, 2] {
        let Some(cable) = Cable::of_guest(rails - 1) else {
            return eprintln!("skipped: no cable that may be cut (cargo xtask guest --rails 2)");
        };
        // So many bytes are in flight that the write does not end while a cancel waits.
        let much = |config: &mut Config| set(config, "UCCL_CHUNK_SIZE_KB", "4096");
        let Some(p) = joined(rails, much) else { return };
        for (giver, writer) in [(there(&p), back(&p)), (back(&p), there(&p))] {
            let mut tries = 0..20;
            assert!(tries.any(|_| given_up_by(giver, writer, &cable, rails)), "none was given up");
        }
    }
}
