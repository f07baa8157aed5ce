//! Devices that are opened, and memory that is registered with them, while lanes are made and peers
//! ask.

use std::sync::mpsc;

use uccl_fabric::{
    lane::{
        OpError,
        OpKind::{Read, Write},
    },
    rail::Rail,
};

use super::*;

fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().expose_provenance(), len: bytes.len() }
}

/// Two ends with devices that are not open.
fn unopened() -> Ends {
    let network = RailNetwork::default();
    let end = |role, seed| {
        let devices = vec![network.rail("rail", seed, RailFaults::default())];
        End::with(role, devices, Rails::default())
    };
    let (a, b) = (end(Role::Connector, 1), end(Role::Acceptor, 2));
    Ends { a, b, network }
}

fn open(end: &End) {
    let device = Arc::clone(end.rail_arc()) as Arc<dyn Rail>;
    end.rails.open_by(|| vec![device]);
}

impl End {
    fn rail_arc(&self) -> &Arc<ChaosRail> {
        &self.devices[0]
    }
}

#[test]
fn lanes_are_made_while_devices_are_being_opened() {
    let ends = unopened();
    for end in [&ends.a, &ends.b] {
        let (tell, told) = mpsc::channel::<()>();
        let device = Arc::clone(end.rail_arc()) as Arc<dyn Rail>;
        end.rails.open_by(move || {
            let _ = told.recv_timeout(FAR);
            vec![device]
        });
        for _ in 0..20 {
            ends.turn();
        }
        assert!(!end.lane.has_notes() && !end.rails.are_open() && !end.lane.is_settled());
        tell.send(()).expect("it is being opened");
        ends.until("the devices are open", || end.rails.are_open());
    }
    ends.until("the path is up", || ends.are_up(1));
    assert!(ends.a.lane.is_settled());
}

#[test]
fn a_rail_without_a_path_waits_for_the_peer_and_says_so() {
    let orders: [fn(&Ends) -> [&End; 2]; 2] =
        [|ends| [&ends.a, &ends.b], |ends| [&ends.b, &ends.a]];
    for order in orders {
        let ends = unopened();
        let [first, second] = order(&ends);
        assert_eq!(first.lane.describe(), []);
        open(first);
        ends.until("the devices are open", || first.rails.are_open());
        let waits = Err("the peer has not yet offered its rails".to_owned());
        assert_eq!(first.lane.describe(), [("rail".to_owned(), waits)]);
        open(second);
        ends.until("the path is up", || ends.are_up(1));
        assert_eq!(first.lane.describe(), [("rail".to_owned(), Ok(()))]);
    }
}

#[test]
fn a_side_that_opens_no_device_says_so() {
    let ends = unopened();
    open(&ends.a);
    let bytes = vec![1; 64];
    let region = ends.b.register(&bytes);
    ends.b.rails.open_by(Vec::new);
    ends.until("all is tried", || [&ends.a, &ends.b].iter().all(|end| end.lane.is_settled()));
    assert!(ends.are_up(0));
    ends.until("nothing waits", || !ends.b.rails.is_busy_with(region.slot));
}

/// Posts an operation that waits for this end's memory to be registered, and watches it until it
/// has ended.
fn waits_for_registration_at(late: impl Fn(&Ends) -> &End, kind: OpKind) {
    let ends = unopened();
    let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
    let (_, theirs) = (ends.a.register(&ours), ends.b.register(&theirs));
    let device = Arc::clone(late(&ends).rail_arc());
    let hold = device.hold_registrations();
    [&ends.a, &ends.b].into_iter().for_each(open);
    ends.until("the path is up", || ends.are_up(1));
    ends.until("a registration", || hold.is_waited_for());
    assert!(ends.a.lane.reaches(&[span_of(&ours)], MemoryKind::Host), "soon");
    let remote = RemoteSpan { len: 64, ..theirs.remote() };
    let told = ends.a.post(kind, part(span_of(&ours), 0, 64), remote);
    for _ in 0..100 {
        ends.turn();
        assert_eq!(told.result(), None);
    }
    drop(hold);
    ends.until("the end", || told.result().is_some());
    assert_eq!((told.result(), ends.network.carried()), (Some(Ok(())), 64));
}

