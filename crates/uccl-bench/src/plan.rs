//! The command's arguments, and the points that follow from them.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};

use super::{
    control::Point,
    ep::EpArgs,
    kinds::{ChecksumMode, DeviceKind, Direction, Memory, OpKind, TransportKind},
    place::{Place, Places},
    report::Sink,
    size::{Size, SizeRange},
};

/// A measurement that is known by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Preset {
    /// As a KV cache is moved, block by block: writes of 1, 2, 4, ... 128 iovs of 1,179,648 bytes
    /// each, one transfer at a time. --size, --iovs, --op and --inflight change that; --duration
    /// says how long
    KvSweep,
}

/// Default values of a preset; options on the command line override them.
struct Choices {
    op: &'static [OpKind],
    size: Option<Size>,
    iovs: &'static [u32],
    inflight: u32,
}

const PLAIN: Choices = Choices {
    op: &[OpKind::Write, OpKind::Read, OpKind::Send, OpKind::Notif],
    size: None,
    iovs: &[1],
    inflight: 4,
};

impl Preset {
    fn choices(self) -> Choices {
        match self {
            Self::KvSweep => Choices {
                op: &[OpKind::Write],
                size: Some(Size(1_179_648)),
                iovs: &[1, 2, 4, 8, 16, 32, 64, 128],
                inflight: 1,
            },
        }
    }
}

/// Measurements other than transfers.
#[derive(Subcommand, Debug)]
pub(crate) enum Measurement {
    Ep(EpArgs),
}

