//! Whole groups in threads of one process: the tests compare dispatches and combines with results
//! computed here.

mod chaos;
mod guards;
mod many;
mod masks;

use std::{
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use uccl_ep::{
    Block, Config, Error, Exchange, Group, Result,
    combine::{Combine, CombineChoices, CombineInput, CombineOutput, CombineRows, Order, SumOrder},
    control_len,
    dispatch::{
        Dispatch, DispatchInput, DispatchOutput, Handle, Payload, ReceiveCounts, Room, RowLayout,
    },
    nodes::Nodes,
    numerics::{bf16, sum},
    record::{Areas, Record},
    release_block,
    routing::{Choices, Routing},
};
use uccl_libfabric::{LibfabricRail, LibfabricSettings};
use uccl_p2p::Transport;

/// The ranks of a group, and the way between them.
#[derive(Clone, Copy)]
struct Ranks {
    count: usize,
    /// Nodes that the ranks are spread over, though all are on one host.
    nodes: usize,
    transport: Transport,
    pool: usize,
    timeout: Duration,
}

impl Ranks {
    /// Ranks that map each other's windows.
    fn near(count: usize) -> Self {
        let timeout = Duration::from_secs(20);
        Self { count, nodes: 1, transport: Transport::Tcp, pool: 1 << 20, timeout }
    }

    /// Ranks on several nodes.
    fn apart(count: usize, nodes: usize, transport: Transport) -> Self {
        Self { nodes, transport, ..Self::near(count) }
    }

    fn config(&self, rank: usize) -> Config {
        let Self { count: ranks, nodes, transport, pool, timeout } = *self;
        let bind = Some([127, 0, 0, 1].into());
        let network = uccl_p2p::Config { transport, bind, num_cpus: 1, ..Default::default() };
        let node = Some((rank * nodes / ranks) as u64);
        let (masks_late, network) = (false, Some(network));
        Config { rank, ranks, pool, timeout, masks_late, node, network }
    }
}

/// Runs `rank` for each rank of a group, in threads of their own.
fn world<T: Send>(ranks: Ranks, rank: impl Fn(Arc<Group>) -> T + Sync) -> Vec<T> {
    let join = |me: usize, exchange: &mut Exchange<'_>| Group::join(ranks.config(me), exchange);
    world_by(ranks.count, join, rank)
}

/// The same, with the caller's way to join.
fn world_by<T: Send>(
    count: usize,
    join: impl Fn(usize, &mut Exchange<'_>) -> Result<Arc<Group>> + Sync,
    rank: impl Fn(Arc<Group>) -> T + Sync,
) -> Vec<T> {
    let (board, barrier) = (Mutex::new(vec![None; count]), Barrier::new(count));
    let join = |me: usize| {
        let mut exchange = |mine: Vec<u8>| {
            board.lock().unwrap()[me] = Some(mine);
            barrier.wait();
            let all = board.lock().unwrap().clone();
            barrier.wait();
            Ok(all)
        };
        rank(join(me, &mut exchange).unwrap())
    };
    let join = &join;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..count).map(|me| scope.spawn(move || join(me))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const HIDDEN: usize = 128;

/// A rank's tokens: their values and choices follow from its number and the seed.
struct RankTokens {
    rows: Vec<u16>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    routing: Arc<Routing>,
}

impl RankTokens {
    fn new(seed: u64, me: usize, ranks: usize, top_k: usize, most: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(seed * 64 + me as u64);
        let num_experts = ranks * 4;
        let tokens = random.usize(0..=most);
        let mut experts = Vec::new();
        for _ in 0..tokens {
            let mut all: Vec<i32> = (0..num_experts as i32).collect();
            random.shuffle(&mut all);
            experts
                .extend(all.iter().take(top_k).map(|e| if random.u8(..6) == 0 { -1 } else { *e }));
        }
        // Sums of these are exact in bf16.
        let rows =
            (0..tokens * HIDDEN).map(|_| bf16::from_f32(random.i32(-4..=4) as f32)).collect();
        let weights = (0..tokens * top_k).map(|_| random.i32(0..=2) as f32).collect();
        let choices = Choices { experts: &experts, top_k, num_experts, ranks };
        let routing = Arc::new(Routing::new(choices).unwrap());
        Self { rows, experts, weights, routing }
    }

    /// The same, relayed where the group has relays.
    fn relayed(mut self, group: &Group) -> Self {
        if let Some(nodes) = group.relays() {
            let routing = Routing::clone(&self.routing);
            self.routing = Arc::new(routing.relayed(nodes).unwrap());
        }
        self
    }

    fn tokens(&self) -> DispatchInput {
        let rows = self.rows.as_ptr().cast();
        let payload = Payload::Bytes(2 * HIDDEN);
        DispatchInput {
            rows,
            stride: 2 * HIDDEN,
            payload,
            scales: None,
            weights: Some(self.weights.as_ptr()),
            is_stable: true,
        }
    }
}

struct ReceivedRows {
    rows: Vec<u16>,
    weights: Vec<f32>,
    handle: Arc<Handle>,
}

fn never() -> bool {
    false
}

/// Dispatches, and puts received rows in order of rank, or by experts that begin at multiples of
/// `by_experts`.
fn dispatched(
    group: &Arc<Group>,
    own: &RankTokens,
    room: Room,
    by_experts: Option<usize>,
) -> Result<ReceivedRows> {
    // SAFETY: the vectors live until the dispatch is over.
    let mut dispatch = unsafe {
        Dispatch::begin(group, Arc::clone(&own.routing), own.tokens(), room, &mut never)?
    };
    let counts = dispatch.counts(&mut never)?;
    let top_k = own.routing.top_k();
    let (layout, len, weights_of_row) = match by_experts {
        None => (RowLayout::ByToken, counts.total(), top_k),
        Some(stride) => (RowLayout::ByExpert((0..4).map(|e| e * stride).collect()), 4 * stride, 1),
    };
    let mut rows = vec![0x7fc0; len * HIDDEN];
    let mut weights = vec![f32::NAN; len * weights_of_row];
    let outputs = DispatchOutput {
        len,
        rows: rows.as_mut_ptr().cast(),
        stride: 2 * HIDDEN,
        scales: None,
        choices: None,
        weights: Some(weights.as_mut_ptr()),
        zero_foreign_weights: false,
    };
    // SAFETY: the vectors have as many rows.
    let handle = Arc::new(unsafe { dispatch.receive(outputs, &layout, &mut never)? });
    Ok(ReceivedRows { rows, weights, handle })
}

/// How a test combines.
#[derive(Clone, Copy, Debug)]
struct CombineOptions {
    sends: CombineRows,
    sums: SumOrder,
    relays: Option<Order>,
    is_stable: bool,
}

/// Begins to send rows back.
fn begin(arrived: &ReceivedRows, options: CombineOptions) -> Result<Combine> {
    let CombineOptions { sends, relays, is_stable, .. } = options;
    let results = CombineInput {
        rows: arrived.rows.as_ptr().cast(),
        len: arrived.rows.len() / HIDDEN,
        stride: 2 * HIDDEN,
        hidden: HIDDEN,
        sends,
        weights: (!is_stable).then_some(arrived.weights.as_ptr()),
        is_packed: false,
        relays,
        is_stable,
    };
    // SAFETY: callers keep the vectors until the combine is over.
    unsafe { Combine::begin(&arrived.handle, results, &mut never) }
}

/// Sums the rows that come back.
fn finish(combine: Combine, own: &RankTokens, options: CombineOptions) -> Result<Vec<u16>> {
    let CombineOptions { sums, is_stable, .. } = options;
    let mut rows = vec![0; own.rows.len()];
    let mut weights = vec![0.0; own.weights.len()];
    let combined = CombineOutput {
        rows: rows.as_mut_ptr(),
        sums,
        bias: [None; 2],
        weights: Some(weights.as_mut_ptr()),
    };
    // SAFETY: there is a row, and weights, for each token.
    unsafe { combine.finish(combined, &mut never)? };
    for (weight, (expert, own)) in weights.iter().zip(own.experts.iter().zip(&own.weights)) {
        let expected = if *expert < 0 { 0.0 } else { *own };
        // Summed by rank, a weight comes back from each rank that the token went to.
        assert!(
            is_stable || sums == SumOrder::ByRank || *weight == expected,
            "{weight} for {own} of expert {expert}"
        );
    }
    Ok(rows)
}

fn combined(own: &RankTokens, arrived: &ReceivedRows, options: CombineOptions) -> Result<Vec<u16>> {
    finish(begin(arrived, options)?, own, options)
}

/// A row times a number, where that is exact.
fn times(row: &[u16], by: f32) -> Vec<u16> {
    // A sum begins with 0, and -0 is lost in it.
    row.iter().map(|bits| bf16::from_f32(bf16::to_f32(*bits) * by + 0.0)).collect()
}

/// The ways that rows of a dispatch may come back.
fn ways(own: &RankTokens, sends: CombineRows) -> Vec<CombineOptions> {
    let weighted = (SumOrder::Weighted(own.weights.as_ptr()), None);
    let (choice, rank) = (SumOrder::ByChoice, SumOrder::ByRank);
    let sums = match sends {
        CombineRows::EachExpert => vec![(choice, None), weighted],
        // Without relays these say nothing.
        _ => vec![
            (choice, None),
            (choice, Some(Order::ByChoice)),
            (rank, None),
            (rank, Some(Order::ByRank)),
        ],
    };
    let options = |(sums, relays)| {
        [true, false].map(|is_stable| CombineOptions { sends, sums, relays, is_stable })
    };
    sums.into_iter().flat_map(options).collect()
}

/// Dispatches and combines in every way; experts change nothing.
fn multiples(places: Ranks, seeds: std::ops::Range<u64>) {
    world(places, |group| multiples_of(&group, seeds.clone()));
}

fn multiples_of(group: &Arc<Group>, seeds: std::ops::Range<u64>) {
    let ranks = group.ranks();
    let relayed = [false, true].into_iter().take(if group.relays().is_some() { 2 } else { 1 });
    for (seed, is_relayed) in relayed.flat_map(|is| seeds.clone().map(move |seed| (seed, is))) {
        let top_k = 1 + seed as usize % 4;
        let own = RankTokens::new(seed, group.rank(), ranks, top_k, 30);
        let own = if is_relayed { own.relayed(group) } else { own };
        for (room, by_experts, sends) in [
            (Room::Tokens(30), Some(30 * ranks), CombineRows::EachExpert),
            (Room::Tokens(30), Some(30 * ranks), CombineRows::SumOfExperts),
            (Room::Tokens(30), None, CombineRows::Row),
            // Room for few tokens: rounds.
            (Room::Bytes(ranks * 4096), None, CombineRows::Row),
        ] {
            let arrived = dispatched(group, &own, room, by_experts).unwrap();
            for options in ways(&own, sends) {
                let out = combined(&own, &arrived, options).unwrap();
                for token in 0..own.routing.tokens() {
                    let chosen =
                        || (token * top_k..(token + 1) * top_k).filter(|k| own.experts[*k] >= 0);
                    let goes = (0..ranks)
                        .filter(|rank| own.routing.tokens_to(*rank).contains(&(token as u32)));
                    let by = match (sends, options.sums) {
                        (CombineRows::Row, _) => goes.count() as f32,
                        (_, SumOrder::Weighted(_)) => chosen().map(|k| own.weights[k]).sum(),
                        _ => chosen().count() as f32,
                    };
                    let row = &own.rows[token * HIDDEN..][..HIDDEN];
                    assert_eq!(
                        out[token * HIDDEN..][..HIDDEN],
                        times(row, by),
                        "seed {seed} token {token}"
                    );
                }
            }
        }
    }
}

#[test]
fn experts_that_change_nothing_give_back_a_multiple() {
    for ranks in 1..=5 {
        multiples(Ranks::near(ranks), 0..12);
    }
}

#[test]
fn ranks_on_several_nodes_get_the_same_as_ranks_on_one() {
    for (ranks, nodes) in [(2, 2), (4, 2), (4, 4), (8, 4)] {
        multiples(Ranks::apart(ranks, nodes, Transport::Tcp), 0..4);
    }
}

#[test]
fn nodes_reach_each_other_over_every_link_of_this_machine() {
    for transport in [Transport::Auto, Transport::Local, Transport::Fifo] {
        multiples(Ranks::apart(4, 2, transport), 0..3);
    }
}

#[test]
fn nodes_reach_each_other_over_rails() {
    let named = std::env::var("UCCL_TEST_LIBFABRIC").ok();
    for provider in named.as_deref().unwrap_or("tcp;ofi_rxm").split(',') {
        let provider = Some(provider.to_owned());
        let libfabric = LibfabricSettings { provider, ..LibfabricSettings::default() };
        if let Err(why) = LibfabricRail::open_all(&libfabric) {
            eprintln!("skipped: {why}");
            continue;
        }
        let ranks = Ranks::apart(4, 2, Transport::Libfabric);
        let join = |me: usize, exchange: &mut Exchange<'_>| {
            let mut config = ranks.config(me);
            config.network.iter_mut().for_each(|network| network.libfabric = libfabric.clone());
            Group::join(config, exchange)
        };
        world_by(ranks.count, join, |group| multiples_of(&group, 0..3));
    }
}

#[test]
fn tokens_for_a_far_rank_go_in_one_write() {
    let all = masks::Meeting::new(2);
    world(Ranks::apart(2, 2, Transport::Tcp), |group| {
        let own = RankTokens::new(7, group.rank(), 2, 2, 40);
        assert!(own.routing.tokens_to(1 - group.rank()).len() > 1);
        let posted = || group.network_stats().map(|stats| stats.transfers_posted).unwrap();
        let before = posted();
        dispatched(&group, &own, Room::Tokens(40), None).unwrap();
        // The proxy may be behind.
        let deadline = Instant::now() + Duration::from_secs(20);
        while posted() < before + 2 && Instant::now() < deadline {
            thread::yield_now();
        }
        // A rank that ends takes the connection along, by which the other's proxy is yet to send.
        all.wait();
        // One sends the tokens with their mark, the other the mark that the peer's tokens were
        // taken.
        assert_eq!(posted(), before + 2);
    });
}

/// The byte that fills a token's row.
fn filling(rank: usize, token: usize) -> u8 {
    (1 + rank * 100 + token) as u8
}

/// Dispatches rows that are larger than caches together, and changes them as soon as that is
/// allowed.
fn large_rows_arrive(is_stable: bool) {
    const TOKENS: usize = 100;
    // Rows begin and end within cache lines.
    const LEN: usize = 20_008;
    world(Ranks { pool: 16 << 20, ..Ranks::near(2) }, |group| {
        let me = group.rank();
        // Tokens for this rank's experts, for the other's, and for both.
        let experts: Vec<i32> = (0..TOKENS as i32)
            .flat_map(|token| [token % 8, (token + 1 + token / 8 % 7) % 8])
            .collect();
        let chosen = Choices { experts: &experts, top_k: 2, num_experts: 8, ranks: 2 };
        let mut rows: Vec<u8> =
            (0..TOKENS).flat_map(|token| vec![filling(me, token); LEN]).collect();
        let tokens = DispatchInput {
            rows: rows.as_ptr(),
            stride: LEN,
            payload: Payload::Bytes(LEN),
            scales: None,
            weights: None,
            is_stable,
        };
        let routing = Arc::new(Routing::new(chosen).unwrap());
        // SAFETY: rows live until the dispatch is over, and change only where it allows that.
        let mut dispatch = unsafe {
            Dispatch::begin(&group, routing, tokens, Room::Tokens(TOKENS), &mut never).unwrap()
        };
        if !is_stable {
            rows.fill(0xff);
        }
        let most = 2 * TOKENS;
        let len = dispatch.counts(&mut never).unwrap().of_experts().len() * most;
        let mut out = vec![0u8; len * LEN];
        let outputs = DispatchOutput {
            len,
            rows: out.as_mut_ptr(),
            stride: LEN,
            scales: None,
            choices: None,
            weights: None,
            zero_foreign_weights: false,
        };
        let layout = RowLayout::ByExpert((0..len / most).map(|expert| expert * most).collect());
        // SAFETY: there is memory for as many rows.
        let handle = unsafe { dispatch.receive(outputs, &layout, &mut never).unwrap() };
        let mut arrived = 0;
        for entry in handle.table.chunks_exact(handle.width()) {
            let expected = filling(entry[1] as usize, entry[0] as usize);
            for row in entry[2..].iter().filter(|row| **row >= 0) {
                arrived += 1;
                let row = &out[*row as usize * LEN..][..LEN];
                assert!(row.iter().all(|byte| *byte == expected), "{entry:?}");
            }
        }
        assert!(arrived * LEN > 2 << 20, "{arrived} rows");
    });
}

#[test]
fn rows_larger_than_caches_arrive() {
    large_rows_arrive(true);
}

#[test]
fn rows_may_change_once_they_have_been_sent_unless_they_stay() {
    large_rows_arrive(false);
}

/// Compares the received rows with those that each rank sends, relayed where the group has relays.
fn rows_arrive(ranks: Ranks, most: usize, rooms: &[Room]) {
    let count = ranks.count;
    world(ranks, |group| {
        let own = |rank| RankTokens::new(7, rank, count, 2, most).relayed(&group);
        let owns: Vec<_> = (0..count).map(own).collect();
        let me = group.rank();
        for room in rooms {
            let arrived = dispatched(&group, &owns[me], *room, None).unwrap();
            let mut at = 0;
            for (rank, own) in owns.iter().enumerate() {
                for token in own.routing.tokens_to(me) {
                    let row = &own.rows[*token as usize * HIDDEN..][..HIDDEN];
                    assert_eq!(arrived.rows[at * HIDDEN..][..HIDDEN], *row);
                    let weights = &own.weights[*token as usize * 2..][..2];
                    assert_eq!(arrived.weights[at * 2..][..2], *weights);
                    let entry = &arrived.handle.table[at * 4..][..2];
                    assert_eq!(entry, [*token as i32, rank as i32]);
                    at += 1;
                }
            }
            assert_eq!(at * HIDDEN, arrived.rows.len());
        }
    });
}

#[test]
fn rows_arrive_by_rank_and_token_however_ranks_are_spread() {
    for (ranks, nodes) in [(3, 1), (2, 2), (4, 2), (8, 4)] {
        // Room for all tokens at once, and for few of them.
        let rooms = [Room::Tokens(40), Room::Bytes(ranks * 2048), Room::Bytes(ranks * 5000)];
        rows_arrive(Ranks::apart(ranks, nodes, Transport::Tcp), 40, &rooms);
    }
}

#[test]
fn a_pool_without_room_for_relays_does_without() {
    // Rows go to each rank's 40 slots of 288 bytes; inboxes would be more than the rest of a page.
    let places = Ranks { pool: 4 * 40 * 288 + 4096, ..Ranks::apart(4, 2, Transport::Tcp) };
    world(places, |group| {
        let own = RankTokens::new(9, group.rank(), 4, 2, 40).relayed(&group);
        let arrived = dispatched(&group, &own, Room::Tokens(40), None).unwrap();
        assert_eq!((own.routing.nodes().count, arrived.handle.relayed.len()), (2, 1));
        let relays = Some(Order::ByRank);
        let options = CombineOptions {
            sends: CombineRows::Row,
            sums: SumOrder::ByRank,
            relays,
            is_stable: true,
        };
        combined(&own, &arrived, options).unwrap();
    });
}

/// A rank's result for a token of another: sums of these are not exact.
fn made(by: usize, rank: usize, token: usize) -> Vec<u16> {
    let seed = (by * 64 + rank) * 1024 + token;
    let mut random = fastrand::Rng::with_seed(seed as u64);
    (0..HIDDEN).map(|_| bf16::from_f32(random.f32() * 8.0 - 4.0)).collect()
}

fn sum_of(rows: &[Vec<u16>]) -> Vec<u16> {
    let rows: Vec<_> = rows.iter().map(Vec::as_slice).collect();
    let mut out = vec![0; HIDDEN];
    sum::plain(&rows, &mut out);
    out
}

#[test]
fn a_sum_is_rounded_at_each_node_and_at_the_end() {
    for (ranks, nodes) in [(4, 2), (6, 3), (6, 2)] {
        world(Ranks::apart(ranks, nodes, Transport::Tcp), |group| {
            let (me, of_node) = (group.rank(), ranks / nodes);
            let own = RankTokens::new(5, me, ranks, 6, 40).relayed(&group);
            let mut arrived = dispatched(&group, &own, Room::Tokens(40), None).unwrap();
            for (row, entry) in arrived.rows.chunks_mut(HIDDEN).zip(arrived.handle.table.chunks(8))
            {
                row.copy_from_slice(&made(me, entry[1] as usize, entry[0] as usize));
            }
            let mut has_rounded = false;
            for (sums, order) in
                [(SumOrder::ByRank, Order::ByRank), (SumOrder::ByChoice, Order::ByChoice)]
            {
                let options = CombineOptions {
                    sends: CombineRows::Row,
                    sums,
                    relays: Some(order),
                    is_stable: true,
                };
                let out = combined(&own, &arrived, options).unwrap();
                for (token, out) in out.chunks(HIDDEN).enumerate() {
                    let choices = own.routing.choices(token);
                    let by =
                        |rank: usize| own.routing.last_choice(rank, choices).map(|k| (k, rank));
                    let in_order = |mut all: Vec<(usize, usize)>| {
                        all.sort_by_key(|(k, nth)| if order == Order::ByRank { *nth } else { *k });
                        all.into_iter().map(|(_, nth)| nth)
                    };
                    let of = |node: usize| (node * of_node..(node + 1) * of_node).filter_map(by);
                    let node_sum = |node| {
                        let rows = in_order(of(node).collect()).map(|rank| made(rank, me, token));
                        sum_of(&rows.collect::<Vec<_>>())
                    };
                    let last = |node| of(node).map(|(k, _)| k).max().map(|k| (k, node));
                    let sums = in_order((0..nodes).filter_map(last).collect()).map(node_sum);
                    assert_eq!(out, sum_of(&sums.collect::<Vec<_>>()), "token {token} {order:?}");
                    let all = in_order((0..ranks).filter_map(by).collect());
                    let once = sum_of(&all.map(|rank| made(rank, me, token)).collect::<Vec<_>>());
                    has_rounded |= out != once;
                }
            }
            assert!(has_rounded || own.routing.tokens() == 0, "one rounding would give the same");
        });
    }
}

#[test]
fn a_token_for_several_ranks_of_a_node_crosses_once() {
    let bytes = |is_relayed: bool| -> u64 {
        let sent = world(Ranks::apart(4, 2, Transport::Tcp), |group| {
            let own = RankTokens::new(9, group.rank(), 4, 8, 40);
            let own = if is_relayed { own.relayed(&group) } else { own };
            let arrived = dispatched(&group, &own, Room::Tokens(40), None).unwrap();
            let relays = Some(Order::ByRank);
            let options = CombineOptions {
                sends: CombineRows::Row,
                sums: SumOrder::ByRank,
                relays,
                is_stable: true,
            };
            combined(&own, &arrived, options).unwrap();
            // The counters may be behind the peers.
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                let stats = group.network_stats().unwrap();
                if stats.transfers_done == stats.transfers_posted || Instant::now() > deadline {
                    return stats.bytes_sent;
                }
                thread::yield_now();
            }
        });
        sent.into_iter().sum()
    };
    let (flat, relayed) = (bytes(false), bytes(true));
    assert!(relayed > 0 && 10 * relayed < 7 * flat, "{relayed} bytes with relays, {flat} without");
    eprintln!("{relayed} bytes crossed with relays, {flat} without");
}

#[test]
fn more_than_an_outbox_holds_arrives_in_parts() {
    let ranks = Ranks { pool: 64 << 20, ..Ranks::apart(2, 2, Transport::Tcp) };
    let all = Room::Tokens(60_000);
    // An outbox has 4 MiB, and a token of these takes 288 bytes.
    assert!(
        (0..2).any(|me| RankTokens::new(7, me, 2, 2, 60_000).routing.tokens_to(1 - me).len() > 20_000)
    );
    rows_arrive(ranks, 60_000, &[all, all, all]);
}

#[test]
fn a_far_rank_that_goes_away_is_named_with_its_missing_marks() {
    let errors = world(Ranks::apart(3, 3, Transport::Tcp), |group| {
        let own = RankTokens::new(1, group.rank(), 3, 2, 8);
        let is_there = group.rank() != 1;
        is_there.then(|| dispatched(&group, &own, Room::Tokens(8), None).err())
    });
    let texts: Vec<_> = errors.iter().flatten().flatten().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    for text in &texts {
        // The first rank to fail informs the other, and may be gone before the other has read that.
        assert!(text.starts_with("dispatch on rank ") && text.contains(" expected, "), "{text}");
    }
    assert!(texts.iter().any(|text| text.contains(": rank 1 ")), "{texts:?}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let errors = world(Ranks { timeout: Duration::from_millis(300), ..Ranks::near(3) }, |group| {
        let own = RankTokens::new(1, group.rank(), 3, 2, 8);
        let is_absent = group.rank() == 1;
        let done = (!is_absent).then(|| dispatched(&group, &own, Room::Tokens(8), None).err());
        // Until the others have failed: if this rank ends, they fail for that reason.
        thread::sleep(Duration::from_millis(600));
        done.flatten()
    });
    for rank in [0, 2] {
        let error = errors[rank].as_ref().expect("rank 1 is absent");
        let text = error.to_string();
        // The first rank to fail informs the other.
        let names_it = text.contains("rank 1: data of call 1 round 0 expected, nothing seen")
            || text.contains("gave up on call 1");
        assert!(names_it && text.starts_with(&format!("dispatch on rank {rank}")), "{text}");
    }
    assert!(errors.iter().flatten().any(|e| matches!(e, Error::Overdue { .. })));
}

