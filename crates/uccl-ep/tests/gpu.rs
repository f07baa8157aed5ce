//! Groups on one GPU, with all their ranks. Each kernel of a rank waits for the other ranks'
//! kernels, so each has few blocks.

#[path = "cuda/mod.rs"]
mod cuda;

use std::time::Duration;

use uccl_ep::{combine::Order, numerics::quantise::ScaleFormat};
use uccl_p2p::Transport;

use self::cuda::{Case, Format, Loss, Masks, Normal, Route, has_gpu};

const CASE: Case = Case {
    seed: 1,
    ranks: 2,
    local_experts: 4,
    top_k: 4,
    hidden: 1024,
    format: Format::Bf16,
    is_packed: false,
    slots: 32,
    rounds: 3,
    places: 4,
    blocks: 8,
    late: Duration::ZERO,
    lost: None,
    masks: None,
    route: Route::Direct,
};

const NORMAL: Normal = Normal {
    seed: 1,
    ranks: 2,
    local_experts: 4,
    top_k: 8,
    hidden: 7168,
    scales: 0,
    slots: 512,
    is_full: false,
    rounds: 3,
    places: 2,
    blocks: 8,
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

const KINDS: [Format; 5] = [
    Format::Bf16,
    Format::Fp8(ScaleFormat::Exact),
    Format::Fp8(ScaleFormat::PowerOfTwo),
    Format::Fp8(ScaleFormat::Exponent),
    Format::Nvfp4(84.0),
];

/// One test at a time has the GPU: kernels of different tests would wait for each other's memory
/// calls.
static GPU: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> Option<std::sync::MutexGuard<'static, ()>> {
    let guard = GPU.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    has_gpu().then_some(guard)
}

#[test]
fn one_rank_makes_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, format) in (0..).zip(KINDS) {
        Case { seed, ranks: 1, format, ..CASE }.run();
    }
}

#[test]
fn one_rank_with_rows_back_as_logfmt_makes_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    Case { ranks: 1, is_packed: true, ..CASE }.run();
}

#[test]
fn one_rank_makes_the_bytes_of_the_cpu_in_normal_mode() {
    let Some(_alone) = alone() else { return };
    let one = Normal { ranks: 1, slots: 32, hidden: 1024, ..NORMAL };
    Normal { biases: 2, is_cached: true, ..one }.run();
    Normal { scales: 8, is_worst: true, order: Order::ByChoice, ..one }.run();
}

#[test]
fn ranks_send_partial_sums() {
    let Some(_alone) = alone() else { return };
    // The first and the last rank send the weights of their tokens.
    Case { ranks: 3, top_k: 8, slots: 100, hidden: 7168, ..CASE }.run();
}

#[test]
fn two_and_four_ranks_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, format) in (0..).zip(KINDS) {
        for ranks in [2, 4] {
            Case { seed, ranks, format, ..CASE }.run();
        }
    }
}

#[test]
fn blocks_that_do_not_send_share_records() {
    let Some(_alone) = alone() else { return };
    // Two blocks for each record, beside the blocks that send.
    for (seed, format) in (0..).zip(KINDS) {
        Case { seed, format, slots: 4, hidden: 7168, blocks: 24, ..CASE }.run();
    }
}

#[test]
fn rows_of_every_width_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, hidden) in (10..).zip([128, 256, 640, 1536, 4096, 7168]) {
        for format in
            KINDS.into_iter().filter(|format| *format != Format::Fp8(ScaleFormat::Exponent))
        {
            Case { seed, hidden, format, slots: 128, rounds: 1, ..CASE }.run();
        }
    }
    let exponent = Format::Fp8(ScaleFormat::Exponent);
    Case { seed: 20, hidden: 7168, format: exponent, top_k: 8, slots: 128, rounds: 1, ..CASE }
        .run();
}

