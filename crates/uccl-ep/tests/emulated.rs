//! The kernels on a CPU, with an emulated driver and an emulated GPU. The tests cover the kernels
//! and the calls of host code where there is no GPU, but not the order of the kernels' memory
//! accesses.

#[path = "cuda/mod.rs"]
mod cuda;
mod emulator;
mod wide;

use std::time::Duration;

use uccl_ep::{combine::Order, cuda::Occupancy, numerics::quantise::ScaleFormat};
use uccl_p2p::Transport;

use self::cuda::{Case, Format, Loss, Masks, Normal, Ranks, Rounds, Route, ways_of_a_plan, world};

const SMALL: Case = Case {
    seed: 1,
    ranks: 2,
    local_experts: 3,
    top_k: 2,
    hidden: 512,
    format: Format::Bf16,
    is_packed: false,
    slots: 5,
    rounds: 2,
    places: 4,
    blocks: 2,
    late: Duration::ZERO,
    lost: None,
    masks: None,
    route: Route::Direct,
};

#[test]
fn a_gpu_makes_the_bytes_of_the_cpu() {
    emulator::load();
    let fp8 = [ScaleFormat::Exact, ScaleFormat::PowerOfTwo, ScaleFormat::Exponent].map(Format::Fp8);
    for (seed, format) in (0..).zip([Format::Bf16].into_iter().chain(fp8)) {
        let ranks = 1 + seed as usize % 3;
        Case { seed, ranks, format, top_k: 1 + seed as usize, ..SMALL }.run();
    }
    // Widths that no warp fills, and more tokens than threads of a warp.
    Case { hidden: 640, format: Format::Fp8(ScaleFormat::Exact), slots: 40, rounds: 1, ..SMALL }
        .run();
    Case { hidden: 8, slots: 70, local_experts: 40, top_k: 32, rounds: 1, ..SMALL }.run();
}

#[test]
fn ranks_share_a_gpu_that_is_the_same_one() {
    emulator::load();
    let share = |gpus: &[u32]| {
        let agree =
            |ranks: &Ranks, me: usize| Occupancy::agree(me, gpus[me], 4, &mut ranks.exchange(me));
        world(gpus.len(), agree)
    };
    let shares: Vec<_> = share(&[0, 1, 0]).into_iter().map(|share| share.ok()).collect();
    let (shared, alone) = (Occupancy::of(8, 4, 2), Occupancy::of(8, 4, 1));
    assert_eq!(shares, [shared, alone, shared].map(Some));
    assert!(!shared.is_alone && alone.is_alone);
    let reasons = share(&[0, 99]).into_iter().map(|share| share.map_err(|e| e.to_string()));
    let reasons: Vec<_> = reasons.map(|share| share.err().unwrap_or_default()).collect();
    assert!(reasons[0].contains("it has no GPU"), "{reasons:?}");
    assert!(reasons[1].contains("99"), "{reasons:?}");
}

#[test]
fn blocks_that_do_not_send_share_records() {
    emulator::load();
    // Two blocks for each of two records, beside the one that sends; a block's warps take half of
    // such a row at a time.
    for format in [Format::Bf16, Format::Fp8(ScaleFormat::Exact)] {
        Case { format, slots: 1, hidden: 14_336, blocks: 6, rounds: 1, ..SMALL }.run();
    }
}

#[test]
fn rows_go_as_nvfp4_and_come_back_as_logfmt() {
    emulator::load();
    for (seed, global_scale) in (0..).zip([1.0, 84.0, 0.001, 3000.0]) {
        let (ranks, hidden) = (1 + seed as usize % 3, [128, 640, 512, 1152][seed as usize]);
        let format = Format::Nvfp4(global_scale);
        Case { seed, ranks, hidden, format, is_packed: true, ..SMALL }.run();
    }
    // More rows of an expert than a tile of scales has, and a group that no other group is behind.
    Case { slots: 70, hidden: 64, format: Format::Nvfp4(6.0), rounds: 1, ..SMALL }.run();
}

#[test]
fn calls_take_the_places_of_calls_that_have_ended() {
    emulator::load();
    for places in [1, 2] {
        Case { hidden: 128, rounds: 12, places, ..SMALL }.run();
    }
    let late = Duration::from_millis(100);
    Case { hidden: 128, rounds: 4, places: 1, late, ..SMALL }.run();
}

