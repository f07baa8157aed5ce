//! Lanes that are killed while their devices take long.

use std::sync::mpsc;

use uccl_fabric::lane::{
    LaneError, OpError,
    OpKind::{Read, Write},
};

use super::*;

/// Two ends with two paths, of which the first one's device does not end its channels while the
/// second one's does.
struct Slow {
    ends: Ends,
    ours: Vec<u8>,
    local: Region,
    remote: RemoteSpan,
    _theirs: Vec<u8>,
}

impl Slow {
    fn new() -> Self {
        let ends = Ends::over(&[RailFaults::default(), RailFaults::default()]);
        let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
        let (local, remote) = (ends.a.register(&ours), ends.b.register(&theirs).remote());
        let remote = RemoteSpan { len: 64, ..remote };
        let slow = Self { ends, ours, local, remote, _theirs: theirs };
        // Both know each other's key from now on.
        let first = slow.post();
        slow.ends.until("the first read", || first.result().is_some());
        slow.ends.a.devices[0].hold_ends(true);
        slow
    }

    fn post(&self) -> Arc<OpReport> {
        let local = Span { addr: self.ours.as_ptr().expose_provenance(), len: 64 };
        self.ends.a.post(Read, local, self.remote)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.ends.a.devices[0].hold_ends(false);
    }
}

#[test]
fn a_killed_lane_waits_for_its_devices_together_and_not_for_ever() {
    let slow = Slow::new();
    let (lane, network) = (&slow.ends.a.lane, &slow.ends.network);
    let before = network.count().0;
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            lane.kill();
            tell.send(()).expect("awaited");
        });
        let began = Instant::now();
        while network.count().0 == before {
            assert!(began.elapsed() < FAR, "the second device has to wait for the first");
            std::thread::yield_now();
        }
        // Nobody else is held up meanwhile.
        assert!(matches!(lane.progress(&Nobody), Ok(_) | Err(LaneError::Killed)));
        assert!(!lane.touched_by_peer(1000) && lane.paths_up() == 0);
        let in_time = told.recv_timeout(FAR);
        slow.ends.a.devices[0].hold_ends(false);
        in_time.expect("it does not wait for ever");
    });
}

#[test]
fn an_operation_that_a_device_does_not_end_is_kept_and_told_of() {
    let slow = Slow::new();
    let (lane, rails) = (&slow.ends.a.lane, &slow.ends.a.rails);
    let other = vec![3; 4096];
    let unused = slow.ends.a.register(&other);
    slow.ends.a.devices.iter().for_each(|device| device.stick());
    let posted = [slow.post(), slow.post()];
    lane.kill();
    // Each path had one of them.
    let results = posted.each_ref().map(|told| told.result());
    assert_eq!(results.iter().flatten().collect::<Vec<_>>(), [&Err(OpError::LaneDown)]);
    let left = lane.aftermath().expect("a device still reads or writes");
    assert!(left.copies() && !left.is_over());
    assert!(left.touches(slow.local.slot) && lane.touched_by_peer(slow.local.slot));
    assert!(!left.touches(unused.slot) && !lane.touched_by_peer(unused.slot));
    left.look();
    assert!(posted.iter().any(|told| told.result().is_none()), "its memory is still touched");
    slow.ends.a.devices[0].hold_ends(false);
    let began = Instant::now();
    while left.copies() {
        assert!(began.elapsed() < FAR, "it does not end");
        std::thread::yield_now();
    }
    assert!(!left.is_over(), "an operation is to be told");
    left.look();
    assert!(posted.iter().all(|told| told.result() == Some(Err(OpError::LaneDown))));
    assert!(left.is_over() && !lane.touched_by_peer(slow.local.slot));
    rails.remove(slow.local.slot).expect("it lets go");
}

#[test]
fn memory_that_was_lent_over_a_channel_that_does_not_end_is_kept() {
    let slow = Slow::new();
    let region = slow.local.remote();
    let bytes = vec![4; 4096];
    slow.ends.b.register(&bytes);
    let local = Span { addr: bytes.as_ptr().expose_provenance(), len: 64 };
    let write = slow.ends.b.post(Write, local, RemoteSpan { len: 64, ..region });
    slow.ends.until("the peer's write", || write.result().is_some());
    slow.ends.a.lane.kill();
    let left = slow.ends.a.lane.aftermath().expect("a device does not end");
    assert!(left.touches(slow.local.slot));
    slow.ends.a.devices[0].hold_ends(false);
    let began = Instant::now();
    while !left.is_over() {
        assert!(began.elapsed() < FAR, "it does not end");
        std::thread::yield_now();
    }
    assert!(!left.touches(slow.local.slot));
}

#[test]
fn nothing_is_left_of_a_lane_after_its_devices_end() {
    let ends = Ends::joined();
    let lane = &ends.a.lane;
    lane.kill();
    assert!(lane.aftermath().is_none());
    lane.kill();
    assert!(matches!(lane.progress(&Nobody), Err(LaneError::Killed)));
}

/// Another lane would be given memory that a GPU still writes to.
#[test]
fn a_write_that_a_gpu_may_still_copy_does_not_go_another_way() {
    let ends = keys::staged_within(Role::Connector, u32::MAX);
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let _local = ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
    let write = ends.a.post(Write, local, RemoteSpan { len: 64, ..region.remote() });
    ends.until("a copy", || ends.a.lane.state.lock().copies.are_under_way());
    ends.a.lane.kill();
    let ended = write.result();
    assert!(matches!(ended, Some(Err(OpError::Gpu(_)))), "{ended:?}");
}
