//! The limits of a peer with the keys that it was given, even if its notes lie.

use uccl_chaos::GpuFaults;
use uccl_fabric::{
    gpu::CopyBy,
    lane::{
        OpError,
        OpKind::{Read, Write},
    },
    rail::{Channel, Rail as _, Request, RequestEnd, RequestError},
};
use uccl_wire::{
    frame::Status,
    rails::{Grant, Note, RegionId},
};

use super::*;

/// The grant that one end sends to a peer that asks about a region.
fn granted(end: &End, region: &Region) -> Grant {
    end.hear(&Note::Ask(id_of(region))).expect("a sound note");
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < FAR, "there is no answer");
        match end.lane.take_note() {
            Some(Note::Grant(_, grant)) => return grant,
            None => end.progress(),
            note => panic!("{note:?}"),
        }
    }
}

/// A peer on the same network that uses keys without asking.
struct Hostile {
    channel: Box<dyn Channel>,
    _other: Box<dyn Channel>,
    bytes: Vec<u8>,
    local_key: u64,
    _registration: Box<dyn uccl_fabric::rail::Registration>,
}

impl Hostile {
    fn new(network: &RailNetwork) -> Self {
        let rail = network.rail("hostile", 9, RailFaults::default());
        let (mut channel, mut other) = (rail.open().expect("open"), rail.open().expect("open"));
        channel.connect(other.address()).expect("joined");
        other.connect(channel.address()).expect("joined");
        let bytes = vec![0xee; 256];
        let span = Span { addr: bytes.as_ptr().expose_provenance(), len: bytes.len() };
        let registration = rail.register(span, MemoryKind::Host, Rights::ALL).expect("taken");
        let local_key = registration.local_key();
        Self { channel, _other: other, bytes, local_key, _registration: registration }
    }

    /// Tries to reach the first bytes of a region with a key that its owner gave.
    fn tries(&mut self, kind: OpKind, grant: &Grant) -> Result<(), RequestError> {
        let path = grant.paths.first().expect("a key");
        let remote_key = self.channel.import(&path.key).expect("a key");
        let local = Span { addr: self.bytes.as_ptr().expose_provenance(), len: 8 };
        let request = Request {
            kind,
            local,
            local_key: self.local_key,
            remote_addr: path.base,
            remote_key,
            tag: 1,
        };
        // SAFETY: the bytes live as long as the channel, which completes its requests within a few
        // polls.
        assert_eq!(unsafe { self.channel.post(&[request]) }.expect("it lives"), 1);
        let mut ended: Vec<RequestEnd> = Vec::new();
        while ended.is_empty() {
            self.channel.poll(&mut ended).expect("it lives");
        }
        ended.remove(0).result
    }
}

/// Slots are small numbers, which anybody can guess.
#[test]
fn a_peer_that_does_not_know_a_region_is_told_no_key() {
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let region = ends.b.register(&bytes);
    let asked = |id| {
        ends.b.hear(&Note::Ask(id)).expect("a sound note");
        ends.b.lane.take_note()
    };
    let id = id_of(&region);
    for forged in [RegionId { key: id.key ^ 1, ..id }, RegionId { slot: id.slot + 1, ..id }] {
        assert_eq!(asked(forged), Some(Note::Deny(forged, Status::UnknownKey)));
    }
    assert_eq!(ends.b.regions.refused(), 2);
    granted(&ends.b, &region);
    drop(ends.b.regions.revoke(region.slot, region.key).expect("registered"));
    assert_eq!(asked(id), Some(Note::Deny(id, Status::UnknownKey)));
}

