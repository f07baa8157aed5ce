//! The engine over rails that are slow, full, out of order, cut, pulled and plugged in again.

use std::{
    sync::{Arc, mpsc},
    task::Poll,
    time::{Duration, Instant},
};

use fastrand::Rng;
use uccl_chaos::{ChaosRail, GpuFaults, RailFaults, RailNetwork, each_seed, warnings_of};
use uccl_fabric::gpu::CopyBy;
use uccl_wire::rails::{Note, RegionId};

use super::{
    SHORT,
    workload::{Plan, Workload, move_one},
    world::{ByRails, FAR, Memory, Side},
};
use crate::{
    Acceptance, Config, ConnectRequest, Endpoint, Error, Iov, Moves, MrId, NoInterrupt, Op,
    Request, Transport,
    devices::OpenedDevices,
    drive::{
        core::connection::{
            Connection,
            transfers::{Lookup, MAX_PENDING},
        },
        pair::on_loopback,
        timers::TO_PROBE,
    },
    wire::advert::Advert,
};

fn some_faults(rng: &mut Rng) -> RailFaults {
    RailFaults {
        delay_polls: [0, 0, 3, 30][rng.usize(0..4)],
        depth: [1, 3, 64][rng.usize(0..3)],
        chunk_bytes: [100, 4096, 64 << 10][rng.usize(0..3)],
        reorder: rng.bool(),
        keys_of_channels: rng.bool(),
        ..RailFaults::default()
    }
}

fn some_rails(rng: &mut Rng, most: usize) -> Vec<RailFaults> {
    let count = rng.usize(1..most + 1);
    (0..count).map(|_| some_faults(rng)).collect()
}

fn workload(seed: u64, rails: ByRails<'_>, plan: Plan, longest: usize) -> Workload {
    let shortest = rails.faults.iter().map(|faults| faults.chunk_bytes).min().unwrap_or(4096);
    Workload::new(seed, rails.join(seed), plan, (shortest as usize * 100).min(longest))
}

fn up(side: &Side) -> usize {
    side.connection().lanes.rails.as_ref().map_or(0, |rails| rails.paths_up())
}

#[test]
fn everything_ends_and_nothing_lands_afterwards() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let rails = some_rails(&mut rng, 3);
        let plan = Plan {
            steps: rng.usize(1..120),
            cancels: rng.bool(),
            deadlines: rng.bool(),
            revokes: rng.bool(),
            streams: rng.bool(),
            loss: false,
        };
        let mut work = workload(seed, ByRails::new(&rails), plan, 1 << 20);
        assert!(work.sides.iter().all(|side| up(side) == rails.len()));
        work.run(|_, _| {});
        work.leave();
    });
}

#[test]
fn rails_break_and_come_back_under_load() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut rails = some_rails(&mut rng, 3);
        let count = rails.len();
        for rail in &mut rails {
            rail.break_permille = rng.u32(0..30);
        }
        let (cancels, revokes, deadlines) = (rng.bool(), rng.bool(), rng.bool());
        let plan = Plan { steps: 120, cancels, revokes, deadlines, ..Plan::default() };
        let mut work = workload(seed, ByRails::new(&rails), plan, 1 << 20);
        let mut out = vec![false; count];
        work.run(|_, sides| {
            let (n, end) = (rng.usize(0..count), rng.usize(0..2));
            match rng.u32(0..40) {
                0 => sides[end].rails[n].cut(),
                1 if !out[n] => {
                    out[n] = true;
                    sides[end].rails[n].pull();
                }
                2 => {
                    out[n] = false;
                    sides.iter().for_each(|side| side.rails[n].plug());
                }
                _ => {}
            }
        });
        let [a, b] = &work.sides;
        for side in [a, b] {
            side.rails.iter().for_each(|rail| rail.plug());
        }
        a.until("the return of every rail", || up(a) == count && up(b) == count);
        work.leave();
    });
}