/// Rank 0 ends a call by `give_up`, after it has sent one round. Rank 1 learns that at once, and
/// not after its timeout.
fn gives_up(give_up: impl Fn(Dispatch) + Sync) {
    let all = Barrier::new(2);
    let texts = world(Ranks::near(2), |group| {
        // Several rounds for each rank.
        let experts: Vec<i32> = (0..80).map(|token| token % 8).collect();
        let choices = Choices { experts: &experts, top_k: 1, num_experts: 8, ranks: 2 };
        let routing = Arc::new(Routing::new(choices).unwrap());
        let rows = vec![0u16; 80 * HIDDEN];
        let tokens = DispatchInput {
            rows: rows.as_ptr().cast(),
            stride: 2 * HIDDEN,
            payload: Payload::Bytes(2 * HIDDEN),
            scales: None,
            weights: None,
            is_stable: true,
        };
        // SAFETY: the rows live until the dispatch is over.
        let begun =
            unsafe { Dispatch::begin(&group, routing, tokens, Room::Bytes(2 * 2048), &mut never) };
        let mut dispatch = begun.unwrap();
        let arrives = dispatch.counts(&mut never).unwrap().total();
        let mut out = vec![0u16; arrives * HIDDEN];
        let outputs = DispatchOutput {
            len: arrives,
            rows: out.as_mut_ptr().cast(),
            stride: 2 * HIDDEN,
            scales: None,
            choices: None,
            weights: None,
            zero_foreign_weights: false,
        };
        let text = match group.rank() {
            0 => {
                give_up(dispatch);
                String::new()
            }
            // SAFETY: there is memory for as many rows.
            _ => unsafe { dispatch.receive(outputs, &RowLayout::ByToken, &mut never) }
                .err()
                .map_or_else(|| "nothing".to_owned(), |why| why.to_string()),
        };
        // If this rank ended, the other would fail for that reason.
        all.wait();
        text
    });
    assert!(texts[1].contains("rank 0 gave up on call 1"), "{texts:?}");
}