#[test]
fn a_peer_that_asks_about_memory_yet_to_be_registered_is_answered_afterwards() {
    for kind in [Read, Write] {
        waits_for_registration_at(|ends| &ends.b, kind);
    }
}

#[test]
fn an_operation_waits_for_memory_of_ours_that_is_yet_to_be_registered() {
    for kind in [Read, Write] {
        waits_for_registration_at(|ends| &ends.a, kind);
    }
}

#[test]
fn an_operation_goes_elsewhere_if_no_device_takes_its_memory() {
    let ends = unopened();
    let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
    let (_, theirs) = (ends.a.register(&ours), ends.b.register(&theirs));
    ends.a.rail().refuse_memory(100);
    let hold = ends.a.rail_arc().hold_registrations();
    [&ends.a, &ends.b].into_iter().for_each(open);
    ends.until("the path is up", || ends.are_up(1));
    let told = ends.a.post(Write, span_of(&ours), theirs.remote());
    (0..20).for_each(|_| ends.turn());
    assert_eq!(told.result(), None);
    drop(hold);
    ends.until("the refusal", || told.result().is_some());
    assert_eq!(told.result(), Some(Err(OpError::Unreachable)));
    assert!(!ends.a.lane.reaches(&[span_of(&ours)], MemoryKind::Host));
}

#[test]
fn a_write_that_waits_for_a_registration_can_be_cancelled() {
    let ends = unopened();
    let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
    let (_, theirs) = (ends.a.register(&ours), ends.b.register(&theirs));
    let hold = ends.a.rail_arc().hold_registrations();
    [&ends.a, &ends.b].into_iter().for_each(open);
    ends.until("the path is up", || ends.are_up(1));
    let told = ends.a.post(Write, span_of(&ours), theirs.remote());
    ends.a.lane.cancel(told.name());
    assert_eq!(told.result(), Some(Err(OpError::Cancelled)));
    drop(hold);
}

#[test]
fn a_region_that_ends_before_its_turn_is_shown_to_no_device() {
    let end = unopened().a;
    let (short, long) = (vec![1; 100], vec![2; 4096]);
    let regions = [end.register(&long), end.register(&short)];
    let hold = end.rail_arc().hold_registrations();
    open(&end);
    let began = Instant::now();
    while !hold.is_waited_for() {
        assert!(began.elapsed() < FAR, "nothing is registered");
        std::thread::yield_now();
    }
    // The short one is at the device.
    for region in &regions {
        assert!(end.rails.is_busy_with(region.slot));
        end.rails.retire(region.slot);
    }
    assert_eq!(regions.each_ref().map(|one| end.rails.is_busy_with(one.slot)), [false, true]);
    assert!(!end.lane.reaches(&[span_of(&short)], MemoryKind::Host), "it is about to end");
    drop(hold);
    while end.rails.is_busy_with(regions[1].slot) {
        assert!(began.elapsed() < FAR, "it is not registered");
        std::thread::yield_now();
    }
    assert_eq!(end.rail().network().count().1, 1);
    assert!(end.rails.over(span_of(&short)).is_none(), "retired");
    regions.iter().for_each(|region| end.rails.remove(region.slot).expect("it lets go"));
    assert_eq!(end.rail().network().count().1, 0);
}

#[test]
fn regions_that_wait_hold_up_no_drop() {
    let end = unopened().a;
    let network = end.rail().network().clone();
    let bytes = vec![1; 4096];
    end.register(&bytes);
    drop(end);
    assert_eq!(network.count().1, 0);
}

#[test]
fn nothing_waits_for_devices_after_a_panic_in_their_opening() {
    let end = unopened().a;
    let bytes = vec![1; 4096];
    let region = end.register(&bytes);
    end.rails.open_by(|| panic!("as the test asks"));
    let began = Instant::now();
    while end.rails.is_busy_with(region.slot) {
        assert!(began.elapsed() < FAR, "it waits");
        std::thread::yield_now();
    }
    assert!(end.rails.are_open() && end.rails.all().is_empty());
}

