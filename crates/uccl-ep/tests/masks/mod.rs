//! Ranks that are left out and let in again, and ranks that are late.

use super::*;

/// Rows of one call: how they go, and how they come back.
#[derive(Clone, Copy)]
struct Shape {
    room: Room,
    by_experts: Option<usize>,
    how: How,
}

impl Shape {
    /// As low latency mode has them.
    fn low_latency(ranks: usize) -> Self {
        let how = How { sends: Sends::EachExpert, sums: Sums::ByChoice, relays: None, stays: true };
        Self { room: Room::Tokens(TOKENS), by_experts: Some(TOKENS * ranks), how }
    }

    /// As normal mode has them, in several rounds.
    fn normal(ranks: usize) -> Self {
        let how = How { sends: Sends::Row, sums: Sums::ByRank, relays: None, stays: true };
        Self { room: Room::Bytes(ranks * 2048), by_experts: None, how }
    }
}

/// The most tokens of a rank.
const TOKENS: usize = 24;

/// What experts that change nothing make of a rank's tokens, where only some ranks are there.
fn expected(own: &Own, how: How, is_there: &[bool]) -> Vec<u16> {
    let routing = &own.routing;
    let times_of = |token: usize| match how.sends {
        Sends::EachExpert => {
            let owners = routing.choices(token).iter().filter_map(|k| routing.owner(*k));
            owners.filter(|(rank, _)| is_there[*rank]).count()
        }
        _ => {
            let goes = |rank: &usize| routing.to(*rank).contains(&(token as u32));
            (0..is_there.len()).filter(|rank| is_there[*rank]).filter(goes).count()
        }
    };
    let rows = own.rows.chunks_exact(HIDDEN).enumerate();
    rows.flat_map(|(token, row)| times(row, times_of(token) as f32)).collect()
}

/// A rank that makes calls one after the other.
struct Caller<'a> {
    group: &'a Arc<Group>,
    shape: Shape,
    /// By rank, whether the dispatches that follow go there.
    is_there: Vec<bool>,
    seed: u64,
    /// A dispatch without its combine, and where it went.
    open: Option<(Own, Arrived, Vec<bool>)>,
}

impl<'a> Caller<'a> {
    fn new(group: &'a Arc<Group>, shape: Shape) -> Self {
        let is_there = vec![true; group.ranks()];
        Self { group, shape, is_there, seed: 0, open: None }
    }

    /// Leaves the last rank out, or, at the last rank, all others; or lets them in.
    fn mask(&mut self, is_masked: bool) {
        let (me, last) = (self.group.rank(), self.group.ranks() - 1);
        for rank in (0..=last).filter(|rank| *rank != me && (me == last || *rank == last)) {
            self.group.mask(rank, is_masked).unwrap();
            self.is_there[rank] = !is_masked;
        }
    }

    fn dispatch(&mut self) {
        self.seed += 1;
        let (me, ranks) = (self.group.rank(), self.group.ranks());
        let own = Own::new(self.seed, me, ranks, 3, TOKENS).relayed(self.group);
        let Shape { room, by_experts, .. } = self.shape;
        let arrived = dispatched(self.group, &own, room, by_experts).unwrap();
        self.open = Some((own, arrived, self.is_there.clone()));
    }

    /// Combines; `between` is done when rows have been sent and are not yet summed.
    fn combine(&mut self, between: impl FnOnce(&mut Self)) {
        let (own, arrived, sent_to) = self.open.take().unwrap();
        let how = self.shape.how;
        let both = sent_to.iter().zip(&self.is_there).map(|(sent, is)| *sent && *is);
        let expected = expected(&own, how, &both.collect::<Vec<_>>());
        let combine = begin(&arrived, how).unwrap();
        between(self);
        let out = finish(combine, &own, how).unwrap();
        assert!(
            out == expected,
            "rank {} of {}, call {}",
            self.group.rank(),
            self.group.ranks(),
            self.seed
        );
    }

    fn pairs(&mut self, count: usize) {
        for _ in 0..count {
            self.dispatch();
            self.combine(|_| ());
        }
    }

    /// Makes the dispatch or the combine that is next.
    fn call(&mut self) {
        match self.open {
            Some(_) => self.combine(|_| ()),
            None => self.dispatch(),
        }
    }
}

/// Leaves a rank out for some calls and lets it in again, wherever in a pair of calls that is.
fn comes_back(ranks: Ranks, shape: fn(usize) -> Shape) {
    world(ranks, |group| {
        let mut caller = Caller::new(&group, shape(group.ranks()));
        for calls in 1..=9 {
            // Left out behind a pair, and behind a dispatch.
            for is_open in [false, true] {
                caller.pairs(2);
                if is_open {
                    caller.dispatch();
                }
                caller.mask(true);
                (0..calls).for_each(|_| caller.call());
                caller.mask(false);
                if caller.open.is_some() {
                    caller.combine(|_| ());
                }
            }
            // Let in between the sending of rows and their sums.
            for is_sent in [false, true] {
                if is_sent {
                    caller.dispatch();
                }
                caller.mask(true);
                if !is_sent {
                    caller.dispatch();
                }
                caller.combine(|caller| caller.mask(false));
            }
        }
        caller.pairs(9);
    });
}

#[test]
fn a_rank_that_is_let_in_gives_and_gets_as_if_it_was_never_left_out() {
    for ranks in 2..=8 {
        comes_back(Ranks::near(ranks), Shape::low_latency);
        comes_back(Ranks::near(ranks), Shape::normal);
    }
}

#[test]
fn a_far_rank_that_is_let_in_gives_and_gets_as_if_it_was_never_left_out() {
    for (ranks, nodes) in [(2, 2), (4, 2)] {
        comes_back(Ranks::apart(ranks, nodes, Transport::Tcp), Shape::low_latency);
        comes_back(Ranks::apart(ranks, nodes, Transport::Tcp), Shape::normal);
    }
}