#[test]
fn a_call_that_is_dropped_is_one_that_a_rank_gave_up_on() {
    gives_up(drop);
}

#[test]
fn a_rank_that_has_too_little_room_for_its_rows_tells_the_others() {
    gives_up(|dispatch| {
        let outputs = DispatchOutput {
            len: 1,
            rows: std::ptr::null_mut(),
            stride: 2 * HIDDEN,
            scales: None,
            choices: None,
            weights: None,
            zero_foreign_weights: false,
        };
        // SAFETY: nothing is written, as there is too little room.
        let why =
            unsafe { dispatch.receive(outputs, &RowLayout::ByToken, &mut never) }.err().unwrap();
        assert_eq!(why.to_string(), "80 rows arrive, and there is room for 1");
    });
}

#[test]
fn ranks_that_differ_are_told_the_difference() {
    let errors = world(Ranks::near(2), |group| {
        let own = RankTokens::new(1, group.rank(), 2, 1 + group.rank(), 8);
        dispatched(&group, &own, Room::Tokens(8), None).err().map(|e| e.to_string())
    });
    let text =
        errors.iter().flatten().find(|text| text.contains("top-k")).expect("one of them sees it");
    assert!(
        text.contains("rank 1 has top-k 2, this rank 1")
            || text.contains("rank 0 has top-k 1, this rank 2"),
        "{text}"
    );
}