#[test]
fn a_part_that_may_be_read_is_not_written_by_its_key() {
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let region = ends.b.register(&bytes);
    let sent = part(region.span, 1024, 512);
    let sent = ends.b.regions.insert_part(region.slot, MemoryKind::Host, sent, Rights::READ, None);
    let sent = sent.expect("a part");
    let mut hostile = Hostile::new(&ends.network);

    let grant = granted(&ends.b, &sent);
    assert!(grant.read && !grant.write);
    assert_eq!(hostile.tries(Read, &grant), Ok(()));
    assert_eq!(hostile.bytes[..8], [7; 8]);
    assert_eq!(hostile.tries(Write, &grant), Err(RequestError::Access));
    assert!(bytes.iter().all(|byte| *byte == 7));

    let whole = granted(&ends.b, &region);
    assert_ne!(whole.paths[0].key, grant.paths[0].key);
    ends.b.rails.remove(region.slot).expect("the device lets go");
    for grant in [grant, whole] {
        assert_eq!(hostile.tries(Read, &grant), Err(RequestError::Access), "both keys have ended");
    }
}

#[test]
fn a_registration_that_was_refused_for_a_part_is_tried_again() {
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let region = ends.b.register(&bytes);
    let send = |at| {
        let sent = part(region.span, at, 512);
        let (kind, rights) = (MemoryKind::Host, Rights::READ);
        ends.b.regions.insert_part(region.slot, kind, sent, rights, None).expect("a part")
    };
    ends.b.rail().refuse_memory(100);
    // The pauses grow: of four questions, the device is tried at the first, the second and the
    // fourth.
    for at in 0..4 {
        assert!(granted(&ends.b, &send(at)).paths.is_empty(), "the device takes it");
    }
    ends.b.rail().refuse_memory(0);
    let reached = (4..8).filter(|at| !granted(&ends.b, &send(*at)).paths.is_empty()).count();
    assert_eq!(reached, 1, "three pass, and then it is tried");
    assert!(!granted(&ends.b, &send(8)).paths.is_empty());
    ends.b.rails.remove(region.slot).expect("the device lets go");
    assert_eq!(ends.network.count().1, 0, "nothing is left");
}

#[test]
fn a_key_ends_with_its_region_though_another_lies_around_it() {
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let outer = ends.b.register(&bytes);
    let inner = ends.b.register(&bytes[512..1024]);
    let mut hostile = Hostile::new(&ends.network);
    let grants = [&outer, &inner].map(|region| granted(&ends.b, region));
    ends.b.rails.remove(inner.slot).expect("the device lets go");
    assert_eq!(hostile.tries(Write, &grants[1]), Err(RequestError::Access));
    assert_eq!(hostile.tries(Read, &grants[0]), Ok(()), "the outer region lives");
    assert!(bytes.iter().all(|byte| *byte == 7));
}

#[test]
fn a_device_that_does_not_let_go_is_told_of_and_may_be_asked_again() {
    let ends = Ends::joined();
    let bytes = vec![7; 4096];
    let region = ends.b.register(&bytes);
    let mut hostile = Hostile::new(&ends.network);
    let grant = granted(&ends.b, &region);
    ends.b.rail().hold_memory(true);
    for _ in 0..2 {
        ends.b.rails.remove(region.slot).expect_err("it does not let go");
    }
    assert_eq!(hostile.tries(Read, &grant), Ok(()), "as was said");
    ends.b.rail().hold_memory(false);
    ends.b.rails.remove(region.slot).expect("it lets go");
    assert_eq!(hostile.tries(Read, &grant), Err(RequestError::Access));
    ends.b.rails.remove(region.slot).expect("there is nothing left to do");
}

