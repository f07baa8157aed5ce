//! Groups of ranks that are threads of one process, over TCP and the links of a host.

mod common;

use std::{cell::Cell, sync::Barrier, thread, time::Duration};

use common::{FAR, Memory, byte, done, endpoint, on_hosts};
use uccl_collective::{CallOptions, Direction, Error, Group, GroupRequest};
use uccl_p2p::{Endpoint, NoInterrupt, Transport};

const BOTH: [Transport; 2] = [Transport::Tcp, Transport::Local];

/// Runs a function on each rank of a group on one host.
fn on_ranks(transport: Transport, ranks: usize, run: impl Fn(Endpoint, Group) + Send + Sync) {
    on_hosts(transport, &vec![1; ranks], run);
}

#[test]
fn every_rank_gets_the_bytes_that_are_its_own() {
    const LENS: [usize; 5] = [0, 1, 4096, 40_000, 1 << 20];
    let none = CallOptions::default();
    for transport in BOTH {
        for ranks in [1, 2, 3] {
            on_ranks(transport, ranks, |_end, group| {
                let own = group.rank();
                for len in LENS {
                    let input = Memory::filled(len, |at| byte(own, 0, at));
                    let outputs: Vec<_> = (0..ranks).map(|_| Memory::filled(len, |_| 0)).collect();
                    let places = outputs.iter().map(Memory::buffer).collect();
                    done(group.all_gather(input.buffer(), places, none));
                    for (from, output) in outputs.iter().enumerate().filter(|(r, _)| *r != own) {
                        let expected: Vec<_> = (0..len).map(|at| byte(from, 0, at)).collect();
                        assert!(output.bytes() == expected, "{len} bytes of rank {from}");
                    }
                    let inputs: Vec<_> = (0..ranks)
                        .map(|to| Memory::filled(len / (to + 1), |at| byte(own, to, at)))
                        .collect();
                    let outputs: Vec<_> =
                        (0..ranks).map(|_| Memory::filled(len / (own + 1), |_| 0)).collect();
                    done(group.all_to_all(
                        inputs.iter().map(Memory::buffer).collect(),
                        outputs.iter().map(Memory::buffer).collect(),
                        none,
                    ));
                    for (from, output) in outputs.iter().enumerate().filter(|(r, _)| *r != own) {
                        let len = len / (own + 1);
                        let expected: Vec<_> = (0..len).map(|at| byte(from, own, at)).collect();
                        assert!(output.bytes() == expected, "{len} bytes of rank {from}");
                    }
                    for root in 0..ranks {
                        let sent = if own == root { root } else { 99 };
                        let memory = Memory::filled(len, |at| byte(sent, 1, at));
                        done(group.broadcast(root, memory.buffer(), none));
                        let expected: Vec<_> = (0..len).map(|at| byte(root, 1, at)).collect();
                        assert!(memory.bytes() == expected, "{len} bytes of root {root}");
                    }
                }
                done(group.barrier(none));
            });
        }
    }
}

#[test]
fn scattered_parts_come_back_gathered() {
    let none = CallOptions::default();
    on_ranks(Transport::Local, 3, |_end, group| {
        for root in 0..3 {
            let own = group.rank();
            let whole = Memory::filled(3 * 5000, |at| byte(root, at / 5000, at));
            let back = Memory::filled(3 * 5000, |_| 0);
            let parts = |memory: &Memory| match own == root {
                true => (0..3).map(|to| memory.part(to * 5000, 5000)).collect(),
                false => Vec::new(),
            };
            let part = Memory::filled(5000, |at| byte(root, own, own * 5000 + at));
            let expected = part.bytes();
            done(group.scatter(root, parts(&whole), part.buffer(), none));
            assert!(part.bytes() == expected);
            done(group.gather(root, part.buffer(), parts(&back), none));
            if own == root {
                let (whole, back) = (whole.bytes(), back.bytes());
                for from in (0..3).filter(|from| *from != root) {
                    let range = from * 5000..(from + 1) * 5000;
                    assert!(whole[range.clone()] == back[range], "the part of rank {from}");
                }
            }
        }
    });
}

