//! Whole groups in threads of one process: what is dispatched and combined is compared with what is computed here.

use std::{
    sync::{Arc, Barrier, Mutex},
    thread,
    time::Duration,
};

use uccl_ep::{
    Block, Config, Error, Group, Result,
    combine::{Combine, Combined, Results, Sends, Sums},
    dispatch::{Dispatch, Handle, Layout, Outputs, Payload, Room, Tokens},
    let_go,
    numerics::bf16,
    routing::{Choices, Routing},
};

/// Runs `rank` for each rank of a group, in threads of their own.
fn world<T: Send>(
    ranks: usize,
    pool: usize,
    timeout: Duration,
    rank: impl Fn(Arc<Group>) -> T + Sync,
) -> Vec<T> {
    let (board, barrier) = (Mutex::new(vec![None; ranks]), Barrier::new(ranks));
    let join = |me: usize| {
        let mut exchange = |mine: Vec<u8>| {
            board.lock().unwrap()[me] = Some(mine);
            barrier.wait();
            let all = board.lock().unwrap().clone();
            barrier.wait();
            Ok(all)
        };
        let config = Config { rank: me, ranks, pool, timeout, masks_late: false };
        rank(Group::join(config, &mut exchange).unwrap())
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks).map(|me| scope.spawn(move || join(me))).collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const HIDDEN: usize = 128;

/// What a rank has: its tokens' values and choices follow from its number and the seed.
struct Own {
    rows: Vec<u16>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    routing: Arc<Routing>,
}

impl Own {
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

    fn tokens(&self) -> Tokens {
        let rows = self.rows.as_ptr().cast();
        let payload = Payload::Bytes(2 * HIDDEN);
        Tokens {
            rows,
            stride: 2 * HIDDEN,
            payload,
            scales: None,
            weights: Some(self.weights.as_ptr()),
        }
    }
}

struct Arrived {
    rows: Vec<u16>,
    weights: Vec<f32>,
    handle: Arc<Handle>,
}

fn never() -> bool {
    false
}

/// Dispatches, and puts what arrives rank by rank, or by experts that begin at multiples of `by_experts`.
fn dispatched(
    group: &Arc<Group>,
    own: &Own,
    room: Room,
    by_experts: Option<usize>,
) -> Result<Arrived> {
    // SAFETY: the vectors live until the dispatch is over.
    let mut dispatch = unsafe {
        Dispatch::begin(group, Arc::clone(&own.routing), own.tokens(), room, &mut never)?
    };
    let counts = dispatch.counts(&mut never)?;
    let top_k = own.routing.top_k();
    let (layout, len, weights_of_row) = match by_experts {
        None => (Layout::Rows, counts.total(), top_k),
        Some(stride) => (Layout::Experts((0..4).map(|e| e * stride).collect()), 4 * stride, 1),
    };
    let mut rows = vec![0x7fc0; len * HIDDEN];
    let mut weights = vec![f32::NAN; len * weights_of_row];
    let outputs = Outputs {
        len,
        rows: rows.as_mut_ptr().cast(),
        stride: 2 * HIDDEN,
        scales: None,
        choices: None,
        weights: Some(weights.as_mut_ptr()),
        zeroes_foreign_weights: false,
    };
    // SAFETY: the vectors have as many rows.
    let handle = Arc::new(unsafe { dispatch.receive(outputs, &layout, &mut never)? });
    Ok(Arrived { rows, weights, handle })
}

fn combined(
    own: &Own,
    arrived: &Arrived,
    sends: Sends,
    sums: Sums,
    stays: bool,
) -> Result<Vec<u16>> {
    let results = Results {
        rows: arrived.rows.as_ptr().cast(),
        len: arrived.rows.len() / HIDDEN,
        stride: 2 * HIDDEN,
        hidden: HIDDEN,
        sends,
        weights: (!stays).then_some(arrived.weights.as_ptr()),
        is_packed: false,
        stays,
    };
    // SAFETY: the vectors live until the combine is over.
    let combine = unsafe { Combine::begin(&arrived.handle, results, &mut never)? };
    let mut rows = vec![0; own.rows.len()];
    let mut weights = vec![0.0; own.weights.len()];
    let combined = Combined {
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
            stays || sums == Sums::ByRank || *weight == expected,
            "{weight} for {own} of expert {expert}"
        );
    }
    Ok(rows)
}

/// A row times a number, where that is exact.
fn times(row: &[u16], by: f32) -> Vec<u16> {
    // A sum begins with 0, and -0 is lost in it.
    row.iter().map(|bits| bf16::from_f32(bf16::to_f32(*bits) * by + 0.0)).collect()
}