#[test]
fn rows_that_come_back_as_logfmt_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, hidden) in (60..).zip([128, 256, 640, 1536, 4096, 7168]) {
        for (ranks, format) in [1, 2, 4].into_iter().zip(KINDS) {
            Case { seed, ranks, hidden, format, is_packed: true, slots: 64, ..CASE }.run();
        }
    }
}

#[test]
fn nvfp4_with_any_global_scale_makes_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    let scales = [f32::MIN_POSITIVE, 1e-20, 0.001, 1.0, 3000.0, 1e20, f32::MAX];
    for (seed, global_scale) in (70..).zip(scales) {
        Case { seed, format: Format::Nvfp4(global_scale), slots: 100, ..CASE }.run();
    }
}

#[test]
fn many_experts_and_choices_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, top_k) in (30..).zip([1, 8, 31, 32]) {
        Case { seed, top_k, local_experts: 64, hidden: 128, slots: 100, ..CASE }.run();
    }
    Case { seed: 40, local_experts: 512, hidden: 128, top_k: 6, ranks: 4, ..CASE }.run();
}

#[test]
fn calls_take_the_places_of_calls_that_have_ended() {
    let Some(_alone) = alone() else { return };
    for places in [1, 2, 3] {
        Case { seed: 50, rounds: 40, places, ranks: 4, hidden: 256, ..CASE }.run();
    }
    let late = Duration::from_millis(100);
    Case { seed: 51, rounds: 4, places: 1, late, ..CASE }.run();
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_gpu_stays_usable() {
    let Some(_alone) = alone() else { return };
    let errors = CASE.names_the_rank_that_does_not_come();
    assert!(errors[1].is_empty(), "{errors:?}");
    CASE.run();
}

#[test]
fn calls_go_on_without_a_rank_that_is_late_or_masked() {
    let Some(_alone) = alone() else { return };
    for lost in [Loss::Late, Loss::Masked] {
        Case { lost: Some((1, lost)), rounds: 6, places: 2, ..CASE }.run();
        Case { lost: Some((0, lost)), ranks: 3, format: Format::Fp8(ScaleFormat::Exact), ..CASE }
            .run();
    }
}

/// A rank is left out for one to nine calls, and takes part again after each time.
const MASKS: Masks =
    Masks { rank: 1, calls: (1, 9), masks_late: false, is_between: false, behind: 5 };

#[test]
fn a_rank_that_was_left_out_takes_part_again() {
    let Some(_alone) = alone() else { return };
    let between = Masks { is_between: true, ..MASKS };
    for (seed, masks) in (90..).zip([MASKS, between, Masks { masks_late: true, ..between }]) {
        for ranks in [2, 3, 8] {
            let (masks, blocks) = (Some(masks), 8);
            Case { masks, seed, ranks, blocks, hidden: 512, slots: 16, ..CASE }.run();
            let few = Normal { slots: 32, hidden: 512, is_worst: true, blocks, ..NORMAL };
            Normal { masks, seed, ranks, ..few }.run();
            let by_choice = Normal { order: Order::ByChoice, is_cached: true, ..few };
            Normal { masks, seed, ranks, by_expert: Some(4), ..by_choice }.run();
        }
        let (masks, route) = (Some(masks), Route::ViaHost(2, Transport::Tcp));
        Case { masks, seed, route, hidden: 512, slots: 16, ranks: 4, ..CASE }.run();
        Normal { masks, seed, route, hidden: 512, slots: 32, ranks: 4, ..NORMAL }.run();
        Case { masks, seed, hidden: 512, slots: 16, is_packed: true, ..CASE }.run();
    }
}

#[test]
fn ranks_that_differ_are_told_the_difference() {
    let Some(_alone) = alone() else { return };
    let errors = CASE.fails(Duration::from_secs(5), |me| Some(Case { top_k: 1 + me, ..CASE }));
    let errors = errors.join(" / ");
    let is_named = ["rank 1 has top-k 2, this rank 1", "rank 0 has top-k 1, this rank 2"];
    assert!(is_named.iter().any(|said| errors.contains(said)), "{errors}");
}

#[test]
fn normal_mode_makes_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for ranks in [1, 2, 4] {
        for is_worst in [false, true] {
            Normal { ranks, is_worst, ..NORMAL }.run();
        }
    }
    Normal { hidden: 7168, scales: 56, biases: 2, is_cached: true, ..NORMAL }.run();
    Normal {
        rounds: 40,
        places: 1,
        slots: 32,
        is_worst: true,
        is_cached: true,
        ranks: 4,
        ..NORMAL
    }
    .run();
    let many = Normal { slots: 4096, hidden: 512, rounds: 1, local_experts: 64, ..NORMAL };
    many.run();
    Normal { hidden: 64, by_expert: Some(128), order: Order::ByChoice, ..many }.run();
    for by_expert in [None, Some(128)] {
        Normal { hidden: 64, has_layout: true, is_cached: true, by_expert, ..many }.run();
    }
    for seed in 0..50 {
        Normal { slots: 120, rounds: 6, ..NORMAL }.drawn(seed).run();
    }
}

