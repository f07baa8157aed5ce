//! Peers that ask for too much, and work that must not be held up by slow devices or peers.

use std::{
    cell::Cell,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
};

use uccl_fabric::{
    lane::{
        OpError,
        OpKind::{Read, Write},
    },
    mem::Span,
    rail::Rail,
};
use uccl_wire::rails::{MAX_RAILS, Note, PathId, RailOffer};

use super::*;

fn offer() -> RailOffer {
    RailOffer { name: "theirs".into(), link: "chaos".into(), network: String::new() }
}

/// An end that has accepted, and heard an offer.
fn acceptor() -> (End, RailNetwork) {
    let network = RailNetwork::default();
    let end = End::new(Role::Acceptor, vec![network.rail("ours", 1, RailFaults::default())]);
    end.hear(&Note::Offer(vec![offer()])).expect("an honest peer");
    assert!(matches!(end.lane.take_note(), Some(Note::Offer(_))));
    (end, network)
}

#[test]
fn no_more_rails_are_offered_than_may_be() {
    let network = RailNetwork::default();
    let rail = |n: usize| {
        network.rail(&format!("rail{n}"), n as u64, RailFaults::default()) as Arc<dyn Rail>
    };
    let rails = Rails::new((0..MAX_RAILS + 1).map(rail).collect());
    assert_eq!((rails.all().len(), rails.offer().len()), (MAX_RAILS, MAX_RAILS));
}

#[test]
fn a_rail_has_one_path() {
    let (end, network) = acceptor();
    let before = network.count();
    let open = |path, attempt| {
        end.hear(&Note::Open { id: PathId { path, attempt }, rail: 0, address: vec![0; 8] })
    };
    open(0, 1).expect("an honest peer");
    let began = Instant::now();
    while network.count().0 == before.0 {
        assert!(began.elapsed() < FAR, "no channel is made");
        std::thread::yield_now();
    }
    let ends = network.count().0;
    assert_eq!(ends, before.0 + 1);
    open(1, 1).expect_err("another path over the same rail");
    open(0, 2).expect_err("the path has a channel");
    assert_eq!(network.count().0, ends);
}

#[test]
fn a_peer_that_asks_and_never_listens_is_cut() {
    let (end, _network) = acceptor();
    let ask = Note::Ask(RegionId { slot: 7, key: 7 });
    let most = 1 << 16;
    for _ in 0..most {
        end.hear(&ask).expect("it may listen later");
    }
    end.hear(&ask).expect_err("more questions than are answered");

    // A peer with questions that wait for a device is limited too.
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let region = ends.b.register(&bytes);
    let sent = part(region.span, 0, 512);
    let sent = ends.b.regions.insert_part(region.slot, MemoryKind::Host, sent, Rights::READ, None);
    let ask = Note::Ask(id_of(&sent.expect("a part")));
    let hold = ends.b.rail().hold_registrations();
    let refused = (0..=most).find_map(|_| ends.b.hear(&ask).err());
    drop(hold);
    assert!(refused.is_some_and(|why| why.contains("more questions")));
}

#[test]
fn a_region_ends_once() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let _local = ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let revoke = Note::Revoke(id_of(&region));
    for _ in 0..1000 {
        ends.a.hear(&revoke).expect("nothing is on its way there");
        assert_eq!(ends.a.lane.take_note(), Some(Note::Released(id_of(&region))));
    }
    ends.a.rail().stick();
    let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
    let told = ends.a.post(Write, local, RemoteSpan { len: 64, ..region.remote() });
    ends.turn();
    ends.a.hear(&revoke).expect("something is on its way there");
    ends.a.hear(&revoke).expect_err("it is ending already");
    assert!(told.result().is_none());
}

/// Ending a channel may take a device long.
#[test]
fn a_channel_that_cannot_be_joined_holds_up_nobody() {
    let (end, _network) = acceptor();
    end.rail().hold_ends(true);
    let id = PathId { path: 0, attempt: 1 };
    end.hear(&Note::Open { id, rail: 0, address: b"nonsense!".to_vec() }).expect("to be tried");
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !matches!(&end.lane.describe()[0].1, Err(why) if why.contains("no address")) {
                end.progress();
            }
            tell.send(()).expect("awaited");
        });
        let in_time = told.recv_timeout(FAR);
        let refused = end.lane.take_note();
        end.rail().hold_ends(false);
        in_time.expect("the lane goes on while the channel ends");
        assert_eq!(refused, None, "there may be another attempt as soon as the peer is told");
    });
    let began = Instant::now();
    let refused = loop {
        assert!(began.elapsed() < FAR, "the peer is not told");
        end.progress();
        if let Some(note) = end.lane.take_note() {
            break note;
        }
    };
    assert!(matches!(&refused, Note::Refused { id: of, .. } if *of == id), "{refused:?}");
    end.hear(&Note::Open { id: PathId { attempt: 2, ..id }, rail: 0, address: vec![0; 8] })
        .expect("another attempt");
}

