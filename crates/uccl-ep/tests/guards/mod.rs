//! Counts from a peer, and numbers of rows from a caller, are checked before use.

use uccl_ep::numerics::quantise::ScaleFormat;

use super::*;

/// Tokens of each rank: two for each of the four experts of two ranks.
const TOKENS: usize = 8;

fn own_of(rank: usize) -> RankTokens {
    let experts: Vec<i32> = (0..TOKENS as i32).map(|token| token % 4).collect();
    let rows = (0..TOKENS).flat_map(|token| vec![(100 * rank + token + 1) as u16; HIDDEN]);
    let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks: 2 };
    let routing = Arc::new(Routing::new(choices).unwrap());
    RankTokens { rows: rows.collect(), weights: vec![1.0; TOKENS], experts, routing }
}

/// How areas of dispatches are divided here.
fn areas() -> Areas {
    Areas {
        record: Record { payload: 2 * HIDDEN, scales: 0, top_k: 1 },
        local_experts: 2,
        nodes: Nodes::one(2),
    }
}

/// The memory for some rows, and more behind it, after a dispatch during which `garble` has changed
/// the words of the last rank's area in this rank's window. It changes them before they are counted
/// where all tokens have room, else after the first round was.
fn received(
    room: Room,
    layout: &RowLayout,
    rows: usize,
    garble: impl Fn(&mut [u32]) + Sync,
) -> Vec<Vec<u16>> {
    let all = Barrier::new(2);
    world(Ranks::near(2), |group| {
        let own = own_of(group.rank());
        // SAFETY: the vectors live until the dispatch is over.
        let begun = unsafe {
            Dispatch::begin(&group, Arc::clone(&own.routing), own.tokens(), room, &mut never)
        };
        let mut dispatch = begun.unwrap();
        let slots = match room {
            Room::Tokens(slots) => slots,
            Room::Bytes(len) => {
                dispatch.counts(&mut never).unwrap();
                areas().slots_in(len)
            }
        };
        all.wait();
        // SAFETY: the call is the first, so its place begins the pool; all of the round has been
        // sent, the next one is sent when this one has been taken, and the area begins with words.
        garble(unsafe {
            let area = group.pool().add(areas().area_at(slots, 1));
            std::slice::from_raw_parts_mut(area.cast(), 3)
        });
        dispatch.counts(&mut never).unwrap();
        let mut out = vec![0; (rows + 8) * HIDDEN];
        let outputs = DispatchOutput {
            len: rows,
            rows: out.as_mut_ptr().cast(),
            stride: 2 * HIDDEN,
            scales: None,
            choices: None,
            weights: None,
            zero_foreign_weights: false,
        };
        // SAFETY: there is memory for as many rows.
        unsafe { dispatch.receive(outputs, layout, &mut never) }.unwrap();
        out.into_iter().step_by(HIDDEN).collect()
    })
}

/// The first values of rows of expert `expert` of all ranks.
fn of_expert(expert: usize) -> impl Iterator<Item = u16> {
    [0, 1]
        .into_iter()
        .flat_map(move |rank| [expert, expert + 4].map(|token| (100 * rank + token + 1) as u16))
}

#[test]
fn no_more_rows_are_taken_than_a_rank_told_of() {
    let seen = received(Room::Tokens(16), &RowLayout::ByToken, TOKENS, |words| words[0] = 16);
    all_arrived(&seen);
}

/// All tokens are there, and nothing is behind them.
fn all_arrived(seen: &[Vec<u16>]) {
    for (rank, rows) in seen.iter().enumerate() {
        let of = |from: usize| {
            let tokens = (0..TOKENS).filter(move |token| token % 4 / 2 == rank);
            tokens.map(move |token| (100 * from + token + 1) as u16)
        };
        assert_eq!(rows[..TOKENS], of(0).chain(of(1)).collect::<Vec<_>>());
        assert_eq!(rows[TOKENS..], [0; 8], "rows behind those that were counted");
    }
}

/// Behind an area lies a round of another rank, or no round at all.
#[test]
fn no_more_of_a_round_is_taken_than_its_area_has() {
    // Two of the four tokens that each rank has for the other.
    let len = areas().place(2);
    assert_eq!(areas().slots_in(len), 2);
    all_arrived(&received(Room::Bytes(len), &RowLayout::ByToken, TOKENS, |words| words[0] = 16));
}

#[test]
fn no_row_goes_behind_those_that_there_is_memory_for() {
    // The last rank has rows for the second expert, and counts none.
    let layout = RowLayout::ByExpert(vec![0, 4]);
    let seen = received(Room::Tokens(16), &layout, 6, |words| words[2] = 0);
    for (rank, rows) in seen.iter().enumerate() {
        let expected = of_expert(2 * rank).chain(of_expert(2 * rank + 1).take(2));
        assert_eq!(rows[..6], expected.collect::<Vec<_>>());
        assert_eq!(rows[6..], [0; 8], "rows behind the memory");
    }
}

