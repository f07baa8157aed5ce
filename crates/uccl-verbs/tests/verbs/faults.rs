//! Failures are reported, and memory beside the request's is not touched.

use std::{
    env,
    net::Ipv6Addr,
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use uccl_fabric::{
    lane::OpKind::{Read, Write},
    mem::Span,
    rail::{Channel, Rail, RailError, Request, RequestError},
};
use uccl_verbs::VerbsSettings;
use uccl_wire::verbs::VerbsAddress;

use crate::support::{Cable, Memory, Pair, Rails, all_kinds_of_channels, impatient, request};

/// Some requests succeed, then one is wrong: it fails with its reason, and the channel is dead.
fn refused(change: impl Fn(&mut Request), expected: &RequestError) {
    for (name, settings) in all_kinds_of_channels() {
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        for kind in [Write, Read] {
            let what = format!("{kind:?} over {name}");
            let ours = Memory::zeros(&rails.a, 1024);
            let theirs = Memory::zeros(&rails.b, 1024);
            let mut pair = rails.joined();
            let good = request(kind, pair.a.as_mut(), (&ours, &theirs), 0..512, 1);
            let mut bad = request(kind, pair.a.as_mut(), (&ours, &theirs), 0..512, 2);
            change(&mut bad);
            let (ended, result) = pair.run(&[good, good, good, bad]);
            let told: Vec<_> = ended.iter().map(|ended| (ended.tag, &ended.result)).collect();
            let wrong = Err(expected.clone());
            let all = [(1, &Ok(())), (1, &Ok(())), (1, &Ok(())), (2, &wrong)];
            assert_eq!(told, all, "{what}: {result:?}");
            let again = result.err().unwrap_or_else(|| pair.until_dead().1);
            assert!(matches!(again, RailError::Lost(_)), "{what}: {again}");
            // SAFETY: nothing is posted to a dead channel.
            let posted = unsafe { pair.a.post(&[good]) };
            assert!(matches!(posted, Err(RailError::Lost(_))), "{what}: {posted:?}");
            assert!(pair.a.probe(3).is_err());
        }
    }
}

#[test]
fn a_forged_key_is_refused_by_the_peers_device() {
    refused(|request| request.remote_key ^= 0x5500, &RequestError::Access);
}

#[test]
fn a_range_outside_the_region_is_refused() {
    refused(|request| request.remote_addr += 1000, &RequestError::Access);
    refused(|request| request.remote_addr = u64::MAX - 100, &RequestError::Access);
}

/// NICs report the request that failed; soft-RoCE only flushes all of them.
#[test]
fn local_memory_that_the_device_does_not_know_ends_the_channel() {
    let Some(rails) = Rails::shared() else { return };
    let (ours, theirs) = (Memory::zeros(&rails.a, 1024), Memory::zeros(&rails.b, 1024));
    for kind in [Write, Read] {
        let mut pair = rails.joined();
        let good = request(kind, pair.a.as_mut(), (&ours, &theirs), 0..512, 1);
        let (ended, result) = pair.run(&[Request { local_key: 0xdead_beef, ..good }]);
        let told = ended.iter().all(|ended| ended.result == Err(RequestError::Local));
        assert!(told, "{kind:?}: {ended:?}");
        let error = result.err().unwrap_or_else(|| pair.until_dead().1);
        assert!(matches!(error, RailError::Lost(_)), "{kind:?}: {error}");
    }
}

#[test]
fn a_request_that_is_too_long_is_told_and_harms_nothing() {
    let Some(rails) = Rails::shared() else { return };
    let mut pair = rails.joined();
    let ours = Memory::zeros(&rails.a, 1024);
    let theirs = Memory::zeros(&rails.b, 1024);
    let mut long = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..512, 1);
    long.local = Span { len: pair.a.limits().max_bytes as usize + 1, ..long.local };
    let (ended, result) = pair.run(&[long]);
    result.expect("the channel lives");
    assert!(matches!(ended[0].result, Err(RequestError::Failed(_))), "{ended:?}");
    pair.probes().expect("the way works");
}

