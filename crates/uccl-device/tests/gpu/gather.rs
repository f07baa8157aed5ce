//! The copy kernels, byte by byte.

use uccl_device::cuda::{
    Context, DeviceBuffer, GpuError, Gpus, PinnedBuffer, Stream,
    gather::{Completion, LaunchOptions, Launcher, LauncherConfig, Piece, Tables, WordChange},
};

use crate::support::{Peer, assert_same, buffer, download, gpus, pattern, peers, stream, upload};

/// The byte that fills a destination before.
const POISON: u8 = 0xa5;

/// Memory in one of the places that a kernel reaches.
enum Memory {
    Device(DeviceBuffer),
    Pinned(Box<PinnedBuffer>),
}

impl Memory {
    fn device(context: &'static Context, bytes: &[u8]) -> Self {
        Self::Device(buffer(context, bytes))
    }

    fn pinned(context: &'static Context, bytes: &[u8]) -> Self {
        let mut memory = PinnedBuffer::new(context, bytes.len()).expect("pinned memory");
        // SAFETY: nobody else has it yet.
        unsafe { memory.as_mut_slice() }.copy_from_slice(bytes);
        Self::Pinned(Box::new(memory))
    }

    fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address(),
            Self::Pinned(memory) => memory.address(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Device(memory) => {
                download(memory.context(), memory.address(), memory.len_bytes())
            }
            // SAFETY: the kernels have ended.
            Self::Pinned(memory) => unsafe { memory.as_slice() }.to_vec(),
        }
    }
}

/// Where the pieces lie in both memories, apart from each other in the destination.
struct Plan {
    /// Offsets in destination and source, and lengths.
    parts: Vec<(usize, usize, usize)>,
    len: usize,
}

impl Plan {
    /// `lens`, each at a random alignment or all at the one that is given.
    fn new(seed: u64, lens: &[usize], aligned: Option<usize>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut at = 0;
        let mut places: Vec<_> = lens
            .iter()
            .map(|len| {
                let place = at + aligned.unwrap_or_else(|| random.usize(0..33));
                at = place + len;
                if let Some(to) = aligned {
                    at = at.next_multiple_of(to.max(1));
                }
                place
            })
            .collect();
        let destinations = places.clone();
        if aligned.is_none() {
            let mut order: Vec<_> = (0..lens.len()).collect();
            random.shuffle(&mut order);
            let mut at = 0;
            for index in order {
                places[index] = at + random.usize(0..33);
                at = places[index] + lens[index];
            }
        }
        let parts = destinations.into_iter().zip(places).zip(lens);
        let parts = parts.map(|((to, from), len)| (to, from, *len)).collect();
        Self { parts, len: at + 40 * (lens.len() + 1) }
    }

    fn pieces(&self, destination: u64, source: u64) -> Vec<Piece> {
        let piece = |&(to, from, len): &(usize, usize, usize)| Piece {
            destination: destination + to as u64,
            source: source + from as u64,
            len_bytes: len as u64,
        };
        self.parts.iter().map(piece).collect()
    }

