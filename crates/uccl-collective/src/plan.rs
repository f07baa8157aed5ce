//! The messages of a collective: plain data; no I/O, lock, clock or thread.
//!
//! Every collective here is an exchange: each rank has a piece for each other rank, or none, and
//! room for a piece of each other rank, or none. Each message goes straight to its rank, but for
//! those of a long [broadcast](relayed_broadcast) to other hosts.

mod relays;

pub use relays::{Hosts, Relay, RelayPlan, relayed_broadcast};

use crate::error::{Error, Result};

/// A part of one of a call's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The index of the buffer.
    pub buffer: usize,
    /// Where it begins in the buffer, in bytes.
    pub offset: usize,
    /// Its length in bytes.
    pub len: usize,
}

impl Piece {
    /// All of a buffer of this length.
    #[must_use]
    pub fn whole(buffer: usize, len: usize) -> Self {
        Self { buffer, offset: 0, len }
    }
}

/// Whether a message leaves or arrives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From this rank.
    Send,
    /// To this rank.
    Recv,
}

/// A message of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Whether it leaves or arrives.
    pub direction: Direction,
    /// The other side.
    pub peer: usize,
    /// Its bytes, or the room for them.
    pub piece: Piece,
}

/// A rank of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its number.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

/// The messages of an exchange: `inputs[r]` goes to rank `r`, `outputs[r]` comes from it. A piece
/// without bytes is no message. The own rank's piece is not among them: it is copied.
///
/// Receives are first, so that data that comes finds its place. Each rank begins with the rank
/// after its own, so that not all ranks send to the same one.
#[must_use]
pub fn exchange(at: Place, inputs: &[Option<Piece>], outputs: &[Option<Piece>]) -> Vec<Message> {
    let others = |step: usize| (at.rank + step) % at.ranks;
    let before = (1..at.ranks).map(|step| others(at.ranks - step));
    let after = (1..at.ranks).map(others);
    let message = |direction, peer: usize, pieces: &[Option<Piece>]| {
        let piece = pieces.get(peer).copied().flatten().filter(|piece| piece.len > 0)?;
        Some(Message { direction, peer, piece })
    };
    let received = before.filter_map(|peer| message(Direction::Recv, peer, outputs));
    let sent = after.filter_map(|peer| message(Direction::Send, peer, inputs));
    received.chain(sent).collect()
}

/// Every rank gets the piece of every rank.
///
/// # Errors
/// There is not one output for each rank.
pub fn all_gather(at: Place, input: Piece, outputs: &[Piece]) -> Result<Vec<Message>> {
    let outputs = one_each(at, outputs, "outputs")?;
    Ok(exchange(at, &vec![Some(input); at.ranks], &outputs))
}

/// Every rank gets a piece of its own from every rank.
///
/// # Errors
/// There is not one input and one output for each rank.
pub fn all_to_all(at: Place, inputs: &[Piece], outputs: &[Piece]) -> Result<Vec<Message>> {
    let (inputs, outputs) = (one_each(at, inputs, "inputs")?, one_each(at, outputs, "outputs")?);
    Ok(exchange(at, &inputs, &outputs))
}

/// Every rank gets the root's piece.
///
/// # Errors
/// There is no such root.
pub fn broadcast(at: Place, root: usize, piece: Piece) -> Result<Vec<Message>> {
    check_rank(at, root)?;
    let (inputs, outputs) = match root == at.rank {
        true => (vec![Some(piece); at.ranks], Vec::new()),
        false => (Vec::new(), only(at, root, piece)),
    };
    Ok(exchange(at, &inputs, &outputs))
}

/// Every rank gets its piece of the root's. `inputs` are the root's, one for each rank; other ranks
/// have none.
///
/// # Errors
/// There is no such root, or it has not one input for each rank.
pub fn scatter(at: Place, root: usize, inputs: &[Piece], output: Piece) -> Result<Vec<Message>> {
    check_rank(at, root)?;
    let (inputs, outputs) = match root == at.rank {
        true => (one_each(at, inputs, "inputs")?, Vec::new()),
        false => (Vec::new(), only(at, root, output)),
    };
    Ok(exchange(at, &inputs, &outputs))
}

/// The root gets every rank's piece. `outputs` are the root's, one for each rank; other ranks have
/// none.
///
/// # Errors
/// There is no such root, or it has not one output for each rank.
pub fn gather(at: Place, root: usize, input: Piece, outputs: &[Piece]) -> Result<Vec<Message>> {
    check_rank(at, root)?;
    let (inputs, outputs) = match root == at.rank {
        true => (Vec::new(), one_each(at, outputs, "outputs")?),
        false => (only(at, root, input), Vec::new()),
    };
    Ok(exchange(at, &inputs, &outputs))
}

fn only(at: Place, peer: usize, piece: Piece) -> Vec<Option<Piece>> {
    (0..at.ranks).map(|rank| (rank == peer).then_some(piece)).collect()
}

fn one_each(at: Place, pieces: &[Piece], name: &str) -> Result<Vec<Option<Piece>>> {
    if pieces.len() != at.ranks {
        let why = format!("{} {name} for {} ranks: each has one", pieces.len(), at.ranks);
        return Err(Error::Invalid(why));
    }
    Ok(pieces.iter().copied().map(Some).collect())
}