#[test]
fn a_channel_that_is_refused_holds_up_nobody() {
    let network = RailNetwork::default();
    let end = End::new(Role::Connector, vec![network.rail("ours", 1, RailFaults::default())]);
    assert!(matches!(end.lane.take_note(), Some(Note::Offer(_))));
    end.hear(&Note::Offer(vec![offer()])).expect("an honest peer");
    let began = Instant::now();
    let id = loop {
        assert!(began.elapsed() < FAR, "it does not open");
        end.progress();
        match end.lane.take_note() {
            Some(Note::Open { id, .. }) => break id,
            None => {}
            Some(note) => panic!("{note:?}"),
        }
    };
    end.rail().hold_ends(true);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let heard = end.hear(&Note::Refused { id, why: "no room".into() });
            tell.send(heard).expect("awaited");
        });
        let in_time = told.recv_timeout(FAR);
        end.rail().hold_ends(false);
        in_time.expect("the lane goes on while the channel ends").expect("an honest peer");
    });
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < FAR, "there is no other attempt");
        end.progress();
        match end.lane.take_note() {
            Some(Note::Open { id: next, .. }) => break assert_eq!(next.attempt, id.attempt + 1),
            Some(Note::Down(down)) => assert_eq!(down, id),
            Some(Note::Settled) | None => {}
            Some(note) => panic!("{note:?}"),
        }
    }
}

/// Two pairs of rails, of which nothing gets over the second: the peer's rail was pulled.
fn half_pulled(devices: [[Arc<ChaosRail>; 2]; 2], network: &RailNetwork) -> Ends {
    let [a, b] = devices;
    b[1].pull();
    let (a, b) = (End::new(Role::Connector, a.into()), End::new(Role::Acceptor, b.into()));
    Ends { a, b, network: network.clone() }
}

#[test]
fn a_pair_of_rails_that_never_works_is_told_of_once() {
    let network = RailNetwork::default();
    let rail = |n: usize, seed| network.rail(&format!("rail{n}"), seed, RailFaults::default());
    let devices = [[rail(1, 1), rail(2, 2)], [rail(3, 3), rail(4, 4)]];
    let attempts = |ends: &Ends| ends.a.lane.state.lock().paths[1].id.attempt;
    let said = warnings_of(|| {
        let ends = half_pulled(devices.clone(), &network);
        ends.until("some attempts", || ends.a.lane.is_settled() && attempts(&ends) > 4);
        ends.b.devices[1].plug();
        ends.until("the return of the rail", || ends.are_up(2));
        ends.b.devices[1].pull();
        ends.until("its loss", || ends.are_up(1));
        let before = attempts(&ends);
        ends.until("some attempts", || attempts(&ends) > before + 2);
    });
    let useless: Vec<_> = said.iter().filter(|one| one.contains("does not reach")).collect();
    let [useless] = useless[..] else { panic!("{said:?}") };
    assert!(useless.contains("rail2 ") && useless.contains("rail4 ("), "{useless}");
    assert!(useless.contains("the peer: the device is gone: it was pulled"), "{useless}");
}

/// A device with several addresses tries another where one does not reach the peer.
#[test]
fn a_device_is_told_how_many_attempts_have_failed() {
    let network = RailNetwork::default();
    let rail = |n: usize, seed| network.rail(&format!("rail{n}"), seed, RailFaults::default());
    let devices = [[rail(1, 1), rail(2, 2)], [rail(3, 3), rail(4, 4)]];
    let ends = half_pulled(devices, &network);
    let failed = || [0, 1].map(|at: usize| ends.a.devices[at].failed_before());
    ends.until("some attempts", || failed()[1] == 3);
    ends.b.devices[1].plug();
    ends.until("the return of the rail", || ends.are_up(2));
    let attempts = || ends.a.lane.state.lock().paths[1].id.attempt;
    let before = attempts();
    ends.a.devices[1].cut();
    ends.until("another attempt", || attempts() > before && ends.are_up(2));
    assert_eq!(failed(), [0, 0], "the last attempt did not fail");
}

