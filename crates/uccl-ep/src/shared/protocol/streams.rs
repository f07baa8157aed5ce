//! The streams between ranks in a call, and the words that tell how far each is.

use crate::shared::nodes::Nodes;

/// Rounds of data between this rank and a peer. Both directions of it are the same here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    /// The rank at the other end.
    pub peer: usize,
    /// The rank that owns the tokens.
    pub owner: usize,
    /// The number of its words in this rank's window.
    pub local_word: usize,
    /// The number of its words in the peer's window.
    pub remote_word: usize,
}

/// Streams that a rank passes on: rounds of a dispatch arrive over `across` and leave over `local`.
/// A combine uses them the other way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RelayStreams {
    /// Between this rank and the one that owns the tokens, on another node.
    pub across: Stream,
    /// Between this rank and the ranks of its node.
    pub local: Vec<Stream>,
}

/// A rank's streams. They are named for a dispatch; a combine uses the same in the other direction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Streams {
    /// The streams by which its own tokens leave.
    pub own: Vec<Stream>,
    /// The streams by which tokens arrive, in the order of the ranks that own them.
    pub arriving: Vec<Stream>,
    /// The streams that it passes on.
    pub relayed: Vec<RelayStreams>,
}

impl Streams {
    /// Every rank writes to every rank.
    #[must_use]
    pub fn flat(me: usize, ranks: usize) -> Self {
        let with = |owner: Option<usize>| {
            let stream = move |peer| Stream {
                peer,
                owner: owner.unwrap_or(peer),
                local_word: peer,
                remote_word: me,
            };
            (0..ranks).map(stream).collect()
        };
        Self { own: with(Some(me)), arriving: with(None), relayed: Vec::new() }
    }

    /// Ranks of a node write to each other. To another node a rank writes only to its *relay*
    /// there, the rank with the same number, which passes it on.
    #[must_use]
    pub fn two_level(me: usize, nodes: Nodes) -> Self {
        let (node, local) = (nodes.node_of(me), nodes.local_of(me));
        let words = TwoLevelWords(nodes);
        let near = |peer: usize, owner: usize| Stream {
            peer: nodes.rank(node, peer),
            owner,
            local_word: words.local(nodes.node_of(owner), peer),
            remote_word: words.local(nodes.node_of(owner), local),
        };
        let across = |other: usize, owner: usize| Stream {
            peer: nodes.rank(other, local),
            owner,
            local_word: words.across(other),
            remote_word: words.across(node),
        };
        let others = || (0..nodes.count).filter(|other| *other != node);
        let relay = |other: usize| {
            let owner = nodes.rank(other, local);
            let local = (0..nodes.ranks).map(|peer| near(peer, owner)).collect();
            RelayStreams { across: across(other, owner), local }
        };
        let own = (0..nodes.ranks).map(|peer| near(peer, me));
        // Rounds with tokens of a rank come from the rank of this node with the same number.
        let arriving = (0..nodes.all_ranks()).map(|owner| near(nodes.local_of(owner), owner));
        Self {
            own: own.chain(others().map(|other| across(other, me))).collect(),
            arriving: arriving.collect(),
            relayed: others().map(relay).collect(),
        }
    }
}

/// The numbers of words in a window: first one for each rank, for calls without relays and for the
/// marks of any call's end; then those of calls with relays. So a word is always written by the
/// same rank.
struct TwoLevelWords(Nodes);

impl TwoLevelWords {
    /// The word between this rank and a rank of its node, for tokens of a rank of `node` that has
    /// the number of one of both.
    fn local(&self, node: usize, peer: usize) -> usize {
        self.0.all_ranks() + self.0.rank(node, peer)
    }

    /// The word between this rank and its relay on another node.
    fn across(&self, other: usize) -> usize {
        2 * self.0.all_ranks() + other
    }
}

/// The number of words of each kind in a window, for each call that may be under way.
#[must_use]
pub fn words_of(nodes: Nodes) -> usize {
    match nodes.count {
        1 => nodes.ranks,
        count => 2 * nodes.all_ranks() + count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every stream that leaves a rank, with that rank and the direction of a dispatch.
    fn leaving(me: usize, streams: &Streams) -> Vec<Stream> {
        let passed = streams.relayed.iter().flat_map(|relay| &relay.local);
        let all: Vec<_> = streams.own.iter().chain(passed).copied().collect();
        assert!(all.iter().all(|stream| stream.owner != me || streams.own.contains(stream)));
        all
    }

    fn coming(streams: &Streams) -> Vec<Stream> {
        let across = streams.relayed.iter().map(|relay| relay.across);
        streams.arriving.iter().copied().chain(across).collect()
    }

    #[test]
    fn both_ends_of_a_stream_know_it_by_the_same_words() {
        for (count, ranks) in [(2, 1), (2, 2), (3, 4), (4, 2)] {
            let nodes = Nodes { count, ranks };
            let all = nodes.all_ranks();
            let worlds: [Vec<Streams>; 2] = [
                (0..all).map(|me| Streams::flat(me, all)).collect(),
                (0..all).map(|me| Streams::two_level(me, nodes)).collect(),
            ];
            for world in worlds {
                for me in 0..all {
                    let (leave, come) = (leaving(me, &world[me]), coming(&world[me]));
                    for stream in leave {
                        let there = coming(&world[stream.peer]);
                        let other = Stream {
                            peer: me,
                            owner: stream.owner,
                            local_word: stream.remote_word,
                            remote_word: stream.local_word,
                        };
                        let found = there.iter().filter(|found| **found == other).count();
                        assert_eq!(found, 1, "{stream:?} of rank {me} at rank {}", stream.peer);
                    }
                    let mut words: Vec<_> = come.iter().map(|stream| stream.local_word).collect();
                    words.sort_unstable();
                    words.dedup();
                    assert_eq!(words.len(), come.len(), "no two streams share words");
                    assert!(words.iter().all(|word| *word < words_of(nodes)));
                }
            }
        }
    }

    #[test]
    fn a_token_crosses_to_the_relay_with_its_ranks_number() {
        let streams = Streams::two_level(1, Nodes { count: 3, ranks: 2 });
        let peers =
            |streams: &[Stream]| streams.iter().map(|stream| stream.peer).collect::<Vec<_>>();
        assert_eq!(peers(&streams.own), [0, 1, 3, 5]);
        assert_eq!(peers(&streams.arriving), [0, 1, 0, 1, 0, 1]);
        let owner: Vec<_> = streams.relayed.iter().map(|relay| relay.across.owner).collect();
        assert_eq!(owner, [3, 5]);
    }
}
