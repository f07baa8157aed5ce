//! Counts from a peer, and numbers of rows from a caller, are checked before use.

use super::*;

/// Tokens of each rank: two for each of the four experts of two ranks.
const TOKENS: usize = 8;

fn own_of(rank: usize) -> Own {
    let experts: Vec<i32> = (0..TOKENS as i32).map(|token| token % 4).collect();
    let rows = (0..TOKENS).flat_map(|token| vec![(100 * rank + token + 1) as u16; HIDDEN]);
    let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks: 2 };
    let routing = Arc::new(Routing::new(choices).unwrap());
    Own { rows: rows.collect(), weights: vec![1.0; TOKENS], experts, routing }
}

/// The memory after a dispatch with `rows` rows of output, and some rows behind them. `garble`
/// changes the words of the last rank's area of this rank's window. There are `slots` in an area.
fn received(
    slots: usize,
    layout: &Layout,
    rows: usize,
    garble: impl Fn(&mut [u32]) + Sync,
) -> Vec<Vec<u16>> {
    let all = Barrier::new(2);
    world(Ranks::near(2), |group| {
        let own = own_of(group.rank());
        // SAFETY: the vectors live until the dispatch is over.
        let begun = unsafe {
            let (routing, room) = (Arc::clone(&own.routing), Room::Tokens(slots));
            Dispatch::begin(&group, routing, own.tokens(), room, &mut never)
        };
        let mut dispatch = begun.unwrap();
        all.wait();
        let areas = Areas {
            record: Record { payload: 2 * HIDDEN, scales: 0, top_k: 1 },
            local_experts: 2,
            nodes: Nodes::one(2),
        };
        // SAFETY: the call is the first, so its place begins the pool; all has been sent, and the area begins with words.
        garble(unsafe {
            let area = group.pool().add(areas.area_at(slots, 1));
            std::slice::from_raw_parts_mut(area.cast(), 3)
        });
        dispatch.counts(&mut never).unwrap();
        let mut out = vec![0; (rows + 8) * HIDDEN];
        let outputs = Outputs {
            len: rows,
            rows: out.as_mut_ptr().cast(),
            stride: 2 * HIDDEN,
            scales: None,
            choices: None,
            weights: None,
            zeroes_foreign_weights: false,
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
    let seen = received(16, &Layout::Rows, TOKENS, |words| words[0] = 16);
    for (rank, rows) in seen.iter().enumerate() {
        let of = |from: usize| {
            let tokens = (0..TOKENS).filter(move |token| token % 4 / 2 == rank);
            tokens.map(move |token| (100 * from + token + 1) as u16)
        };
        assert_eq!(rows[..TOKENS], of(0).chain(of(1)).collect::<Vec<_>>());
        assert_eq!(rows[TOKENS..], [0; 8], "rows behind those that were told of");
    }
}

#[test]
fn no_row_goes_behind_those_that_there_is_memory_for() {
    // The last rank has rows for the second expert, and its count of them is 0.
    let seen = received(16, &Layout::Experts(vec![0, 4]), 6, |words| words[2] = 0);
    for (rank, rows) in seen.iter().enumerate() {
        let expected = of_expert(2 * rank).chain(of_expert(2 * rank + 1).take(2));
        assert_eq!(rows[..6], expected.collect::<Vec<_>>());
        assert_eq!(rows[6..], [0; 8], "rows behind the memory");
    }
}

#[test]
fn a_rank_that_tells_of_more_tokens_than_it_has_room_for_is_refused() {
    const SLOTS: usize = 16;
    let all = Barrier::new(2);
    let texts = world(Ranks::near(2), |group| {
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
        // SAFETY: headers lie before the pool; all has been sent, and nobody reads before this rank does.
        unsafe {
            let window = group.pool().sub(control_len(2)).cast::<u64>();
            let told = window.add((11 + 3 + 1) * 8 + 6);
            assert_eq!(std::slice::from_raw_parts(told, 2), [TOKENS as u64 / 2, TOKENS as u64]);
            told.write(SLOTS as u64 + 1);
            told.add(1).write(SLOTS as u64 + 1);
        }
        let why = dispatch.counts(&mut never).err().unwrap().to_string();
        all.wait();
        why
    });
    for text in texts {
        assert!(text.contains("rank 1 has tokens for this rank 17, this rank 16"), "{text}");
    }
}

#[test]
fn fewer_rows_than_the_handle_tells_of_are_refused() {
    world(Ranks::near(1), |group| {
        let experts: Vec<i32> = (0..TOKENS as i32).map(|token| token % 4).collect();
        let choices = Choices { experts: &experts, top_k: 1, num_experts: 4, ranks: 1 };
        let routing = Arc::new(Routing::new(choices).unwrap());
        let own = Own { routing, ..own_of(0) };
        for (by_experts, sends, needs) in [
            (None, Sends::Row, TOKENS),
            // The last of the four experts has its two rows at 30 and 31.
            (Some(10), Sends::EachExpert, 32),
            (Some(10), Sends::SumOfExperts, 32),
        ] {
            let arrived = dispatched(&group, &own, Room::Tokens(TOKENS), by_experts).unwrap();
            let begin = |len: usize| {
                let results = Results { len, sends, ..results_in(arrived.rows.as_ptr(), &arrived) };
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