#[test]
fn memory_that_no_rail_takes_goes_another_way() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut rails = some_rails(&mut rng, 2);
        rails.iter_mut().for_each(|rail| rail.refuse_memory_percent = [50, 100][rng.usize(0..2)]);
        let (revokes, cancels) = (rng.bool(), rng.bool());
        let plan = Plan { steps: 100, revokes, cancels, ..Plan::default() };
        let mut work = workload(seed, ByRails::new(&rails), plan, 1 << 20);
        work.run(|_, _| {});
        work.leave();
    });
}

fn copies(delay_polls: u32, fail_at: Option<u64>) -> CopyBy {
    CopyBy::from(GpuFaults { delay_polls, fail_at, seed: 1 })
}

fn some_copies(rng: &mut Rng) -> CopyBy {
    copies([0, 3, 50][rng.usize(0..3)], None)
}

#[test]
fn memory_that_a_side_cannot_register_goes_over_rails_all_the_same() {
    let rails = [RailFaults::default(), RailFaults::default()];
    let copy_by = [copies(3, None), copies(3, None)];
    let mut sides = ByRails { copy_by, ..ByRails::new(&rails) }.join(1);
    let (mut rng, network) = (Rng::with_seed(1), sides[0].rails[0].network().clone());
    let registered = network.count();
    for refusing in [[100, 0], [0, 100], [100, 100]] {
        for (side, percent) in sides.iter().zip(refusing) {
            side.rails.iter().for_each(|rail| rail.refuse_memory(percent));
        }
        for op in [Op::Write, Op::Read] {
            let (before, len) = (network.carried(), 3 << 20 | 5);
            move_one(&sides, &mut rng, op, len).expect("through chunks");
            assert_eq!(network.carried() - before, len as u64, "{refusing:?} {op:?}");
        }
    }
    // The posting side has chunks of its own, the other side chunks for its peer: no more, however
    // much was moved.
    let areas = network.count().1 - registered.1;
    assert_eq!(areas, 2 * rails.len());
    sides.iter_mut().for_each(Side::leave);
    assert_eq!(network.count().1, 0);
}

#[test]
fn a_slow_way_is_told_once_and_shown() {
    for (copy_by, slow) in
        [([copies(0, None), copies(0, None)], Moves::Staged), (by_gpus(), Moves::Tcp)]
    {
        let mut sides = ByRails { copy_by, ..ByRails::new(&[RailFaults::default()]) }.join(1);
        let mut rng = Rng::with_seed(1);
        let moves = |side: &Side| side.ep.connection(side.conn).expect("it is there").moves;
        move_one(&sides, &mut rng, Op::Write, 1000).expect("the rail takes it");
        assert_eq!([moves(&sides[0]), moves(&sides[1])], [Moves::Direct; 2]);

        sides[0].rails[0].refuse_memory(100);
        let memory = [0; 3].map(|_: i32| Memory::new(&mut rng, &[1000]));
        let mut regions = Vec::new();
        let said = warnings_of(|| regions.extend(memory.iter().map(|one| sides[0].register(one))));
        assert_eq!(said.len(), 1, "{said:?}");
        let has = |what| said[0].contains(what);
        assert!(has("rail0") && has("host memory") && has("ulimit -l"), "{said:?}");
        assert_eq!([moves(&sides[0]), moves(&sides[1])], [slow, Moves::Direct]);
        for mr in regions {
            sides[0].ep.deregister(mr).expect("unused");
        }
        assert_eq!(moves(&sides[0]), Moves::Direct, "such regions have ended");

        sides[0].rails[0].refuse_memory(0);
        sides[1].rails[0].refuse_memory(100);
        let [ours, theirs] = [0; 2].map(|_: i32| Memory::new(&mut rng, &[1000]));
        let (mr, peer_mr) = (sides[0].register(&ours), sides[1].register(&theirs));
        assert_eq!(moves(&sides[0]), Moves::Direct, "it has not met the region yet");
        let (iovs, adverts) = (ours.iovs(mr), theirs.adverts(&sides[1], peer_mr));
        let request = Request::new(sides[0].conn, Op::Write, &iovs, &adverts);
        sides[0].ep.run(&request, &mut NoInterrupt).expect("in another way");
        assert_eq!([moves(&sides[0]), moves(&sides[1])], [slow; 2]);
        sides[0].ep.deregister(mr).expect("unused");
        sides[1].ep.deregister(peer_mr).expect("unused");
        // The side that met a region over TCP does not learn that the region has ended.
        let told = if slow == Moves::Tcp { slow } else { Moves::Direct };
        assert_eq!([moves(&sides[0]), moves(&sides[1])], [told, Moves::Direct]);
        sides.iter_mut().for_each(Side::leave);
    }
}