#[test]
fn messages_of_a_pair_meet_in_their_order() {
    let none = CallOptions::default();
    for transport in BOTH {
        on_ranks(transport, 2, |_end, group| {
            let (own, other) = (group.rank(), 1 - group.rank());
            let len = |i: usize| 1 + i * 7919 % 100_000;
            let sent: Vec<_> =
                (0..40).map(|i| Memory::filled(len(i), |at| byte(own, i, at))).collect();
            let room: Vec<_> = (0..40).map(|i| Memory::filled(len(i), |_| 0)).collect();
            let mut works = Vec::new();
            for (sent, room) in sent.iter().zip(&room) {
                works.push(group.message(Direction::Recv, other, room.buffer(), none));
                works.push(group.message(Direction::Send, other, sent.buffer(), none));
            }
            for work in works {
                let id = work.as_ref().expect("begun").id();
                done(group.work(id));
                done(work);
            }
            for (i, room) in room.iter().enumerate() {
                let expected: Vec<_> = (0..len(i)).map(|at| byte(other, i, at)).collect();
                assert!(room.bytes() == expected, "message {i}");
            }
            assert!(matches!(group.work(u64::MAX), Err(Error::UnknownWork(_))));
            let nobody = Memory::filled(1, |_| 0);
            let sent = group.message(Direction::Send, 2, nobody.buffer(), none);
            assert!(matches!(sent, Err(Error::NoSuchRank { rank: 2, ranks: 2 })));
        });
    }
}

#[test]
fn a_message_of_another_length_fails() {
    on_ranks(Transport::Local, 2, |_end, group| {
        let memory = Memory::filled(100, |_| 0);
        let (part, none) = (memory.part(0, 50), CallOptions::default());
        let work = match group.rank() {
            0 => group.message(Direction::Send, 1, part, none),
            _ => group.message(Direction::Recv, 0, memory.buffer(), none),
        };
        let ended = work.expect("begun").wait(Some(FAR), &mut NoInterrupt);
        match group.rank() {
            0 => assert!(ended.expect("well")),
            _ => assert!(matches!(
                ended,
                Err(Error::WrongLength { rank: 0, received: 50, expected: 100 })
            )),
        }
        done(group.barrier(none));
    });
}

#[test]
fn memory_is_registered_once_and_ends_with_its_range() {
    on_ranks(Transport::Local, 1, |end, group| {
        let memory = Memory::filled(100, |_| 0);
        let whole = memory.buffer();
        let mr = group.register(&whole).expect("registered");
        assert_eq!(group.register(&memory.part(10, 20)).expect("registered"), mr);
        assert_eq!(group.registered(whole.ptr() + 99, 1), Some(mr));
        assert_eq!(group.registered(whole.ptr() + 99, 2), None);
        assert!(!group.deregister(whole.ptr(), 99).expect("asked"), "another range");
        assert!(group.deregister(whole.ptr(), 100).expect("asked"));
        assert_eq!(group.registered(whole.ptr(), 1), None);
        assert_eq!(end.stats().expect("open").regions, 1, "that of the barriers");
    });
}

#[test]
fn a_call_leaves_no_region_behind() {
    on_ranks(Transport::Local, 2, |end, group| {
        let none = CallOptions::default();
        let memory = Memory::filled(1 << 20, |_| 0);
        for _ in 0..20 {
            done(group.broadcast(0, memory.buffer(), none));
        }
        assert_eq!(end.stats().expect("open").regions, 1, "that of the barriers");
    });
}