#[test]
fn small_batches_are_taken_and_summed_when_their_flags_are_set() {
    emulator::load();
    Case { hidden: 640, ..SMALL }.waits_for_flags();
}

#[test]
fn a_rank_with_too_large_counts_is_named() {
    emulator::load();
    SMALL.names_a_rank_with_too_large_counts();
}

/// Many choices of each rank. The calls of the first and the last rank are one launch each: these
/// ranks send the weights of their tokens.
const SUMMED: Case = Case { ranks: 3, local_experts: 5, top_k: 8, slots: 50, rounds: 1, ..SMALL };

#[test]
fn a_rank_sends_partial_sums_where_it_has_weights() {
    emulator::load();
    Case { hidden: 640, ..SUMMED }.run();
    // Weights arrive in the place of earlier calls' weights.
    Case { hidden: 8, rounds: 6, places: 2, ..SUMMED }.run();
    // More choices than there are flags for: own rows are sent back too.
    Case { hidden: 8, slots: 260, ..SUMMED }.run();
}

#[test]
fn spoilt_records_lead_to_no_other_memory() {
    emulator::load();
    SMALL.reaches_no_more_when_spoilt();
    SUMMED.reaches_no_more_when_spoilt();
    // The only rank's rows stay where they are.
    Case { ranks: 1, ..SMALL }.reaches_no_more_when_spoilt();
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    emulator::load();
    let errors = SMALL.names_the_rank_that_does_not_come();
    assert_eq!(errors[1], "");
}

#[test]
fn calls_go_on_without_a_rank_that_is_late_or_masked() {
    emulator::load();
    for lost in [Loss::Late, Loss::Masked] {
        Case { lost: Some((1, lost)), rounds: 6, places: 2, ..SMALL }.run();
        Case { lost: Some((0, lost)), format: Format::Fp8(ScaleFormat::Exact), ..SMALL }.run();
    }
}

#[test]
fn a_group_meets_anew_without_a_rank_and_with_another() {
    emulator::load();
    for (masks, ranks) in [(None, 3), (Some(Masks { masks_late: true, ..MASKS }), 2)] {
        Case { masks, ranks, hidden: 128, slots: 3, ..SMALL }.meets_anew();
    }
}

/// A rank is left out for one to nine calls, and each time takes part again, for two calls more
/// than there are slots.
const MASKS: Masks =
    Masks { rank: 1, calls: (1, 9), masks_late: false, is_between: false, behind: 5 };

/// By one launch for a call, and by two; late ranks are left out, or not.
fn each_masks() -> [Masks; 3] {
    [MASKS, Masks { masks_late: true, ..MASKS }, Masks { is_between: true, calls: (1, 4), ..MASKS }]
}

#[test]
fn a_rank_that_was_left_out_takes_part_again() {
    let _alone = ALONE.lock();
    emulator::load();
    for (seed, masks) in (0..).zip(each_masks()) {
        let masks = Some(masks);
        Case { masks, seed, hidden: 128, slots: 3, ..SMALL }.run();
    }
    let masks = Some(Masks { calls: (6, 9), ..MASKS });
    Case { masks, ranks: 3, hidden: 128, slots: 3, places: 1, ..SMALL }.run();
    let masks = Some(Masks { is_between: true, masks_late: true, calls: (1, 2), ..MASKS });
    Case { masks, hidden: 128, is_packed: true, ..SMALL }.run();
    Case { masks, ..SUMMED }.run();
    let masks = Some(Masks { rank: 0, calls: (3, 4), ..MASKS });
    Case { masks, ranks: 8, hidden: 128, slots: 2, blocks: 1, ..SMALL }.run();
}

#[test]
fn a_far_rank_that_was_left_out_takes_part_again() {
    let _alone = ALONE.lock();
    emulator::load();
    for (seed, masks) in (0..).zip(each_masks()) {
        let masks = Some(masks);
        Case { masks, seed, hidden: 128, slots: 3, ..FAR }.run();
    }
    let masks = Some(Masks { rank: 2, calls: (3, 4), ..MASKS });
    Case { masks, ranks: 4, hidden: 128, slots: 2, places: 1, ..FAR }.run();
}