#[test]
fn zero_copy_rows_are_there_until_the_next_call() {
    let Some(_alone) = alone() else { return };
    let zero_copy =
        Normal { zero_copy: true, is_worst: true, is_cached: true, slots: 96, ..NORMAL };
    for ranks in [1, 2, 4] {
        Normal { ranks, rounds: 6, places: 1, ..zero_copy }.run();
    }
    Normal { scales: 56, has_layout: true, order: Order::ByChoice, ..zero_copy }.run();
    Normal { slots: 4096, hidden: 512, rounds: 1, ..zero_copy }.run();
}

#[test]
fn rows_by_expert_are_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    // Rows are for the worst case, and a test mostly fills and compares them: few rounds, few
    // tokens.
    let by_expert = Normal { by_expert: Some(64), order: Order::ByChoice, biases: 1, ..NORMAL };
    let by_expert = Normal { slots: 96, rounds: 1, ..by_expert };
    for ranks in [1, 2, 4] {
        for is_worst in [false, true] {
            Normal { ranks, is_worst, zero_gaps: is_worst, ..by_expert }.run();
        }
    }
    Normal { scales: 56, is_cached: true, zero_gaps: true, ..by_expert }.run();
    Normal { is_each: true, is_cached: true, ranks: 4, ..by_expert }.run();
    let small = Normal { by_expert: Some(16), slots: 32, hidden: 512, is_worst: true, ..by_expert };
    Normal { rounds: 40, places: 1, is_cached: true, ranks: 4, ..small }.run();
    Normal { local_experts: 512, hidden: 64, ranks: 4, ..small }.run();
}

#[test]
fn a_rank_that_does_not_come_to_normal_mode_is_named() {
    let Some(_alone) = alone() else { return };
    Normal { slots: 32, ..NORMAL }.names_the_rank_that_does_not_come();
}

#[test]
fn normal_mode_goes_on_without_a_rank_that_is_late_or_masked() {
    let Some(_alone) = alone() else { return };
    NORMAL.goes_on_without_the_lost();
}

#[test]
fn a_fault_of_a_rank_in_normal_mode_is_named() {
    let Some(_alone) = alone() else { return };
    // The error may name either of the two choices.
    NORMAL.names_the_fault_of_a_rank("of token 0 is no expert");
}

#[test]
fn a_host_that_is_interrupted_gives_up_its_call() {
    let Some(_alone) = alone() else { return };
    NORMAL.gives_up_when_interrupted();
}

#[test]
fn spoilt_tables_of_normal_mode_lead_to_no_other_memory() {
    let Some(_alone) = alone() else { return };
    NORMAL.reaches_no_more_when_spoilt();
}