/// Ranks 0 and 1 notice that rank 2 has left in the middle of a call, and go on without it.
fn expect_others_to_go_on(transport: Transport, hosts: &[u8], is_root: bool) {
    let met = Barrier::new(3);
    on_hosts(transport, hosts, |end, group| {
        let none = CallOptions::default();
        done(group.barrier(none));
        if group.rank() == 2 {
            met.wait();
            group.close();
            end.close().expect("closed");
            return;
        }
        let memory = Memory::filled(1 << 20, |_| 0);
        let root = if is_root { 2 } else { 0 };
        let failed = loop {
            // A send to the lost rank may have been taken before its end.
            let work = group.broadcast(root, memory.buffer(), none);
            let ended = work.and_then(|work| {
                met.wait_once();
                work.wait(Some(FAR), &mut NoInterrupt)
            });
            if let Err(e) = ended {
                break e;
            }
        };
        assert!(matches!(failed, Error::Lost { rank: 2, .. }), "{failed}");
        let again = group.broadcast(0, memory.buffer(), none).map(|_| ());
        assert!(matches!(again, Err(Error::Lost { rank: 2, .. })), "the group has ended");
        assert_eq!(group.lost(&mut NoInterrupt).expect("asked"), [2]);
        let pair = group.shrink(FAR, &mut NoInterrupt).expect("the others");
        assert_eq!((pair.rank(), pair.ranks()), (group.rank(), 2));
        assert_eq!(pair.members(), [0, 1]);
        drop(group);
        let memory = Memory::filled(5000, |at| byte(pair.rank(), 0, at));
        done(pair.broadcast(1, memory.buffer(), none));
        assert!(memory.bytes() == (0..5000).map(|at| byte(1, 0, at)).collect::<Vec<_>>());
        done(pair.barrier(none));
    });
}

/// Lets rank 2 go as soon as a rank has begun a call.
trait WaitOnce {
    fn wait_once(&self);
}

impl WaitOnce for Barrier {
    fn wait_once(&self) {
        thread_local!(static HAS_MET: Cell<bool> = const { Cell::new(false) });
        if !HAS_MET.replace(true) {
            self.wait();
        }
    }
}

#[test]
fn ranks_go_on_without_one_that_left() {
    for transport in BOTH {
        for hosts in [[1, 1, 1], [1, 2, 3]] {
            expect_others_to_go_on(transport, &hosts, true);
            expect_others_to_go_on(transport, &hosts, false);
        }
    }
}

#[test]
fn ranks_that_disagree_do_not_join() {
    let (here, there) = (endpoint(Transport::Tcp, 1), endpoint(Transport::Tcp, 1));
    let stranger = endpoint(Transport::Tcp, 1);
    let timeout = Duration::from_secs(5);
    // One of them means a third rank as well.
    let pair = [&here, &there].map(|end| Group::card(end).to_vec()).to_vec();
    let three = [&here, &there, &stranger].map(|end| Group::card(end).to_vec()).to_vec();
    thread::scope(|scope| {
        for (rank, cards) in [pair, three].into_iter().enumerate() {
            let endpoint = [&here, &there][rank];
            scope.spawn(move || {
                let cards = &cards;
                let needs_registration = false;
                let request = GroupRequest { endpoint, rank, cards, timeout, needs_registration };
                let joined = Group::join(&request, &mut NoInterrupt).map(|_| ());
                let other = 1 - rank;
                match joined {
                    Err(Error::Disagreement { rank, .. }) => assert_eq!(rank, other),
                    Err(Error::NotJoined { .. } | Error::Engine(_)) => {}
                    other => panic!("{other:?}"),
                }
            });
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let (here, there) = (endpoint(Transport::Tcp, 1), endpoint(Transport::Tcp, 1));
    let cards = [&here, &there].map(|end| Group::card(end).to_vec());
    let timeout = Duration::from_millis(300);
    for rank in [0, 1] {
        let endpoint = [&here, &there][rank];
        let request =
            GroupRequest { endpoint, rank, cards: &cards, timeout, needs_registration: false };
        let joined = Group::join(&request, &mut NoInterrupt).map(|_| ());
        let Err(Error::NotJoined { missing, .. }) = joined else { panic!("{joined:?}") };
        assert_eq!(missing, [1 - rank]);
        assert_eq!(endpoint.stats().expect("open").connections, 0);
    }
    let wrong = [vec![0; 32], vec![]];
    for cards in [&wrong[..], &[]] {
        let request =
            GroupRequest { endpoint: &here, rank: 0, cards, timeout, needs_registration: false };
        assert!(Group::join(&request, &mut NoInterrupt).is_err());
    }
}