#[test]
fn a_region_is_touched_while_our_own_device_works_by_its_registration() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let remote = ends.b.register(&theirs).remote();
    let _outer = ends.a.register(&ours);
    let inner = ends.a.register(&ours[512..1024]);
    let local = part(inner.span, 0, 64);
    let remote = RemoteSpan { len: 64, ..remote };
    // The key is known from now on.
    let first = ends.a.post(Read, local, remote);
    ends.until("the first read has ended", || first.result().is_some());

    ends.a.rail().stick();
    let second = ends.a.post(Read, local, remote);
    assert!(ends.a.lane.touched_by_peer(inner.slot), "the device may write there");
    ends.a.rail().unstick();
    ends.until("the second read has ended", || second.result().is_some());
    assert!(!ends.a.lane.touched_by_peer(inner.slot));
    // A later read does not use the inner region's registration, though it is for the same bytes.
    ends.a.rail().stick();
    let third = ends.a.post(Read, local, remote);
    assert!(!ends.a.lane.touched_by_peer(inner.slot));
    ends.a.rails.remove(inner.slot).expect("the device lets go");
    ends.a.rail().unstick();
    ends.until("the third read has ended", || third.result().is_some());
    assert_eq!([second.result(), third.result()], [Some(Ok(())), Some(Ok(()))]);
    let fourth = ends.a.post(Read, local, remote);
    ends.until("the fourth read has ended", || fourth.result().is_some());
    assert_eq!(fourth.result(), Some(Ok(())), "the outer region is still there");
}

/// The owner's devices would not refuse a late request: another region keeps the same memory
/// registered.
#[test]
fn a_region_is_not_released_while_something_is_on_its_way_there() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let _local = ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let _same = ends.b.register(&theirs);
    let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
    let remote = RemoteSpan { len: 64, ..region.remote() };
    let first = ends.a.post(Write, local, remote);
    ends.until("the first write has ended", || first.result().is_some());

    ends.a.rail().stick();
    let second = ends.a.post(Write, local, remote);
    assert!(ends.b.lane.touched_by_peer(region.slot));
    for _ in 0..20 {
        ends.turn();
    }
    assert!(ends.b.lane.touched_by_peer(region.slot), "a write is on its way");
    assert!(second.result().is_none());
    // Nor while the write may still land: our channel is lost, but its other end still exists.
    ends.a.rail().cut();
    ends.a.progress();
    assert!(ends.b.lane.touched_by_peer(region.slot), "a write may land");
    ends.a.rail().unstick();
    ends.until("both ends are gone", || !ends.b.lane.touched_by_peer(region.slot));
}

/// Two ends. The device at `refusing` takes no memory, so the bytes are copied there, slowly.
fn staged(refusing: Role) -> Ends {
    staged_within(refusing, 1000)
}

/// The same, where a copy takes up to as many looks.
pub(super) fn staged_within(refusing: Role, delay_polls: u32) -> Ends {
    let network = RailNetwork::default();
    let end = |role, seed| {
        let percent = if role == refusing { 100 } else { 0 };
        let faults = RailFaults { refuse_memory_percent: percent, ..RailFaults::default() };
        let devices = vec![network.rail("rail", seed, faults)];
        let slow = GpuFaults { delay_polls, fail_at: None, seed };
        let rails = Rails::new(devices.iter().map(|rail| Arc::clone(rail) as _).collect());
        End::with(role, devices, rails.copying_by(CopyBy::from(slow)))
    };
    let (a, b) = (end(Role::Connector, 1), end(Role::Acceptor, 2));
    let ends = Ends { a, b, network };
    ends.until("the path is up", || ends.are_up(1));
    ends
}

/// The bytes in a chunk are on their way to a region as much as the bytes in a device.
#[test]
fn a_region_is_not_released_while_a_chunk_is_on_its_way_there() {
    for refusing in [Role::Connector, Role::Acceptor] {
        let ends = staged(refusing);
        let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
        let _local = ends.a.register(&ours);
        let region = ends.b.register(&theirs);
        let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
        let write = ends.a.post(Write, local, RemoteSpan { len: 64, ..region.remote() });
        let copying = ends.of(refusing);
        ends.until("a copy", || copying.lane.state.lock().copies.are_under_way());
        // Delivers the queued notes first.
        while let Some(note) = ends.b.lane.take_note() {
            ends.a.hear(&note).expect("an honest peer");
        }
        ends.a.hear(&Note::Revoke(id_of(&region))).expect("an honest peer");
        let mut released = false;
        let began = Instant::now();
        while !released {
            assert!(began.elapsed() < FAR, "it is never released");
            ends.b.progress();
            while let Some(note) = ends.b.lane.take_note() {
                ends.a.hear(&note).expect("an honest peer");
            }
            ends.a.progress();
            while let Some(note) = ends.a.lane.take_note() {
                if note == Note::Released(id_of(&region)) {
                    assert_eq!(write.result(), Some(Ok(())), "released by {refusing:?}");
                    released = true;
                } else {
                    ends.b.hear(&note).expect("an honest peer");
                }
            }
        }
        assert!(theirs[..64] == ours[..64]);
    }
}