fn by_gpus() -> [CopyBy; 2] {
    [CopyBy::default(), CopyBy::default()]
}

fn one_region(side: &Side) -> (Memory, MrId) {
    let memory = Memory::new(&mut Rng::with_seed(1), &[1000]);
    let mr = side.register(&memory);
    (memory, mr)
}

#[test]
fn a_device_that_does_not_let_go_is_named_and_asked_again() {
    let mut sides = ByRails::new(&[RailFaults::default()]).join(1);
    let (_memory, mr) = one_region(&sides[0]);
    sides[0].rails[0].hold_memory(true);
    for _ in 0..2 {
        match sides[0].ep.deregister(mr) {
            Err(Error::StillTouched { regions, by, .. }) => {
                assert_eq!((&regions[..], &*by), (&[mr][..], "a device"));
            }
            other => panic!("{other:?}"),
        }
    }
    sides[0].rails[0].hold_memory(false);
    sides[0].ep.deregister(mr).expect("it lets go");
    let again = sides[0].ep.deregister(mr);
    assert!(matches!(again, Err(Error::UnknownRegion(_))), "{again:?}");
    sides.iter_mut().for_each(Side::leave);
}

/// A lane that is made while a region is given back sees that the region was retired, even if no
/// lane could be asked before.
#[test]
fn nothing_new_is_requested_with_a_region_that_is_given_back() {
    let timeout = Duration::from_millis(20);
    let sides = ByRails { timeout, ..ByRails::new(&[RailFaults::default()]) }.join(1);
    let (_memory, mr) = one_region(&sides[0]);
    let core = sides[0].ep.core();
    let lease = core.mrs.look_up(mr, |found| found.lease()).expect("registered");
    let slot = lease.mr().region.slot;
    sides[0].ep.disconnect(sides[0].conn).expect("it was there");
    let closed = sides[0].ep.close();
    assert!(matches!(closed, Err(Error::StillTouched { .. })), "{closed:?}");
    let rails = &core.rails.get().expect("rails").rails;
    assert!(!rails.retire(slot), "it could still be used");
    drop(lease);
    sides.iter().for_each(|side| side.ep.close().expect("nobody touches anything"));
}

#[test]
fn a_region_is_given_back_when_devices_have_seen_it() {
    let mut sides = ByRails::new(&[RailFaults::default()]).join(1);
    let mut rng = Rng::with_seed(1);
    let [ours, theirs] = [(); 2].map(|()| Memory::new(&mut rng, &[100_000]));
    let (mr, peer_mr) = (sides[0].register(&ours), sides[1].register(&theirs));
    let slot = sides[0].ep.core().mrs.get(mr).expect("registered").region.slot;
    let rails = &sides[0].ep.core().rails.get().expect("rails").rails;
    let hold = sides[0].rails[0].hold_registrations();
    // The peer reads the sent data, and asks for a key to do so.
    let (sent, wanted) = (ours.iovs(mr), theirs.iovs(peer_mr));
    let send = Request::new(sides[0].conn, Op::Send, &sent, &[]);
    let send = sides[0].ep.post(&send).expect("posted");
    let recv = Request::new(sides[1].conn, Op::Recv, &wanted, &[]);
    let recv = sides[1].ep.post(&recv).expect("posted");
    sides[0].until("the question of the peer", || rails.is_busy_with(slot));
    sides[0].ep.cancel(send).expect("known");
    sides[0].until("the end of the send", || sides[0].ep.core().mrs.revoke(mr).is_ok());
    std::thread::scope(|scope| {
        let given_back = scope.spawn(|| sides[0].ep.deregister(mr));
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            assert!(!given_back.is_finished(), "the device may reach it when it has seen it");
        }
        drop(hold);
        given_back.join().expect("no panic").expect("nothing touches it any more");
    });
    sides[1].ep.cancel(recv).expect("known");
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn a_peer_that_asks_and_reads_no_answer_is_cut() {
    let sides = ByRails::new(&[RailFaults::default()]).join(1);
    let conn = sides[1].connection();
    let rails = conn.lanes.rails.as_ref().expect("rails");
    let lane = conn.lanes.rails_place() as u16;
    let mut ask = Vec::new();
    Note::Ask(RegionId { slot: 7, key: 7 }).encode_to(&mut ask);
    sides[1].lanes[0].inner().pipe().stall();
    let asked = 4 << 20;
    let refused = (0..asked).find_map(|_| {
        // A worker may be passing on earlier answers.
        while rails.has_notes() {
            conn.forward_notes();
        }
        conn.on_link(lane, &ask).and_then(|_| conn.check_unread()).err()
    });
    let refused = refused.expect("so much is not kept for it");
    assert!(refused.contains("than is read of the answers"), "{refused}");
    drop(conn);
    sides.iter().for_each(|side| side.ep.close().expect("nobody touches anything"));
}