/// Measure transfers between two processes.
///
/// Without --listen or --connect, a second process is started on this host. Latency is the time of
/// a blocking call with nothing else outstanding (of both sides, if --direction is bi); for
/// notifications and pingpong, half of a round. GB/s (1e9 bytes a second, both directions together)
/// is measured with --inflight transfers outstanding and is the median of up to five batches. Each
/// outstanding transfer has buffers of its own, unless --buffers says otherwise; iovs are never
/// adjacent in memory. --inflight 1 measures both on the same transfers and one buffer.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) measurement: Option<Measurement>,
    /// A well-known measurement; other options that are given override its own
    #[arg(long, value_enum)]
    pub(crate) preset: Option<Preset>,
    /// Operations to measure [default: write,read,send,notif]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) op: Vec<OpKind>,
    /// Bytes of an iov: sizes (64, 4K, 1M) and ranges (1M..64M by factors of 4, 1K..1M:2 by factors
    /// of 2) [default: 64..64M]
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    pub(crate) size: Vec<SizeRange>,
    /// Iovs of a transfer, each of --size bytes; several give rows side by side [default: 1]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) iovs: Vec<u32>,
    /// Transfers of one side, or of both at once
    #[arg(long, value_enum, default_value = "uni")]
    pub(crate) direction: Direction,
    /// Time for each point: 200ms, 1s, 0.5
    #[arg(long, default_value = "200ms", value_parser = parse_duration)]
    pub(crate) duration: Duration,
    /// Transfers outstanding while GB/s is measured [default: 4]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) inflight: Option<u32>,
    /// Buffers that transfers take turns with; with fewer than are outstanding, several share one,
    /// as in ucx_perftest [default: --inflight]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) buffers: Option<u32>,
    /// Links to use; several give rows side by side
    #[arg(long, visible_alias = "link", value_enum, value_delimiter = ',', default_value = "auto")]
    pub(crate) transport: Vec<TransportKind>,
    /// Where pageable host memory comes from; several give rows side by side
    #[arg(long, value_enum, value_delimiter = ',', default_value = "heap")]
    pub(crate) memory: Vec<Memory>,
    /// Kind of memory of this side's buffers
    #[arg(long, value_enum, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceKind,
    /// Kind of memory of the other side's buffers [default: as --device]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) peer_device: Option<DeviceKind>,
    /// The GPU of this side, as its driver counts: of its buffers, or that pinned ones are made for
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: u32,
    /// The GPU of the other side [default: on one host the one after --gpu, if there is one; else
    /// the same number]
    #[arg(long, value_name = "N")]
    pub(crate) peer_gpu: Option<u32>,
    /// Post transfers behind a CUDA stream, which waits for them: each follows a small piece of
    /// work there, and the next work follows it, --inflight of them ahead of the host. GB/s is then
    /// the rate of such a pipeline, latency the time of one step of it. Needs --device gpu; leaves
    /// notif out
    #[arg(long, conflicts_with = "limits")]
    pub(crate) stream: bool,
    /// Look at every byte that arrives in a last, untimed round of each point
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set,
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) verify: bool,
    /// When data carries a checksum [default: UCCL_P2P_CHECKSUM, or auto]
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on")]
    pub(crate) checksum: Option<ChecksumMode>,
    /// TCP streams of a connection; 0 chooses [default: UCCL_P2P_TCP_STREAMS, or 0]
    #[arg(long)]
    pub(crate) streams: Option<usize>,
    /// Write everything as JSON to a file, or - for standard output
    #[arg(long, value_name = "FILE", value_parser = Sink::parse)]
    pub(crate) json: Option<Sink>,
    /// Write the rows as CSV to a file, or - for standard output
    #[arg(long, value_name = "FILE", value_parser = Sink::parse)]
    pub(crate) csv: Option<Sink>,
    /// Draw GB/s against size as an SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<std::path::PathBuf>,
    /// Measure this machine's limits too: memcpy, raw TCP, process_vm_readv, shared memory,
    /// threads; or, where a side is a GPU, its driver's own copies between the two sides' kinds of
    /// memory
    #[arg(long)]
    pub(crate) raw: bool,
    /// Measure this machine's limits alone
    #[arg(long)]
    pub(crate) limits: bool,
    /// Serve a benchmark on another host: any process that reaches this address may make this one
    /// use memory and CPU, unless UCCL_P2P_PSK is set [default address: 0.0.0.0:28190]
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = "0.0.0.0:28190",
          conflicts_with_all = ["connect", "limits", "raw", "json", "csv", "plot"])]
    pub(crate) listen: Option<String>,
    /// With --listen: end after one benchmark
    #[arg(long, requires = "listen")]
    pub(crate) once: bool,
    /// Measure against a host that runs uccl bench --listen
    #[arg(long, value_name = "ADDR")]
    pub(crate) connect: Option<String>,
    /// 1: the other side is a second endpoint of this process
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with_all = ["connect", "listen", "limits", "raw"])]
    pub(crate) processes: u8,
    /// Give up a transfer that takes longer: 60s
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
}

/// The default sweep.
const SWEEP: (u64, u64) = (64, 64 << 20);

/// No notification is longer.
const MAX_NOTIF: u64 = 64 << 20;

/// The default sweep leaves larger notifications out: they are messages, not tensors.
const SWEEP_MAX_NOTIF: u64 = 1 << 20;

impl BenchArgs {
    /// Fills options that were not given with the preset's values.
    pub(crate) fn with_preset(mut self) -> Self {
        let preset = self.preset.map_or(PLAIN, Preset::choices);
        if self.op.is_empty() {
            self.op = preset.op.to_vec();
        }
        if self.size.is_empty() {
            self.size.extend(preset.size.map(SizeRange::from));
        }
        if self.iovs.is_empty() {
            self.iovs = preset.iovs.to_vec();
        }
        self.inflight.get_or_insert(preset.inflight);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.json == Some(Sink::Stdout) && self.csv == Some(Sink::Stdout) {
            bail!("--json and --csv cannot both go to standard output: give one of them a file");
        }
        let hosts = [self.device, self.peer_device()].contains(&DeviceKind::Cpu);
        if !hosts && self.memory != [Memory::Heap] {
            bail!("--memory says where pageable host memory comes from, and neither side has any");
        }
        if self.stream {
            self.check_stream()?;
        }
        if self.op.contains(&OpKind::Pingpong) && self.has_gpu_memory() {
            bail!(
                "a processor watches the memory of pingpong, which cannot be a GPU's: leave one of them out"
            );
        }
        if !self.limits && self.op.contains(&OpKind::Notif) {
            let sizes = SizeRange::flatten(&self.size);
            if let Some(size) = sizes.iter().find(|size| size.0 > MAX_NOTIF) {
                bail!("a notification carries at most 64 MiB: leave {size} or notif out");
            }
        }
        Ok(())
    }