#[test]
fn a_rank_that_was_left_out_of_normal_mode_takes_part_again() {
    let _alone = ALONE.lock();
    emulator::load();
    let few = Normal { is_worst: true, hidden: 64, ..NORMAL };
    for (seed, masks) in (0..).zip(each_masks()) {
        let masks = Some(masks);
        Normal { masks, seed, ..few }.run();
        let masks = masks.map(|masks| Masks { calls: (1, 4), ..masks });
        let by_choice = Normal { order: Order::ByChoice, ranks: 3, is_cached: true, ..few };
        Normal { masks, seed, by_expert: Some(4), has_layout: seed == 1, ..by_choice }.run();
        let route = Route::ViaHost(2, Transport::Tcp);
        Normal { masks, seed, ranks: 2 + seed as usize, route, ..few }.run();
    }
    let masks = Some(Masks { calls: (7, 9), is_between: true, ..MASKS });
    Normal { masks, zero_copy: true, ..few }.run();
    Normal { masks, ranks: 8, slots: 2, blocks: 1, is_worst: false, ..few }.run();
}

#[test]
fn ranks_that_differ_are_told_the_difference() {
    emulator::load();
    let errors = SMALL.fails(Duration::from_secs(20), |me| Some(Case { top_k: 1 + me, ..SMALL }));
    let errors = errors.join(" / ");
    assert!(errors.contains("has top-k") || errors.contains("gave up on call 1"), "{errors}");
    assert!(
        errors.contains("rank 1 has top-k 2, this rank 1")
            || errors.contains("rank 0 has top-k 1, this rank 2"),
        "{errors}"
    );
}

/// Tests that keep all of a machine busy, or depend on time.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

const NORMAL: Normal = Normal {
    seed: 1,
    ranks: 2,
    local_experts: 3,
    top_k: 2,
    hidden: 528,
    scales: 0,
    slots: 6,
    is_full: false,
    rounds: 2,
    places: 2,
    blocks: 2,
    has_weights: true,
    biases: 0,
    order: Order::ByRank,
    is_worst: false,
    guess: None,
    zero_copy: false,
    is_cached: false,
    has_layout: false,
    by_expert: None,
    is_each: false,
    zero_gaps: false,
    lost: None,
    masks: None,
    fault: None,
    route: Route::Direct,
};

#[test]
fn normal_mode_makes_the_bytes_of_the_cpu() {
    emulator::load();
    for seed in 0..12 {
        NORMAL.drawn(seed).run();
    }
    // More tokens than a block counts.
    Normal { hidden: 8, slots: 300, is_full: true, rounds: 1, by_expert: Some(8), ..NORMAL }.run();
    // Parts of several tokens, and blocks that send and others that take.
    let many = Normal { hidden: 8, slots: 1500, is_full: true, rounds: 1, blocks: 5, ..NORMAL };
    Normal { is_cached: true, is_worst: true, ..many }.run();
    Normal { by_expert: Some(8), ranks: 3, ..many }.run();
    // Calls take the places of calls that have ended, and all are enqueued before any is waited
    // for.
    Normal { rounds: 12, places: 1, is_worst: true, is_cached: true, ranks: 3, ..NORMAL }.run();
    // A token has several experts of a rank, and their rows are sent back as one sum or each by
    // itself.
    let by_choice = Normal { order: Order::ByChoice, top_k: 4, hidden: 72, ranks: 3, ..NORMAL };
    for is_each in [false, true] {
        let by_expert = Normal { by_expert: Some(4), is_each, zero_gaps: true, ..by_choice };
        Normal { places: 1, is_worst: true, is_cached: true, ..by_expert }.run();
    }
    // More tokens than threads of a warp.
    Normal { hidden: 8, slots: 70, local_experts: 40, top_k: 32, rounds: 1, ..NORMAL }.run();
}

#[test]
fn zero_copy_rows_are_there_until_the_next_call() {
    emulator::load();
    let zero_copy = Normal { zero_copy: true, is_worst: true, is_cached: true, ..NORMAL };
    Normal { rounds: 6, places: 1, ranks: 3, scales: 5, ..zero_copy }.run();
    // An area's counts take the bytes of several rows.
    Normal { hidden: 8, local_experts: 70, has_layout: true, order: Order::ByChoice, ..zero_copy }
        .run();
    Normal { top_k: 0, has_weights: false, ranks: 1, ..zero_copy }.run();
    // Parts of several tokens, and blocks that send and others that take.
    Normal { hidden: 8, slots: 1500, is_full: true, rounds: 1, blocks: 5, ..zero_copy }.run();
}