/// The owner's devices would not refuse it: the region's registration may end later, and another
/// one may cover it.
#[test]
fn nothing_more_goes_to_a_region_that_was_released() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let _local = ends.a.register(&ours);
    let region = ends.b.register(&theirs);
    let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
    let write = || ends.a.post(Write, local, RemoteSpan { len: 64, ..region.remote() });
    let first = write();
    ends.until("the first write", || first.result().is_some());
    drop(ends.b.regions.revoke(region.slot, region.key).expect("registered"));
    ends.until("its release", || !ends.b.lane.touched_by_peer(region.slot));
    let (carried, second) = (ends.network.carried(), write());
    ends.until("the second write", || second.result().is_some());
    assert_eq!(second.result(), Some(Err(OpError::Remote(Status::UnknownKey))));
    assert_eq!(ends.network.carried(), carried);
}

#[test]
fn a_region_is_touched_while_a_lost_channel_of_ours_ends() {
    let ends = Ends::joined();
    let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
    let local = ends.a.register(&ours);
    let remote = RemoteSpan { len: 64, ..ends.b.register(&theirs).remote() };
    let span = Span { len: 64, ..local.span };
    let first = ends.a.post(Read, span, remote);
    ends.until("the first read", || first.result().is_some());
    ends.a.rail().stick();
    ends.a.post(Read, span, remote);
    ends.a.rail().hold_ends(true);
    ends.a.rail().pull();
    ends.until("the loss of the path", || ends.a.lane.paths_up() == 0);
    let while_it_ends = ends.a.lane.touched_by_peer(local.slot);
    ends.a.rail().hold_ends(false);
    assert!(while_it_ends, "the device may write there");
    ends.until("the end of the channel", || !ends.a.lane.touched_by_peer(local.slot));
}

/// Ends of which the second one's device has let go of a region and taken it anew; and what it
/// granted before.
struct Stale {
    ends: Ends,
    ours: Vec<u8>,
    _theirs: Vec<u8>,
    region: Region,
    grant: Grant,
}

impl Stale {
    fn new() -> Self {
        let ends = Ends::joined();
        let (ours, theirs) = (vec![1; 4096], vec![2; 4096]);
        ends.a.register(&ours);
        let region = ends.b.register(&theirs);
        let grant = granted(&ends.b, &region);
        ends.b.rails.remove(region.slot).expect("the device lets go");
        ends.b.rails.add(region.slot, region.span, MemoryKind::Host, region.rights);
        Self { ends, ours, _theirs: theirs, region, grant }
    }

    fn write(&self) -> Arc<OpReport> {
        let local = Span { addr: self.ours.as_ptr().expose_provenance(), len: 64 };
        self.ends.a.post(Write, local, RemoteSpan { len: 64, ..self.region.remote() })
    }