#[test]
fn tokens_without_room_are_refused_with_the_sizes() {
    world(Ranks { pool: 4096, ..Ranks::near(2) }, |group| {
        let own = RankTokens::new(3, group.rank(), 2, 2, 30);
        let text = dispatched(&group, &own, Room::Tokens(30), None).err().unwrap().to_string();
        assert!(text.contains("bytes of the buffer, which has 4096"), "{text}");
        let text = dispatched(&group, &own, Room::Tokens(0), None).err().unwrap().to_string();
        assert!(text.contains("room for 0 of each rank"), "{text}");
        // The bytes of that many tokens would wrap around to few.
        let text = dispatched(&group, &own, Room::Tokens(1 << 59), None).err().unwrap().to_string();
        assert!(text.contains("576460752303423488"), "{text}");
    });
}

/// The experts' results: a row for each received one, which stays in place.
fn results_in(rows: *const u16, arrived: &ReceivedRows) -> CombineInput {
    CombineInput {
        rows: rows.cast(),
        len: arrived.rows.len() / HIDDEN,
        stride: 2 * HIDDEN,
        hidden: HIDDEN,
        sends: CombineRows::EachExpert,
        weights: None,
        is_packed: false,
        relays: None,
        is_stable: true,
    }
}

/// Puts the experts' results into a block, and begins a combine that leaves the rows there.
fn begun(group: &Arc<Group>, own: &RankTokens, arrived: &ReceivedRows) -> (Arc<Block>, Combine) {
    let block = group.block(2 * arrived.rows.len()).unwrap();
    let rows = block.as_ptr().cast::<u16>();
    // SAFETY: the block has room for the rows, and nobody reads it yet.
    unsafe { rows.copy_from_nonoverlapping(arrived.rows.as_ptr(), arrived.rows.len()) };
    let results = results_in(rows, arrived);
    assert!(group.is_read(&block) && !own.rows.is_empty());
    // SAFETY: the block lives until the combine is over.
    let mut combine = unsafe { Combine::begin(&arrived.handle, results, &mut never) }.unwrap();
    combine.leave_rows();
    (block, combine)
}

