//! The best that this machine's GPUs do: copies by the copy engine and by the kernels, at every
//! size and for vectors, from one GPU to another (or within one, where there is one), and to and
//! from the host.
//!
//! One command, one table for each question: `gpu_limits [ROUNDS]`. In each round every way is
//! timed once, one after the other, so that a disturbance of the machine reaches all of them; the
//! numbers are medians.

use std::{cell::RefCell, error::Error, rc::Rc, time::Instant};

use uccl_device::cuda::{
    BatchArrays, BatchCopy, Context, DeviceBuffer, Direction, Event, GpuError, Gpus, PinnedBuffer,
    Priority, Stream, classify,
    gather::{Completion, LaunchOptions, Launcher, LauncherConfig, Piece, Tables},
};

type Run = Box<dyn FnMut() -> Result<(), GpuError>>;
type SharedLauncher = Rc<RefCell<Launcher>>;

/// One way to do a task.
struct Way {
    name: String,
    run: Run,
    seconds: Vec<f64>,
}

impl Way {
    fn new(name: impl Into<String>, run: impl FnMut() -> Result<(), GpuError> + 'static) -> Self {
        Self { name: name.into(), run: Box::new(run), seconds: Vec::new() }
    }

    fn median(&mut self) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        self.seconds.get(self.seconds.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Times every way once in each round, after two rounds that do not count.
fn measure(ways: &mut [Way], rounds: usize) -> Result<(), GpuError> {
    for round in 0..rounds + 2 {
        for way in &mut *ways {
            let start = Instant::now();
            (way.run)()?;
            if round >= 2 {
                way.seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(())
}

/// Microseconds, and GB/s (of 1e9).
fn figures(seconds: f64, bytes: usize) -> String {
    let rate = bytes as f64 / seconds / 1e9;
    format!("{:9.1} us {rate:6.1}", seconds * 1e6)
}

/// The two ends of a copy, and the context that makes it.
struct Route {
    name: String,
    context: &'static Context,
    direction: Direction,
    destination: u64,
    source: u64,
}

/// Everything of one GPU that the ways use.
struct Tools {
    streams: Vec<Rc<Stream>>,
    launcher: SharedLauncher,
}

impl Tools {
    fn new(context: &'static Context, portable: bool) -> Result<Self, GpuError> {
        let streams = (0..4).map(|_| Stream::new(context, Priority::Normal).map(Rc::new));
        let config = LauncherConfig { slots: 8, portable, ..LauncherConfig::of(context) };
        let launcher = Rc::new(RefCell::new(Launcher::new(context, config)?));
        Ok(Self { streams: streams.collect::<Result<_, _>>()?, launcher })
    }

    fn kernel(&self, name: String, pieces: Rc<[Piece]>, options: LaunchOptions) -> Way {
        let (launcher, stream) = (self.launcher.clone(), self.streams[0].clone());
        Way::new(name, move || {
            let mut launcher = launcher.borrow_mut();
            // SAFETY: the memory lives until the end of the program, and the launch is waited for.
            let launch = unsafe { launcher.launch(&stream, &pieces, options) }?;
            launcher.wait(launch)
        })
    }

    /// Copies of all pieces, dealt out to some streams, and all of them waited for.
    fn engine(&self, streams: usize, pieces: Rc<[Piece]>, direction: Direction) -> Way {
        let streams: Vec<_> = self.streams.iter().take(streams).cloned().collect();
        let name = match streams.len() {
            1 => "engine, 1 stream".to_owned(),
            count => format!("engine, {count} streams"),
        };
        Way::new(name, move || {
            for (piece, stream) in pieces.iter().zip(streams.iter().cycle()) {
                let (to, from) = (piece.destination, piece.source);
                // SAFETY: the memory lives until the end of the program, and the streams are waited
                // for.
                unsafe { stream.copy(to, from, piece.len_bytes as usize, direction) }?;
            }
            streams.iter().try_for_each(|stream| stream.synchronize())
        })
    }

    /// The first pieces by an engine, the others by the kernel, at the same time.
    fn mixed(&self, percent: usize, pieces: &[Piece], direction: Direction) -> Way {
        let (by_engine, by_kernel) = pieces.split_at(pieces.len() * percent / 100);
        let (by_engine, by_kernel): (Rc<[Piece]>, Rc<[Piece]>) =
            (by_engine.into(), by_kernel.into());
        let (launcher, streams) = (self.launcher.clone(), self.streams.clone());
        Way::new(format!("engine {percent} %, kernel"), move || {
            let mut launcher = launcher.borrow_mut();
            let options = LaunchOptions::default();
            // SAFETY: the memory lives until the end of the program, and the launch is waited for.
            let launch = unsafe { launcher.launch(&streams[0], &by_kernel, options) }?;
            for piece in &by_engine[..] {
                let (to, from, len) = (piece.destination, piece.source, piece.len_bytes as usize);
                // SAFETY: the memory lives until the end of the program, and the stream is waited
                // for.
                unsafe { streams[1].copy(to, from, len, direction) }?;
            }
            launcher.wait(launch)?;
            streams[1].synchronize()
        })
    }

    fn batch(&self, pieces: &[Piece]) -> Option<Way> {
        let stream = self.streams[0].clone();
        let copies: BatchArrays = pieces
            .iter()
            .map(|piece| BatchCopy {
                destination: piece.destination,
                source: piece.source,
                len_bytes: piece.len_bytes as usize,
            })
            .collect();
        stream.has_batches().then(|| {
            Way::new("engine, batch", move || {
                // SAFETY: the memory lives until the end of the program, and the stream is waited
                // for.
                unsafe { stream.copy_batch(&copies) }?;
                stream.synchronize()
            })
        })
    }
}

fn by_size(route: &Route, tools: &Tools, rounds: usize) -> Result<(), Box<dyn Error>> {
    println!("\n## {}, one piece, by size (median time, GB/s)\n", route.name);
    let sizes: Vec<_> = (12..=28).step_by(2).map(|power| 1_usize << power).collect();
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for len in &sizes {
        let mut ways = ways_for_one(route, tools, *len)?;
        measure(&mut ways, rounds)?;
        for (index, way) in ways.iter_mut().enumerate() {
            let figure = figures(way.median(), *len);
            match lines.get_mut(index) {
                Some((_, figures)) => figures.push(figure),
                None => lines.push((way.name.clone(), vec![figure])),
            }
        }
    }
    let heads: Vec<_> = sizes.iter().map(|len| format!("{:>19}", readable(*len))).collect();
    println!("{:<28}{}", "", heads.join(" "));
    for (name, figures) in lines {
        println!("{name:<28}{}", figures.join(" "));
    }
    Ok(())
}

fn readable(len: usize) -> String {
    match len {
        0..0x10_0000 => format!("{} KiB", len >> 10),
        _ => format!("{} MiB", len >> 20),
    }
}

fn ways_for_one(route: &Route, tools: &Tools, len: usize) -> Result<Vec<Way>, GpuError> {
    let (to, from) = (route.destination, route.source);
    let piece = Piece { destination: to, source: from, len_bytes: len as u64 };
    let pieces: Rc<[Piece]> = Rc::new([piece]);
    let mut ways = vec![tools.engine(1, pieces.clone(), route.direction)];
    if let Some(first) = ways.first_mut() {
        first.name = "engine, synchronise".to_owned();
    }
    let (stream, event) = (tools.streams[0].clone(), Event::new(route.context)?);
    let direction = route.direction;
    ways.push(Way::new("engine, event polled", move || {
        // SAFETY: the memory lives until the end of the program, and the event is waited for.
        unsafe { stream.copy(to, from, len, direction) }?;
        event.record(&stream)?;
        while !event.is_done()? {
            std::hint::spin_loop();
        }
        Ok(())
    }));
    let halves: Rc<[Piece]> = halves(piece).into();
    let mut two = tools.engine(2, halves, route.direction);
    two.name = "engine, halves, 2 streams".to_owned();
    ways.push(two);
    for (name, completion, tables, blocks) in [
        ("kernel, event", Completion::Event, Tables::Auto, 0),
        ("kernel, flag", Completion::Flag, Tables::Auto, 0),
        ("kernel, flag, 4 KiB", Completion::Flag, Tables::Small, 0),
        ("kernel, flag, 32 KiB", Completion::Flag, Tables::Wide, 0),
        ("kernel, flag, host table", Completion::Flag, Tables::Host, 0),
        ("kernel, flag, 16 blocks", Completion::Flag, Tables::Auto, 16),
        ("kernel, flag, 32 blocks", Completion::Flag, Tables::Auto, 32),
        ("kernel, flag, 64 blocks", Completion::Flag, Tables::Auto, 64),
    ] {
        let options = LaunchOptions { blocks, completion, tables, word: None };
        ways.push(tools.kernel(name.to_owned(), pieces.clone(), options));
    }
    Ok(ways)
}

fn halves(piece: Piece) -> [Piece; 2] {
    let half = piece.len_bytes / 2;
    let rest = Piece {
        destination: piece.destination + half,
        source: piece.source + half,
        len_bytes: piece.len_bytes - half,
    };
    [Piece { len_bytes: half, ..piece }, rest]
}

/// Pieces apart from each other and in no order.
fn scattered(route: &Route, count: usize, len: usize, skew: u64) -> Rc<[Piece]> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut places: Vec<_> = (0..count as u64).collect();
    let gap = len as u64 + 256;
    random.shuffle(&mut places);
    let to = places.clone();
    random.shuffle(&mut places);
    let piece = |(to, from): (u64, u64)| Piece {
        destination: route.destination + to * gap,
        source: route.source + from * gap + skew,
        len_bytes: len as u64,
    };
    to.into_iter().zip(places).map(piece).collect()
}

fn vectors(route: &Route, tools: &Tools, rounds: usize) -> Result<(), Box<dyn Error>> {
    let shapes = [
        (64, 4096, 0),
        (64, 65_536, 0),
        (64, 1 << 20, 0),
        (256, 4096, 0),
        (1024, 4096, 0),
        (4096, 4096, 0),
        (4096, 4096, 5),
        (4096, 256, 0),
        (298, 1_179_648, 0),
    ];
    for (count, len, skew) in shapes {
        let shifted = if skew == 0 { "" } else { ", source 5 bytes off" };
        println!("\n## {}, {count} x {len} B{shifted} (median time, GB/s)\n", route.name);
        let pieces = scattered(route, count, len, skew);
        let mut ways: Vec<_> =
            [1, 2, 4].map(|n| tools.engine(n, pieces.clone(), route.direction)).into();
        // The driver's batch is not meant for copies between a GPU and pinned memory.
        ways.extend(tools.batch(&pieces));
        if len >= 1 << 20 {
            ways.extend([10, 15, 20, 25, 30].map(|n| tools.mixed(n, &pieces, route.direction)));
        }
        for blocks in [4, 8, 16, 24, 32, 48, 64, 96, 132] {
            let options = LaunchOptions { blocks, completion: Completion::Flag, ..<_>::default() };
            ways.push(tools.kernel(format!("kernel, {blocks} blocks"), pieces.clone(), options));
        }
        for tables in [Tables::Host, Tables::Device] {
            let completion = Completion::Flag;
            let options = LaunchOptions { completion, tables, ..LaunchOptions::default() };
            ways.push(tools.kernel(
                format!("kernel, all, {tables:?} table"),
                pieces.clone(),
                options,
            ));
        }
        let options = LaunchOptions::default();
        ways.push(tools.kernel("kernel, all, event".to_owned(), pieces, options));
        measure(&mut ways, rounds)?;
        for way in &mut ways {
            let figures = figures(way.median(), count * len);
            println!("{:<28}{figures}", way.name);
        }
    }
    Ok(())
}

/// The costs of calls that move no data.
fn calls(context: &'static Context, tools: &Tools, address: u64) -> Result<(), Box<dyn Error>> {
    println!("\n## Calls (mean of 10,000, nanoseconds)\n");
    let stream = tools.streams[0].clone();
    let event = Event::new(context)?;
    let mut ways = [
        Way::new("classify device memory", move || classify(address).map(|_| ())),
        Way::new("make current, from none", move || context.make_current().map(|_| ())),
        Way::new("record an event", {
            let stream = stream.clone();
            move || event.record(&stream)
        }),
        Way::new("look at an idle stream", move || stream.is_idle().map(|_| ())),
    ];
    for way in &mut ways {
        let start = Instant::now();
        for _ in 0..10_000 {
            (way.run)()?;
        }
        println!("{:<28}{:9.0}", way.name, start.elapsed().as_secs_f64() * 1e5);
    }
    Ok(())
}

/// Room for every vector, gaps included.
const ROOM: usize = 400 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = match std::env::args().nth(1) {
        Some(rounds) => rounds.parse()?,
        None => 21,
    };
    let gpus = Gpus::get();
    if let Some(reason) = gpus.why_none() {
        println!("skipped: lacks a GPU ({reason})");
        return Ok(());
    }
    for gpu in gpus.devices() {
        println!(
            "GPU {}: {} at {}, {} SMs",
            gpu.ordinal(),
            gpu.name(),
            gpu.pci(),
            gpu.multiprocessors()
        );
    }
    println!("driver: CUDA {:?}", gpus.driver_version());
    let start = Instant::now();
    let context = gpus.device(0)?.context()?;
    println!("context of GPU 0: {:.0} ms", milliseconds(start));
    let start = Instant::now();
    let mut tools = Tools::new(context, true)?;
    println!("kernels, compiled by the driver or from its cache: {:.0} ms", milliseconds(start));
    if Launcher::has_machine_code() {
        let start = Instant::now();
        tools = Tools::new(context, false)?;
        println!("kernels, machine code: {:.0} ms", milliseconds(start));
    }
    println!("{rounds} rounds");
    let here = DeviceBuffer::new(context, ROOM)?;
    calls(context, &tools, here.address())?;
    let far = far_buffer(gpus, context)?;
    let pinned = PinnedBuffer::new(context, ROOM)?;
    let (near, there) = (here.address(), far.address());
    let way = if gpus.devices().len() > 1 { "GPU 0 to 1" } else { "within GPU 0" };
    let back = if gpus.devices().len() > 1 { "GPU 1 to 0, by 0" } else { "within GPU 0, back" };
    let route = |name: &str, direction, destination, source| Route {
        name: name.to_owned(),
        context,
        direction,
        destination,
        source,
    };
    let routes = [
        route(way, Direction::DeviceToDevice, there, near),
        route(back, Direction::DeviceToDevice, near, there),
        route("GPU 0 to pinned", Direction::DeviceToHost, pinned.address(), near),
        route("pinned to GPU 0", Direction::HostToDevice, near, pinned.address()),
    ];
    for route in &routes {
        by_size(route, &tools, rounds)?;
    }
    for route in &routes {
        vectors(route, &tools, rounds)?;
    }
    context.synchronize()?;
    Ok(())
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// On another GPU if there is one that can be reached.
fn far_buffer(gpus: &'static Gpus, context: &'static Context) -> Result<DeviceBuffer, GpuError> {
    let Some(other) = gpus.devices().get(1) else { return DeviceBuffer::new(context, ROOM) };
    let other = other.context()?;
    context.enable_peer(other)?;
    other.enable_peer(context)?;
    DeviceBuffer::new(other, ROOM)
}