#[test]
fn a_region_that_is_no_more_registered_is_out_of_reach() {
    let Some(rails) = Rails::shared() else { return };
    let mut pair = rails.joined();
    let ours = Memory::random(&rails.a, 4096, 5);
    let Memory { registration, bytes } = Memory::zeros(&rails.b, 4096);
    let theirs = Memory { registration, bytes };
    let write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..4096, 1);
    let Memory { registration, bytes } = theirs;
    drop(registration);
    let (ended, result) = pair.run(&[write]);
    let refused = ended.first().map(|ended| &ended.result);
    assert_eq!(refused, Some(&Err(RequestError::Access)), "{result:?}");
    assert!(bytes.iter().all(|&byte| byte == 0));
}

#[test]
fn a_peer_that_has_dropped_its_end_is_lost() {
    for (name, settings) in all_kinds_of_channels() {
        let settings = VerbsSettings { timeout: 10, retries: 3, ..settings };
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        let ours = Memory::random(&rails.a, 4096, 6);
        let theirs = Memory::zeros(&rails.b, 4096);
        let Pair { mut a, b } = rails.joined();
        drop(b);
        let write = request(Write, a.as_mut(), (&ours, &theirs), 0..4096, 1);
        let mut pair = Pair { a, b: rails.b.open().expect("another") };
        let (ended, result) = pair.run(&[write]);
        let error = result.expect_err("nobody answers");
        let silence = |why: &str| {
            let reasons = ["did not answer", "acknowledges nothing", "end was closed"];
            reasons.iter().any(|reason| why.contains(reason))
        };
        assert!(matches!(&error, RailError::Lost(why) if silence(why)), "{name}: {error}");
        assert!(ended.is_empty(), "{name}: {ended:?}");
        assert!(theirs.bytes.iter().all(|&byte| byte == 0));
        assert!(pair.a.probe(1).is_err() && pair.a.arm().is_ok_and(|sleep| !sleep));
    }
}

#[test]
fn a_channel_that_is_not_joined_takes_nothing() {
    let Some(rails) = Rails::shared() else { return };
    let mut alone = rails.a.open().expect("a channel");
    let memory = Memory::zeros(&rails.a, 64);
    let write = request(Write, alone.as_mut(), (&memory, &memory), 0..64, 1);
    // SAFETY: nothing is posted.
    assert!(unsafe { alone.post(&[write]) }.is_err());
    assert!(alone.probe(1).is_err());
    alone.poll(&mut Vec::new()).expect("it is not dead either");
}

/// When the drop has returned, requests in flight do not land any more.
#[test]
fn a_drop_ends_the_requests_in_flight() {
    let Some(rails) = Rails::shared() else { return };
    const LEN: usize = 16 << 20;
    for kind in [Write, Read] {
        let ours = Memory::random(&rails.a, LEN, 7);
        let theirs = Memory::random(&rails.b, LEN, 8);
        let Pair { mut a, b } = rails.joined();
        let all = request(kind, a.as_mut(), (&ours, &theirs), 0..LEN, 1);
        // SAFETY: the memory is kept until the channel is dropped.
        assert_eq!(unsafe { a.post(&[all]) }.expect("posted"), 1);
        match kind {
            Read => drop(a),
            Write => drop(b),
        }
        let (ours_then, theirs_then) = (ours.bytes.clone(), theirs.bytes.clone());
        thread::sleep(Duration::from_millis(50));
        let same = match kind {
            Read => ours_then == ours.bytes,
            Write => theirs_then == theirs.bytes,
        };
        assert!(same, "{kind:?}: memory changes after the drop");
    }
}

fn ip(arguments: &str) {
    let run = Command::new("ip").args(arguments.split(' ')).status();
    assert!(run.is_ok_and(|status| status.success()), "ip {arguments}");
}

fn set_link(name: &str, state: &str) {
    ip(&format!("link set {name} {state}"));
}