fn check_rank(at: Place, rank: usize) -> Result<()> {
    match rank < at.ranks {
        true => Ok(()),
        false => Err(Error::NoSuchRank { rank, ranks: at.ranks }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The messages of all ranks: (from, to) with the pieces of both sides.
    fn pairs(
        ranks: usize,
        plan: impl Fn(Place) -> Result<Vec<Message>>,
    ) -> BTreeMap<(usize, usize), [Vec<Piece>; 2]> {
        let mut pairs: BTreeMap<_, [Vec<Piece>; 2]> = BTreeMap::new();
        for rank in 0..ranks {
            for message in plan(Place { rank, ranks }).expect("a plan") {
                let (pair, side) = match message.direction {
                    Direction::Send => ((rank, message.peer), 0),
                    Direction::Recv => ((message.peer, rank), 1),
                };
                pairs.entry(pair).or_default()[side].push(message.piece);
            }
        }
        pairs
    }

    /// Each pair has one send and one receive, of the same length.
    fn expect_met(pairs: &BTreeMap<(usize, usize), [Vec<Piece>; 2]>) {
        for (pair, [sent, received]) in pairs {
            assert_eq!((sent.len(), received.len()), (1, 1), "{pair:?}");
            assert_eq!(sent[0].len, received[0].len, "{pair:?}");
            assert_ne!(pair.0, pair.1);
        }
    }

    #[test]
    fn each_message_meets_one_of_its_length() {
        for ranks in 1..9 {
            let slots: Vec<_> =
                (0..ranks).map(|rank| Piece { buffer: 1, offset: 8 * rank, len: 8 }).collect();
            let whole = Piece::whole(0, 8);
            let all = pairs(ranks, |at| all_gather(at, whole, &slots));
            assert_eq!(all.len(), ranks * (ranks - 1));
            expect_met(&all);
            let len = |from: usize, to: usize| 3 * from + 5 * to;
            let all = pairs(ranks, |at| {
                let inputs: Vec<_> =
                    (0..ranks).map(|to| Piece::whole(0, len(at.rank, to))).collect();
                let outputs: Vec<_> =
                    (0..ranks).map(|from| Piece::whole(1, len(from, at.rank))).collect();
                all_to_all(at, &inputs, &outputs)
            });
            expect_met(&all);
            for root in 0..ranks {
                let fan = pairs(ranks, |at| broadcast(at, root, whole));
                expect_met(&fan);
                assert!(fan.keys().all(|pair| pair.0 == root) && fan.len() == ranks - 1);
                expect_met(&pairs(ranks, |at| scatter(at, root, &slots, whole)));
                let fan = pairs(ranks, |at| gather(at, root, whole, &slots));
                expect_met(&fan);
                assert!(fan.keys().all(|pair| pair.1 == root) && fan.len() == ranks - 1);
            }
        }
    }

    #[test]
    fn receives_are_first_and_the_next_rank_is_the_first_to_be_sent_to() {
        let slots: Vec<_> = (0..4).map(|rank| Piece::whole(rank, 1)).collect();
        let messages = all_to_all(Place { rank: 1, ranks: 4 }, &slots, &slots).expect("a plan");
        let order: Vec<_> = messages.iter().map(|m| (m.direction, m.peer)).collect();
        let (recv, send) = (Direction::Recv, Direction::Send);
        assert_eq!(order, [(recv, 0), (recv, 3), (recv, 2), (send, 2), (send, 3), (send, 0)]);
    }

    #[test]
    fn in_each_step_every_rank_is_sent_to_once_and_expects_it() {
        for ranks in 2..9 {
            let slots: Vec<_> = (0..ranks).map(|rank| Piece::whole(rank, 1)).collect();
            let peers = |rank, direction| -> Vec<_> {
                let messages = all_to_all(Place { rank, ranks }, &slots, &slots).expect("a plan");
                let of_it = messages.into_iter().filter(|one| one.direction == direction);
                of_it.map(|message| message.peer).collect()
            };
            let sent: Vec<_> = (0..ranks).map(|rank| peers(rank, Direction::Send)).collect();
            let expected: Vec<_> = (0..ranks).map(|rank| peers(rank, Direction::Recv)).collect();
            for step in 0..ranks - 1 {
                let mut reached: Vec<_> = sent.iter().map(|peers| peers[step]).collect();
                for (rank, peer) in reached.iter().enumerate() {
                    assert_eq!(expected[*peer][step], rank, "step {step} of {ranks} ranks");
                }
                reached.sort_unstable();
                assert_eq!(reached, (0..ranks).collect::<Vec<_>>(), "step {step}");
            }
        }
    }

    #[test]
    fn wrong_counts_and_roots_are_refused() {
        let (at, piece) = (Place { rank: 0, ranks: 2 }, Piece::whole(0, 1));
        assert!(all_gather(at, piece, &[piece]).is_err());
        assert!(all_to_all(at, &[piece; 2], &[piece; 3]).is_err());
        assert!(broadcast(at, 2, piece).is_err());
        assert!(scatter(at, 0, &[], piece).is_err());
        assert!(gather(at, 0, piece, &[piece; 1]).is_err());
        assert_eq!(gather(at, 1, piece, &[]).expect("a plan").len(), 1);
    }
}