#[test]
fn a_plan_asks_for_memory_and_waits_as_it_must() {
    emulator::load();
    for ranks in [1, 2] {
        ways_of_a_plan(ranks);
    }
}

const ROUNDS: Rounds = Rounds {
    tokens: &[7, 5],
    room: 4,
    blocks: 2,
    by_expert: None,
    is_bounded: false,
    spare: 0,
    route: Route::Direct,
    masks_late: false,
    timeout: Duration::from_secs(60),
};

#[test]
fn more_tokens_than_the_pool_has_room_for_go_in_rounds() {
    emulator::load();
    ROUNDS.run();
    // A rank has few tokens, or none, and learns of the others'.
    Rounds { tokens: &[3, 11], ..ROUNDS }.run();
    Rounds { tokens: &[0, 9, 2], blocks: 3, ..ROUNDS }.run();
    Rounds { tokens: &[10], room: 3, ..ROUNDS }.run();
    // As many as fit, and one more: a rank with room for all rows learns of the other rank's.
    Rounds { tokens: &[4, 4], ..ROUNDS }.run();
    Rounds { tokens: &[1, 5], ..ROUNDS }.run();
    for by_expert in [None, Some(4)] {
        // No host waits.
        Rounds { is_bounded: true, by_expert, ..ROUNDS }.run();
        Rounds { is_bounded: true, by_expert, tokens: &[9, 0, 4], ..ROUNDS }.run();
    }
    // More segments than one in a round, and rounds that begin within one.
    Rounds { tokens: &[140, 30], room: 135, blocks: 4, ..ROUNDS }.run();
}

#[test]
fn ranks_say_nothing_in_rounds_without_their_tokens() {
    emulator::load();
    // No rank has tokens in the last round, and then in two.
    for (tokens, spare) in [(&[9, 1][..], 0), (&[5, 1], 7), (&[1, 0, 6], 4), (&[0, 0], 12)] {
        let rounds = Rounds { is_bounded: true, tokens, spare, ..ROUNDS };
        for route in
            [Route::Direct, Route::ViaHost(2, Transport::Tcp), Route::ViaHost(1, Transport::Tcp)]
        {
            Rounds { route, ..rounds }.says_nothing_without_tokens();
            for by_expert in [None, Some(4)] {
                Rounds { route, by_expert, ..rounds }.run();
            }
        }
        Rounds { masks_late: true, ..rounds }.run();
    }
}

#[test]
fn rounds_have_no_more_tokens_than_the_counts_ahead_of_them() {
    emulator::load();
    let bounded = Rounds { is_bounded: true, ..ROUNDS }.soon();
    bounded.refuses_more_than_announced();
    Rounds { route: Route::ViaHost(2, Transport::Tcp), ..bounded }.refuses_more_than_announced();
}

#[test]
fn ranks_with_other_bounds_of_rounds_are_told_so() {
    emulator::load();
    Rounds { is_bounded: true, tokens: &[3, 9], ..ROUNDS }.soon().tells_of_more_tokens();
    ROUNDS.refuses_more_than_the_call_says();
}

#[test]
fn a_rank_that_is_lost_before_its_rounds_leaves_rows_of_zeros() {
    emulator::load();
    let masks_late = Rounds { masks_late: true, tokens: &[5, 9], ..ROUNDS }.soon();
    masks_late.blanks_rows_of_a_lost_rank();
}

#[test]
fn rounds_of_two_launches_are_like_those_of_one() {
    emulator::load();
    let via_host = Rounds { route: Route::ViaHost(2, Transport::Tcp), ..ROUNDS };
    let masks_late = Rounds { masks_late: true, ..ROUNDS };
    for by_launches in [via_host, masks_late] {
        by_launches.run();
        Rounds { tokens: &[2, 9, 0], ..by_launches }.run();
        for by_expert in [None, Some(4)] {
            let is_bounded = true;
            Rounds { is_bounded, by_expert, tokens: &[9, 0, 4, 6], ..by_launches }.run();
        }
    }
}