#[test]
fn experts_that_change_nothing_give_back_a_multiple() {
    for seed in 0..60 {
        let ranks = 1 + seed as usize % 5;
        let top_k = 1 + seed as usize % 4;
        world(ranks, 1 << 20, Duration::from_secs(20), |group| {
            let own = Own::new(seed, group.rank(), ranks, top_k, 30);
            for (room, by_experts, sends) in [
                (Room::Tokens(30), Some(30 * ranks), Sends::EachExpert),
                (Room::Tokens(30), Some(30 * ranks), Sends::SumOfExperts),
                (Room::Tokens(30), None, Sends::Row),
                // Room for few tokens: rounds.
                (Room::Bytes(ranks * 4096), None, Sends::Row),
            ] {
                let arrived = dispatched(&group, &own, room, by_experts).unwrap();
                let weighted = Sums::Weighted(own.weights.as_ptr());
                let all = [
                    Sums::ByChoice,
                    if sends == Sends::EachExpert { weighted } else { Sums::ByRank },
                ];
                for (sums, stays) in
                    all.map(|sums| [(sums, false), (sums, true)]).into_iter().flatten()
                {
                    let out = combined(&own, &arrived, sends, sums, stays).unwrap();
                    for token in 0..own.routing.tokens() {
                        let chosen = || {
                            (token * top_k..(token + 1) * top_k).filter(|k| own.experts[*k] >= 0)
                        };
                        let goes = (0..ranks)
                            .filter(|rank| own.routing.to(*rank).contains(&(token as u32)));
                        let by = match (sends, sums) {
                            (Sends::Row, _) => goes.count() as f32,
                            (_, Sums::Weighted(_)) => chosen().map(|k| own.weights[k]).sum(),
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
        });
    }
}

#[test]
fn rows_arrive_by_rank_and_token() {
    world(3, 1 << 20, Duration::from_secs(20), |group| {
        let owns = [0, 1, 2].map(|rank| Own::new(7, rank, 3, 2, 40));
        let me = group.rank();
        for room in [Room::Tokens(40), Room::Bytes(3 * 2048)] {
            let arrived = dispatched(&group, &owns[me], room, None).unwrap();
            let mut at = 0;
            for (rank, own) in owns.iter().enumerate() {
                for token in own.routing.to(me) {
                    let row = &own.rows[*token as usize * HIDDEN..][..HIDDEN];
                    assert_eq!(arrived.rows[at * HIDDEN..][..HIDDEN], *row);
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
fn a_rank_that_does_not_come_is_named() {
    let errors = world(3, 1 << 18, Duration::from_millis(300), |group| {
        let own = Own::new(1, group.rank(), 3, 2, 8);
        let is_absent = group.rank() == 1;
        let done = (!is_absent).then(|| dispatched(&group, &own, Room::Tokens(8), None).err());
        // Until the others have failed: a rank that goes away has ended.
        thread::sleep(Duration::from_millis(600));
        done.flatten()
    });
    for rank in [0, 2] {
        let error = errors[rank].as_ref().expect("rank 1 is absent");
        let text = error.to_string();
        // The first to fail tells the other.
        let names_it = text.contains("rank 1: data of call 1 round 0 expected, nothing seen")
            || text.contains("gave up on call 1");
        assert!(names_it && text.starts_with(&format!("dispatch on rank {rank}")), "{text}");
    }
    assert!(errors.iter().flatten().any(|e| matches!(e, Error::Overdue { .. })));
}

#[test]
fn ranks_that_differ_are_told_in_what() {
    let errors = world(2, 1 << 18, Duration::from_secs(5), |group| {
        let own = Own::new(1, group.rank(), 2, 1 + group.rank(), 8);
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
fn what_has_no_room_is_refused_with_the_sizes() {
    world(2, 4096, Duration::from_secs(5), |group| {
        let own = Own::new(3, group.rank(), 2, 2, 30);
        let text = dispatched(&group, &own, Room::Tokens(30), None).err().unwrap().to_string();
        assert!(text.contains("bytes of the buffer, which has 4096"), "{text}");
        let text = dispatched(&group, &own, Room::Tokens(0), None).err().unwrap().to_string();
        assert!(text.contains("room for 0 of each rank"), "{text}");
        // Bytes for so many would wrap around to few.
        let text = dispatched(&group, &own, Room::Tokens(1 << 59), None).err().unwrap().to_string();
        assert!(text.contains("576460752303423488"), "{text}");
    });
}

/// What experts made of tokens, in a block, and a combine of it under way, its rows left to the block.
fn begun(group: &Arc<Group>, own: &Own, arrived: &Arrived) -> (Arc<Block>, Combine) {
    let block = group.block(2 * arrived.rows.len()).unwrap();
    let rows = block.as_ptr().cast::<u16>();
    // SAFETY: the block has room for the rows, and nobody reads it yet.
    unsafe { rows.copy_from_nonoverlapping(arrived.rows.as_ptr(), arrived.rows.len()) };
    let results = Results {
        rows: rows.cast(),
        len: arrived.rows.len() / HIDDEN,
        stride: 2 * HIDDEN,
        hidden: HIDDEN,
        sends: Sends::EachExpert,
        weights: None,
        is_packed: false,
        stays: true,
    };
    assert!(group.is_read(&block) && !own.rows.is_empty());
    // SAFETY: the block lives until the combine is over.
    let mut combine = unsafe { Combine::begin(&arrived.handle, results, &mut never) }.unwrap();
    combine.leave_rows();
    (block, combine)
}

/// Ends a combine whose sums take each choice once.
fn summed(combine: Combine, own: &Own) -> Result<Vec<u16>> {
    let mut rows = vec![0; own.rows.len()];
    let (sums, bias) = (Sums::ByChoice, [None; 2]);
    let combined = Combined { rows: rows.as_mut_ptr(), sums, bias, weights: None };
    // SAFETY: there is a row for each token.
    unsafe { combine.finish(combined, &mut never)? };
    Ok(rows)
}

/// A rank's tokens, all of which have a choice that is not none.
fn some_own(group: &Group, ranks: usize) -> Own {
    (0..)
        .map(|seed| Own::new(seed, group.rank(), ranks, 3, 20))
        .find(|own| !own.rows.is_empty())
        .unwrap()
}

#[test]
fn rows_in_a_block_are_read_where_they_are_and_not_before_all_have_ended() {
    let all = Barrier::new(3);
    world(3, 1 << 20, Duration::from_secs(20), |group| {
        let own = some_own(&group, 3);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(60)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        all.wait();
        // They have been sent, and are changed nonetheless: each becomes its double.
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
fn a_combine_of_a_block_ends_when_all_have_read_it() {
    world(2, 1 << 20, Duration::from_secs(20), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let block = group.block(2 * arrived.rows.len()).unwrap();
        let rows = block.as_ptr().cast::<u16>();
        for round in 0..20 {
            // SAFETY: the block has room for the rows, and the combine before has ended.
            unsafe { rows.copy_from_nonoverlapping(arrived.rows.as_ptr(), arrived.rows.len()) };
            let results = Results {
                rows: rows.cast(),
                len: arrived.rows.len() / HIDDEN,
                stride: 2 * HIDDEN,
                hidden: HIDDEN,
                sends: Sends::EachExpert,
                weights: None,
                is_packed: false,
                stays: true,
            };
            // SAFETY: the block lives until the combine is over.
            let combine = unsafe { Combine::begin(&arrived.handle, results, &mut never) }.unwrap();
            if round % 2 == group.rank() {
                thread::sleep(Duration::from_millis(5));
            }
            let out = summed(combine, &own).unwrap();
            assert!(group.is_read(&block));
            // What a peer would read if it were not done.
            // SAFETY: nobody reads any more.
            unsafe { rows.write_bytes(0xff, arrived.rows.len()) };
            assert!(out.iter().all(|bits| *bits != 0xffff), "round {round}");
        }
    });
}

#[test]
fn a_block_that_is_let_go_stays_until_peers_have_read_it() {
    let all = Barrier::new(2);
    world(2, 1 << 20, Duration::from_secs(20), |group| {
        let own = some_own(&group, 2);
        let arrived = dispatched(&group, &own, Room::Tokens(20), Some(40)).unwrap();
        let (block, combine) = begun(&group, &own, &arrived);
        let is_early = group.rank() == 0;
        if !is_early {
            all.wait();
        }
        summed(combine, &own).unwrap();
        let_go(group, block);
        drop(arrived);
        if is_early {
            all.wait();
        }
    });
}

#[test]
fn a_row_outside_its_block_is_refused() {
    let all = Barrier::new(2);
    world(2, 1 << 20, Duration::from_secs(20), |group| {
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
    world(1, 4096, Duration::from_secs(5), |group| {
        let block = group.block(100).unwrap();
        let start = block.as_ptr().addr();
        assert!(group.has_block(&(start..start + 100)));
        assert!(!group.has_block(&(start..start + 101)) && !group.has_block(&(start - 1..start)));
        drop(block);
        assert!(!group.has_block(&(start..start + 100)));
    });
}
