//! Devices that take long over the needs of an answer or an operation: a key for one channel, or
//! chunks of locked memory.

use std::sync::mpsc;

use uccl_chaos::GpuFaults;
use uccl_fabric::{
    gpu::CopyBy,
    lane::{
        OpError,
        OpKind::{Read, Write},
    },
};

use super::*;

fn with_keys_of_channels() -> Ends {
    Ends::over(&[RailFaults { keys_of_channels: true, ..RailFaults::default() }])
}

fn start_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().expose_provenance(), len: 64 }
}

fn start_of_region(region: &Region) -> RemoteSpan {
    RemoteSpan { len: 64, ..region.remote() }
}

/// Does something while a device is held up, which fails if it waits for that device.
fn meanwhile<T>(hold: T, act: impl FnOnce() + Send) {
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            act();
            let _ = tell.send(());
        });
        let in_time = told.recv_timeout(FAR + FAR);
        drop(hold);
        in_time.expect("the lanes go on meanwhile");
    });
}

#[test]
fn a_key_for_one_channel_is_of_use_there_only() {
    let ends = with_keys_of_channels();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (local, region) = (ends.a.register(&ours), ends.b.register(&theirs));
    for kind in [Write, Read] {
        let told = ends.a.post(kind, start_of(&ours), start_of_region(&region));
        ends.until("the end", || told.result().is_some());
        assert_eq!(told.result(), Some(Ok(())));
    }
    assert!(theirs[..64].iter().all(|byte| *byte == 1) && ends.network.carried() == 128);
    // After a loss there is another key.
    ends.a.rail().cut();
    ends.until("the loss", || ends.are_up(0));
    ends.until("the return", || ends.are_up(1));
    let told = ends.a.post(Read, start_of(&ours), start_of_region(&region));
    ends.until("the end", || told.result().is_some());
    assert_eq!((told.result(), ends.network.carried()), (Some(Ok(())), 192));
    ends.b.rails.remove(region.slot).expect("the device lets go");
    ends.a.rails.remove(local.slot).expect("the device lets go");
    assert_eq!(ends.network.count().1, 0);
}

/// It may have to lock much memory.
#[test]
fn a_device_that_takes_long_over_a_key_holds_up_nobody() {
    let ends = with_keys_of_channels();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (ours_too, theirs_too) = (vec![3u8; 4096], vec![4u8; 4096]);
    let regions = [ends.a.register(&ours), ends.b.register(&theirs)];
    let others = [ends.a.register(&ours_too), ends.b.register(&theirs_too)];
    let hold = ends.b.rail().hold_exports();
    let write = ends.a.post(Write, start_of(&ours), start_of_region(&regions[1]));
    let second = ends.a.post(Write, start_of(&ours), start_of_region(&others[1]));
    meanwhile(hold, || {
        // The peer asks about our memory and reads it over the same channel.
        let read = ends.b.post(Read, start_of(&theirs_too), start_of_region(&others[0]));
        ends.until("a read of the other end", || read.result().is_some());
        assert_eq!(read.result(), Some(Ok(())));
        assert_eq!((write.result(), second.result()), (None, None), "they need keys");
        let is_busy = |region: &Region| ends.b.rails.is_busy_with(region.slot);
        assert!(is_busy(&regions[1]) && is_busy(&others[1]));
        assert!(ends.b.rails.remove(regions[1].slot).is_err(), "the device may reach it");
    });
    ends.until("the writes", || write.result().is_some() && second.result().is_some());
    assert_eq!([write.result(), second.result()], [Some(Ok(())), Some(Ok(()))]);
    assert!(!ends.b.rails.is_busy_with(regions[1].slot));
}

#[test]
fn a_region_that_ends_while_its_key_is_made_is_denied() {
    let ends = with_keys_of_channels();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (_, region) = (ends.a.register(&ours), ends.b.register(&theirs));
    let hold = ends.b.rail().hold_exports();
    let write = ends.a.post(Write, start_of(&ours), start_of_region(&region));
    ends.until("the making of a key", || ends.b.rails.is_busy_with(region.slot));
    ends.b.rails.retire(region.slot);
    drop(ends.b.regions.revoke(region.slot, region.key).expect("registered"));
    drop(hold);
    ends.until("the denial", || write.result().is_some());
    assert!(matches!(write.result(), Some(Err(OpError::Remote(_)))), "{:?}", write.result());
    assert!(!ends.b.rails.is_busy_with(region.slot) && !ends.b.lane.touched_by_peer(region.slot));
    ends.b.rails.remove(region.slot).expect("the device lets go");
    assert_eq!(ends.network.count().1, 1, "only our own is left");
}