/// Ends a combine with sums that take each choice once.
fn summed(combine: Combine, own: &RankTokens) -> Result<Vec<u16>> {
    let mut rows = vec![0; own.rows.len()];
    let (sums, bias) = (SumOrder::ByChoice, [None; 2]);
    let combined = CombineOutput { rows: rows.as_mut_ptr(), sums, bias, weights: None };
    // SAFETY: there is a row for each token.
    unsafe { combine.finish(combined, &mut never)? };
    Ok(rows)
}

/// A rank's inputs with at least one token.
fn some_own(group: &Group, ranks: usize) -> RankTokens {
    (0..)
        .map(|seed| RankTokens::new(seed, group.rank(), ranks, 3, 20))
        .find(|own| !own.rows.is_empty())
        .unwrap()
}

#[test]
fn a_choice_that_is_none_in_the_combine_is_left_out() {
    world(Ranks::near(2), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let chosen: Vec<i32> = own
            .experts
            .iter()
            .enumerate()
            .map(|(at, e)| if at % 2 == 0 { -1 } else { *e })
            .collect();
        let wide: Vec<i64> = chosen.iter().map(|expert| (*expert).into()).collect();
        for given in [CombineChoices::I32(chosen.as_ptr()), CombineChoices::I64(wide.as_ptr())] {
            let results = results_in(arrived.rows.as_ptr(), &arrived);
            // SAFETY: the vectors live until the combine is over.
            let combine = unsafe {
                let mut combine = Combine::begin(&arrived.handle, results, &mut never).unwrap();
                combine.leave_out(given);
                combine
            };
            let out = summed(combine, &own).unwrap();
            for (token, out) in out.chunks(HIDDEN).enumerate() {
                let left = chosen[token * 3..][..3].iter().filter(|expert| **expert >= 0);
                let row = &own.rows[token * HIDDEN..][..HIDDEN];
                assert_eq!(*out, times(row, left.count() as f32), "token {token}");
            }
        }
    });
}