    fn check_stream(&self) -> Result<()> {
        if self.device != DeviceKind::Gpu {
            bail!(
                "--stream is a stream of the GPU whose memory this side's buffers are: say --device gpu"
            );
        }
        if self.direction == Direction::Bi && self.peer_device() != DeviceKind::Gpu {
            bail!(
                "--stream --direction bi needs a GPU on the other side too: leave --peer-device out"
            );
        }
        if self.op.iter().all(|op| *op == OpKind::Notif) {
            bail!("notifications follow no stream: leave --stream out, or measure transfers");
        }
        Ok(())
    }

    /// The sizes of transfers with `iovs` iovs.
    pub(crate) fn sizes(&self, iovs: u32) -> Vec<Size> {
        match self.size.is_empty() {
            false => SizeRange::flatten(&self.size),
            true => {
                let up = std::iter::successors(Some(SWEEP.0), |bytes| Some(bytes * 4));
                let iovs = u64::from(iovs);
                up.take_while(|bytes| {
                    *bytes <= SWEEP.1 && (bytes * iovs <= SWEEP.1 || *bytes == SWEEP.0)
                })
                .map(Size)
                .collect()
            }
        }
    }

    /// The other side's device.
    pub(crate) fn peer_device(&self) -> DeviceKind {
        self.peer_device.unwrap_or(self.device)
    }

    fn has_gpu_memory(&self) -> bool {
        [self.device, self.peer_device()].contains(&DeviceKind::Gpu)
    }

    /// Whether any side's memory is the driver's.
    pub(crate) fn needs_gpus(&self) -> bool {
        [self.device, self.peer_device()].iter().any(|device| *device != DeviceKind::Cpu)
    }

    /// The GPU of the other side. `gpus`: how many GPUs this side sees, if both sides are on one
    /// host.
    pub(crate) fn peer_gpu(&self, gpus: Option<u32>) -> u32 {
        self.peer_gpu.unwrap_or_else(|| match gpus {
            Some(count) if self.gpu + 1 < count => self.gpu + 1,
            _ => self.gpu,
        })
    }

    /// Where buffers lie, if pageable host memory is of one kind.
    pub(crate) fn places(&self, memory: Memory, peer_gpu: u32) -> Places {
        Places {
            lead: Place::of(self.device, memory, self.gpu),
            serve: Place::of(self.peer_device(), memory, peer_gpu),
        }
    }

    /// The points of one transport, in the order they are measured.
    pub(crate) fn points(&self, peer_gpu: u32) -> Vec<Point> {
        let mut points = Vec::new();
        for &memory in &self.memory {
            for &op in &self.op {
                // A notification has no iovs and no memory of its own.
                if op == OpKind::Notif && (memory != self.memory[0] || self.stream) {
                    continue;
                }
                let places = self.places(memory, peer_gpu);
                let iovs = if op == OpKind::Notif { &[1][..] } else { &self.iovs };
                for &iovs in iovs {
                    let sizes = self.sizes(iovs).into_iter().filter(|size| self.suits(op, *size));
                    points.extend(sizes.map(|size| self.point(op, places, size, iovs)));
                }
            }
        }
        points
    }