#[test]
fn a_copy_that_fails_ends_its_transfer_alone() {
    for failing in [0, 1] {
        let rails = [RailFaults { refuse_memory_percent: 100, ..RailFaults::default() }];
        let mut copy_by = [copies(3, None), copies(3, None)];
        copy_by[failing] = copies(3, Some(2));
        let mut sides = ByRails { copy_by, ..ByRails::new(&rails) }.join(1);
        let mut rng = Rng::with_seed(1);
        for op in [Op::Write, Op::Read] {
            let why = move_one(&sides, &mut rng, op, 3 << 20).expect_err("a copy fails");
            let reason = ["chaos", "the peer's memory could not be touched"][failing];
            assert!(why.to_string().contains(reason), "{why}");
            move_one(&sides, &mut rng, op, 3 << 20).expect("later copies do not fail");
        }
        sides.iter_mut().for_each(Side::leave);
    }
}

#[test]
fn memory_that_no_rail_takes_passes_through_chunks() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut rails = some_rails(&mut rng, 2);
        for rail in &mut rails {
            rail.refuse_memory_percent = [30, 100][rng.usize(0..2)];
            rail.break_permille = [0, 0, 10][rng.usize(0..3)];
        }
        let copy_by = [some_copies(&mut rng), some_copies(&mut rng)];
        let (cancels, revokes, deadlines) = (rng.bool(), rng.bool(), rng.bool());
        let plan = Plan { steps: 100, cancels, revokes, deadlines, ..Plan::default() };
        let by_rails = ByRails { copy_by, ..ByRails::new(&rails) };
        let mut work = workload(seed, by_rails, plan, 3 << 20);
        work.run(|_, _| {});
        work.leave();
    });
}