#[test]
fn rows_in_a_block_are_read_where_they_are_and_not_before_all_have_ended() {
    let all = Barrier::new(3);
    world(Ranks::near(3), |group| {
        let own = some_own(&group, 3);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(60)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        all.wait();
        // The rows have been sent, and are changed nonetheless: each becomes its double.
        let rows = block.as_ptr().cast::<u16>();
        for (at, bits) in arrived.rows.iter().enumerate() {
            let double = bf16::from_f32(2.0 * bf16::to_f32(*bits));
            // SAFETY: the block has as many values, and nobody reads before all have met again.
            unsafe { rows.add(at).write(double) };
        }
        all.wait();
        let is_last = group.rank() == 2;
        if is_last {
            thread::sleep(Duration::from_millis(100));
        }
        let out = summed(combine, &own).unwrap();
        assert!(is_last || !group.is_read(&block), "rank 2 reads yet");
        for (token, out) in out.chunks(HIDDEN).enumerate() {
            let chosen = own.routing.choices(token).iter().filter(|choice| **choice >= 0).count();
            let row = &own.rows[token * HIDDEN..][..HIDDEN];
            assert_eq!(*out, times(row, 2.0 * chosen as f32), "token {token}");
        }
        all.wait();
        assert!(group.is_read(&block));
    });
}