/// The kernel reports such a peer in the same way as a device that was removed.
#[test]
fn a_peer_that_cannot_be_joined_harms_no_other_channel() {
    if env::var_os("RDMA_VM_RANK").is_none() {
        return eprintln!("skipped: lacks a guest, whose routes may be changed");
    }
    // The first GID is the IPv6 one.
    let settings = VerbsSettings { gid_index: Some(0), ..VerbsSettings::default() };
    let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
    let mut pair = rails.joined();
    let device = &rails.a.info().name;
    let device = device.split(':').next().expect("a name");
    let interface = format!("/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0");
    let interface = std::fs::read_to_string(interface).expect("an interface");
    // The host takes it for its own, and then finds no interface that has it.
    let nobody = "fd99::1";
    let route = format!("local {nobody}/128 dev {}", interface.trim());
    ip(&format!("-6 route add {route}"));
    let mut address = VerbsAddress::decode(rails.b.open().expect("a channel").address());
    if let Ok(address) = &mut address {
        address.gid = nobody.parse::<Ipv6Addr>().expect("an address").octets();
    }
    let address = address.expect("its own").encode();
    let refused = rails.a.open().expect("a channel").connect(&address);
    ip(&format!("-6 route del {route}"));
    assert!(
        matches!(refused, Err(RailError::Os { errno: libc::ENODEV, .. })),
        "another error is not what this is about: {refused:?}"
    );
    pair.probes().expect("what was joined before works");
    assert!(rails.a.is_up(), "and so does the device");
    rails.joined().probes().expect("for others too");
}

/// Writes over queue pairs that are not reliable.
fn over_uc() -> VerbsSettings {
    VerbsSettings { rc_mode: false, queue_pairs: Some(1), ..impatient() }
}

/// By the clock alone the peer has been silent for too long; but its answer has come.
#[test]
fn a_side_that_looks_late_finds_that_the_peer_had_answered() {
    let Some(rails) = Rails::open(Cable::Shared, &over_uc()) else { return };
    let (ours, theirs) = (Memory::random(&rails.a, 4096, 9), Memory::zeros(&rails.b, 4096));
    let mut pair = rails.joined();
    let write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..4096, 1);
    // SAFETY: the memory outlives the channels.
    assert_eq!(unsafe { pair.a.post(&[write]) }.expect("posted"), 1);
    let landed = || {
        // SAFETY: our own memory, which a device may be writing to.
        (0..4096)
            .all(|at| unsafe { theirs.bytes.as_ptr().add(at).read_volatile() } == ours.bytes[at])
    };
    until("the write has landed", || {
        pair.b.poll(&mut Vec::new()).expect("it lives");
        landed()
    });
    for _ in 0..100 {
        // Acknowledges.
        pair.b.poll(&mut Vec::new()).expect("it lives");
        thread::sleep(Duration::from_millis(1));
    }
    // Longer than a peer may be silent with these settings.
    thread::sleep(Duration::from_millis(2500));
    let second = Request { tag: 2, ..write };
    // SAFETY: as above.
    assert_eq!(unsafe { pair.a.post(&[second]) }.expect("the peer has answered"), 1);
    let (mut ended, began) = (Vec::new(), Instant::now());
    while ended.len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(60), "{ended:?}");
        pair.b.poll(&mut Vec::new()).expect("it lives");
        pair.a.poll(&mut ended).expect("it lives");
        thread::yield_now();
    }
    assert!(ended.iter().all(|ended| ended.result == Ok(())), "{ended:?}");
}

/// The queue of the first end's link, in which packets wait.
struct Delay;

impl Delay {
    const LINK: &str = "rail1a";