/// The counts that a rank finds when the last one announces so many tokens for it, and so many in
/// all, with room for [`SLOTS`].
fn counted(over: u64, tokens: u64) -> Vec<Result<ReceiveCounts>> {
    let all = Barrier::new(2);
    world(Ranks::near(2), |group| {
        let own = own_of(group.rank());
        // SAFETY: the vectors live until the dispatch is over.
        let begun = unsafe {
            let (routing, room) = (Arc::clone(&own.routing), Room::Tokens(SLOTS));
            Dispatch::begin(&group, routing, own.tokens(), room, &mut never)
        };
        let mut dispatch = begun.unwrap();
        all.wait();
        // Behind its words a stream has headers of 64 bytes, which end with the numbers of tokens:
        // for this rank, and all. This is the header that the last rank has written for the first
        // call.
        // SAFETY: headers lie before the pool; all has been sent, and nobody reads before this rank
        // does.
        unsafe {
            let window = group.pool().sub(control_len(2)).cast::<u64>();
            let counts = window.add((11 + 3 + 1) * 8 + 6);
            assert_eq!(std::slice::from_raw_parts(counts, 2), [TOKENS as u64 / 2, TOKENS as u64]);
            counts.write(over);
            counts.add(1).write(tokens);
        }
        let counts = dispatch.counts(&mut never).cloned();
        all.wait();
        counts
    })
}

const SLOTS: usize = 16;

#[test]
fn a_rank_that_tells_of_more_tokens_than_it_has_room_for_is_refused() {
    for counts in counted(SLOTS as u64 + 1, SLOTS as u64 + 1) {
        let text = counts.err().unwrap().to_string();
        assert!(text.contains("rank 1 has tokens for this rank 17, this rank 16"), "{text}");
    }
}

#[test]
fn fewer_rows_than_the_handle_tells_of_are_refused() {
    world(Ranks::near(1), |group| {
        let experts: Vec<i32> = (0..TOKENS as i32).map(|token| token % 4).collect();
        let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks: 1 };
        let routing = Arc::new(Routing::new(choices).unwrap());
        let own = RankTokens { routing, ..own_of(0) };
        for (by_experts, sends, needs) in [
            (None, CombineRows::Row, TOKENS),
            // The last of the four experts has its two rows at 30 and 31.
            (Some(10), CombineRows::EachExpert, 32),
            (Some(10), CombineRows::SumOfExperts, 32),
        ] {
            let arrived = dispatched(&group, &own, Room::Tokens(TOKENS), by_experts).unwrap();
            let begin = |len: usize| {
                let results =
                    CombineInput { len, sends, ..results_in(arrived.rows.as_ptr(), &arrived) };
                // SAFETY: the rows live until the combine is over.
                unsafe { Combine::begin(&arrived.handle, results, &mut never) }
            };
            let why = begin(needs - 1).err().unwrap().to_string();
            let said = format!("{} rows are given, and the handle tells of {needs}", needs - 1);
            assert_eq!(why, said);
            summed(begin(needs).unwrap(), &own).unwrap();
        }
    });
}

/// Bytes and rounds for as many tokens as a rank tells of can be counted.
#[test]
fn a_rank_has_no_more_tokens_than_can_be_counted() {
    for tokens in [1 << 28, (1 << 32) + 8, u64::MAX] {
        for counts in counted(TOKENS as u64 / 2, tokens) {
            assert_eq!(counts.unwrap().tokens_of, [TOKENS as u32, 1 << 28]);
        }
    }
}

/// Whether `begin` is refused, and said to be so.
fn is_refused<T>(begun: Result<T>, why: &str) {
    let text = begun.err().expect(why).to_string();
    assert!(text.contains(why), "{text}");
}

#[test]
fn rows_that_could_not_be_read_as_numbers_are_refused() {
    world(Ranks::near(1), |group| {
        let experts: Vec<i32> = (0..TOKENS as i32).map(|token| token % 4).collect();
        let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks: 1 };
        let routing = Arc::new(Routing::new(choices).unwrap());
        let own = RankTokens { routing, ..own_of(0) };
        let room = Room::Tokens(TOKENS);
        for (by, stride) in [(1, 2 * HIDDEN), (0, 2 * HIDDEN + 1)] {
            let payload = Payload::Quantised(HIDDEN, ScaleFormat::Exact);
            let rows = own.tokens().rows.wrapping_add(by);
            let tokens = DispatchInput { rows, stride, payload, ..own.tokens() };
            // SAFETY: nothing is read, as it is refused.
            let begun = unsafe {
                Dispatch::begin(&group, Arc::clone(&own.routing), tokens, room, &mut never)
            };
            is_refused(begun, "rows to quantise are aligned to 2 bytes");
        }
        let arrived = dispatched(&group, &own, room, None).unwrap();
        let sound =
            CombineInput { sends: CombineRows::Row, ..results_in(arrived.rows.as_ptr(), &arrived) };
        let refused = |results: CombineInput, why: &str| {
            // SAFETY: nothing is read, as it is refused.
            is_refused(unsafe { Combine::begin(&arrived.handle, results, &mut never) }, why);
        };
        let why = "rows of bf16 are aligned to 2 bytes";
        refused(CombineInput { rows: sound.rows.wrapping_add(1), ..sound }, why);
        refused(CombineInput { stride: 2 * HIDDEN + 1, ..sound }, why);
        let packed = CombineInput { is_packed: true, ..sound };
        refused(CombineInput { hidden: HIDDEN - 2, ..packed }, "rows to pack have a multiple of");
    });
}