#[test]
fn a_write_that_waits_for_a_key_does_not_outlast_its_channel() {
    let ends = with_keys_of_channels();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (_, region) = (ends.a.register(&ours), ends.b.register(&theirs));
    let hold = ends.b.rail().hold_exports();
    let write = ends.a.post(Write, start_of(&ours), start_of_region(&region));
    ends.until("the making of a key", || hold.is_waited_for());
    ends.b.rail().cut();
    ends.until("the loss", || ends.b.lane.paths_up() == 0);
    drop(hold);
    ends.until("the end of the write", || write.result().is_some());
    assert!(matches!(write.result(), Some(Ok(()) | Err(OpError::Unreachable))));
    ends.until("the return", || ends.are_up(1));
    let again = ends.a.post(Write, start_of(&ours), start_of_region(&region));
    ends.until("another write", || again.result().is_some());
    assert_eq!(again.result(), Some(Ok(())));
    assert!(!ends.b.rails.is_busy_with(region.slot));
}

#[test]
fn a_lane_that_is_killed_while_a_key_is_made_is_over_when_that_is() {
    let ends = with_keys_of_channels();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (_, region) = (ends.a.register(&ours), ends.b.register(&theirs));
    let hold = ends.b.rail().hold_exports();
    ends.a.post(Write, start_of(&ours), start_of_region(&region));
    ends.until("the making of a key", || hold.is_waited_for());
    let lane = &ends.b.lane;
    meanwhile((), || lane.kill());
    let left = lane.aftermath().expect("a key is being made");
    assert!(!left.is_over() && ends.b.rails.is_busy_with(region.slot));
    drop(hold);
    let began = Instant::now();
    while !left.is_over() {
        assert!(began.elapsed() < FAR, "it does not end");
        std::thread::yield_now();
    }
    assert!(!ends.b.rails.is_busy_with(region.slot));
    ends.b.rails.remove(region.slot).expect("the device lets go");
}

/// Two ends. The device at `refusing` takes no memory except locked memory.
fn staged(refusing: Role) -> Ends {
    let network = RailNetwork::default();
    let end = |role, seed| {
        let percent = if role == refusing { 100 } else { 0 };
        let faults = RailFaults { refuse_memory_percent: percent, ..RailFaults::default() };
        let devices = vec![network.rail("rail", seed, faults)];
        let rails = Rails::new(devices.iter().map(|rail| Arc::clone(rail) as _).collect());
        let copies = GpuFaults { delay_polls: 0, fail_at: None, seed };
        End::with(role, devices, rails.copying_by(CopyBy::from(copies)))
    };
    let (a, b) = (end(Role::Connector, 1), end(Role::Acceptor, 2));
    let ends = Ends { a, b, network };
    ends.until("the path is up", || ends.are_up(1));
    ends
}

/// A write that needs chunks at the end `refusing`. While `act` holds the gate, that end's device
/// waits before it registers them.
fn waits_for_chunks(refusing: Role, act: impl FnOnce(&Ends, &OpReport, uccl_chaos::GateHold)) {
    let ends = staged(refusing);
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let (_, region) = (ends.a.register(&ours), ends.b.register(&theirs));
    let slow = if refusing == Role::Connector { &ends.a } else { &ends.b };
    let hold = slow.rail().hold_registrations();
    let write = ends.a.post(Write, start_of(&ours), start_of_region(&region));
    act(&ends, &write, hold);
    ends.a.lane.kill();
    ends.b.lane.kill();
}

#[test]
fn a_device_that_takes_long_over_chunks_holds_up_nobody() {
    for refusing in [Role::Connector, Role::Acceptor] {
        waits_for_chunks(refusing, |ends, write, hold| {
            let (tell, told) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    ends.until("chunks are shown to the device", || hold.is_waited_for());
                    (0..100).for_each(|_| ends.turn());
                    assert_eq!(write.result(), None, "it needs chunks");
                    tell.send(()).expect("awaited");
                });
                let in_time = told.recv_timeout(FAR + FAR);
                hold.release();
                in_time.expect("the lanes go on meanwhile");
            });
            ends.until("the write", || write.result().is_some());
            assert_eq!(write.result(), Some(Ok(())), "{refusing:?}");
        });
    }
}

#[test]
fn an_operation_that_waits_for_chunks_can_be_cancelled() {
    waits_for_chunks(Role::Connector, |ends, write, hold| {
        ends.until("chunks are shown to the device", || hold.is_waited_for());
        ends.a.lane.cancel(write.name());
        assert_eq!(write.result(), Some(Err(OpError::Cancelled)));
    });
}

#[test]
fn a_lane_that_is_killed_while_chunks_are_made_is_over_when_they_are() {
    for refusing in [Role::Connector, Role::Acceptor] {
        waits_for_chunks(refusing, |ends, write, hold| {
            ends.until("chunks are shown to the device", || hold.is_waited_for());
            let end = if refusing == Role::Connector { &ends.a } else { &ends.b };
            let before = ends.network.count().1;
            meanwhile((), || end.lane.kill());
            let left = end.lane.aftermath().expect("chunks are being made");
            assert!(!left.is_over());
            drop(hold);
            let began = Instant::now();
            while !left.is_over() {
                assert!(began.elapsed() < FAR, "it does not end");
                std::thread::yield_now();
            }
            assert_eq!(ends.network.count().1, before, "the chunks are gone");
            let is_ours = refusing == Role::Connector;
            assert_eq!(write.result(), is_ours.then_some(Err(OpError::LaneDown)));
        });
    }
}