#[test]
fn a_rail_reaches_the_region_that_an_advert_was_made_of_and_no_other() {
    let rails = [RailFaults::default()];
    let mut sides = ByRails::new(&rails).join(1);
    let mut rng = Rng::with_seed(1);
    let [here, there] = [0, 1].map(|_| Memory::new(&mut rng, &[9000]));
    let (mr, all) = (sides[0].register(&here), sides[1].register(&there));
    let whole = there.adverts(&sides[1], all)[0];
    // SAFETY: a part of memory that is kept until both endpoints are closed.
    let part = unsafe { sides[1].ep.register(whole.addr as usize + 3000, 3000) };
    let part = part.expect("registered");
    let of_part =
        sides[1].ep.advertise(part, whole.addr as usize + 3000, 3000).expect("advertised");
    let write = |advert: Advert| {
        let iovs = [Iov { len: advert.len as usize, ..here.iovs(mr)[0] }];
        let adverts = [advert];
        let request = Request::new(sides[0].conn, Op::Write, &iovs, &adverts);
        sides[0].ep.run(&request, &mut NoInterrupt)
    };
    let refused = |advert: Advert| {
        let before = there.now();
        let refused = write(advert);
        assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{refused:?}");
        assert!(there.now() == before);
    };
    let network = sides[0].rails[0].network();
    let before = network.carried();
    write(of_part).expect("its own memory");
    assert_eq!(network.carried() - before, 3000, "not over the rail");
    for advert in [
        Advert { len: 3001, ..of_part },
        Advert { addr: of_part.addr - 1, ..of_part },
        Advert { addr: whole.addr, len: 9000, ..of_part },
    ] {
        refused(advert);
    }
    sides[1].ep.deregister(part).expect("unused");
    refused(of_part);
    write(whole).expect("the region around it is there still");
    assert!(here.pieces() == there.pieces());
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn a_second_deregistration_leaves_the_registration_of_the_next_region_alone() {
    let rails = [RailFaults::default()];
    let mut sides = ByRails::new(&rails).join(1);
    let mut rng = Rng::with_seed(1);
    let memory = Memory::new(&mut rng, &[100]);
    let core = sides[0].ep.core();
    let mr = sides[0].register(&memory);
    let slot = core.mrs.get(mr).expect("it is there").region.slot;
    let [first, second] = [(); 2].map(|()| core.mrs.revoke(mr).expect("it is there still"));
    core.drain(vec![first], None).expect("nobody is at it");
    let [here, there] = [0, 1].map(|_| Memory::new(&mut rng, &[9000]));
    let (next, theirs) = (sides[0].register(&here), sides[1].register(&there));
    assert_eq!(core.mrs.get(next).expect("it is there").region.slot, slot);
    core.drain(vec![second], None).expect("that memory was given back");
    let (iovs, adverts) = (here.iovs(next), there.adverts(&sides[1], theirs));
    let network = sides[0].rails[0].network();
    let before = network.carried();
    let write = Request::new(sides[0].conn, Op::Write, &iovs, &adverts);
    sides[0].ep.run(&write, &mut NoInterrupt).expect("written");
    assert_eq!(network.carried() - before, 9000, "not over the rail");
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn memory_that_is_being_registered_is_not_given_back() {
    let rails = [RailFaults::default()];
    let sides = ByRails { timeout: SHORT, ..ByRails::new(&rails) }.join(1);
    let memory = Memory::new(&mut Rng::with_seed(1), &[9000]);
    let (ep, network) = (&sides[0].ep, sides[0].rails[0].network());
    let hold = sides[0].rails[0].hold_registrations();
    std::thread::scope(|scope| {
        // SAFETY: the memory is kept until the endpoint is closed.
        let register = || unsafe { ep.register(memory.addr(), memory.len()) };
        let registering = scope.spawn(register);
        sides[0].until("a registration", || hold.is_waited_for());
        let early = ep.close();
        assert!(matches!(early, Err(Error::StillTouched { .. })), "{early:?}");
        drop(hold);
        let registered = registering.join().expect("no panic");
        assert!(matches!(registered, Err(Error::Closed)), "{registered:?}");
        // After this error the caller has the memory back.
        assert_eq!(network.count().1, 0);
    });
    sides.iter().for_each(|side| side.ep.close().expect("nobody touches anything"));
    assert_eq!(network.count().1, 0);
}

#[test]
fn without_a_rail_the_streams_carry_on() {
    let rails = [RailFaults::default()];
    let mut sides = ByRails::new(&rails).join(1);
    let mut rng = Rng::with_seed(1);
    sides[0].rails[0].pull();
    sides[0].until("the loss of the rail", || up(&sides[0]) + up(&sides[1]) == 0);
    for op in [Op::Write, Op::Read] {
        move_one(&sides, &mut rng, op, 3 << 20).expect("the stream takes over");
    }
    sides[0].rails[0].plug();
    sides[0].until("the return of the rail", || sides.iter().all(|side| up(side) == 1));
    for op in [Op::Write, Op::Read] {
        move_one(&sides, &mut rng, op, 3 << 20).expect("the rail is back");
    }
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn nothing_is_left_of_rails_that_come_and_go() {
    let rails = [RailFaults::default(), RailFaults::default()];
    let mut sides = ByRails::new(&rails).join(1);
    let mut rng = Rng::with_seed(1);
    let before = sides[0].rails[0].network().count();
    for round in 0..50 {
        let (end, rail) = (round % 2, round / 2 % 2);
        sides[end].rails[rail].pull();
        move_one(&sides, &mut rng, Op::Write, 1 << 20).expect("the other takes over");
        sides[end].rails[rail].plug();
        sides[0].until("the return of the rail", || sides.iter().all(|side| up(side) == 2));
    }
    assert_eq!(sides[0].rails[0].network().count(), before);
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn a_rail_that_does_not_answer_holds_up_nobody() {
    let silent = RailFaults { delay_polls: u32::MAX, ..RailFaults::default() };
    let rails = [RailFaults::default(), silent];
    let mut sides = ByRails::new(&rails).join(1);
    let paths = sides[0].connection().lanes.rails.as_ref().expect("rails").describe();
    let why: Vec<_> = paths.into_iter().map(|(_, state)| state.err()).collect();
    assert_eq!(why, [None, Some("nothing has got through yet".to_owned())]);
    move_one(&sides, &mut Rng::with_seed(1), Op::Write, 3 << 20).expect("one rail is enough");
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn a_call_that_may_become_a_transfer_is_refused_before_it_moves_if_none_fits() {
    let rails = [RailFaults::default()];
    let mut sides = ByRails { timeout: Duration::ZERO, ..ByRails::new(&rails) }.join(1);
    let mut rng = Rng::with_seed(1);
    let [mut here, there] = [0, 1].map(|_| Memory::new(&mut rng, &[100]));
    let (mr, peer_mr) = (sides[0].register(&here), sides[1].register(&there));
    let (iovs, adverts) = (here.iovs(mr), there.adverts(&sides[1], peer_mr));
    let (ep, conn) = (sides[0].ep.clone(), sides[0].conn);
    let run = move |op| ep.run(&Request::new(conn, op, &iovs, &adverts), &mut NoInterrupt);
    // The rail has the region's key now.
    run(Op::Write).expect("it works");
    here.reuse(&mut rng);
    let before = there.now();

    let recv = here.iovs(mr);
    let recv = Request::new(conn, Op::Recv, &recv, &[]);
    for _ in 0..MAX_PENDING {
        sides[0].ep.post(&recv).expect("room for it");
    }
    sides[0].rails[0].stick();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || [Op::Write, Op::Read].map(|op| tell.send(run(op)).is_ok()));
    for _ in 0..2 {
        let ended = told.recv_timeout(FAR).expect("it ends");
        assert!(matches!(ended, Err(Error::Full { .. })), "{ended:?}");
    }
    sides[0].rails[0].unstick();
    assert!(there.now() == before && here.unchanged(), "what was refused has moved");
    sides[0].connection().failed_contexts.check(0).expect("nothing has failed");

    sides[0].ep.disconnect(conn).expect("it was there");
    sides.iter_mut().for_each(|side| side.ep.close().expect("closed"));
    assert!(here.unchanged(), "ours");
    assert!(there.now() == before, "the peer's");
    std::mem::forget((here, there));
}

#[test]
fn a_connection_with_rails_that_are_never_tried_is_accepted_in_time() {
    let rails = [RailFaults { delay_polls: u32::MAX, ..RailFaults::default() }];
    let sides = ByRails { timeout: SHORT, ..ByRails::new(&rails) }.join_untried(1);
    // From now on no bytes from the peer arrive, so its message that it has tried the rails never
    // comes.
    sides[0].lanes[0].inner().pipe().stall();
    let (ep, conn) = (&sides[1].ep, sides[1].connection());
    let offered = Acceptance { conn: conn.id, ip: [127, 0, 0, 1].into(), gpu_index: 0 };
    conn.accept_when_settled(offered.clone());
    drop(conn);
    let accepted = ep.accept(Some(FAR), &mut NoInterrupt).expect("its time is over");
    assert_eq!(accepted.conn, offered.conn);
    ep.check_connection(accepted.conn).expect("it lives, without rails");
    sides.iter().for_each(|side| side.ep.close().expect("nobody touches anything"));
}

/// Settings of an endpoint that may use only rails.
fn with_rails_alone() -> Config {
    Config { transport: Transport::Libfabric, timeout: FAR, ..on_loopback() }
}

/// Two endpoints that may use only rails, and the first one's rail.
fn rails_alone() -> ([Endpoint; 2], Arc<ChaosRail>) {
    let network = RailNetwork::default();
    let rails = [1, 2].map(|seed| network.rail("rail", seed, RailFaults::default()));
    let endpoint = |rail: &Arc<ChaosRail>| {
        let rails = vec![Arc::clone(rail) as _];
        Endpoint::with_rails(with_rails_alone(), rails).expect("an endpoint")
    };
    let [first, _] = &rails;
    (rails.each_ref().map(endpoint), Arc::clone(first))
}

#[test]
fn a_rail_that_nothing_may_stand_in_for_has_as_long_as_connecting_may_take() {
    let ([a, b], rail) = rails_alone();
    rail.stick();
    let connect = |timeout| a.connect(b.addr(), Some(timeout), &mut NoInterrupt);
    let why = connect(SHORT).expect_err("nothing gets through").to_string();
    let within = format!("no rail works within {SHORT:?}: rail: nothing has got through yet");
    assert!(why.contains(&within), "{why}");
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| connect(FAR));
        // Longer than a rail's probe may take where streams could carry the data.
        std::thread::sleep(TO_PROBE + SHORT);
        assert!(!connecting.is_finished());
        rail.unstick();
        connecting.join().expect("no panic").expect("it gets through in time");
    });
    b.accept(Some(FAR), &mut NoInterrupt).expect("accepted");
}

#[test]
fn a_connect_over_rails_is_polled_and_cancelled() {
    let ([a, b], rail) = rails_alone();
    let addrs = [b.addr()];
    let request = ConnectRequest { timeout: Some(Duration::ZERO), ..ConnectRequest::new(&addrs) };
    let begin = || a.begin_connect(&request).expect("begun");
    let until = |mut is_so: Box<dyn FnMut() -> bool + '_>| {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < FAR, "it never happens");
            std::thread::yield_now();
        }
    };
    rail.stick();
    let stuck = begin();
    until(Box::new(|| stuck.poll().is_pending() && a.core().open_conns().len() == 1));
    // The rail is never up, and there is no time limit: a poll that waited would never return.
    for _ in 0..20 {
        assert!(stuck.poll().is_pending());
    }
    let cancelled = stuck.cancel();
    assert!(matches!(cancelled, Err(Error::Cancelled { .. })), "{cancelled:?}");
    assert!(a.core().open_conns().is_empty());
    until(Box::new(|| b.core().open_conns().is_empty()));
    rail.unstick();
    let going = begin();
    let mut made = None;
    until(Box::new(|| {
        if let Poll::Ready(result) = going.poll() {
            made = Some(result.expect("connected"));
        }
        made.is_some()
    }));
    b.accept(Some(FAR), &mut NoInterrupt).expect("accepted");
    assert_eq!(made.map(|conn| a.connection(conn).expect("known").lanes), Some(1));
    [a, b].into_iter().for_each(|ep| ep.close().expect("nobody touches anything"));
}

