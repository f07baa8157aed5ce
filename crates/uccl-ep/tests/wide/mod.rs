//! Groups with more ranks than a word has bits.

use super::*;

/// Ranks with numbers above 63, and fewer than a whole part of a set.
const WIDE: Case = Case {
    ranks: 66,
    local_experts: 1,
    top_k: 4,
    hidden: 8,
    slots: 2,
    rounds: 1,
    places: 2,
    blocks: 1,
    ..SMALL
};

const WIDE_NORMAL: Normal = Normal {
    ranks: 66,
    local_experts: 1,
    top_k: 4,
    hidden: 8,
    slots: 2,
    rounds: 1,
    blocks: 1,
    ..NORMAL
};

const WIDE_BY_EXPERT: Normal = Normal { by_expert: Some(2), order: Order::ByChoice, ..WIDE_NORMAL };

/// Whether tests that keep two processors busy for minutes run.
fn are_slow_wanted() -> bool {
    let are_wanted = std::env::var_os("UCCL_TEST_SLOW").is_some_and(|value| value == "1");
    if !are_wanted {
        eprintln!("skipped: lacks UCCL_TEST_SLOW=1: a GPU of 66 and of 130 ranks for minutes");
    }
    are_wanted
}

#[test]
fn low_latency_mode_of_many_ranks_makes_the_bytes_of_the_cpu() {
    let _alone = ALONE.lock();
    emulator::load();
    WIDE.run();
    // Sets of three words, and more experts of a rank than one.
    let format = Format::Fp8(ScaleFormat::Exact);
    Case { ranks: 130, local_experts: 2, hidden: 128, is_packed: true, format, ..WIDE }.run();
}

#[test]
fn normal_mode_of_many_ranks_makes_the_bytes_of_the_cpu() {
    let _alone = ALONE.lock();
    emulator::load();
    // Two segments of tokens of a rank.
    Normal { slots: 70, hidden: 16, scales: 3, biases: 1, ..WIDE_NORMAL }.run();
    Normal { is_each: true, has_layout: true, ..WIDE_BY_EXPERT }.run();
    // A token goes to more ranks than a warp has lanes.
    Normal { local_experts: 0, top_k: 0, has_weights: false, ..WIDE_NORMAL }.run();
}

#[test]
fn sets_of_three_words_serve_normal_mode_and_rounds() {
    if !are_slow_wanted() {
        return;
    }
    let _alone = ALONE.lock();
    emulator::load();
    Normal { ranks: 130, is_worst: true, is_cached: true, ..WIDE_BY_EXPERT }.run();
    Rounds { tokens: &FEW, blocks: 1, by_expert: Some(4), ..ROUNDS }.run();
}

#[test]
fn many_ranks_reach_each_other_and_a_far_one_by_the_host() {
    if !are_slow_wanted() {
        return;
    }
    let _alone = ALONE.lock();
    emulator::load();
    let route = Route::LastApart(Transport::Tcp);
    Case { route, ..WIDE }.run();
    Normal { route, ..WIDE_NORMAL }.run();
}

#[test]
fn a_rank_with_a_high_number_is_left_out_and_takes_part_again() {
    let _alone = ALONE.lock();
    emulator::load();
    let masks = Some(Masks { rank: 65, calls: (2, 2), behind: 1, ..MASKS });
    Case { masks, ..WIDE }.run();
    Normal { masks, is_worst: true, ..WIDE_NORMAL }.run();
    Case { lost: Some((64, Loss::Masked)), ..WIDE }.run();
}

#[test]
fn a_group_of_many_meets_anew_without_a_rank_and_with_another() {
    let _alone = ALONE.lock();
    emulator::load();
    WIDE.meets_anew();
}

/// One rank has more tokens than there is room for.
static FEW: [usize; 66] = {
    let mut tokens = [1; 66];
    tokens[65] = 5;
    tokens
};

#[test]
fn many_ranks_go_in_rounds() {
    let _alone = ALONE.lock();
    emulator::load();
    Rounds { tokens: &FEW, blocks: 1, is_bounded: true, ..ROUNDS }.run();
}

#[test]
fn a_group_of_too_many_ranks_is_told_the_limit() {
    emulator::load();
    let ranks = uccl_ep::MAX_RANKS + 1;
    let config = uccl_ep::cuda::Config {
        rank: 0,
        ranks,
        pool: 1,
        timeout: Duration::from_secs(1),
        masks_late: false,
        device: 0,
        blocks: 1,
        is_alone: true,
        reach: uccl_ep::cuda::Reach::Direct,
        node: None,
        network: None,
    };
    let mut exchange = |mine: Vec<u8>| Ok(vec![Some(mine)]);
    let why = uccl_ep::cuda::Group::join(config, &mut exchange).err().map(|e| e.to_string());
    assert!(why.as_ref().is_some_and(|why| why.contains("a group has up to 512")), "{why:?}");
}