#[test]
fn rows_in_a_block_are_sent_between_nodes() {
    for (ranks, nodes) in [(2, 2), (4, 2)] {
        let all = Barrier::new(ranks);
        world(Ranks::apart(ranks, nodes, Transport::Tcp), |group| {
            let own = some_own(&group, ranks).relayed(&group);
            let arrived = dispatched(&group, &own, Room::Tokens(20), Some(20 * ranks)).unwrap();
            let (block, combine) = begun(&group, &own, &arrived);
            assert!(!group.is_read(&block), "own rows are summed yet");
            all.wait();
            // The rows have been sent: only this rank's own tokens are summed from the present
            // bytes.
            let len = 2 * arrived.rows.len();
            // SAFETY: the block has as many bytes, and nobody reads before all have met again.
            unsafe { block.as_ptr().write_bytes(0, len) };
            all.wait();
            let out = summed(combine, &own).unwrap();
            for (token, out) in out.chunks(HIDDEN).enumerate() {
                let owners = own.routing.choices(token).iter().map(|k| own.routing.owner(*k));
                let sent = owners.flatten().filter(|(rank, _)| *rank != group.rank()).count();
                let row = &own.rows[token * HIDDEN..][..HIDDEN];
                assert_eq!(*out, times(row, sent as f32), "token {token}");
            }
        });
    }
}

