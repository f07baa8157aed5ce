//! Broadcasts with relays, message by message.

use std::collections::{BTreeMap, VecDeque};

use super::*;

/// A group with its ranks on these hosts.
fn hosts(of_rank: &[u8]) -> Hosts {
    Hosts::of(of_rank.iter().map(|host| IpAddr::from([10, 0, 0, *host])))
}

/// A pair of ranks, and whether the message is the root's.
type Pair = (usize, usize, bool);

/// A rank while its messages go.
struct Rank {
    plan: RelayPlan,
    /// By the index of the receive.
    has_come: Vec<bool>,
    is_sent: Vec<bool>,
}

impl Rank {
    fn receives(&self) -> impl Iterator<Item = (usize, bool, Message)> {
        let direct = self.plan.direct.iter().map(|message| (true, *message));
        let all = direct.chain(self.plan.received.iter().map(|message| (false, *message)));
        let numbered = all.enumerate().map(|(at, (direct, message))| (at, direct, message));
        numbered.filter(|(_, _, message)| message.direction == Direction::Recv)
    }
}

/// Runs a broadcast: every message meets one of its pair with the same bytes, in order, and
/// nobody sends bytes that it does not have. The bytes that each rank gets, and that the root
/// sends to other hosts.
fn run(hosts: &Hosts, root: usize, len: usize) -> Option<(Vec<usize>, usize)> {
    let ranks = hosts.of_rank.len();
    let piece = Piece { buffer: 0, offset: 24, len };
    let mut all = Vec::new();
    for rank in 0..ranks {
        let plan = relayed_broadcast(Place { rank, ranks }, root, piece, hosts);
        let plan = plan.expect("a root")?;
        let messages = plan.direct.len() + plan.received.len();
        let (has_come, is_sent) = (vec![false; messages], vec![false; plan.relays.len()]);
        all.push(Rank { plan, has_come, is_sent });
    }
    let mut under_way: BTreeMap<Pair, VecDeque<Piece>> = BTreeMap::new();
    let mut sent = 0;
    for message in all[root].plan.direct.iter() {
        assert_eq!(message.direction, Direction::Send);
        let way = under_way.entry((root, message.peer, true)).or_default();
        way.push_back(message.piece);
        if hosts.of_rank[message.peer] != hosts.of_rank[root] {
            sent += message.piece.len;
        }
    }
    let mut got = vec![0; ranks];
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, state) in all.iter_mut().enumerate().filter(|(rank, _)| *rank != root) {
            let receives: Vec<_> = state.receives().collect();
            for (at, direct, message) in receives {
                let way = under_way.entry((message.peer, rank, direct)).or_default();
                if state.has_come[at] || way.is_empty() {
                    continue;
                }
                assert_eq!(way.pop_front(), Some(message.piece), "{} to {rank}", message.peer);
                (state.has_come[at], moved) = (true, true);
                got[rank] += message.piece.len;
            }
            let mut is_held = vec![false; ranks];
            for (relay, is_sent) in state.plan.relays.iter().zip(&mut state.is_sent) {
                let peer = relay.message.peer;
                if *is_sent {
                    continue;
                }
                if is_held[peer] || !state.has_come[relay.after] {
                    is_held[peer] = true;
                    continue;
                }
                under_way.entry((rank, peer, false)).or_default().push_back(relay.message.piece);
                (*is_sent, moved) = (true, true);
            }
        }
    }
    assert!(under_way.values().all(VecDeque::is_empty), "all have been received");
    Some((got, sent))
}

const LAYOUTS: [&[u8]; 8] = [
    &[0, 1, 2],
    &[0, 1, 1],
    &[0, 1, 2, 3],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1, 0, 1],
    &[0, 1, 1, 1, 2, 2, 0],
    &[0, 1, 2, 3, 4, 5, 6, 7],
    &[3, 3, 1, 1, 1, 1, 2, 2],
];

#[test]
fn every_rank_gets_every_byte_once_and_the_root_sends_each_once() {
    for layout in LAYOUTS {
        let hosts = hosts(layout);
        assert!(hosts.need_relays());
        for root in 0..layout.len() {
            for len in [SHORTEST, SHORTEST + 1, 16 << 20, (70 << 20) - 3] {
                let Some((got, sent)) = run(&hosts, root, len) else {
                    let far = layout.iter().filter(|host| **host != layout[root]).count();
                    assert!(far < 2, "{layout:?} from {root}");
                    continue;
                };
                let expected = |rank| if rank == root { 0 } else { len };
                let expected: Vec<_> = (0..layout.len()).map(expected).collect();
                assert_eq!((got, sent), (expected, len), "{layout:?} from {root}");
            }
        }
    }
}

#[test]
fn ranks_of_other_hosts_share_the_relays() {
    for layout in [LAYOUTS[2], LAYOUTS[6], LAYOUTS[7]] {
        let (hosts, ranks, len) = (hosts(layout), layout.len(), 64 << 20);
        for rank in (1..ranks).filter(|rank| layout[*rank] != layout[0]) {
            let plan = relayed_broadcast(Place { rank, ranks }, 0, Piece::whole(0, len), &hosts);
            let plan = plan.expect("a root").expect("relays");
            let sent = plan.relays.iter().map(|relay| relay.message.piece.len);
            assert!(sent.sum::<usize>() <= len * (ranks - 2) / (ranks - 1) + len / 8, "{rank}");
            let parts = plan.direct.len() + plan.received.len();
            assert!(parts <= MOST_CHUNKS * ranks, "{parts} messages");
        }
    }
}

#[test]
fn the_root_sends_short_ones_and_those_of_one_host_itself() {
    let (at, long) = (Place { rank: 1, ranks: 4 }, Piece::whole(0, 64 << 20));
    let plan = |layout, piece| relayed_broadcast(at, 0, piece, &hosts(layout)).expect("a root");
    assert_eq!(plan(&[0, 0, 0, 0], long), None);
    assert_eq!(plan(&[0, 0, 0, 1], long), None, "one rank is elsewhere");
    assert_eq!(plan(&[0, 1, 2, 3], Piece::whole(0, SHORTEST - 1)), None);
    assert!(plan(&[0, 1, 2, 3], Piece::whole(0, SHORTEST)).is_some());
    assert!(!hosts(&[0, 0, 0]).need_relays() && !hosts(&[0, 1]).need_relays());
    assert!(relayed_broadcast(at, 4, long, &hosts(&[0, 1, 2, 3])).is_err());
}