    /// The destination's contents afterwards: the rest is as it was.
    fn expected(&self, source: &[u8]) -> Vec<u8> {
        let mut expected = vec![POISON; self.len];
        for &(to, from, len) in &self.parts {
            expected[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        expected
    }
}

/// One launch, waited for; the launcher's stream is another one each time.
fn copy(launcher: &mut Launcher, stream: &Stream, pieces: &[Piece], options: LaunchOptions) {
    // SAFETY: both memories live until the launch has been waited for.
    let launch = unsafe { launcher.launch(stream, pieces, options) }.expect("enqueued");
    launcher.wait(launch).expect("it ends well");
    assert_eq!(launcher.is_done(launch), Ok(true));
}

/// Every way of launching.
fn all_options() -> Vec<LaunchOptions> {
    let tables = [Tables::Auto, Tables::Small, Tables::Wide, Tables::Host, Tables::Device];
    let completions = [Completion::Event, Completion::Flag];
    let all = tables.into_iter().flat_map(|tables| {
        completions.map(|completion| LaunchOptions {
            completion,
            tables,
            ..LaunchOptions::default()
        })
    });
    all.collect()
}

/// From one memory to another by the GPU of `runner`, in every way; checks every byte.
fn check(runner: &'static Context, plan: &Plan, make: impl Fn(&[u8], bool) -> Memory, what: &str) {
    let bytes = pattern(plan.len as u64, plan.len);
    let source = make(&bytes, false);
    let expected = plan.expected(&bytes);
    let mut launcher = Launcher::new(runner, LauncherConfig::of(runner)).expect("kernels");
    for options in all_options() {
        let through = stream(runner);
        let destination = make(&vec![POISON; plan.len], true);
        let pieces = plan.pieces(destination.address(), source.address());
        copy(&mut launcher, &through, &pieces, options);
        assert_same(&destination.bytes(), &expected, &format!("{what}, {options:?}"));
    }
}

fn plans() -> Vec<(String, Plan)> {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut lens = |count: usize, most: usize| -> Vec<usize> {
        (0..count).map(|_| random.usize(0..most)).collect()
    };
    let random: Vec<_> = [(1, 70), (70, 100), (300, 5000), (20, 200_000), (3, 5_000_000)]
        .into_iter()
        .map(|(count, most)| {
            let lens = lens(count, most);
            (format!("{count} pieces below {most}, seed {seed}"), Plan::new(seed, &lens, None))
        })
        .collect();
    let aligned = [(1, 4096), (64, 4096), (512, 4096), (1, 32 << 20), (10, 1_179_648)];
    let aligned = aligned.into_iter().map(|(count, len)| {
        (format!("{count} x {len}"), Plan::new(seed, &vec![len; count], Some(16)))
    });
    let mixed: Vec<_> = (0..70).chain([0, 0, 1 << 20, 0, 17]).collect();
    let mixed = ("every short length".to_owned(), Plan::new(seed, &mixed, None));
    random.into_iter().chain(aligned).chain([mixed]).collect()
}

#[test]
fn pieces_within_a_gpu_arrive_whole() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    for (what, plan) in plans() {
        check(context, &plan, |bytes, _| Memory::device(context, bytes), &what);
    }
}

#[test]
fn the_driver_compiles_the_kernels_where_there_is_no_machine_code() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    println!("machine code in this build: {}", Launcher::has_machine_code());
    let config = LauncherConfig { portable: true, ..LauncherConfig::of(context) };
    let mut launcher = Launcher::new(context, config).expect("kernels");
    let plan = Plan::new(3, &[100, 4096, 70_001], None);
    let bytes = pattern(3, plan.len);
    let (source, destination) = (buffer(context, &bytes), buffer(context, &vec![POISON; plan.len]));
    let pieces = plan.pieces(destination.address(), source.address());
    copy(&mut launcher, &stream(context), &pieces, LaunchOptions::default());
    let found = download(context, destination.address(), plan.len);
    assert_same(&found, &plan.expected(&bytes), "compiled by the driver");
}

#[test]
fn pieces_to_and_from_another_gpu_arrive_whole() {
    let Some((a, b)) = peers() else { return };
    for (what, plan) in plans() {
        let write = |bytes: &[u8], to: bool| Memory::device(if to { b } else { a }, bytes);
        check(a, &plan, write, &format!("write, {what}"));
        let read = |bytes: &[u8], to: bool| Memory::device(if to { a } else { b }, bytes);
        check(a, &plan, read, &format!("read, {what}"));
    }
}

#[test]
fn pieces_to_and_from_the_host_arrive_whole() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let place = |bytes: &[u8], host: bool| match host {
        true => Memory::pinned(context, bytes),
        false => Memory::device(context, bytes),
    };
    for (what, plan) in plans() {
        check(context, &plan, |bytes, to| place(bytes, to), &format!("to the host, {what}"));
        check(context, &plan, |bytes, to| place(bytes, !to), &format!("from the host, {what}"));
    }
}

