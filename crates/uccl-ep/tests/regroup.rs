//! Ranks that come and go, in threads of one process.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use uccl_ep::{
    Config, Error, Exchange, Group, Result,
    combine::{Combine, CombineInput, CombineOutput, CombineRows, SumOrder},
    dispatch::{Dispatch, DispatchInput, DispatchOutput, Handle, Payload, Room, RowLayout},
    numerics::bf16,
    routing::{Choices, Routing},
};
use uccl_p2p::Transport;

const HIDDEN: usize = 128;
/// The number of ranks that there is room for.
const RANKS: usize = 3;
const EXPERTS: usize = 2 * RANKS;
const TOKENS: usize = 12;
const TOP_K: usize = 3;
/// The longest wait for a rank.
const LONG: Duration = Duration::from_secs(20);

/// The bytes of an exchange, by rank.
type ExchangedBytes = Vec<Option<Vec<u8>>>;

/// The exchanges of all meetings, by the meeting's name and the exchange's number.
#[derive(Default)]
struct Board {
    given: Mutex<HashMap<(String, usize), ExchangedBytes>>,
    changed: Condvar,
}

impl Board {
    /// One rank's exchange in a meeting of the ranks that are `there`.
    fn meeting(
        &self,
        name: String,
        me: usize,
        there: &[usize],
    ) -> impl FnMut(Vec<u8>) -> Result<ExchangedBytes> {
        let mut turn = 0;
        move |mine| {
            turn += 1;
            let mut given = self.given.lock().unwrap();
            let key = (name.clone(), turn);
            given.entry(key.clone()).or_insert_with(|| vec![None; RANKS])[me] = Some(mine);
            self.changed.notify_all();
            let lacks = |all: &mut HashMap<_, ExchangedBytes>| {
                there.iter().any(|rank| all[&key][*rank].is_none())
            };
            let (given, _) = self.changed.wait_timeout_while(given, LONG, lacks).unwrap();
            Ok(given[&key].clone())
        }
    }
}

/// How ranks reach each other, and how long they wait.
#[derive(Clone, Copy)]
struct Spread {
    /// Nodes that the ranks are spread over, though all are on one host.
    nodes: usize,
    timeout: Duration,
}

const NEAR: Spread = Spread { nodes: 1, timeout: LONG };
const APART: Spread = Spread { nodes: RANKS, timeout: LONG };

impl Spread {
    fn config(self, rank: usize) -> Config {
        let bind = Some([127, 0, 0, 1].into());
        let transport = Transport::Tcp;
        let network = uccl_p2p::Config { transport, bind, num_cpus: 1, ..Default::default() };
        let node = Some((rank * self.nodes / RANKS) as u64);
        Config {
            rank,
            ranks: RANKS,
            pool: 1 << 20,
            timeout: self.timeout,
            masks_late: false,
            node,
            network: Some(network),
        }
    }

    fn join(self, me: usize, exchange: &mut Exchange<'_>) -> Result<Arc<Group>> {
        Group::join(self.config(me), exchange)
    }
}

