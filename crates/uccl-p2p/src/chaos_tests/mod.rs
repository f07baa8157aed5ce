//! The engine over lanes that split, delay, reorder, repeat, stall and are cut. A test that fails
//! names its seed; `UCCL_CHAOS_SEED` runs that one again, `UCCL_CHAOS_RUNS` says how many to run.

mod asks;
mod by_address;
mod ends;
mod rails;
mod workload;
mod world;

use std::{
    sync::atomic::{AtomicU64, Ordering::Acquire},
    time::Duration,
};

use fastrand::Rng;
use uccl_chaos::each_seed;
use uccl_device::cuda::GpuError;
use uccl_fabric::pipe::Pipe;

use self::{
    workload::{Plan, Workload, move_one},
    world::{LaneChaos, Memory, Side, join, join_asking},
};
use crate::{
    Change, Error, NoInterrupt, Op, Request, Signal, Status,
    drive::{
        core::connection::{deferred_transfers::Mark, transfer::Fence},
        pair::post_behind,
    },
};

const PATIENT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(1);

fn some_lanes(rng: &mut Rng, count: usize) -> Vec<LaneChaos> {
    (0..count).map(|_| LaneChaos::some(rng)).collect()
}

fn workload(seed: u64, lanes: &[LaneChaos], plan: Plan) -> Workload {
    let longest = lanes.iter().map(LaneChaos::bearable_bytes).min().unwrap_or(0);
    Workload::new(seed, join(seed, lanes, PATIENT), plan, longest)
}

fn lost(side: &Side) -> u64 {
    side.ep.stats().expect("ours").lanes_lost
}

#[test]
fn everything_ends_and_nothing_lands_afterwards() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let count = rng.usize(1..5);
        let lanes = some_lanes(&mut rng, count);
        let plan = Plan {
            steps: rng.usize(1..120),
            cancels: rng.bool(),
            deadlines: rng.bool(),
            revokes: rng.bool(),
            streams: rng.bool(),
            loss: false,
        };
        let mut work = workload(seed, &lanes, plan);
        work.run(|_, _| {});
        assert!(work.sides.iter().all(|side| lost(side) == 0 && side.living_lanes() == count));
        work.leave();
    });
}

#[test]
fn a_cut_data_lane_hands_its_work_to_the_others() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let count = rng.usize(2..5);
        let mut lanes = some_lanes(&mut rng, count);
        let cut = rng.usize(1..count);
        let after = 1 << rng.u32(3..22);
        lanes[cut].pipe[rng.usize(0..2)].cut_after = Some(rng.u64(0..after));
        if rng.bool() {
            let lost = rng.usize(1..count);
            lanes[lost].ends[rng.usize(0..2)].lose_after = Some(rng.u64(1..30));
        }
        let (cancels, revokes) = (rng.bool(), rng.bool());
        let plan = Plan { steps: 120, cancels, revokes, ..Plan::default() };
        let mut work = workload(seed, &lanes, plan);
        work.run(|_, _| {});
        for side in &work.sides {
            assert_eq!(side.living_lanes() + lost(side) as usize, count);
        }
        work.leave();
    });
}

#[test]
fn every_data_lane_may_go() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let lanes = some_lanes(&mut rng, 4);
        let (cancels, streams) = (rng.bool(), rng.bool());
        let plan = Plan { steps: 120, cancels, streams, ..Plan::default() };
        let mut work = workload(seed, &lanes, plan);
        let at: Vec<usize> = (1..4).map(|_| rng.usize(0..120)).collect();
        let by = rng.usize(0..2);
        work.run(|step, sides| {
            for lane in (1..4).filter(|lane| at[lane - 1] == step) {
                Pipe::cut(sides[by].lanes[lane].inner().pipe());
            }
        });
        for side in &work.sides {
            side.until("the loss of three lanes", || lost(side) == 3);
            assert_eq!(side.living_lanes(), 1);
        }
        work.leave();
    });
}

#[test]
fn with_the_first_lane_the_connection_ends() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let count = rng.usize(1..4);
        let mut lanes = some_lanes(&mut rng, count);
        let after = 1 << rng.u32(3..16);
        lanes[0].pipe[rng.usize(0..2)].cut_after = Some(rng.u64(0..after));
        let (cancels, streams) = (rng.bool(), rng.bool());
        let plan = Plan { steps: 120, cancels, streams, loss: true, ..Plan::default() };
        let mut work = workload(seed, &lanes, plan);
        work.run(|step, sides| {
            // Cuts the pipe in any case, even if it has carried few bytes.
            if step == 110 {
                Pipe::cut(sides[0].lanes[0].inner().pipe());
            }
        });
        work.leave();
    });
}

#[test]
fn a_stalled_data_lane_is_taken_out() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let lanes = vec![LaneChaos::default(); 3];
        let mut sides = join(seed, &lanes, SHORT);
        let (stalled, by) = (rng.usize(1..3), rng.usize(0..2));
        sides[by].lanes[stalled].inner().pipe().stall();
        for op in [Op::Write, Op::Read] {
            move_one(&sides, &mut rng, op, 5 << 20).expect("the others take over");
        }
        for side in &sides {
            side.until("the loss of one lane", || lost(side) == 1);
            assert_eq!(side.living_lanes(), 2);
        }
        sides.iter_mut().for_each(Side::leave);
    });
}