#[test]
fn a_combine_of_a_block_ends_when_all_have_read_it() {
    world(Ranks::near(2), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let block = group.block(2 * arrived.rows.len()).unwrap();
        let rows = block.as_ptr().cast::<u16>();
        for round in 0..20 {
            // SAFETY: the block has room for the rows, and the combine before has ended.
            unsafe { rows.copy_from_nonoverlapping(arrived.rows.as_ptr(), arrived.rows.len()) };
            let results = results_in(rows, &arrived);
            // SAFETY: the block lives until the combine is over.
            let combine = unsafe { Combine::begin(&arrived.handle, results, &mut never) }.unwrap();
            if round % 2 == group.rank() {
                thread::sleep(Duration::from_millis(5));
            }
            let out = summed(combine, &own).unwrap();
            assert!(group.is_read(&block));
            // A peer that is not done would read these values.
            // SAFETY: nobody reads any more.
            unsafe { rows.write_bytes(0xff, arrived.rows.len()) };
            assert!(out.iter().all(|bits| *bits != 0xffff), "round {round}");
        }
    });
}

#[test]
fn a_block_that_is_let_go_stays_until_peers_have_read_it() {
    let all = Barrier::new(2);
    world(Ranks::near(2), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        let is_early = group.rank() == 0;
        if !is_early {
            all.wait();
        }
        summed(combine, &own).unwrap();
        release_block(group, block);
        drop(arrived);
        if is_early {
            all.wait();
        }
    });
}

#[test]
fn a_group_goes_when_the_last_of_its_blocks_has_been_read() {
    let all = Barrier::new(2);
    let groups = world(Ranks::near(2), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        let weak = Arc::downgrade(&group);
        drop(arrived);
        if group.rank() == 0 {
            summed(combine, &own).unwrap();
            // No call follows.
            release_block(group, block);
            all.wait();
        } else {
            all.wait();
            summed(combine, &own).unwrap();
        }
        weak
    });
    let deadline = Instant::now() + Duration::from_secs(10);
    while groups.iter().any(|group| group.strong_count() > 0) {
        assert!(Instant::now() < deadline, "a group is kept");
        thread::yield_now();
    }
}

#[test]
fn a_barrier_is_passed_when_all_have_come() {
    for ranks in [Ranks::near(3), Ranks::apart(4, 2, Transport::Tcp)] {
        let come = AtomicUsize::new(0);
        world(ranks, |group| {
            let (me, count) = (group.rank(), ranks.count);
            for turn in 0..30 {
                if turn % count == me {
                    thread::sleep(Duration::from_millis(2));
                }
                come.fetch_add(1, Ordering::Relaxed);
                group.barrier(&mut never).unwrap();
                let seen = come.load(Ordering::Relaxed);
                assert!(seen >= count * (turn + 1), "{seen} have come at turn {turn}");
                if turn % 7 == 0 {
                    multiples_of(&group, 0..1);
                }
            }
        });
    }
}

#[test]
fn a_rank_that_makes_another_call_than_a_barrier_is_told_so() {
    let errors = world(Ranks::near(2), |group| {
        let own = RankTokens::new(1, group.rank(), 2, 2, 8);
        let done = match group.rank() {
            0 => group.barrier(&mut never),
            _ => dispatched(&group, &own, Room::Tokens(8), None).map(drop),
        };
        done.err().map(|e| e.to_string())
    });
    assert!(errors.iter().flatten().any(|text| text.contains("as kind of call")), "{errors:?}");
}

#[test]
fn a_row_outside_its_block_is_refused() {
    let all = Barrier::new(2);
    world(Ranks::near(2), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        all.wait();
        // SAFETY: all have sent, and nobody takes before all have met again.
        unsafe { group.pool().write_bytes(0xff, group.pool_len()) };
        all.wait();
        let why = summed(combine, &own).unwrap_err().to_string();
        // A peer that comes later maps the block.
        all.wait();
        drop(block);
        assert!(
            why.contains("tells of a row at 18446744073709551615") || why.contains("gave up"),
            "{why}"
        );
    });
}

#[test]
fn memory_is_in_a_block_or_not() {
    world(Ranks { pool: 4096, ..Ranks::near(1) }, |group| {
        let block = group.block(100).unwrap();
        let start = block.as_ptr().addr();
        assert!(group.has_block(&(start..start + 100)));
        assert!(!group.has_block(&(start..start + 101)) && !group.has_block(&(start - 1..start)));
        drop(block);
        assert!(!group.has_block(&(start..start + 100)));
    });
}
