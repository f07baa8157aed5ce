//! Ranks that are left out and let in again, and ranks that are late.

use std::sync::Condvar;

use uccl_ep::dispatch::ChoicesOut;

use super::*;

/// Rows of one call: how they go, and how they come back.
#[derive(Clone, Copy)]
struct Shape {
    room: Room,
    by_experts: Option<usize>,
    options: CombineOptions,
}

impl Shape {
    /// The shape of low latency mode.
    fn low_latency(ranks: usize) -> Self {
        let options = CombineOptions {
            sends: CombineRows::EachExpert,
            sums: SumOrder::ByChoice,
            relays: None,
            is_stable: true,
        };
        Self { room: Room::Tokens(TOKENS), by_experts: Some(TOKENS * ranks), options }
    }

    /// The shape of normal mode, in several rounds.
    fn normal(ranks: usize) -> Self {
        let options = CombineOptions {
            sends: CombineRows::Row,
            sums: SumOrder::ByRank,
            relays: None,
            is_stable: true,
        };
        Self { room: Room::Bytes(ranks * 2048), by_experts: None, options }
    }
}

/// The most tokens of a rank.
const TOKENS: usize = 24;

/// A meeting point of ranks, which do not wait for one that has failed.
pub(super) struct Meeting {
    ranks: usize,
    come: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, come: Mutex::new(0), changed: Condvar::new() }
    }

    pub(super) fn wait(&self) {
        let mut come = self.come.lock().unwrap();
        *come += 1;
        self.changed.notify_all();
        let all = come.next_multiple_of(self.ranks);
        let limit = Duration::from_secs(30);
        let met = self.changed.wait_timeout_while(come, limit, |come| *come < all).unwrap();
        assert!(!met.1.timed_out(), "a rank does not come");
    }
}

