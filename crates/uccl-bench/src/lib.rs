//! `uccl bench`: transfers between two processes, and the limits they are compared with.
//!
//! One side leads: it has the command's arguments, measures, and prints. The other side serves it,
//! as a process or a thread of this host or as a process of another host.
//!
//! ```text
//!   arguments    plan   the arguments, and the points that follow from them
//!                kinds, size, pattern, pieces, place: the dimensions of a point
//!   sides        run    the side that leads: one point after the other
//!                server the side that serves
//!                side   an endpoint, its memory of a point, its part of a phase
//!                buffer, flag, ordered_stream: memory, its watched byte, transfers on a CUDA stream
//!   between      peer   the other side as the leading one knows it
//!                control, auth: the messages of the two, and their first ones
//!   results      stats, report, table, plot: numbers, JSON and CSV, lines, a picture
//!   palette      colours and type of pictures, for `plot` and for the command
//!   limits       the machine without the engine: copies, TCP, shared memory, GPUs
//!   paths        the engine's choice of a path, for the command
//!   ep           dispatch and combine between ranks of this host
//!   vm           copies between two processes' memory, for `limits` and for the command
//! ```

mod auth;
mod buffer;
mod control;
mod ep;
mod flag;
mod kinds;
mod limits;
mod ordered_stream;
pub mod palette;
mod paths;
mod pattern;
mod peer;
mod pieces;
mod place;
mod plan;
mod plot;
mod report;
mod role;
mod run;
mod server;
mod side;
mod size;
mod stats;
mod table;
pub mod vm;

use std::io::{IsTerminal, stderr};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use uccl_device::{Topology, cuda::Gpus};

pub use self::{
    ep::{RANK_SUBCOMMAND, serve_rank},
    paths::{ChosenGpuPaths, ChosenPaths, GpuPair, OtherEnd, chosen_gpu_paths, chosen_paths},
    peer::SUBCOMMAND,
    plan::BenchArgs,
    server::serve_parent,
};
use self::{
    kinds::{DeviceKind, TransportKind},
    peer::Peer,
    place::Place,
    plan::Measurement,
    report::{GpuNames, Machine, Report, Row, Sink, Verification},
    run::Session,
};

/// Runs the benchmark of the arguments. An error if a byte arrived wrong.
pub fn run(args: BenchArgs) -> Result<()> {
    let args = &args.with_preset();
    if let Some(Measurement::Ep(args)) = &args.measurement {
        return ep::run(args);
    }
    args.check()?;
    if let Some(addr) = &args.listen {
        return server::listen(addr, args.once);
    }
    let mut peer = match &args.connect {
        Some(addr) => Peer::connect(addr)?,
        None if args.processes == 1 => Peer::start_thread()?,
        None => Peer::spawn()?,
    };
    peer.gpu = args.peer_gpu(gpus_of_both(args, &peer)?);
    let mut output = Output::new(args, &peer);
    if !args.limits {
        transfers(&mut peer, args, &mut output)?;
    }
    if args.limits && args.needs_gpus() && peer.is_local() {
        let places = args.places(args.memory[0], peer.gpu);
        let name = |place: Place| place.gpu().map(place::name).transpose();
        output.gpus(&GpuNames { this: name(places.lead)?, other: name(places.serve)? });
    }
    if args.limits || args.raw {
        limits::measure(&mut peer, args, |row| output.row(row))?;
    }
    output.finish(args, &peer)
}

/// How many GPUs both sides see, if they are on one host and use any. An error if this side lacks
/// its own.
fn gpus_of_both(args: &BenchArgs, peer: &Peer) -> Result<Option<u32>> {
    if !args.needs_gpus() {
        return Ok(None);
    }
    if args.device != DeviceKind::Cpu || peer.is_local() {
        place::context(args.gpu)?;
    }
    Ok(peer.is_local().then(|| Gpus::get().devices().len() as u32))
}

fn transfers(peer: &mut Peer, args: &BenchArgs, output: &mut Output) -> Result<()> {
    let mut missing = Vec::new();
    for &transport in &args.transport {
        match Session::open(peer, args, transport) {
            Ok(session) => points(session, args, output, transport)?,
            // Another path may still work.
            Err(error) => missing.push((transport, error)),
        }
    }
    let every = missing.len() == args.transport.len();
    for (transport, error) in missing {
        if every {
            return Err(error);
        }
        output.say(&format!("{transport}: left out: {error:#}"));
    }
    Ok(())
}