#[test]
fn a_guess_of_how_much_arrives_changes_no_bytes() {
    emulator::load();
    // Guesses that are too small by all tokens and by one, and a right one; the only rank's tokens
    // are all its own.
    let full = Normal { is_full: true, slots: 20, rounds: 3, places: 1, ..NORMAL };
    for guess in [0, 19, 20] {
        let one = Normal { guess: Some(guess), ranks: 1, ..full };
        one.run();
        Normal {
            scales: 5,
            is_cached: true,
            top_k: 1,
            local_experts: 1,
            by_expert: Some(4),
            ..one
        }
        .run();
    }
    // Ranks make calls in the same place one after the other, and all or some of them have guessed
    // wrong.
    for guess in [0, 12, 40] {
        let several = Normal { guess: Some(guess), ranks: 2, rounds: 12, slots: 20, ..full };
        Normal { is_cached: true, is_full: false, ..several }.run();
        let by_expert = Normal { by_expert: Some(4), zero_gaps: true, ..several };
        Normal { order: Order::ByChoice, rounds: 4, ..by_expert }.run();
    }
    // Parts of several tokens, and more blocks.
    let many = Normal { hidden: 8, slots: 1500, rounds: 1, blocks: 5, ..full };
    for guess in [100, 3000] {
        Normal { guess: Some(guess), ..many }.run();
    }
    // Where one launch does not do all of a call, nothing is guessed.
    let guessed = Normal { guess: Some(12), ..NORMAL };
    Normal { route: Route::ViaHost(2, Transport::Tcp), ..guessed }.run();
    Normal { lost: Some((1, Loss::Masked)), ranks: 3, ..guessed }.run();
}

#[test]
fn tokens_go_where_they_were_laid_out_without_their_choices() {
    emulator::load();
    let twice = Normal { has_layout: true, is_cached: true, ..NORMAL };
    // The second dispatch has the place of the first, and all are enqueued before any is waited
    // for.
    Normal { rounds: 6, places: 1, is_worst: true, ranks: 3, ..twice }.run();
    // More tokens than a block counts.
    let many = Normal { hidden: 8, slots: 600, is_full: true, rounds: 1, ..twice };
    Normal { ranks: 3, biases: 1, ..many }.run();
    Normal { by_expert: Some(8), order: Order::ByChoice, top_k: 4, blocks: 5, ..many }.run();
    // Rows are not sent in parts.
    Normal { route: Route::ViaHost(2, Transport::Tcp), ..twice }.run();
    Normal { lost: Some((1, Loss::Masked)), ranks: 3, ..twice }.run();
}

#[test]
fn more_ranks_than_a_warp_has_threads_make_the_bytes_of_the_cpu() {
    let _alone = ALONE.lock();
    emulator::load();
    let many = Normal { hidden: 8, slots: 2, ranks: 34, rounds: 1, blocks: 1, ..NORMAL };
    let by_choice = Normal { local_experts: 1, top_k: 31, order: Order::ByChoice, ..many };
    Normal { by_expert: Some(2), ..by_choice }.run();
    Normal { local_experts: 0, top_k: 0, has_weights: false, ..many }.run();
}

#[test]
fn a_rank_that_does_not_come_to_normal_mode_is_named() {
    emulator::load();
    NORMAL.names_the_rank_that_does_not_come();
}

#[test]
fn normal_mode_goes_on_without_a_rank_that_is_late_or_masked() {
    let _alone = ALONE.lock();
    emulator::load();
    NORMAL.goes_on_without_the_lost();
}

#[test]
fn a_fault_of_a_rank_in_normal_mode_is_named() {
    emulator::load();
    NORMAL.names_the_fault_of_a_rank("choice 1 of token 0 is no expert");
}

#[test]
fn a_host_that_is_interrupted_gives_up_its_call() {
    emulator::load();
    NORMAL.gives_up_when_interrupted();
}

#[test]
fn spoilt_tables_of_normal_mode_lead_to_no_other_memory() {
    emulator::load();
    NORMAL.reaches_no_more_when_spoilt();
}

/// All blocks of its launches take part: one sends and one takes.
const IN_CHUNKS: Normal = Normal { seed: 12, slots: 20, top_k: 3, scales: 40, biases: 1, ..NORMAL };