#[test]
fn every_alignment_and_short_length_arrives_whole() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let bytes = pattern(1, 16 * 16 * 1024);
    let source = buffer(context, &bytes);
    let mut launcher = Launcher::new(context, LauncherConfig::of(context)).expect("kernels");
    let through = stream(context);
    for len in (0..100).chain([511, 512, 513, 2047, 2048, 2049, 2600]) {
        let destination = buffer(context, &vec![POISON; 256 * 4096]);
        let mut expected = vec![POISON; 256 * 4096];
        let part = |pair: usize| {
            let (to, from) = (pair * 4096 + pair / 16, pair * 1000 / 16 * 16 + pair % 16);
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            Piece {
                destination: destination.address() + to as u64,
                source: source.address() + from as u64,
                len_bytes: len as u64,
            }
        };
        let pieces: Vec<_> = (0..256).map(part).collect();
        copy(&mut launcher, &through, &pieces, LaunchOptions::default());
        let found = download(context, destination.address(), expected.len());
        assert_same(&found, &expected, &format!("every alignment, {len} bytes"));
    }
}

#[test]
fn thousands_of_pieces_are_several_launches() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let mut random = fastrand::Rng::with_seed(5);
    let lens: Vec<_> = (0..20_000).map(|_| random.usize(0..300)).collect();
    let plan = Plan::new(5, &lens, None);
    let bytes = pattern(6, plan.len);
    let source = buffer(context, &bytes);
    let destination = buffer(context, &vec![POISON; plan.len]);
    let config = LauncherConfig { slots: 8, pieces: 3000, ..LauncherConfig::of(context) };
    let mut launcher = Launcher::new(context, config).expect("kernels");
    let through = stream(context);
    let pieces = plan.pieces(destination.address(), source.address());
    copy(&mut launcher, &through, &pieces, LaunchOptions::default());
    let found = download(context, destination.address(), plan.len);
    assert_same(&found, &plan.expected(&bytes), "20,000 pieces");
    let many = vec![Piece::default(); 8 * 3000 + 1];
    // SAFETY: nothing is copied.
    let error = unsafe { launcher.launch(&through, &many, LaunchOptions::default()) };
    assert_eq!(error, Err(GpuError::TooManyIovs { count: 24_001, most: 24_000 }));
}

#[test]
fn slots_are_used_again_and_their_lack_is_told() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let config = LauncherConfig { slots: 2, ..LauncherConfig::of(context) };
    let mut launcher = Launcher::new(context, config).expect("kernels");
    let through = stream(context);
    let len = 256 << 20;
    let source = buffer(context, &pattern(7, 1 << 20));
    let large = DeviceBuffer::new(context, len).expect("device memory");
    let piece = |address| Piece { destination: address, source: source.address(), len_bytes: 4096 };
    for completion in [Completion::Event, Completion::Flag] {
        let options = LaunchOptions { completion, ..LaunchOptions::default() };
        // The first launch of a kernel may wait for all work, while the driver loads it.
        copy(&mut launcher, &through, &[piece(large.address())], options);
        // SAFETY: all buffers live until everything has been waited for.
        unsafe {
            // Long work before the launches keeps them under way.
            for value in 0..1000_u32 {
                through.fill(large.address(), value as u8, len).expect("enqueued");
            }
            let one = launcher.launch(&through, &[piece(large.address())], options);
            let two = launcher.launch(&through, &[piece(large.address() + 4096)], options);
            let three = launcher.launch(&through, &[piece(large.address() + 8192)], options);
            assert_eq!(three, Err(GpuError::Busy { slots: 2 }));
            launcher.wait(two.expect("enqueued")).expect("it ends well");
            assert_eq!(launcher.is_done(one.expect("enqueued")), Ok(true));
        }
        for _ in 0..100 {
            copy(&mut launcher, &through, &[piece(large.address())], options);
        }
    }
    // A launch without pieces ends as well.
    for options in all_options() {
        copy(&mut launcher, &through, &[], options);
        copy(&mut launcher, &through, &[Piece::default(); 5], options);
    }
}