    /// Until `is_so`, gives the first questions of the first end the old answer, and lets `other`
    /// see all else that it says.
    fn until(&self, old: usize, is_so: impl Fn(&Self) -> bool, mut other: impl FnMut(Note)) {
        let (began, mut asked) = (Instant::now(), 0);
        while !is_so(self) {
            assert!(began.elapsed() < FAR, "it never is so");
            self.ends.a.progress();
            while let Some(note) = self.ends.a.lane.take_note() {
                match note {
                    Note::Ask(region) if asked < old => {
                        asked += 1;
                        let answer = Note::Grant(region, self.grant.clone());
                        self.ends.a.hear(&answer).expect("a sound note");
                    }
                    note => other(note),
                }
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_key_that_a_device_refused_is_asked_for_anew() {
    let stale = Stale::new();
    let (write, mut asked) = (stale.write(), 0);
    stale.until(
        1,
        |_| write.result().is_some(),
        |note| {
            asked += usize::from(note == Note::Ask(id_of(&stale.region)));
            let answer = granted(&stale.ends.b, &stale.region);
            stale.ends.a.hear(&Note::Grant(id_of(&stale.region), answer)).expect("a sound note");
        },
    );
    assert_eq!((write.result(), asked), (Some(Ok(())), 1));
}

/// The peer grants what its device refuses, over and over.
#[test]
fn a_part_that_is_refused_again_and_again_ends() {
    let stale = Stale::new();
    let write = stale.write();
    stale.until(4, |_| write.result().is_some(), |note| panic!("once too often: {note:?}"));
    assert_eq!(write.result(), Some(Err(OpError::Remote(Status::UnknownKey))));
}

#[test]
fn a_region_is_not_released_while_a_part_is_to_be_requested_again_there() {
    let stale = Stale::new();
    let (write, id) = (stale.write(), id_of(&stale.region));
    let has_again = |stale: &Stale| !stale.ends.a.lane.state.lock().again.is_empty();
    stale.until(1, has_again, |_| {});
    stale.ends.a.hear(&Note::Revoke(id)).expect("an honest peer");
    let mut turns = 0;
    while turns < 20 {
        stale.ends.a.progress();
        while let Some(note) = stale.ends.a.lane.take_note() {
            assert_ne!(note, Note::Released(id), "a part is still to go there");
        }
        turns += 1;
    }
    assert!(write.result().is_none());
    stale.ends.a.hear(&Note::Deny(id, Status::UnknownKey)).expect("an honest peer");
    let released = std::cell::Cell::new(false);
    stale.until(0, |_| released.get(), |note| released.set(note == Note::Released(id)));
    assert_eq!(write.result(), Some(Err(OpError::Remote(Status::UnknownKey))));
}

#[test]
fn a_write_that_was_called_off_is_not_requested_again() {
    let stale = Stale::new();
    stale.ends.a.rail().stick();
    let write = stale.write();
    let is_under_way = |stale: &Stale| stale.ends.a.lane.state.lock().paths[0].load() > 0;
    stale.until(1, is_under_way, |note| panic!("{note:?}"));
    stale.ends.a.lane.cancel(write.name());
    assert!(write.result().is_none(), "the device has it");
    stale.ends.a.rail().unstick();
    stale.until(0, |_| write.result().is_some(), |note| panic!("it asks again: {note:?}"));
    assert_eq!(write.result(), Some(Err(OpError::Cancelled)));
}

#[test]
fn chunks_stay_while_a_channel_that_may_reach_them_does_not_end() {
    for refusing in [Role::Connector, Role::Acceptor] {
        let ends = staged(refusing);
        let (ours, theirs) = (vec![1u8; 4096], vec![2u8; 4096]);
        let _local = ends.a.register(&ours);
        let region = ends.b.register(&theirs);
        let local = Span { addr: ours.as_ptr().expose_provenance(), len: 64 };
        let write = ends.a.post(Write, local, RemoteSpan { len: 64, ..region.remote() });
        ends.until("the write", || write.result().is_some());
        let end = ends.of(refusing);
        end.rail().hold_ends(true);
        end.lane.kill();
        let kept = end.lane.state.lock().left.as_ref().map(|left| left.areas.len());
        end.rail().hold_ends(false);
        assert_eq!(kept, Some(1), "{refusing:?}");
    }
}