/// The sums of a rank's tokens where experts change nothing, and only some ranks are there.
fn expected(own: &RankTokens, options: CombineOptions, is_there: &[bool]) -> Vec<u16> {
    let routing = &own.routing;
    let times_of = |token: usize| match options.sends {
        CombineRows::EachExpert => {
            let owners = routing.choices(token).iter().filter_map(|k| routing.owner(*k));
            owners.filter(|(rank, _)| is_there[*rank]).count()
        }
        _ => {
            let goes = |rank: &usize| routing.tokens_to(*rank).contains(&(token as u32));
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
    /// By rank, whether the next dispatches include it.
    is_there: Vec<bool>,
    seed: u64,
    /// A dispatch without its combine, and by rank whether it was sent there.
    open: Option<(RankTokens, ReceivedRows, Vec<bool>)>,
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
        let own = RankTokens::new(self.seed, me, ranks, 3, TOKENS).relayed(self.group);
        let Shape { room, by_experts, .. } = self.shape;
        let arrived = dispatched(self.group, &own, room, by_experts).unwrap();
        self.open = Some((own, arrived, self.is_there.clone()));
    }

    /// Combines; `between` is done when rows have been sent and are not yet summed.
    fn combine(&mut self, between: impl FnOnce(&mut Self)) {
        let (own, arrived, sent_to) = self.open.take().unwrap();
        let options = self.shape.options;
        let both = sent_to.iter().zip(&self.is_there).map(|(sent, is)| *sent && *is);
        let expected = expected(&own, options, &both.collect::<Vec<_>>());
        let combine = begin(&arrived, options).unwrap();
        between(self);
        let out = finish(combine, &own, options).unwrap();
        let wrong = (0..own.routing.tokens())
            .find(|token| out[token * HIDDEN..][..HIDDEN] != expected[token * HIDDEN..][..HIDDEN]);
        assert!(
            wrong.is_none(),
            "rank {} of {}, pair {}, token {wrong:?}, sent to {sent_to:?}, {:?} there, {options:?}",
            self.group.rank(),
            self.group.ranks(),
            self.seed,
            self.is_there,
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

/// Leaves a rank out for some calls and lets it in again, at each point of a pair of calls.
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
fn a_rank_with_a_high_number_is_left_out_and_let_in() {
    let ranks = Ranks { timeout: Duration::from_secs(60), ..Ranks::near(67) };
    for shape in [Shape::low_latency, Shape::normal] {
        world(ranks, |group| {
            let mut caller = Caller::new(&group, shape(group.ranks()));
            caller.mask(true);
            caller.pairs(1);
            caller.mask(false);
            caller.pairs(2);
        });
    }
}

#[test]
fn a_far_rank_that_is_let_in_gives_and_gets_as_if_it_was_never_left_out() {
    for (ranks, nodes) in [(2, 2), (4, 2)] {
        comes_back(Ranks::apart(ranks, nodes, Transport::Tcp), Shape::low_latency);
        comes_back(Ranks::apart(ranks, nodes, Transport::Tcp), Shape::normal);
    }
}

#[test]
fn a_far_rank_hears_last_of_the_last_call_that_was_made_without_it() {
    // No rank waits between these calls, so marks of several that use one word are under way at
    // once.
    for _ in 0..4 {
        world(Ranks::apart(2, 2, Transport::Tcp), |group| {
            let mut caller = Caller::new(&group, Shape::low_latency(2));
            for _ in 0..100 {
                caller.mask(true);
                caller.pairs(12);
                caller.mask(false);
                caller.pairs(1);
            }
        });
    }
}

/// Runs ranks that leave out late ranks.
fn masking(ranks: Ranks, rank: impl Fn(Arc<Group>) + Sync) {
    let join = |me: usize, exchange: &mut Exchange<'_>| {
        Group::join(Config { masks_late: true, ..ranks.config(me) }, exchange)
    };
    world_by(ranks.count, join, rank);
}

#[test]
fn a_late_rank_is_left_out_of_this_call_and_of_those_that_follow() {
    let all = Meeting::new(3);
    let ranks = Ranks { timeout: Duration::from_secs(2), ..Ranks::near(3) };
    for shape in [Shape::low_latency, Shape::normal] {
        masking(ranks, |group| {
            let mut caller = Caller::new(&group, shape(3));
            caller.pairs(1);
            if group.rank() == 2 {
                // The others continue without it, and it makes the same number of calls without
                // them.
                all.wait();
                assert!(!group.is_masked(0) && !group.is_masked(1));
                caller.mask(true);
                caller.pairs(3);
            } else {
                caller.is_there[2] = false;
                caller.dispatch();
                assert!(group.is_masked(2), "it did not come");
                caller.combine(|_| ());
                // It is not waited for again: that would be seen as it comes.
                caller.pairs(2);
                all.wait();
            }
            all.wait();
            caller.mask(false);
            caller.pairs(5);
        });
    }
}

#[test]
fn a_rank_does_not_leave_itself_out() {
    let ranks = Ranks { timeout: Duration::from_millis(300), ..Ranks::near(2) };
    let all = Meeting::new(2);
    masking(ranks, |group| {
        let (me, shape) = (group.rank(), Shape::low_latency(2));
        let why = group.mask(me, true).unwrap_err().to_string();
        assert_eq!(why, format!("rank {me} is this one, and a rank does not leave itself out"));
        group.mask(me, false).unwrap();
        // Calls without an end: the ninth needs the words of the first.
        let own = RankTokens::new(1, me, 2, 2, TOKENS);
        let begin = || {
            // SAFETY: the vectors live until the dispatches are over.
            unsafe {
                let routing = Arc::clone(&own.routing);
                Dispatch::begin(&group, routing, own.tokens(), shape.room, &mut never)
            }
        };
        let mut begun = Vec::new();
        let why = loop {
            match begin() {
                Ok(dispatch) => begun.push(dispatch),
                Err(why) => break why.to_string(),
            }
        };
        let said = "call 1 of this rank was begun and not ended: a hook is to be called";
        assert!(why.contains(said) || why.contains("gave up on call"), "{why}");
        assert!(!group.is_masked(me), "it leaves itself out");
        all.wait();
    });
}

#[test]
fn a_barrier_waits_no_longer_than_a_call_for_a_rank_that_does_not_come() {
    let all = Meeting::new(3);
    let ranks = Ranks { timeout: Duration::from_secs(2), ..Ranks::near(3) };
    masking(ranks, |group| {
        if group.rank() != 2 {
            group.barrier(&mut never).unwrap();
            assert!(group.is_masked(2), "it did not come");
            group.barrier(&mut never).unwrap();
        }
        all.wait();
    });
}

#[test]
fn rows_of_a_rank_that_is_lost_between_rounds_are_blank() {
    /// Of each rank; some rounds for each.
    const EACH: usize = 40;
    let all = Meeting::new(2);
    let ranks = Ranks { timeout: Duration::from_secs(2), ..Ranks::near(2) };
    for by_experts in [false, true] {
        masking(ranks, |group| {
            // All go to both ranks, to the first expert of each.
            let experts = [0, 2].repeat(EACH);
            let choices = Choices { experts: &experts, top_k: 2, num_experts: 4, ranks: 2 };
            let routing = Arc::new(Routing::new(choices).unwrap());
            let rows = vec![7u16; EACH * HIDDEN];
            let own = RankTokens { rows, weights: vec![3.0; 2 * EACH], experts, routing };
            // SAFETY: the vectors live until the dispatch is over.
            let begun = unsafe {
                let (routing, room) = (Arc::clone(&own.routing), Room::Bytes(2 * 2048));
                Dispatch::begin(&group, routing, own.tokens(), room, &mut never)
            };
            let mut dispatch = begun.unwrap();
            let counts = dispatch.counts(&mut never).unwrap();
            assert_eq!(counts.per_rank, [EACH as u32; 2]);
            if group.rank() == 1 {
                // It sends no more than its first round.
                all.wait();
                return;
            }
            let mut out = vec![9u16; 2 * EACH * HIDDEN];
            let weights_of_row = if by_experts { 1 } else { 2 };
            let mut weights = vec![9.0; 2 * EACH * weights_of_row];
            let mut chosen = vec![9i32; 4 * EACH];
            let outputs = DispatchOutput {
                len: 2 * EACH,
                rows: out.as_mut_ptr().cast(),
                stride: 2 * HIDDEN,
                scales: None,
                choices: (!by_experts).then_some(ChoicesOut::I32(chosen.as_mut_ptr())),
                weights: Some(weights.as_mut_ptr()),
                zero_foreign_weights: true,
            };
            let layout = match by_experts {
                true => RowLayout::ByExpert(vec![0, 2 * EACH]),
                false => RowLayout::ByToken,
            };
            // SAFETY: the vectors have as many rows.
            let handle = unsafe { dispatch.receive(outputs, &layout, &mut never) }.unwrap();
            assert!(group.is_masked(1) && handle.sent_to == [true, false]);
            let came = (0..2 * EACH).filter(|row| out[row * HIDDEN] == 7).count();
            assert!((EACH + 1..2 * EACH).contains(&came), "{came} rows came");
            for row in 0..2 * EACH {
                let is_there = row < came;
                let values = &out[row * HIDDEN..][..HIDDEN];
                assert!(values.iter().all(|v| *v == if is_there { 7 } else { 0 }), "row {row}");
                let weights = &weights[row * weights_of_row..][..weights_of_row];
                let own = if is_there { 3.0 } else { 0.0 };
                assert!(weights[0] == own && weights[1..].iter().all(|w| *w == 0.0), "row {row}");
                let expert = if is_there { 0 } else { -1 };
                assert!(by_experts || chosen[2 * row..][..2] == [expert, -1], "row {row}");
            }
            all.wait();
        });
    }
}
