//! Plans of random shardings, carried out on bytes.

use proptest::prelude::*;
use uccl_shards::plan::{
    FanOut, Options, Peer, Plan, PlanError,
    area::Area,
    layout::{Layout, Place, Seat, Slice, Tensor},
    plan,
};

/// Random numbers of a seed.
struct Draws(fastrand::Rng);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0.usize(0..limit.max(1))
    }
}

#[derive(Debug)]
struct Case {
    tensors: Vec<Tensor>,
    sources: Vec<Layout>,
    targets: Vec<Layout>,
    options: Options,
}

fn whole(shape: &[u64]) -> Area {
    Area { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
}

/// Cuts an area at random places along random dimensions.
fn scatter(area: Area, cuts: usize, draws: &mut Draws) -> Vec<Area> {
    let mut parts = vec![area];
    for _ in 0..cuts {
        let part = parts.swap_remove(draws.below(parts.len()));
        let dims = part.sizes.len();
        let dim = draws.below(dims);
        if dims == 0 || part.sizes[dim] < 2 {
            parts.push(part);
            continue;
        }
        let at = 1 + draws.below(part.sizes[dim] as usize - 1) as u64;
        let (mut low, mut high) = (part.clone(), part);
        low.sizes[dim] = at;
        high.offsets[dim] += at;
        high.sizes[dim] -= at;
        parts.extend([low, high]);
    }
    parts
}

/// Adds a slice behind the others, after a gap, or in a buffer of its own.
fn add(layout: &mut Layout, tensors: &[Tensor], tensor: usize, area: &Area, draws: &mut Draws) {
    let len = area.elements().expect("small") * tensors[tensor].element_bytes;
    if layout.buffers.is_empty() || draws.below(3) == 0 {
        layout.buffers.push(0);
    }
    let buffer = layout.buffers.len() - 1;
    let offset = layout.buffers[buffer] + [0, 0, 3][draws.below(3)];
    layout.buffers[buffer] = offset + len;
    layout.slices.push(Slice { tensor, area: area.clone(), place: Place { buffer, offset } });
}

fn case(draws: &mut Draws) -> Case {
    let tensors: Vec<Tensor> = (0..1 + draws.below(4))
        .map(|i| Tensor {
            name: format!("t{i}"),
            shape: (0..draws.below(4)).map(|_| 1 + draws.below(7) as u64).collect(),
            element_bytes: 1 + draws.below(4) as u64,
        })
        .collect();
    let mut sources = vec![Layout::default(); 1 + draws.below(4)];
    let mut targets = vec![Layout::default(); 1 + draws.below(5)];
    let same = draws.below(2) == 0;
    for layout in sources.iter_mut().chain(&mut targets) {
        let host = (draws.below(3) > 0).then(|| format!("host {}", draws.below(3)));
        layout.seat = Seat { host, lanes: draws.below(3) as u32 };
    }
    for (index, tensor) in tensors.iter().enumerate() {
        for part in scatter(whole(&tensor.shape), draws.below(4), draws) {
            let first = draws.below(sources.len());
            for (rank, source) in sources.iter_mut().enumerate() {
                if rank == first || draws.below(3) == 0 {
                    add(source, &tensors, index, &part, draws);
                }
            }
        }
        let parts = scatter(whole(&tensor.shape), draws.below(4), draws);
        for target in &mut targets {
            let own = scatter(whole(&tensor.shape), draws.below(4), draws);
            for part in if same { &parts } else { &own } {
                // Some are wanted twice.
                for _ in 0..[0, 1, 1, 1, 1, 2][draws.below(6)] {
                    add(target, &tensors, index, part, draws);
                }
            }
        }
    }
    let options = Options {
        fan_out: [FanOut::Automatic, FanOut::AtMost(draws.below(4))][draws.below(2)],
        waves: 1 + draws.below(4),
        cut_bytes: 1 + draws.below(200) as u64,
    };
    Case { tensors, sources, targets, options }
}

/// Byte `byte` of the element at `index`.
fn value(tensor: usize, index: &[u64], byte: u64) -> u8 {
    let position = index.iter().fold(tensor as u64 + 1, |sum, i| sum * 31 + i);
    (position * 7 + byte) as u8 | 1
}

/// Calls `act` with each byte of a slice: its buffer, its offset there, and its value.
fn bytes(tensors: &[Tensor], slice: &Slice, mut act: impl FnMut(usize, usize, u8)) {
    let Area { offsets, sizes } = &slice.area;
    let element_bytes = tensors[slice.tensor].element_bytes;
    for element in 0..slice.area.elements().expect("small") {
        let (mut rest, mut index) = (element, offsets.clone());
        for dim in (0..sizes.len()).rev() {
            index[dim] += rest % sizes[dim];
            rest /= sizes[dim];
        }
        for byte in 0..element_bytes {
            let at = slice.place.offset + element * element_bytes + byte;
            act(slice.place.buffer, at as usize, value(slice.tensor, &index, byte));
        }
    }
}

type Memory = Vec<Vec<u8>>;

fn empty(layout: &Layout) -> Memory {
    layout.buffers.iter().map(|len| vec![0; *len as usize]).collect()
}

fn full(tensors: &[Tensor], layout: &Layout) -> Memory {
    let mut memory = empty(layout);
    for slice in &layout.slices {
        bytes(tensors, slice, |buffer, at, value| memory[buffer][at] = value);
    }
    memory
}

/// Runs a plan, each step with the targets' bytes of the end of the step before. Every byte may be
/// written once.
fn run(case: &Case, plan: &Plan) -> Vec<Memory> {
    let sources: Vec<Memory> = case.sources.iter().map(|s| full(&case.tensors, s)).collect();
    let mut targets: Vec<Memory> = case.targets.iter().map(empty).collect();
    let steps = plan.targets.iter().map(|target| target.steps.len()).max().unwrap_or(0);
    for step in 0..steps {
        let before = targets.clone();
        for (target, plan) in targets.iter_mut().zip(&plan.targets) {
            for read in plan.steps.get(step).into_iter().flat_map(|step| &step.reads) {
                let from = match read.from {
                    Peer::Source(rank) => &sources[rank],
                    Peer::Target(rank) => &before[rank],
                };
                for piece in &read.pieces {
                    let from =
                        &from[piece.from_buffer][piece.from as usize..][..piece.len as usize];
                    assert!(from.iter().all(|byte| *byte != 0), "the source has these bytes");
                    let to = &mut target[piece.to_buffer][piece.to as usize..][..from.len()];
                    assert!(to.iter().all(|byte| *byte == 0), "a byte is read once");
                    to.copy_from_slice(from);
                }
            }
        }
    }
    targets
}

fn shortest(plan: &Plan) {
    for read in plan.targets.iter().flat_map(|t| t.steps.iter().flat_map(|s| &s.reads)) {
        assert!(!read.pieces.is_empty());
        for pair in read.pieces.windows(2) {
            let touch = pair[0].to_buffer == pair[1].to_buffer
                && pair[0].from_buffer == pair[1].from_buffer
                && pair[0].to + pair[0].len == pair[1].to
                && pair[0].from + pair[0].len == pair[1].from;
            assert!(!touch, "pieces that touch at both ends are one");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_of_each_target_comes_once_from_a_right_place(seed in any::<u64>()) {
        let case = case(&mut Draws(fastrand::Rng::with_seed(seed)));
        let Case { tensors, sources, targets, options } = &case;
        let plan = plan(tensors, sources, targets, options).expect("all elements have a source");
        let seen = run(&case, &plan);
        for (target, seen) in targets.iter().zip(&seen) {
            prop_assert_eq!(seen, &full(tensors, target));
        }
        shortest(&plan);
        if options.fan_out == FanOut::AtMost(0) {
            let mut reads = plan.targets.iter().flat_map(|target| target.pieces());
            prop_assert!(reads.all(|(from, _)| matches!(from, Peer::Source(_))));
        }
    }
}

/// `count` ranks that all have the whole of one tensor of bytes.
fn replicas(count: usize, len: u64) -> Vec<Layout> {
    let place = Place { buffer: 0, offset: 0 };
    let slice = Slice { tensor: 0, area: whole(&[len]), place };
    vec![Layout { buffers: vec![len], slices: vec![slice], seat: Seat::default() }; count]
}

fn one(len: u64) -> Vec<Tensor> {
    vec![Tensor { name: "weights".into(), shape: vec![len], element_bytes: 1 }]
}

fn sent_by(plan: &Plan, peer: Peer) -> u64 {
    let pieces = plan.targets.iter().flat_map(|target| target.pieces());
    pieces.filter(|(from, _)| *from == peer).map(|(_, piece)| piece.len).sum()
}

const LEN: u64 = 64 << 20;

#[test]
fn replicas_send_equal_shares() {
    let plan = plan(&one(LEN), &replicas(4, LEN), &replicas(1, LEN), &Options::default());
    let plan = plan.expect("a plan");
    for source in 0..4 {
        assert_eq!(sent_by(&plan, Peer::Source(source)), LEN / 4);
    }
    assert_eq!(plan.targets[0].steps.len(), 1, "nothing waits for anything");
}

#[test]
fn a_source_with_many_readers_sends_each_byte_once() {
    let readers = 8;
    let plan = plan(&one(LEN), &replicas(1, LEN), &replicas(readers, LEN), &Options::default());
    let plan = plan.expect("a plan");
    assert_eq!(sent_by(&plan, Peer::Source(0)), LEN);
    let shares: Vec<u64> = (0..readers).map(|i| sent_by(&plan, Peer::Target(i))).collect();
    let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
    assert_eq!(shares.iter().sum::<u64>(), LEN * (readers as u64 - 1));
    assert!(most - least <= LEN / 4, "readers send about the same: {shares:?}");
}

#[test]
fn a_reader_is_a_source_for_at_most_the_fan_out() {
    let options = Options { fan_out: FanOut::AtMost(2), waves: 1, cut_bytes: LEN };
    let plan = plan(&one(1000), &replicas(1, 1000), &replicas(9, 1000), &options).expect("a plan");
    for target in 0..9 {
        assert!(sent_by(&plan, Peer::Target(target)) <= 2000);
    }
    let levels = plan.targets.iter().map(|target| target.steps.len()).max();
    assert_eq!(levels, Some(4), "1 + 2 + 4 + 2 readers");
}

/// Ranks on hosts of these numbers.
fn on_hosts(mut ranks: Vec<Layout>, hosts: &[usize], lanes: u32) -> Vec<Layout> {
    for (rank, host) in ranks.iter_mut().zip(hosts) {
        rank.seat = Seat { host: Some(format!("host {host}")), lanes };
    }
    ranks
}

fn bytes_between(plan: &Plan, is_wanted: impl Fn(Peer, usize) -> bool) -> u64 {
    let of = |(index, target): (usize, &uccl_shards::TargetPlan)| {
        let pieces = target.pieces().filter(|(from, _)| is_wanted(*from, index));
        pieces.map(|(_, piece)| piece.len).sum::<u64>()
    };
    plan.targets.iter().enumerate().map(of).sum()
}

#[test]
fn readers_on_the_sources_host_all_read_from_it() {
    let (sources, targets) = (replicas(1, LEN), replicas(3, LEN));
    let sources = on_hosts(sources, &[0], 1);
    let targets = on_hosts(targets, &[0, 0, 0], 1);
    let plan = plan(&one(LEN), &sources, &targets, &Options::default()).expect("a plan");
    assert_eq!(sent_by(&plan, Peer::Source(0)), 3 * LEN);
    assert!(plan.targets.iter().all(|target| target.steps.len() == 1), "nothing waits");
}

#[test]
fn a_host_receives_each_byte_once_and_its_readers_take_turns() {
    let hosts = [1, 1, 1, 1, 2, 2, 2, 2];
    let sources = on_hosts(replicas(1, LEN), &[0], 1);
    let targets = on_hosts(replicas(8, LEN), &hosts, 1);
    let plan = plan(&one(LEN), &sources, &targets, &Options::default()).expect("a plan");
    let host_of = |peer: Peer| match peer {
        Peer::Source(_) => 0,
        Peer::Target(rank) => hosts[rank],
    };
    assert_eq!(sent_by(&plan, Peer::Source(0)), LEN, "a source sends each byte once");
    for host in [1, 2] {
        let comes = |from: Peer, to: usize| hosts[to] == host && host_of(from) != host;
        assert_eq!(bytes_between(&plan, comes), LEN);
    }
    for (reader, own) in hosts.iter().enumerate() {
        let over_network = |from: Peer, to: usize| to == reader && host_of(from) != *own;
        let share = bytes_between(&plan, over_network);
        assert!(share.abs_diff(LEN / 4) <= LEN / 16, "reader {reader} reads {share} bytes");
    }
}

#[test]
fn sources_that_can_send_to_all_hosts_at_once_need_no_tree() {
    let (sources, targets) = (replicas(1, LEN), replicas(4, LEN));
    let targets = on_hosts(targets, &[1, 1, 2, 2], 1);
    for (lanes, sent) in [(1, LEN), (2, 2 * LEN)] {
        let sources = on_hosts(sources.clone(), &[0], lanes);
        let plan = plan(&one(LEN), &sources, &targets, &Options::default()).expect("a plan");
        assert_eq!(sent_by(&plan, Peer::Source(0)), sent, "{lanes} lanes");
    }
}

#[test]
fn ranks_that_claim_too_much_are_refused() {
    let huge = 1 << 61;
    let tensors = [Tensor { name: "w".into(), shape: vec![huge, 4], element_bytes: 1 }];
    let columns = |first: u64| {
        let area = Area { offsets: vec![0, first], sizes: vec![huge, 2] };
        let slice = Slice { tensor: 0, area, place: Place { buffer: 0, offset: 0 } };
        Layout { buffers: vec![u64::MAX], slices: vec![slice], seat: Seat::default() }
    };
    let whole = Area { offsets: vec![0, 0], sizes: vec![huge, 4] };
    let place = Place { buffer: 0, offset: 0 };
    let slice = Slice { tensor: 0, area: whole, place };
    let seat = Seat::default();
    let whole = Layout { buffers: vec![u64::MAX], slices: vec![slice], seat };
    for (source, count) in [(whole.clone(), 1), (whole, 2)] {
        let sources = vec![source; count];
        let refused = plan(&tensors, &sources, &[columns(0), columns(2)], &Options::default());
        assert!(matches!(refused, Err(PlanError::TooManyParts { .. })), "{refused:?}");
    }
}

#[test]
fn refusals_name_rank_and_tensor() {
    let tensors = one(10);
    let half = |at: u64| {
        let area = Area { offsets: vec![at], sizes: vec![5] };
        let slice = Slice { tensor: 0, area, place: Place { buffer: 0, offset: 0 } };
        Layout { buffers: vec![5], slices: vec![slice], seat: Seat::default() }
    };
    let of = |source: Layout, target: Layout| {
        plan(&tensors, &[source], &[target], &Options::default()).expect_err("refused")
    };
    let missing = of(half(0), half(5));
    assert_eq!(
        missing.to_string(),
        "no source has [5] elements of weights at [5], which target 0 needs"
    );
    assert!(matches!(of(half(6), half(0)), PlanError::Outside { .. }));
    let short = Layout { buffers: vec![4], ..half(0) };
    assert!(matches!(of(half(0), short), PlanError::Outside { .. }));
    let mut none = tensors.clone();
    none[0].element_bytes = 0;
    let none = plan(&none, &[half(0)], &[half(0)], &Options::default());
    assert!(matches!(none, Err(PlanError::Outside { .. })), "elements of no bytes");
    let mut twice = half(0);
    twice.slices.extend(half(0).slices);
    assert!(matches!(of(half(0), twice), PlanError::Overlap { .. }));
}