#[test]
fn connections_are_made_while_devices_are_opened_and_shown_the_memory() {
    let network = RailNetwork::default();
    let mut rng = Rng::with_seed(1);
    let [first, second] = [1, 2].map(|seed| network.rail("rail", seed, RailFaults::default()));
    let holds = [&first, &second].map(|rail| rail.hold_registrations());
    let (open, is_to_open) = mpsc::channel::<()>();
    let ends = [first, second].map(|rail| {
        let ep = Endpoint::new(with_rails_alone()).expect("an endpoint");
        let memory = [9000, 10_000].map(|len| Memory::new(&mut rng, &[len]));
        // SAFETY: the memory is kept until both endpoints are closed.
        let register = |memory: &Memory| unsafe { ep.register(memory.addr(), memory.len()) };
        let mrs = memory.each_ref().map(|memory| register(memory).expect("registered"));
        (ep, rail, memory, mrs)
    });
    let [(a, of_a, a_memory, a_mrs), (b, of_b, b_memory, b_mrs)] = &ends;
    let devices = Arc::clone(of_a);
    a.core().devices_by(|| {
        move || {
            let _ = is_to_open.recv_timeout(FAR);
            OpenedDevices { rails: vec![devices as _], why_none: String::new() }
        }
    });
    let devices = Arc::clone(of_b);
    b.core().devices_by(|| || OpenedDevices { rails: vec![devices as _], why_none: String::new() });
    let conn = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| a.connect(b.addr(), None, &mut NoInterrupt));
        // The connection is made, and waits for the rails.
        let begun = Instant::now();
        while [a, b].iter().any(|ep| ep.core().open_conns().is_empty()) {
            assert!(begun.elapsed() < FAR, "it is not made");
            std::thread::yield_now();
        }
        open.send(()).expect("it is being opened");
        connecting.join().expect("no panic").expect("connected")
    });
    b.accept(None, &mut NoInterrupt).expect("accepted");
    // The devices are registering the shorter region. The longer one waits, and its deregistration
    // returns at once.
    while !holds.iter().all(|hold| hold.is_waited_for()) {
        std::thread::yield_now();
    }
    a.deregister(a_mrs[1]).expect("no device has seen it");
    let Iov { mr, ptr, len } = b_memory[0].iovs(b_mrs[0])[0];
    let advert = b.advertise(mr, ptr, len).expect("advertised");
    let (iovs, adverts) = (a_memory[0].iovs(a_mrs[0]), [advert]);
    let write = a.post(&Request::new(conn, Op::Write, &iovs, &adverts)).expect("posted");
    drop(holds);
    a.wait(write, Some(FAR), &mut NoInterrupt).expect("written");
    assert_eq!(network.carried(), 9000, "not over the rail");
    assert!(a_memory[0].pieces() == b_memory[0].pieces());
    [a, b].into_iter().for_each(|ep| ep.close().expect("nobody touches anything"));
    assert_eq!(network.count().1, 0);
}