#[test]
fn a_lost_context_is_reported_and_nothing_hangs() {
    if gpus(1).is_none() {
        return;
    }
    let peer = Peer::start("poison");
    assert_eq!(peer.hear(), b"lost, and known to be");
    peer.finish();
}

/// Copies to an address without memory. Runs in another process, as its context is lost then.
pub(crate) fn poison(peer: &Peer) {
    let context = Gpus::get().device(0).expect("a GPU").context().expect("a context");
    let mut launcher = Launcher::new(context, LauncherConfig::of(context)).expect("kernels");
    let through = stream(context);
    let memory = DeviceBuffer::new(context, 4096).expect("device memory");
    let bad = Piece { destination: 0x10_0000, source: memory.address(), len_bytes: 4096 };
    let options = LaunchOptions { completion: Completion::Flag, ..LaunchOptions::default() };
    // SAFETY: the copy harms nothing but this process's context, which the test wants lost.
    let launch = unsafe { launcher.launch(&through, &[bad], options) }.expect("enqueued");
    let error = launcher.wait(launch).expect_err("there is no memory");
    assert!(matches!(error, GpuError::Poisoned { .. }), "{error}");
    println!("{error}");
    assert!(context.is_poisoned());
    assert!(matches!(context.probe(), Err(GpuError::Poisoned { .. })));
    assert!(through.synchronize().is_err());
    drop((launcher, memory, through));
    peer.say(b"lost, and known to be");
}

#[test]
fn memory_that_was_written_by_a_copy_is_seen_by_a_kernel() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let (source, destination) =
        (buffer(context, &pattern(1, 4096)), buffer(context, &[POISON; 4096]));
    let mut launcher = Launcher::new(context, LauncherConfig::of(context)).expect("kernels");
    let through = stream(context);
    let piece =
        Piece { destination: destination.address(), source: source.address(), len_bytes: 4096 };
    for round in 0..50 {
        let wanted = pattern(round, 4096);
        upload(context, source.address(), &wanted);
        copy(&mut launcher, &through, &[piece], LaunchOptions::default());
        assert_same(&download(context, destination.address(), 4096), &wanted, "a new round");
    }
}

#[test]
fn a_word_changes_once_behind_the_copies() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let mut launcher = Launcher::new(context, LauncherConfig::of(context)).expect("kernels");
    let (through, len) = (stream(context), 4 << 20);
    let source = buffer(context, &pattern(3, len));
    let to = DeviceBuffer::new(context, len).expect("device memory");
    let piece = |at: usize, len: usize| Piece {
        destination: to.address() + at as u64,
        source: source.address() + at as u64,
        len_bytes: len as u64,
    };
    let words = buffer(context, &[0; 24]);
    let mut expected = 0_u64;
    let all = [
        vec![],
        vec![piece(0, 8)],
        vec![piece(5, 3 << 20)],
        (0..300).map(|i| piece(i * 64, 31)).collect(),
    ];
    for (options, pieces) in all_options().into_iter().flat_map(|o| all.iter().map(move |p| (o, p)))
    {
        for adds in [true, false] {
            let value = if adds { u64::MAX - 6 } else { expected ^ 0x1234_5678_9abc };
            let word = Some(WordChange { address: words.address() + 8, value, adds });
            expected = if adds { expected.wrapping_add(value) } else { value };
            copy(&mut launcher, &through, pieces, LaunchOptions { word, ..options });
            let found = download(context, words.address(), 24);
            let wanted = [0, expected, 0].map(u64::to_ne_bytes).concat();
            assert_same(&found, &wanted, &format!("{} pieces, {options:?}", pieces.len()));
        }
    }
}