/// A device may be slow to say whether its port is up.
#[test]
fn a_port_that_is_looked_at_holds_up_nobody() {
    let all = OnePath::new(RailFaults::default());
    let ends = &all.ends;
    let one = &ends.a.devices[0];
    let hold = one.hold_looks();
    let before = ends.a.lane.paths_up();
    one.unplug_silently();
    let write = all.write(0);
    let (turns, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let until = |what: &dyn Fn() -> bool| {
        let began = Instant::now();
        while began.elapsed() < FAR && !what() {
            std::thread::yield_now();
        }
        what()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                ends.turn();
                turns.fetch_add(1, Relaxed);
            }
        });
        let looked = until(&|| hold.is_waited_for());
        let before_it = turns.load(Relaxed);
        let went_on = until(&|| turns.load(Relaxed) > before_it + 10);
        let (up, result) = (ends.a.lane.paths_up(), write.result());
        is_over.store(true, Relaxed);
        drop(hold);
        assert!(looked && went_on, "the lane goes on meanwhile");
        assert_eq!((up, result), (before, None));
    });
    ends.until("the loss of the path", || ends.a.lane.paths_up() < before);
    one.unstick();
    one.plug();
    ends.until("the write", || write.result().is_some());
    assert_eq!(write.result(), Some(Ok(())));
}

/// To make queue pairs may take a device long.
#[test]
fn a_channel_that_takes_long_to_make_holds_up_nobody() {
    let over = |which: usize| {
        let network = RailNetwork::default();
        let rail = |n: usize| network.rail(&format!("rail{n}"), n as u64, RailFaults::default());
        let (a, b) = (End::new(Role::Connector, vec![rail(1), rail(2)]), vec![rail(3), rail(4)]);
        let ends = Ends { a, b: End::new(Role::Acceptor, b), network };
        let hold = [&ends.a, &ends.b][which].devices[0].hold_opens();
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ends.until("the other path", || ends.are_up(1));
                tell.send(()).expect("awaited");
            });
            let in_time = told.recv_timeout(FAR);
            drop(hold);
            in_time.expect("the lanes go on while the channel is made");
        });
        ends.until("both paths", || ends.are_up(2));
    };
    [0, 1].into_iter().for_each(over);
}

/// A device may need seconds to register much memory.
#[test]
fn a_device_that_takes_long_over_a_part_holds_up_nobody() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let sent = part(region.span, 1024, 512);
    let sent = ends.b.regions.insert_part(region.slot, MemoryKind::Host, sent, Rights::READ, None);
    let sent = sent.expect("a part");
    let local = |at| Span { addr: ours.as_ptr().expose_provenance() + at, len: 64 };
    let rail = ends.b.rail();
    let hold = rail.hold_registrations();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let read = ends.a.post(Read, local(0), RemoteSpan { len: 64, ..sent.remote() });
        scope.spawn(|| {
            let write = ends.a.post(Write, local(64), RemoteSpan { len: 64, ..region.remote() });
            ends.until("a write to the same region", || write.result().is_some());
            tell.send(()).expect("awaited");
        });
        let in_time = told.recv_timeout(FAR);
        let (ended, is_busy) = (read.result(), ends.b.rails.is_busy_with(region.slot));
        let removed = ends.b.rails.remove(region.slot);
        drop(hold);
        in_time.expect("the lane goes on while the device is shown the memory");
        assert_eq!(ended, None, "the read needs the part's key");
        assert!(is_busy && removed.is_err(), "the device may reach the memory when it is done");
    });
    ends.until("the device is done", || !ends.b.rails.is_busy_with(region.slot));
    ends.b.rails.remove(region.slot).expect("the device lets go");
    assert_eq!(ends.network.count().1, 1, "only our own is left");
}

#[test]
fn a_question_about_a_part_is_answered_when_the_device_is_done() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let parts = [0, 512].map(|at| {
        let sent = part(region.span, at, 512);
        let (kind, rights) = (MemoryKind::Host, Rights::READ);
        ends.b.regions.insert_part(region.slot, kind, sent, rights, None).expect("a part")
    });
    let hold = ends.b.rail().hold_registrations();
    let reads = parts.map(|sent| {
        let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
        ends.a.post(Read, local, RemoteSpan { len: 64, ..sent.remote() })
    });
    (0..20).for_each(|_| ends.turn());
    assert!(ends.b.lane.arm(), "it may sleep meanwhile");
    drop(hold);
    ends.until("both reads", || reads.iter().all(|read| read.result().is_some()));
    assert_eq!([0, 1].map(|n: usize| reads[n].result()), [Some(Ok(())), Some(Ok(()))]);
    assert_eq!(ours[..64], [2; 64]);
}

/// Two regions of the peer's. We know their keys on the first of two paths only.
struct OnePath {
    ends: Ends,
    ours: Vec<u8>,
    regions: [Region; 2],
    _theirs: [Vec<u8>; 2],
}