/// One end's device fails for good, and is there again a while later.
fn is_used_again(which: impl Fn(&Ends) -> &End) {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
    let regions = [ends.a.register(&ours), ends.b.register(&theirs)];
    let remote = |region: &Region| RemoteSpan { len: 64, ..region.remote() };
    let post = |at: usize| {
        let local = part(span_of(&ours), at, 64);
        let told = ends.a.post(Write, local, remote(&regions[1]));
        ends.until("the write", || told.result().is_some());
        told.result()
    };
    assert_eq!(post(0), Some(Ok(())));
    let end = which(&ends);
    end.rail().lose();
    ends.until("the loss", || ends.are_up(0));
    assert!(!ends.a.lane.reaches(&[span_of(&ours)], MemoryKind::Host));
    // Memory that is registered meanwhile is registered with the device later.
    let more = vec![3; 4096];
    let (later, ended) = (end.register(&more), end.register(&more[..100]));
    end.rails.remove(ended.slot).expect("no device has it");
    end.rail().bring_back();
    ends.until("the return", || ends.are_up(1));
    let carried = ends.network.carried();
    assert_eq!((post(128), ends.network.carried()), (Some(Ok(())), carried + 64));
    let (from, to) =
        if std::ptr::eq(end, &ends.a) { (&more, &regions[1]) } else { (&ours, &later) };
    let told = ends.a.post(Write, part(span_of(from), 0, 64), remote(to));
    ends.until("a write with what came meanwhile", || told.result().is_some());
    assert_eq!(told.result(), Some(Ok(())));
    end.rails.remove(later.slot).expect("it lets go");
    for (end, region) in [(&ends.a, &regions[0]), (&ends.b, &regions[1])] {
        end.rails.remove(region.slot).expect("it lets go");
    }
    assert_eq!(ends.network.count().1, 0);
}

#[test]
fn a_device_of_ours_that_was_lost_is_used_again() {
    is_used_again(|ends| &ends.a);
}

#[test]
fn a_device_of_the_peers_that_was_lost_is_used_again() {
    is_used_again(|ends| &ends.b);
}

#[test]
fn a_key_of_a_part_is_made_anew_for_a_device_that_was_lost() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
    ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let sent = part(region.span, 0, 512);
    let sent = ends.b.regions.insert_part(region.slot, MemoryKind::Host, sent, Rights::READ, None);
    let remote = RemoteSpan { len: 64, ..sent.expect("a part").remote() };
    let read = || {
        let told = ends.a.post(Read, part(span_of(&ours), 0, 64), remote);
        ends.until("the read", || told.result().is_some());
        assert_eq!(told.result(), Some(Ok(())));
    };
    read();
    ends.b.rail().lose();
    ends.until("the loss", || ends.are_up(0));
    ends.b.rail().bring_back();
    ends.until("the return", || ends.are_up(1));
    let carried = ends.network.carried();
    read();
    assert_eq!(ends.network.carried(), carried + 64);
    ends.b.rails.remove(region.slot).expect("it lets go");
}

#[test]
fn a_region_stays_while_it_is_being_registered_again() {
    let ends = Ends::joined();
    let theirs = vec![2; 4096];
    let region = ends.b.register(&theirs);
    ends.b.rail().lose();
    ends.until("the loss", || ends.are_up(0));
    let hold = ends.b.rail().hold_registrations();
    ends.b.rail().bring_back();
    ends.until("a registration", || hold.is_waited_for());
    assert!(ends.b.rails.is_busy_with(region.slot) && ends.b.rails.remove(region.slot).is_err());
    drop(hold);
    ends.until("the end of it", || !ends.b.rails.is_busy_with(region.slot));
    ends.b.rails.remove(region.slot).expect("it lets go");
    assert_eq!(ends.network.count().1, 0);
}