fn points(
    mut session: Session<'_>,
    args: &BenchArgs,
    output: &mut Output,
    transport: TransportKind,
) -> Result<()> {
    output.gpus(&session.gpus);
    for point in args.points(session.peer_gpu()) {
        let size = size::Size(point.size);
        let row = session.measure(point);
        output.row(row.with_context(|| format!("{} of {size} over {transport}", point.op))?);
    }
    session.close()
}

/// Where rows go as they come.
struct Output {
    rows: Vec<Row>,
    gpus: GpuNames,
    progress: ProgressBar,
    /// Standard output is taken by JSON or CSV, so that the table goes to standard error.
    stdout_taken: bool,
    label: Label,
}

/// The dimensions that the path column must show.
struct Label {
    transport: bool,
    memory: bool,
}

impl Label {
    fn of(&self, row: &Row) -> String {
        let mut label = row.path.clone();
        if let (true, Some(transport)) = (self.transport, &row.transport)
            && *transport != label
        {
            label = format!("{transport}:{label}");
        }
        if let (true, Some(memory)) = (self.memory, &row.memory) {
            label = format!("{label} {memory}");
        }
        label
    }
}

impl Output {
    fn new(args: &BenchArgs, peer: &Peer) -> Self {
        let points = args.points(peer.gpu).len();
        let transfers = if args.limits { 0 } else { points * args.transport.len() };
        let limits = if args.limits || args.raw { limits::count(args) } else { 0 };
        let progress = ProgressBar::with_draw_target(
            Some((transfers + limits) as u64),
            match stderr().is_terminal() {
                true => ProgressDrawTarget::stderr(),
                false => ProgressDrawTarget::hidden(),
            },
        );
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} points, {eta} left");
        progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let stdout_taken = [&args.json, &args.csv].contains(&&Some(Sink::Stdout));
        let label = Label { transport: args.transport.len() > 1, memory: args.memory.len() > 1 };
        let gpus = GpuNames::default();
        let output = Self { rows: Vec::new(), gpus, progress, stdout_taken, label };
        output.say(&table::header());
        output
    }

    fn say(&self, line: &str) {
        self.progress.suspend(|| match self.stdout_taken {
            true => eprintln!("{line}"),
            false => println!("{line}"),
        });
    }

    /// Prints the GPUs that take part, once.
    fn gpus(&mut self, gpus: &GpuNames) {
        if *gpus == self.gpus {
            return;
        }
        for (side, gpu) in [("this side", &gpus.this), ("the other", &gpus.other)] {
            self.say(&format!("{side}: {}", gpu.as_deref().unwrap_or("no GPU")));
        }
        self.gpus = gpus.clone();
    }

    fn row(&mut self, mut row: Row) {
        row.path_label = self.label.of(&row);
        self.say(&table::row(&row));
        self.progress.inc(1);
        self.rows.push(row);
    }

    fn finish(self, args: &BenchArgs, peer: &Peer) -> Result<()> {
        self.progress.finish_and_clear();
        if let Some(sink) = &args.json {
            let topology = Topology::of_this_machine()?;
            sink.write(&report::json(&Report {
                version: env!("CARGO_PKG_VERSION"),
                machine: Machine::of(&topology),
                peer: (!peer.is_local()).then(|| peer.host.clone()),
                gpus: self.gpus.clone(),
                duration_s: args.duration.as_secs_f64(),
                rows: &self.rows,
            })?)?;
        }
        if let Some(sink) = &args.csv {
            sink.write(&report::csv(&self.rows)?)?;
        }
        if let Some(path) = &args.plot {
            report::write_file(path, &plot::svg(&self.rows, "uccl bench")?)?;
        }
        let wrong = self.rows.iter().filter(|row| row.verified == Verification::No).count();
        match wrong {
            0 => Ok(()),
            _ => bail!(
                "{wrong} points moved wrong bytes: please report this with the rows marked NO"
            ),
        }
    }
}