#[test]
fn chunks_of_normal_mode_are_taken_and_summed_when_their_flags_are_set() {
    emulator::load();
    IN_CHUNKS.waits_for_flags();
    Normal { order: Order::ByChoice, ..IN_CHUNKS }.waits_for_flags();
    Normal { by_expert: Some(4), ..IN_CHUNKS }.waits_for_flags();
}

#[test]
fn own_tokens_of_normal_mode_go_no_further_than_counts() {
    emulator::load();
    IN_CHUNKS.takes_no_more_of_its_own_than_counts();
}

#[test]
fn the_rank_of_a_missing_chunk_is_named_with_the_call() {
    emulator::load();
    IN_CHUNKS.names_the_rank_of_a_missing_chunk();
}

#[test]
fn flags_of_normal_mode_lead_no_further_than_counts() {
    emulator::load();
    IN_CHUNKS.goes_no_further_than_counts();
    Normal { by_expert: Some(4), ..IN_CHUNKS }.goes_no_further_than_counts();
}

#[test]
fn ranks_that_differ_in_normal_mode_are_told_the_difference() {
    emulator::load();
    NORMAL.names_the_difference_of_ranks();
}

const FAR: Case = Case { route: Route::ViaHost(2, Transport::Tcp), ..SMALL };

#[test]
fn a_gpu_with_far_peers_makes_the_bytes_of_the_cpu() {
    emulator::load();
    for (nodes, ranks, transport) in [
        (2, 2, Transport::Tcp),
        (2, 4, Transport::Tcp),
        (3, 3, Transport::Local),
        (1, 2, Transport::Tcp),
    ] {
        let format = if ranks == 4 { Format::Fp8(ScaleFormat::Exact) } else { Format::Bf16 };
        Case { ranks, format, route: Route::ViaHost(nodes, transport), ..FAR }.run();
    }
    // More rows than a warp has threads, and calls that take the places of others.
    Case { hidden: 8, slots: 70, local_experts: 40, top_k: 32, rounds: 1, ..FAR }.run();
    Case { hidden: 128, rounds: 12, places: 1, ..FAR }.run();
    Case { hidden: 640, format: Format::Nvfp4(84.0), is_packed: true, ..FAR }.run();
}

#[test]
fn normal_mode_of_far_ranks_makes_the_bytes_of_the_cpu() {
    emulator::load();
    for seed in 20..24 {
        let route = Route::ViaHost(2, Transport::Tcp);
        Normal { ranks: 4, ..Normal { route, ..NORMAL }.drawn(seed) }.run();
    }
    let far = Normal { route: Route::ViaHost(3, Transport::Local), ranks: 3, ..NORMAL };
    let by_expert = Normal { by_expert: Some(2), order: Order::ByChoice, top_k: 4, ..far };
    Normal { is_each: true, ..by_expert }.run();
    Normal { is_each: false, ..by_expert }.run();
    Normal { rounds: 12, places: 1, is_worst: true, is_cached: true, ..far }.run();
    Normal { hidden: 8, slots: 70, local_experts: 40, top_k: 32, rounds: 1, ..far }.run();
}

#[test]
fn ranks_with_fabric_handles_are_direct_on_several_nodes() {
    emulator::load();
    emulator::join_domain(1);
    Case { ranks: 3, route: Route::Fabric, ..SMALL }.run();
    Normal { ranks: 3, route: Route::Fabric, ..NORMAL }.run();
    Case { ranks: 3, hidden: 128, slots: 3, route: Route::Fabric, ..SMALL }.meets_anew();
}

#[test]
fn a_far_rank_that_goes_away_is_named_by_all_others() {
    emulator::load();
    let errors = Case { ranks: 3, route: Route::ViaHost(3, Transport::Tcp), ..SMALL }
        .loses_the_last(Duration::ZERO);
    assert!(errors[..2].iter().all(|errors| errors.contains("rank 2 ")), "{errors:?}");
}

#[test]
fn calls_go_on_without_a_far_rank_that_is_late_or_masked() {
    emulator::load();
    for lost in [Loss::Late, Loss::Masked] {
        Case { lost: Some((1, lost)), rounds: 6, places: 2, ..FAR }.run();
    }
}

#[test]
fn a_far_rank_that_does_not_come_is_named() {
    emulator::load();
    FAR.names_the_rank_that_does_not_come();
}