/// Posts a write over the rail. `end` kills the lane, but the device keeps the write.
fn a_device_outlives_its_lane(end: impl FnOnce(&Arc<Connection>)) {
    let mut sides = ByRails::new(&[RailFaults::default()]).join(1);
    let mut rng = Rng::with_seed(1);
    let [here, there] = [0, 1].map(|_| Memory::new(&mut rng, &[9000]));
    let (mr, theirs) = (sides[0].register(&here), sides[1].register(&there));
    let (iovs, adverts) = (here.iovs(mr), there.adverts(&sides[1], theirs));
    let (ep, rail) = (&sides[0].ep, &sides[0].rails[0]);
    let write = Request::new(sides[0].conn, Op::Write, &iovs, &adverts);
    ep.run(&write, &mut NoInterrupt).expect("the rail has the key now");
    rail.stick();
    rail.hold_ends(true);
    let id = ep.post(&write).expect("posted");
    let (conn, found) = (sides[0].connection(), ep.core().transfers.find(id).expect("known"));
    let Lookup::Live(transfer) = found else { panic!("it has ended") };
    end(&conn);
    // A worker may be ending it.
    sides[0].until("the end of the connection", || !ep.core().aftermaths.is_empty());
    let (failed, early) = (conn.is_failed(), transfer.finished());
    rail.hold_ends(false);
    assert!(failed && !early, "the device may still read its memory");
    drop(conn);
    sides[0].until("the end of the write", || transfer.finished());
    sides.iter_mut().for_each(|side| side.ep.close().expect("nobody touches anything"));
}

#[test]
fn a_transfer_does_not_end_before_a_device_that_outlives_its_lane() {
    a_device_outlives_its_lane(|conn| conn.fail(Error::Closed));
}

#[test]
fn nothing_is_posted_again_while_a_device_outlives_its_lane() {
    a_device_outlives_its_lane(|conn| conn.lose_lane(conn.lanes.rails_place(), "as the test asks"));
}