impl OnePath {
    fn new(other: RailFaults) -> Self {
        let ends = Ends::over(&[RailFaults::default(), other]);
        let (ours, theirs) = (vec![1u8; 4096], [vec![2u8; 4096], vec![3u8; 4096]]);
        ends.a.register(&ours);
        let regions = [0, 1].map(|n: usize| ends.b.register(&theirs[n]));
        let all = Self { ends, ours, regions, _theirs: theirs };
        let (ends, other) = (&all.ends, &all.ends.a.devices[1]);
        other.pull();
        ends.until("the loss of a path", || ends.are_up(1));
        let known = [0, 1].map(|n| all.write(n));
        ends.until("the keys of one path", || known.iter().all(|told| told.result().is_some()));
        other.plug();
        ends.until("the other path", || ends.are_up(2));
        all
    }

    fn write(&self, region: usize) -> Arc<OpReport> {
        let local = Span { addr: self.ours.as_ptr().expose_provenance(), len: 64 };
        let remote = RemoteSpan { len: 64, ..self.regions[region].remote() };
        self.ends.a.post(Write, local, remote)
    }

    /// Writes to the first region twice and then to the second. Their path is lost before they end,
    /// so they are to be requested again in this order.
    fn lost_writes(&self) -> [Arc<OpReport>; 3] {
        let one = &self.ends.a.devices[0];
        one.stick();
        let writes = [0, 0, 1].map(|region| self.write(region));
        one.pull();
        writes
    }
}

#[test]
fn a_write_that_waits_for_a_key_holds_up_nothing_behind_it() {
    let all = OnePath::new(RailFaults::default());
    let first = id_of(&all.regions[0]);
    let is_lost = |note: &Note| matches!(note, Note::Grant(of, _) if *of == first);
    let [first, again, second] = all.lost_writes();
    all.ends.until_without(is_lost, "the last write", || second.result().is_some());
    assert_eq!((first.result(), second.result()), (None, Some(Ok(()))));
    for write in [again, first] {
        all.ends.a.lane.cancel(write.name());
        assert_eq!(write.result(), Some(Err(OpError::Cancelled)));
    }
}

#[test]
fn a_cancelled_write_ends_though_no_device_has_room() {
    let all = OnePath::new(RailFaults { depth: 1, ..RailFaults::default() });
    let (ends, other) = (&all.ends, &all.ends.a.devices[1]);
    other.stick();
    let writes = all.lost_writes();
    ends.until("the loss of a path", || ends.are_up(1));
    // Time for the remaining keys to arrive and for one write to get under way.
    (0..100).for_each(|_| ends.turn());
    assert!(writes.iter().all(|write| write.result().is_none()));
    // The lost path's channel may still be ending, on a thread of its own. Until it has, it may
    // touch the write's memory.
    ends.until("the cancelled write", || {
        ends.a.lane.cancel(writes[2].name());
        writes[2].result().is_some()
    });
    assert_eq!(writes[2].result(), Some(Err(OpError::Cancelled)));
    other.unstick();
    ends.until("the others", || writes.iter().all(|write| write.result().is_some()));
    assert_eq!([0, 1].map(|n: usize| writes[n].result()), [Some(Ok(())), Some(Ok(()))]);
}

/// Which side's end of a channel takes long to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Late {
    Ours,
    Theirs,
}

/// A path with a write under way is lost. One of its ends goes, and the other end is told; the late
/// one stays for now.
fn is_not_requested_again_before(late: Late) {
    let all = OnePath::new(RailFaults::default());
    let ends = &all.ends;
    let (ours, theirs) = (&ends.a.devices[0], &ends.b.devices[0]);
    let (goes, stays) = if late == Late::Ours { (theirs, ours) } else { (ours, theirs) };
    ours.stick();
    let write = all.write(0);
    let carried = ends.network.carried();
    let told = Cell::new(false);
    let look = |note: &Note| {
        told.set(told.get() || matches!(note, Note::Down(_)));
        false
    };
    stays.hold_ends(true);
    std::thread::scope(|scope| {
        let (over, is_over) = mpsc::channel::<()>();
        // If the lane waits for the late end, which it must not, this lets that end go after a
        // while, so that the test fails and does not hang.
        scope.spawn(move || {
            let _ = is_over.recv_timeout(FAR);
            stays.hold_ends(false);
        });
        goes.cut();
        ends.until_without(look, "the word that one end has gone", || told.get());
        for _ in 0..200 {
            ends.turn();
        }
        assert_eq!((write.result(), ends.network.carried()), (None, carried), "{late:?}");
        drop(over);
    });
    ours.unstick();
    ends.until("the write", || write.result().is_some());
    assert_eq!(write.result(), Some(Ok(())));
    assert_eq!(ends.network.carried(), carried + 64, "once");
}

/// Until our end is gone, our device may still read the memory of a write, or write that of a read.
#[test]
fn nothing_is_requested_again_before_our_end_is_gone() {
    is_not_requested_again_before(Late::Ours);
}

/// A request that our device has sent may still land.
#[test]
fn nothing_is_requested_again_before_the_peers_end_is_gone() {
    is_not_requested_again_before(Late::Theirs);
}