#[test]
fn ranks_that_differ_in_normal_mode_are_told_the_difference() {
    let Some(_alone) = alone() else { return };
    NORMAL.names_the_difference_of_ranks();
}

/// Ranks, their nodes, and the transport between these.
const BY_HOST: [(usize, usize, Transport); 5] = [
    (2, 1, Transport::Tcp),
    (2, 2, Transport::Tcp),
    (4, 4, Transport::Tcp),
    (4, 2, Transport::Tcp),
    (4, 2, Transport::Local),
];

#[test]
fn ranks_that_reach_each_other_by_the_host_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, (ranks, nodes, transport)) in (60..).zip(BY_HOST) {
        for format in [Format::Bf16, Format::Fp8(ScaleFormat::Exact)] {
            let route = Route::ViaHost(nodes, transport);
            Case { seed, ranks, format, route, ..CASE }.run();
            Case { seed, ranks, format, route, hidden: 7168, top_k: 8, slots: 128, ..CASE }.run();
        }
    }
    let far = Case { route: Route::ViaHost(2, Transport::Tcp), ..CASE };
    Case { top_k: 32, local_experts: 64, hidden: 128, slots: 100, ..far }.run();
    for places in [1, 2] {
        Case { rounds: 40, places, ranks: 4, hidden: 256, ..far }.run();
    }
}

#[test]
fn normal_mode_by_the_host_makes_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    for (seed, (ranks, nodes, transport)) in (70..).zip(BY_HOST) {
        let route = Route::ViaHost(nodes, transport);
        Normal { seed, ranks, route, is_worst: true, ..NORMAL }.run();
        for seed in 0..5 {
            Normal { ranks, ..Normal { slots: 200, route, ..NORMAL }.drawn(seed) }.run();
        }
    }
    let far = Normal { route: Route::ViaHost(2, Transport::Tcp), ranks: 4, ..NORMAL };
    let by_expert = Normal { by_expert: Some(16), order: Order::ByChoice, ..far };
    for is_each in [false, true] {
        Normal { is_each, ..by_expert }.run();
    }
    Normal { rounds: 40, places: 1, slots: 32, is_worst: true, is_cached: true, ..far }.run();
}

#[test]
fn a_far_rank_that_does_not_come_is_named_and_the_gpu_stays_usable() {
    let Some(_alone) = alone() else { return };
    let far = Case { route: Route::ViaHost(2, Transport::Tcp), ..CASE };
    far.names_the_rank_that_does_not_come();
    far.run();
}

#[test]
fn a_far_rank_that_goes_away_is_named_by_all_others_and_the_gpu_stays_usable() {
    let Some(_alone) = alone() else { return };
    let far = Case { ranks: 3, route: Route::ViaHost(3, Transport::Tcp), ..CASE };
    let errors = far.loses_the_last(Duration::from_secs(1));
    assert!(errors[..2].iter().all(|errors| errors.contains("rank 2 ")), "{errors:?}");
    far.run();
}

#[test]
fn calls_go_on_without_a_far_rank_that_is_late_or_masked() {
    let Some(_alone) = alone() else { return };
    for lost in [Loss::Late, Loss::Masked] {
        let route = Route::ViaHost(2, Transport::Tcp);
        Case { lost: Some((1, lost)), rounds: 6, places: 2, route, ..CASE }.run();
    }
    Normal { route: Route::ViaHost(3, Transport::Tcp), ..NORMAL }.goes_on_without_the_lost();
}

#[test]
fn a_wrong_choice_is_named() {
    let Some(_alone) = alone() else { return };
    CASE.names_a_wrong_choice();
    // More choices than blocks look at, which are routed first.
    Case { slots: 150, top_k: 32, local_experts: 20, hidden: 128, ..CASE }.names_a_wrong_choice();
}