/// Runs `rank` for each rank, in threads of their own.
fn ranks<T: Send>(rank: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let rank = &rank;
    thread::scope(|scope| {
        let all: Vec<_> = (0..RANKS).map(|me| scope.spawn(move || rank(me))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn never() -> bool {
    false
}

/// A rank's tokens: their values and choices follow from its number and the seed.
struct RankTokens {
    rows: Vec<u16>,
    experts: Vec<i32>,
    routing: Arc<Routing>,
}

impl RankTokens {
    fn new(seed: usize, me: usize) -> Self {
        let mut random = fastrand::Rng::with_seed((seed * RANKS + me) as u64);
        let mut chosen = || random.choose_multiple(0..EXPERTS as i32, TOP_K);
        let experts: Vec<_> = (0..TOKENS).flat_map(|_| chosen()).collect();
        // Sums of these are exact in bf16.
        let rows = (0..TOKENS * HIDDEN).map(|_| bf16::from_f32(random.i32(-4..=4) as f32));
        let choices =
            Choices { experts: &experts, top_k: TOP_K, num_experts: EXPERTS, ranks: RANKS };
        let routing = Arc::new(Routing::new(choices).unwrap());
        Self { rows: rows.collect(), experts, routing }
    }

    /// The sums where experts change nothing, over the experts of the ranks that are there.
    fn sums(&self, there: &[usize]) -> Vec<u16> {
        let tokens = self.rows.chunks_exact(HIDDEN).zip(self.experts.chunks_exact(TOP_K));
        let sum = |(row, experts): (&[u16], &[i32])| {
            let is_there = |expert: &&i32| there.contains(&(**expert as usize * RANKS / EXPERTS));
            let times = experts.iter().filter(is_there).count() as f32;
            row.iter()
                .map(move |v| bf16::from_f32(times * bf16::to_f32(*v) + 0.0))
                .collect::<Vec<_>>()
        };
        tokens.flat_map(sum).collect()
    }

    fn dispatch(&self, group: &Arc<Group>) -> Result<Dispatch> {
        let tokens = DispatchInput {
            rows: self.rows.as_ptr().cast(),
            stride: 2 * HIDDEN,
            payload: Payload::Bytes(2 * HIDDEN),
            scales: None,
            weights: None,
            is_stable: false,
        };
        let routing = Arc::clone(&self.routing);
        // SAFETY: all has been sent when this returns.
        unsafe { Dispatch::begin(group, routing, tokens, Room::Tokens(TOKENS), &mut never) }
    }
}

/// Rows by experts, and the handle to send them back with.
struct ReceivedRows {
    rows: Vec<u16>,
    handle: Arc<Handle>,
}

const ROWS_OF_EXPERT: usize = RANKS * TOKENS;
const ROWS: usize = EXPERTS / RANKS * ROWS_OF_EXPERT;

fn received(dispatch: Dispatch) -> Result<ReceivedRows> {
    let mut rows = vec![0x7fc0; ROWS * HIDDEN];
    let outputs = DispatchOutput {
        len: ROWS,
        rows: rows.as_mut_ptr().cast(),
        stride: 2 * HIDDEN,
        scales: None,
        choices: None,
        weights: None,
        zero_foreign_weights: false,
    };
    let layout = RowLayout::ByExpert((0..EXPERTS / RANKS).map(|e| e * ROWS_OF_EXPERT).collect());
    // SAFETY: the vector has as many rows.
    let handle = Arc::new(unsafe { dispatch.receive(outputs, &layout, &mut never)? });
    Ok(ReceivedRows { rows, handle })
}

fn combined(arrived: &ReceivedRows) -> Result<Vec<u16>> {
    let results = CombineInput {
        rows: arrived.rows.as_ptr().cast(),
        len: ROWS,
        stride: 2 * HIDDEN,
        hidden: HIDDEN,
        sends: CombineRows::EachExpert,
        weights: None,
        is_packed: false,
        relays: None,
        is_stable: false,
    };
    // SAFETY: all has been sent when this returns.
    let combine = unsafe { Combine::begin(&arrived.handle, results, &mut never)? };
    let mut rows = vec![0; TOKENS * HIDDEN];
    let (sums, bias) = (SumOrder::ByChoice, [None; 2]);
    let out = CombineOutput { rows: rows.as_mut_ptr(), sums, bias, weights: None };
    // SAFETY: there is a row for each token.
    unsafe { combine.finish(out, &mut never)? };
    Ok(rows)
}

/// Dispatches and combines, and checks that each token comes back from the ranks that are there.
fn round(group: &Arc<Group>, seed: usize, there: &[usize]) {
    let own = RankTokens::new(seed, group.rank());
    let arrived = received(own.dispatch(group).unwrap()).unwrap();
    assert!(combined(&arrived).unwrap() == own.sums(there), "round {seed}");
}

const ALL: [usize; RANKS] = [0, 1, 2];

/// All ranks meet, then one leaves; the others meet without it, then with a new one in its place;
/// and so on, rank by rank.
fn come_and_go(spread: Spread, turns: usize) {
    let board = Board::default();
    ranks(|me| {
        let mut group: Option<Arc<Group>> = None;
        for turn in 0..turns {
            let mut all = board.meeting(format!("{turn} all"), me, &ALL);
            let met = match &group {
                None => spread.join(me, &mut all).unwrap(),
                Some(group) => group.regroup(&mut all).unwrap(),
            };
            assert_eq!((met.generation() as usize, met.rank()), (2 * turn + 1, me));
            (0..turn % 4 + 1).for_each(|nth| round(&met, 100 * turn + nth, &ALL));
            let (goes, left) = (turn % RANKS, ALL.map(|rank| rank != turn % RANKS));
            group = (me != goes).then(|| {
                let left: Vec<_> = ALL.into_iter().filter(|rank| left[*rank]).collect();
                let mut few = board.meeting(format!("{turn} few"), me, &left);
                let met = met.regroup(&mut few).unwrap();
                assert!(met.is_masked(goes) && met.mask(goes, false).is_err());
                (0..turn % 3).for_each(|nth| round(&met, 100 * turn + 50 + nth, &left));
                met
            });
        }
    });
}

#[test]
fn ranks_that_go_and_come_back_give_and_get_as_before() {
    come_and_go(NEAR, 12);
}

#[test]
fn far_ranks_that_go_and_come_back_give_and_get_as_before() {
    come_and_go(APART, 6);
    come_and_go(Spread { nodes: 2, ..NEAR }, 6);
}

#[test]
fn a_handle_of_an_earlier_generation_is_refused_with_both() {
    let board = Board::default();
    ranks(|me| {
        let group = NEAR.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
        let own = RankTokens::new(1, me);
        let arrived = received(own.dispatch(&group).unwrap()).unwrap();
        // A mask leaves handles as they are.
        let other = (me + 1) % RANKS;
        group.mask(other, true).unwrap();
        group.mask(other, false).unwrap();
        assert!(combined(&arrived).is_ok());
        let next = group.regroup(&mut board.meeting("second".into(), me, &ALL)).unwrap();
        let refused = [combined(&arrived).err(), own.dispatch(&group).err()];
        for (error, phase) in refused.iter().zip(["combine", "dispatch"]) {
            assert!(matches!(error, Some(Error::Stale { of: 1, is: 2, .. })), "{error:?}");
            let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(text.starts_with(&format!("{phase} on rank {me}")), "{text}");
        }
        assert!(matches!(group.regroup(&mut |_| unreachable!()), Err(Error::Stale { .. })));
        round(&next, 2, &ALL);
    });
}

#[test]
fn a_call_under_way_ends_after_ranks_have_met_anew() {
    for spread in [NEAR, APART] {
        let board = Board::default();
        ranks(|me| {
            let group = spread.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
            let own = RankTokens::new(1, me);
            let dispatch = own.dispatch(&group).unwrap();
            let next = group.regroup(&mut board.meeting("second".into(), me, &ALL)).unwrap();
            drop(group);
            round(&next, 2, &ALL);
            let arrived = received(dispatch).unwrap();
            // All ranks' tokens with a choice of this rank's experts are there.
            let of = |from: usize| RankTokens::new(1, from).routing.tokens_to(me).len() as u32;
            assert_eq!(arrived.handle.counts.per_rank, ALL.map(of));
            round(&next, 3, &ALL);
        });
    }
}

#[test]
fn ranks_that_are_at_different_calls_go_on_at_the_furthest() {
    let board = Board::default();
    let spread = Spread { timeout: Duration::from_secs(1), ..NEAR };
    ranks(|me| {
        let group = spread.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
        for _ in 0..3 * me {
            // A call fails because another rank makes no call, or no call any more.
            assert!(RankTokens::new(1, me).dispatch(&group).and_then(received).is_err());
        }
        let group = group.regroup(&mut board.meeting("second".into(), me, &ALL)).unwrap();
        round(&group, 2, &ALL);
    });
}

#[test]
fn writes_of_a_rank_that_was_replaced_are_seen_by_nobody() {
    for spread in [NEAR, APART] {
        let board = Board::default();
        ranks(|me| {
            let first = spread.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
            round(&first, 1, &ALL);
            let mut second = board.meeting("second".into(), me, &ALL);
            if me != 1 {
                let group = first.regroup(&mut second).unwrap();
                // Its successor has the same pid.
                let masked: Vec<_> = ALL.iter().filter(|rank| first.is_masked(**rank)).collect();
                assert_eq!(masked, [&1]);
                (2..40).for_each(|seed| round(&group, seed, &ALL));
                return;
            }
            // The old rank does not know that it was replaced, and sends on.
            let old = thread::spawn(move || {
                (50..52).map_while(|seed| RankTokens::new(seed, me).dispatch(&first).ok()).count()
            });
            let group = spread.join(me, &mut second).unwrap();
            (2..40).for_each(|seed| round(&group, seed, &ALL));
            let sent = old.join().unwrap();
            assert!(sent > 0 || spread.nodes > 1);
        });
    }
}

#[test]
fn a_rank_that_was_masked_for_some_calls_takes_part_again() {
    for spread in [NEAR, APART] {
        let board = Board::default();
        ranks(|me| {
            let group = spread.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
            for turn in 0..4 {
                let there: Vec<_> =
                    ALL.into_iter().filter(|rank| (*rank == 1) == (me == 1)).collect();
                let others = ALL.into_iter().filter(|rank| !there.contains(rank));
                others.clone().for_each(|rank| group.mask(rank, true).unwrap());
                (0..=turn).for_each(|nth| round(&group, 10 * turn + nth, &there));
                others.for_each(|rank| group.mask(rank, false).unwrap());
                (5..9).for_each(|nth| round(&group, 10 * turn + nth, &ALL));
            }
        });
    }
}

#[test]
fn ranks_that_could_not_meet_stay_as_they_were() {
    let board = Board::default();
    ranks(|me| {
        let group = NEAR.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
        let fails = &mut |_| Err(Error::Invalid("the store is away".into()));
        assert!(group.regroup(fails).is_err_and(|e| e.to_string().contains("away")));
        round(&group, 1, &ALL);
        // Rank 2 gives bytes that are no card: all ranks learn of it.
        let mut second = board.meeting("second".into(), me, &ALL);
        let mut garbles = |mine: Vec<u8>| second(if me == 2 { vec![1] } else { mine });
        let text = group.regroup(&mut garbles).err().unwrap().to_string();
        assert!(text.contains("rank 2"), "{text}");
        round(&group, 2, &ALL);
    });
}

#[test]
fn a_rank_that_has_no_memory_for_its_window_tells_the_others() {
    let board = Board::default();
    let texts = ranks(|me| {
        let mut config = NEAR.config(me);
        if me == 1 {
            config.pool = 1 << 61;
        }
        let mut exchange = board.meeting("first".into(), me, &ALL);
        Group::join(config, &mut exchange).err().map(|why| why.to_string())
    });
    for (me, text) in texts.iter().enumerate() {
        let text = text.as_deref().unwrap_or("it has joined");
        let said = if me == 1 { "making a window of" } else { "rank 1 could not make its window" };
        assert!(text.contains(said), "rank {me}: {text}");
    }
}

#[test]
fn a_rank_that_leaves_hears_the_last_word_of_its_calls() {
    for turn in 0..20 {
        let board = Board::default();
        ranks(|me| {
            let group = APART.join(me, &mut board.meeting("first".into(), me, &ALL)).unwrap();
            round(&group, turn, &ALL);
            // The others do not wait until it has ended the call.
            if me != 2 {
                let mut second = board.meeting("second".into(), me, &ALL[..2]);
                round(&group.regroup(&mut second).unwrap(), turn, &ALL[..2]);
            }
        });
    }
}