#[test]
fn a_stalled_first_lane_is_a_silent_peer() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let count = rng.usize(1..4);
        let sides = join(seed, &vec![LaneChaos::default(); count], SHORT);
        sides[1].lanes[0].inner().pipe().stall();
        let ended = move_one(&sides, &mut rng, Op::Write, 5 << 20);
        assert!(
            matches!(&ended, Err(Error::ConnectionLost { peer, .. }) if &**peer == "peer-b"),
            "{ended:?}"
        );
    });
}

#[test]
fn a_write_without_answer_to_its_signal_is_lost_and_not_cancelled() {
    let mut rng = Rng::with_seed(1);
    let sides = join_asking(1, &[LaneChaos::default()], PATIENT, [false; 2]);
    let [from, to] = [(); 2].map(|()| Memory::new(&mut rng, &[100]));
    let word = Box::new(AtomicU64::new(0));
    // SAFETY: an atomic, which stays until both endpoints are closed.
    let mr = unsafe { sides[1].ep.register(word.as_ptr() as usize, 8) }.expect("registered");
    let advert = sides[1].ep.advertise(mr, word.as_ptr() as usize, 8).expect("advertised");
    let signal = Some(Signal { advert, change: Change::Add(1), strong: false });
    let iovs = from.iovs(sides[0].register(&from));
    let adverts = to.adverts(&sides[1], sides[1].register(&to));
    // The peer's answers do not arrive.
    sides[1].lanes[0].inner().pipe().stall();
    let request = Request { signal, ..Request::new(sides[0].conn, Op::Write, &iovs, &adverts) };
    let id = sides[0].ep.post(&request).expect("posted");
    sides[1].until("the signal", || word.load(Acquire) == 1);
    let transfers = sides[0].ep.core().transfers.unfinished(|_| true);
    let [transfer] = &transfers[..] else { panic!("{} transfers", transfers.len()) };
    transfer.conn.fence(transfer, Fence::Cancel);
    drop(transfers);
    Pipe::cut(sides[0].lanes[0].inner().pipe());
    let status = sides[0].ep.wait(id, None, &mut NoInterrupt).expect("known");
    assert!(matches!(status, Status::Failed(Error::ConnectionLost { .. })), "{status:?}");
    sides.iter().for_each(|side| side.ep.close().expect("nobody touches anything"));
}

/// A stream that has failed.
struct BrokenStream;

impl Mark for BrokenStream {
    fn is_reached(&self) -> Result<bool, GpuError> {
        Err(GpuError::Unavailable { reason: "the stream is lost".to_owned() })
    }
}

#[test]
fn a_stream_that_fails_fails_the_transfers_behind_it_and_nothing_else() {
    let mut rng = Rng::with_seed(1);
    let mut sides = join(1, &[LaneChaos::default()], PATIENT);
    let memory = Memory::new(&mut rng, &[1000]);
    let mr = sides[0].register(&memory);
    let iovs = memory.iovs(mr);
    let (conn, op) = (sides[0].conn, Op::Send);
    let request = Request::new(conn, op, &iovs, &[]);
    let id = post_behind(&sides[0].ep, &request, Some(Box::new(BrokenStream))).expect("posted").id;
    let status = sides[0].ep.wait(id, None, &mut NoInterrupt).expect("known");
    let why = match status {
        Status::Failed(e) => e.to_string(),
        status => panic!("{status:?}"),
    };
    assert!(why.contains("the stream is lost"), "{why}");
    assert!(memory.unchanged());
    move_one(&sides, &mut rng, Op::Write, 1000).expect("the connection lives");
    sides[0].ep.deregister(mr).expect("unused");
    sides.iter_mut().for_each(Side::leave);
}

/// A stream that has not reached its mark yet.
struct Busy;

impl Mark for Busy {
    fn is_reached(&self) -> Result<bool, GpuError> {
        Ok(false)
    }
}

#[test]
fn a_cancel_stays_a_cancel_when_a_worker_goes_on_with_it() {
    let mut rng = Rng::with_seed(1);
    let mut sides = join(1, &[LaneChaos::default()], PATIENT);
    let memory = Memory::new(&mut rng, &[1000]);
    let mr = sides[0].register(&memory);
    let iovs = memory.iovs(mr);
    let request = Request::new(sides[0].conn, Op::Send, &iovs, &[]);
    let id = post_behind(&sides[0].ep, &request, Some(Box::new(Busy))).expect("posted").id;
    let transfers = sides[0].ep.core().transfers.unfinished(|_| true);
    let [transfer] = &transfers[..] else { panic!("{} transfers", transfers.len()) };
    // The caller has set the fence, and then a worker sees that the transfer is being ended.
    transfer.body.lock().fence = Some(Fence::Cancel);
    transfer.conn.fence(transfer, Fence::Deadline);
    drop(transfers);
    let status = sides[0].ep.wait(id, None, &mut NoInterrupt).expect("known");
    assert!(matches!(status, Status::Failed(Error::Cancelled { .. })), "{status:?}");
    sides[0].ep.deregister(mr).expect("unused");
    sides.iter_mut().for_each(Side::leave);
}