    /// Buffers that transfers take turns with.
    pub(crate) fn slots(&self) -> usize {
        let inflight = self.inflight();
        self.buffers.map_or(inflight, |buffers| inflight.min(buffers as usize))
    }

    /// Transfers outstanding while GB/s is measured.
    pub(crate) fn inflight(&self) -> usize {
        self.inflight.unwrap_or(PLAIN.inflight) as usize
    }

    fn point(&self, op: OpKind, places: Places, size: Size, iovs: u32) -> Point {
        Point {
            op,
            direction: self.direction,
            places,
            size: size.0,
            iovs: iovs as usize,
            slots: self.slots(),
            stream: self.stream,
        }
    }

    fn suits(&self, op: OpKind, size: Size) -> bool {
        op != OpKind::Notif || !self.size.is_empty() || size.0 <= SWEEP_MAX_NOTIF
    }
}

pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let error = || format!("{text:?} is not a time: write 200ms, 1s or 2m");
    let (digits, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let factor = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        _ => return Err(error()),
    };
    let seconds = digits.trim().parse::<f64>().map_err(|_| error())? * factor;
    match seconds > 0.0 && seconds <= 86_400.0 {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("a time must be more than nothing and at most a day".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn parse(line: &str) -> Result<BenchArgs, clap::Error> {
        let words = std::iter::once("uccl").chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.bench)
    }

    fn args(line: &str) -> BenchArgs {
        parse(line).unwrap_or_else(|error| panic!("{error}")).with_preset()
    }

    #[test]
    fn times_are_read() {
        for (text, ms) in [("200ms", 200), ("1s", 1000), ("0.5", 500), ("2m", 120_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)));
        }
        for wrong in ["", "ms", "0", "-1s", "1h", "nan", "inf", "2days"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_default_sweep() {
        let args = args("");
        assert_eq!(args.sizes(1).len(), 11);
        assert_eq!(args.sizes(1).last(), Some(&Size(64 << 20)));
        assert!(args.verify);
        let notifs = args.points(0).into_iter().filter(|point| point.op == OpKind::Notif);
        assert_eq!(notifs.map(|point| point.size).max(), Some(1 << 20));
        // Many iovs shorten the sweep so that a transfer stays within it.
        let many = args.sizes(1024);
        assert_eq!(many.last(), Some(&Size(64 << 10)));
        assert_eq!(args.sizes(65_536).len(), 3);
    }

    #[test]
    fn lists_give_points_in_order() {
        let args =
            args("--op write,notif --size 4K,1M..4M --memory heap,alloc --iovs 3 --inflight 2");
        let points: Vec<_> =
            args.points(0).iter().map(|p| (p.op, p.places.lead, p.size, p.iovs)).collect();
        assert_eq!(points.len(), 9);
        assert_eq!(points[0], (OpKind::Write, Place::Heap, 4096, 3));
        assert_eq!(points[3], (OpKind::Notif, Place::Heap, 4096, 1));
        assert_eq!(points[6], (OpKind::Write, Place::Alloc, 4096, 3));
    }

    #[test]
    fn several_counts_of_iovs_give_rows_side_by_side() {
        let args = args("--op write,notif --size 4K,8K --iovs 1,9");
        let points: Vec<_> = args.points(0).iter().map(|p| (p.op, p.iovs, p.size)).collect();
        let write = |iovs, size| (OpKind::Write, iovs, size);
        assert_eq!(points[..4], [write(1, 4096), write(1, 8192), write(9, 4096), write(9, 8192)]);
        assert_eq!(points[4..], [(OpKind::Notif, 1, 4096), (OpKind::Notif, 1, 8192)]);
    }

    #[test]
    fn arguments_override_a_preset() {
        let row = |p: &Point| (p.op, p.size, p.iovs);
        let sweep = args("--preset kv-sweep");
        let rows: Vec<_> = sweep.points(0).iter().map(row).collect();
        assert_eq!(rows, [1, 2, 4, 8, 16, 32, 64, 128].map(|n| (OpKind::Write, 1_179_648, n)));
        assert_eq!((sweep.inflight(), sweep.slots()), (1, 1));
        let other = args("--preset kv-sweep --op read --size 64K --iovs 3,5 --inflight 2");
        let rows: Vec<_> = other.points(0).iter().map(row).collect();
        assert_eq!(rows, [3, 5].map(|n| (OpKind::Read, 64 << 10, n)));
        assert_eq!(other.inflight(), 2);
        assert_eq!((args("").inflight(), args("").iovs), (4, vec![1]));
    }

    #[test]
    fn every_link_of_the_engine_can_be_named() {
        for name in ["local", "tcp", "verbs", "libfabric", "cxi", "efa", "udp", "fifo"] {
            for option in ["--transport", "--link"] {
                let [kind] = args(&format!("{option} {name}")).transport[..] else {
                    panic!("{option} {name}")
                };
                assert_eq!(kind.setting().map(|setting| setting.to_string()), Some(name.into()));
                assert_eq!(kind.to_string(), name);
            }
        }
        assert_eq!(args("").transport[0].setting(), None);
    }

    #[test]
    fn flags_with_and_without_a_value() {
        assert!(args("--verify").verify && !args("--verify=false").verify);
        assert_eq!(args("--checksum").checksum, Some(ChecksumMode::On));
        assert_eq!(args("--checksum=off").checksum, Some(ChecksumMode::Off));
        assert_eq!(args("--listen").listen.as_deref(), Some("0.0.0.0:28190"));
        assert_eq!(args("--listen 127.0.0.1:5").listen.as_deref(), Some("127.0.0.1:5"));
    }

    #[test]
    fn each_side_has_its_place() {
        let both = args("--device gpu --gpu 2");
        assert_eq!(
            (both.peer_gpu(Some(4)), both.peer_gpu(Some(3)), both.peer_gpu(None)),
            (3, 2, 2)
        );
        let places = both.places(Memory::Heap, 3);
        assert_eq!((places.lead, places.serve), (Place::Gpu(2), Place::Gpu(3)));
        let mixed = args("--device pinned --peer-device cpu --memory alloc --peer-gpu 7");
        let places = mixed.places(Memory::Alloc, mixed.peer_gpu(Some(2)));
        assert_eq!((places.lead, places.serve), (Place::Pinned(0), Place::Alloc));
        assert!(mixed.needs_gpus() && !args("").needs_gpus());
        assert!(args("--peer-device gpu").needs_gpus());
    }

    #[test]
    fn arguments_that_contradict_each_other_are_refused() {
        for wrong in [
            "--op fly",
            "--size 4X",
            "--iovs 0",
            "--inflight 0",
            "--listen --connect a:1",
            "--once",
            "--preset nothing",
            "--iovs 1,0",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(args("--json - --csv -").check().is_err());
        assert!(args("--device gpu --memory alloc").check().is_err());
        assert!(args("--device gpu --memory alloc --peer-device cpu").check().is_ok());
        for wrong in ["", "--device pinned", "--device gpu --op notif", "--peer-device gpu"] {
            assert!(args(&format!("--stream {wrong}")).check().is_err(), "{wrong}");
        }
        assert!(args("--stream --device gpu --peer-device cpu --direction bi").check().is_err());
        assert!(args("--stream --device gpu --peer-device cpu").check().is_ok());
        assert!(parse("--stream --limits").is_err());
        let points = args("--stream --device gpu --size 64").points(0);
        assert!(points.len() == 3 && points.iter().all(|point| point.stream));
        assert!(args("--op notif --size 128M").check().is_err());
        assert!(args("--op pingpong --peer-device gpu").check().is_err());
        assert!(args("--op pingpong --device pinned").check().is_ok());
        assert!(args("--op write --size 128M").check().is_ok());
        assert!(args("--limits --size 128M").check().is_ok());
    }
}