#[test]
fn more_choices_than_blocks_look_at_make_the_bytes_of_the_cpu() {
    let Some(_alone) = alone() else { return };
    let many = Case { slots: 500, top_k: 32, local_experts: 20, hidden: 128, rounds: 1, ..CASE };
    assert!(many.least_choices() > 4096);
    many.run();
}

#[test]
fn ranks_of_a_node_that_do_not_reach_each_other_go_by_the_host_and_say_why() {
    let Some(_alone) = alone() else { return };
    CASE.says_why_it_goes_by_the_host();
}

#[test]
#[ignore = "measures, and asserts nothing"]
fn how_long_calls_take() {
    let Some(_alone) = alone() else { return };
    let large = Case { hidden: 7168, top_k: 8, slots: 128, local_experts: 32, ..CASE };
    for ranks in [1, 2, 4] {
        for format in [Format::Bf16, Format::Fp8(ScaleFormat::Exact), Format::Nvfp4(84.0)] {
            for blocks in [4, 8, 16, 32] {
                let (took, _) = Case { ranks, format, blocks, ..large }.time(100);
                println!(
                    "{ranks} ranks, {format:?}, {blocks} blocks: {took:?} a dispatch and combine"
                );
            }
        }
    }
}

/// The time of the same kernels without windows of the host, with them, and with proxies.
#[test]
#[ignore = "measures, and asserts nothing"]
fn how_long_calls_take_by_the_host() {
    let Some(_alone) = alone() else { return };
    let large = Case { hidden: 7168, top_k: 8, slots: 128, local_experts: 32, blocks: 16, ..CASE };
    for ranks in [2, 4] {
        for format in [Format::Bf16, Format::Fp8(ScaleFormat::Exact)] {
            for route in [
                Route::Direct,
                Route::ViaHost(1, Transport::Tcp),
                Route::ViaHost(2, Transport::Tcp),
                Route::ViaHost(2, Transport::Local),
                Route::ViaHost(ranks, Transport::Tcp),
                Route::ViaHost(ranks, Transport::Local),
            ] {
                let (took, proxy) = Case { ranks, format, route, ..large }.time(30);
                println!("{ranks} ranks, {format:?}, {route:?}: {took:?} a dispatch and combine");
                if let Some(uccl_ep::ProxyStats { commands, writes, working, under_way, .. }) =
                    proxy
                {
                    println!(
                        "    the proxy: {commands} commands, {writes} writes, {working:?} at work, {under_way:?} with writes under way"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "measures, and asserts nothing"]
fn how_long_layouts_of_normal_mode_take() {
    let Some(_alone) = alone() else { return };
    for slots in [128, 1024, 4096, 16384] {
        let case =
            Normal { ranks: 1, local_experts: 256, hidden: 8, slots, is_full: true, ..NORMAL };
        case.time_layout(20);
        println!("{slots} tokens: {:?} a layout", case.time_layout(200));
    }
}

#[test]
#[ignore = "measures, and asserts nothing"]
fn how_long_calls_of_normal_mode_take() {
    let Some(_alone) = alone() else { return };
    let large = Normal { slots: 4096, local_experts: 64, is_full: true, is_worst: true, ..NORMAL };
    for ranks in [1, 2, 4] {
        for blocks in [8, 16, 32] {
            let (took, rows) = Normal { ranks, blocks, ..large }.time(20);
            println!(
                "{ranks} ranks, {blocks} blocks: {took:?} a dispatch and combine, {rows} rows of 14336 bytes each way"
            );
        }
    }
    // With few experts, as memory is for the worst case.
    let by_expert = Normal { local_experts: 4, by_expert: Some(128), ..large };
    for ranks in [1, 2] {
        for blocks in [8, 16, 32] {
            let (took, tokens) = Normal { ranks, blocks, ..by_expert }.time(20);
            println!(
                "{ranks} ranks, {blocks} blocks, by expert: {took:?} a dispatch and combine, {tokens} tokens of 14336 bytes each way"
            );
        }
    }
}