    fn tc(arguments: &str) -> String {
        let run = Command::new("tc").args(arguments.split(' ')).output().expect("tc");
        assert!(run.status.success(), "tc {arguments}: {}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8_lossy(&run.stdout).into_owned()
    }

    /// Delays packets by `time` from now on.
    fn of(time: &str) -> Self {
        Self::tc(&format!("qdisc add dev {} root netem delay {time}", Self::LINK));
        Self
    }

    /// Later packets do not wait, and overtake those that do.
    fn end_for_later_ones(&self) {
        Self::tc(&format!("qdisc change dev {} root netem delay 0ms", Self::LINK));
    }

    fn holds_something(&self) -> bool {
        let shown = Self::tc(&format!("-s qdisc show dev {} root", Self::LINK));
        !shown.contains("backlog 0b 0p")
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        Self::tc(&format!("qdisc del dev {} root", Self::LINK));
    }
}

/// A message that arrives after later ones may have been taken for lost: its write was sent again
/// and has ended.
#[test]
fn a_network_that_keeps_no_order_is_not_trusted_again() {
    let _alone = CABLE_TO_CUT.lock().unwrap_or_else(PoisonError::into_inner);
    if env::var_os("RDMA_VM_RANK").is_none_or(|_| env::var("RDMA_VM_RAILS").is_ok_and(|n| n == "1"))
    {
        return eprintln!("skipped: lacks a cable of its own to delay (a guest with two rails)");
    }
    let Some(rails) = Rails::open(Cable::ToBeCut, &over_uc()) else { return };
    let (ours, theirs) = (Memory::random(&rails.a, 64, 9), Memory::zeros(&rails.b, 64));
    let mut pair = rails.joined();
    // The neighbour is known from now on.
    pair.probes().expect("the way works");
    let delay = Delay::of("1s");
    let first = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..64, 1);
    // SAFETY: the memory outlives the channels.
    assert_eq!(unsafe { pair.a.post(&[first]) }.expect("posted"), 1);
    until("the first message waits", || delay.holds_something());
    delay.end_for_later_ones();
    let second = Request { tag: 2, ..first };
    // SAFETY: as above.
    assert_eq!(unsafe { pair.a.post(&[second]) }.expect("posted"), 1);
    let mut why = None;
    until("the first message has come", || {
        why = pair.b.poll(&mut Vec::new()).err();
        why.is_some()
    });
    let why = why.expect("it has come").to_string();
    assert!(why.contains("order"), "{why}");
    drop(delay);
    let ways = |channel: Box<dyn Channel>| {
        let address = VerbsAddress::decode(channel.address()).expect("an address");
        (address.reliable.len(), address.unreliable.len())
    };
    assert_eq!(ways(rails.b.open().expect("a channel")), (1, 0), "it is given up");
    assert_eq!(
        ways(rails.a.open().expect("a channel")),
        (1, 1),
        "its own receiver noticed nothing"
    );
    let mut pair = rails.joined();
    let third = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..64, 3);
    pair.run_well(&[third]);
    assert!(ours.bytes == theirs.bytes);
}

/// Held by a test while it cuts or delays the second cable.
static CABLE_TO_CUT: Mutex<()> = Mutex::new(());

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "not so: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_cable_that_is_cut_and_joined_again_is_noticed() {
    let _alone = CABLE_TO_CUT.lock().unwrap_or_else(PoisonError::into_inner);
    if env::var_os("RDMA_VM_RANK").is_none_or(|_| env::var("RDMA_VM_RAILS").is_ok_and(|n| n == "1"))
    {
        return eprintln!("skipped: lacks a cable of its own to cut (a guest with two rails)");
    }
    let Some(rails) = Rails::open(Cable::ToBeCut, &impatient()) else { return };
    let ours = Memory::random(&rails.a, 1 << 20, 9);
    let theirs = Memory::zeros(&rails.b, 1 << 20);
    let mut pair = rails.joined();
    pair.probes().expect("the way works");
    set_link("rail1b", "down");
    until("the port is down", || !rails.b.is_up());
    let write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..1 << 20, 1);
    let (ended, result) = pair.run(&[write]);
    let error = result.expect_err("the cable is cut");
    assert!(matches!(error, RailError::Lost(_)), "{error}");
    assert!(ended.is_empty(), "{ended:?}");
    set_link("rail1b", "up");
    until("both ports are up", || rails.a.is_up() && rails.b.is_up());
    let mut last = None;
    until("a new channel works", || {
        // The neighbour is forgotten when a link goes down, and found anew by a request.
        let mut pair = rails.joined();
        let result = pair.probes().and_then(|()| pair.run(&[write]).1);
        last = Some(format!("{result:?}"));
        result.is_ok()
    });
    assert!(ours.bytes == theirs.bytes, "{last:?}");
}
