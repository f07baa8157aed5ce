//! Long broadcasts to several hosts: ranks pass bytes on. A host is an address of this machine.

mod common;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{FAR, Memory, byte, done, on_hosts};
use uccl_collective::{CallOptions, Direction, Error};
use uccl_p2p::{NoInterrupt, Transport};

/// Long enough for several chunks, and no multiple of one.
const LONG: usize = (1 << 20) + 4097;

fn filled(root: usize, call: usize) -> impl Fn(usize) -> u8 {
    move |at| byte(root, call, at)
}

/// The memory of a broadcast before it.
fn before(own: usize, root: usize, call: usize, len: usize) -> Memory {
    Memory::filled(len, filled(if own == root { root } else { 99 }, call))
}

fn expect(memory: &Memory, root: usize, call: usize) {
    let bytes = memory.bytes();
    let expected: Vec<_> = (0..bytes.len()).map(filled(root, call)).collect();
    assert!(bytes == expected, "call {call} of root {root}");
}

#[test]
fn long_broadcasts_reach_every_rank_of_every_host() {
    let none = CallOptions::default();
    let layouts: [(Transport, &[u8]); 5] = [
        (Transport::Local, &[1, 2, 3]),
        (Transport::Local, &[1, 2, 2, 1]),
        (Transport::Tcp, &[1, 2, 2]),
        (Transport::Tcp, &[1, 2, 3, 4, 5]),
        (Transport::Tcp, &[1, 1, 2, 2, 3, 3, 3, 4]),
    ];
    for (transport, hosts) in layouts {
        on_hosts(transport, hosts, |end, group| {
            let own = group.rank();
            for root in [0, hosts.len() - 1] {
                for len in [1 << 20, 2 * LONG] {
                    let memory = before(own, root, len, len);
                    done(group.broadcast(root, memory.buffer(), none));
                    expect(&memory, root, len);
                }
            }
            done(group.barrier(none));
            assert_eq!(end.stats().expect("open").regions, 1, "that of the barriers");
        });
    }
}

#[test]
fn calls_under_way_together_keep_their_bytes_apart() {
    let none = CallOptions::default();
    on_hosts(Transport::Tcp, &[1, 2, 3, 4], |_end, group| {
        let own = group.rank();
        if own == 0 {
            // The bytes of later calls come before those of the first one, which are this rank's.
            thread::sleep(Duration::from_millis(100));
        }
        let calls: Vec<_> = (0..8).map(|call| (call, call * 3 % 4)).collect();
        let room: Vec<_> =
            calls.iter().map(|(call, root)| before(own, *root, *call, LONG + call)).collect();
        let (input, outputs) = (Memory::filled(5000, filled(own, 40)), [(); 4]);
        let outputs = outputs.map(|()| Memory::filled(5000, |_| 0));
        let mut works = Vec::new();
        for ((call, root), memory) in calls.iter().zip(&room) {
            works.push(group.broadcast(*root, memory.buffer(), none));
            if *call == 4 {
                let outputs = outputs.iter().map(Memory::buffer).collect();
                works.push(group.all_gather(input.buffer(), outputs, none));
            }
        }
        works.into_iter().rev().for_each(done);
        calls.iter().zip(&room).for_each(|((call, root), memory)| expect(memory, *root, *call));
        for (from, output) in outputs.iter().enumerate().filter(|(from, _)| *from != own) {
            expect(output, from, 40);
        }
    });
}

#[test]
fn relays_and_messages_of_a_pair_keep_no_order() {
    let none = CallOptions::default();
    on_hosts(Transport::Tcp, &[1, 2, 3], |_end, group| {
        let own = group.rank();
        let (memory, message) = (before(own, 0, 0, LONG), before(own, 1, 1, LONG));
        match own {
            0 => done(group.broadcast(0, memory.buffer(), none)),
            1 => {
                let begun = group.broadcast(0, memory.buffer(), none);
                done(group.message(Direction::Send, 2, message.buffer(), none));
                done(begun);
            }
            _ => {
                done(group.message(Direction::Recv, 1, message.buffer(), none));
                done(group.broadcast(0, memory.buffer(), none));
                expect(&message, 1, 1);
            }
        }
        expect(&memory, 0, 0);
        done(group.barrier(none));
    });
}

#[test]
fn a_rank_that_does_not_wait_yet_passes_bytes_on() {
    let (none, done_elsewhere) = (CallOptions::default(), AtomicUsize::new(0));
    on_hosts(Transport::Tcp, &[1, 2, 3, 4], |_end, group| {
        let own = group.rank();
        let memories = [0, 1].map(|call| before(own, 0, call, LONG));
        let works = memories.each_ref().map(|memory| group.broadcast(0, memory.buffer(), none));
        let begun = Instant::now();
        while own == 1 && done_elsewhere.load(Ordering::SeqCst) < 3 && begun.elapsed() < FAR {
            thread::sleep(Duration::from_millis(1));
        }
        works.into_iter().for_each(done);
        done_elsewhere.fetch_add(1, Ordering::SeqCst);
        memories.iter().enumerate().for_each(|(call, memory)| expect(memory, 0, call));
        done(group.barrier(none));
    });
}

#[test]
fn a_smaller_group_has_relays_of_its_own() {
    let none = CallOptions::default();
    on_hosts(Transport::Tcp, &[1, 2, 3, 4], |end, group| {
        let own = group.rank();
        let memory = before(own, 0, 0, LONG);
        done(group.broadcast(0, memory.buffer(), none));
        done(group.barrier(none));
        if own == 1 {
            group.close();
            end.close().expect("closed");
            return;
        }
        let failed = loop {
            let work = group.broadcast(0, memory.buffer(), none);
            let ended = work.and_then(|work| work.wait(Some(FAR), &mut NoInterrupt));
            if let Err(e) = ended {
                break e;
            }
        };
        assert!(matches!(failed, Error::Lost { rank: 1, .. }), "{failed}");
        let rest = group.shrink(FAR, &mut NoInterrupt).expect("the others");
        assert_eq!(rest.members(), [0, 2, 3]);
        drop(group);
        for root in 0..3 {
            let memory = before(rest.rank(), root, root, LONG);
            done(rest.broadcast(root, memory.buffer(), none));
            expect(&memory, root, root);
        }
        done(rest.barrier(none));
    });
}