#[test]
fn a_routing_for_other_ranks_is_refused() {
    world(Ranks::near(2), |group| {
        for ranks in [1, 4] {
            let experts = vec![0; TOKENS];
            let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks };
            let routing = Arc::new(Routing::new(choices).unwrap());
            let own = own_of(0);
            // SAFETY: nothing is read, as it is refused.
            let begun = unsafe {
                Dispatch::begin(&group, routing, own.tokens(), Room::Tokens(TOKENS), &mut never)
            };
            is_refused(begun, &format!("the routing is for {ranks} ranks of 2"));
        }
    });
}

/// A relay holds tokens of others: if it is left out, they are lost.
#[test]
fn nobody_relays_while_a_rank_is_left_out() {
    world(Ranks::apart(4, 2, Transport::Tcp), |group| {
        let nodes = group.relays().expect("two nodes of two ranks");
        assert_eq!((nodes.count, nodes.ranks), (2, 2));
        let other = (group.rank() + 1) % 4;
        group.mask(other, true).unwrap();
        assert!(group.is_masked(other) && group.relays().is_none());
        let own = own_of(0);
        let choices = Choices { experts: &own.experts, top_k: 1, num_experts: 4, ranks: 4 };
        let routing = Arc::new(Routing::new(choices).unwrap().relayed(nodes).unwrap());
        // SAFETY: nothing is read, as it is refused.
        let begun = unsafe {
            Dispatch::begin(&group, routing, own.tokens(), Room::Tokens(TOKENS), &mut never)
        };
        is_refused(begun, "the routing relays on 2 nodes of 2 ranks, and this group does not");
        group.mask(other, false).unwrap();
        assert_eq!(group.relays().map(|nodes| nodes.count), Some(2));
        is_refused(group.mask(4, true), "no rank 4 of 4");
    });
}

/// They lie beside the rows that a rank's own tokens have in its place, which are not copied there
/// where rows stay.
#[test]
fn weights_come_back_from_rows_that_stay() {
    for (sends, by_experts) in [(CombineRows::Row, None), (CombineRows::EachExpert, Some(10))] {
        world(Ranks::near(2), |group| {
            let own = own_of(group.rank());
            let arrived = dispatched(&group, &own, Room::Tokens(TOKENS), by_experts).unwrap();
            // The row of a token has a weight of its own.
            let weights: Vec<f32> =
                arrived.rows.iter().step_by(HIDDEN).map(|v| f32::from(*v)).collect();
            let results = CombineInput {
                sends,
                weights: Some(weights.as_ptr()),
                ..results_in(arrived.rows.as_ptr(), &arrived)
            };
            assert!(results.is_stable);
            // SAFETY: rows and weights live until the combine is over.
            let combine = unsafe { Combine::begin(&arrived.handle, results, &mut never) }.unwrap();
            let sums =
                if sends == CombineRows::Row { SumOrder::ByRank } else { SumOrder::ByChoice };
            let (mut rows, mut back) = (vec![0; own.rows.len()], vec![f32::NAN; TOKENS]);
            let combined = CombineOutput {
                rows: rows.as_mut_ptr(),
                sums,
                bias: [None; 2],
                weights: Some(back.as_mut_ptr()),
            };
            // SAFETY: there is a row, and a weight, for each token.
            unsafe { combine.finish(combined, &mut never) }.unwrap();
            assert!(rows == own.rows);
            let expected: Vec<f32> =
                own.rows.iter().step_by(HIDDEN).map(|v| f32::from(*v)).collect();
            assert_eq!(back, expected, "{sends:?}");
        });
    }
}

#[test]
fn a_rank_that_has_not_joined_is_not_let_in() {
    let mut alone = |mine: Vec<u8>| Ok(vec![Some(mine), None]);
    let group = Group::join(Ranks::near(2).config(0), &mut alone).unwrap();
    assert!(group.is_masked(1) && !group.has(1));
    is_refused(group.mask(1, false), "rank 1 has not joined");
    assert!(group.is_masked(1));
    group.mask(1, true).unwrap();
}