#[test]
fn launches_have_no_more_blocks_than_begin_together() {
    emulator::load();
    let blocks = emulator::MOST_TOGETHER + 2;
    Case { ranks: 1, blocks, slots: 9, ..SMALL }.run();
    Normal { ranks: 1, blocks, slots: 40, is_full: true, ..NORMAL }.run();
}

#[test]
fn a_weight_is_never_taken_for_a_count() {
    let calls = [0, 1, 13, 14, 2294, 1 << 20, 1 << 35, u64::MAX >> 24];
    for (call, weight) in
        calls.into_iter().flat_map(|call| [0.0, 0.0625, 1.0, -2.0].map(|weight| (call, weight)))
    {
        // No group makes so many calls.
        assert!(emulator::call_of_weight(call, weight) > 1 << 40, "call {call}, {weight}");
    }
}

/// Pops until the threads are done and the ring is empty, and tells the threads now and then.
fn popped_until_over(ring: &emulator::Ring, begin: u64, is_over: impl Fn() -> bool) -> Vec<u64> {
    let mut popped = Vec::new();
    loop {
        let was_over = is_over();
        let end = begin + popped.len() as u64;
        match ring.pop(end) {
            Some(command) => popped.push(command),
            None if was_over => break,
            None => {
                ring.tell(end);
                std::thread::yield_now();
            }
        }
    }
    ring.tell(begin + popped.len() as u64);
    popped
}

/// Checks the commands of `threads` threads, each of which made `each`, in the order of each
/// thread.
fn assert_all(popped: &[u64], threads: u64, each: u64) {
    for thread in 0..threads {
        let of_thread = popped.iter().filter(|command| *command >> 32 == thread);
        let of_thread = of_thread.map(|command| command & 0xffff_ffff);
        assert!(of_thread.eq((0..each).filter(|i| (thread + i) % 5 != 0)), "thread {thread}");
    }
}

#[test]
fn commands_of_many_warps_go_through_a_small_ring_each_once_and_in_order() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let ring = emulator::Ring::new(32, Duration::from_secs(20));
    let is_over = AtomicBool::new(false);
    let popped = std::thread::scope(|scope| {
        scope.spawn(|| {
            let state = ring.push((2, 64), 60);
            is_over.store(true, Ordering::Release);
            assert_eq!(state, 0);
        });
        popped_until_over(&ring, 0, || is_over.load(Ordering::Acquire))
    });
    assert_all(&popped, 128, 60);
}

#[test]
fn a_wrong_choice_is_named() {
    emulator::load();
    SMALL.names_a_wrong_choice();
    // More choices than blocks look at, which are routed first.
    Case { slots: 150, top_k: 32, local_experts: 20, hidden: 128, ..SMALL }.names_a_wrong_choice();
}

#[test]
fn more_choices_than_blocks_look_at_make_the_bytes_of_the_cpu() {
    emulator::load();
    let many = Case { slots: 500, top_k: 32, local_experts: 20, hidden: 8, rounds: 1, ..SMALL };
    assert!(many.least_choices() > 4096);
    many.run();
    // More records of two ranks than a block counts the rows of.
    let many = Case { slots: 1500, top_k: 4, hidden: 8, rounds: 1, ..SMALL };
    assert!(many.least_choices() > 4 * 700);
    many.run();
}

#[test]
fn ranks_of_a_node_that_do_not_reach_each_other_go_by_the_host_and_say_why() {
    emulator::load();
    SMALL.says_why_it_goes_by_the_host();
}

#[test]
fn a_push_without_room_gives_up_in_time_and_leaves_no_gap() {
    const OVERDUE: u32 = 1;
    const POISONED: u32 = 3;
    let ring = emulator::Ring::new(64, Duration::from_millis(200));
    assert_eq!(ring.push((1, 64), 10), OVERDUE);
    let ring = emulator::Ring::new(64, Duration::from_secs(60));
    ring.poison(true);
    assert_eq!(ring.push((1, 64), 10), POISONED);
    ring.poison(false);
    let first = popped_until_over(&ring, 0, || true);
    assert!((1..=64).contains(&first.len()), "{first:?}");
    // Later commands are right behind it.
    assert_eq!(ring.push((1, 32), 2), 0);
    let second = popped_until_over(&ring, first.len() as u64, || true);
    assert_all(&second, 32, 2);
}
