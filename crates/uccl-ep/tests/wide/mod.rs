//! Groups with more ranks than a word has bits.

use super::*;

/// Ranks with numbers above 63, and fewer than a whole part of a set.
const WIDE: Case = Case {
    ranks: 70,
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
    ranks: 70,
    local_experts: 1,
    top_k: 4,
    hidden: 8,
    slots: 2,
    rounds: 1,
    blocks: 1,
    ..NORMAL
};

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
    Normal { slots: 70, hidden: 16, scales: 3, ranks: 66, biases: 1, ..WIDE_NORMAL }.run();
    let by_expert = Normal { by_expert: Some(2), order: Order::ByChoice, ..WIDE_NORMAL };
    Normal { ranks: 130, is_worst: true, is_cached: true, ..by_expert }.run();
    Normal { is_each: true, has_layout: true, ..by_expert }.run();
    // A token goes to more ranks than a warp has lanes.
    Normal { local_experts: 0, top_k: 0, has_weights: false, ..WIDE_NORMAL }.run();
}

#[test]
fn a_rank_with_a_high_number_is_left_out_and_takes_part_again() {
    let _alone = ALONE.lock();
    emulator::load();
    let masks = Some(Masks { rank: 67, calls: (2, 2), behind: 1, ..MASKS });
    Case { masks, ..WIDE }.run();
    Normal { masks, is_worst: true, ..WIDE_NORMAL }.run();
    Case { lost: Some((65, Loss::Masked)), ..WIDE }.run();
}

#[test]
fn a_group_of_many_meets_anew_without_a_rank_and_with_another() {
    let _alone = ALONE.lock();
    emulator::load();
    Case { ranks: 66, ..WIDE }.meets_anew();
}

#[test]
fn many_ranks_reach_each_other_and_a_far_one_by_the_host() {
    let _alone = ALONE.lock();
    emulator::load();
    let route = Route::LastApart(Transport::Tcp);
    Case { ranks: 66, route, ..WIDE }.run();
    Normal { ranks: 66, route, ..WIDE_NORMAL }.run();
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
    for by_expert in [None, Some(4)] {
        Rounds { tokens: &FEW, blocks: 1, is_bounded: by_expert.is_none(), by_expert, ..ROUNDS }
            .run();
    }
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
