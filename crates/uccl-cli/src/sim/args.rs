//! The arguments, and the simulations that they stand for.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use uccl_sim::{Bursts, Flaps, LinkFaults, Links, Pattern, ReorderFault, Scenario, Topology};

use super::Names;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Network {
    /// All hosts at one switch
    OneSwitch,
    /// Two tiers: hosts at leaves, a link from each leaf to each spine, ECMP by hash
    LeafSpine,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PatternName {
    /// Many hosts send to one
    Incast,
    /// Each host sends to one other at random
    Permutation,
    /// Each host sends to every other
    AllToAll,
    /// Each host sends to the next
    Ring,
    /// Flows between two hosts
    Pair,
}

/// Simulate the transport's algorithms on a network, in virtual time.
#[derive(Args)]
pub(crate) struct SimArgs {
    /// The network
    #[arg(long, value_enum, default_value = "one-switch")]
    network: Network,
    /// Hosts at the switch
    #[arg(long, default_value_t = 16)]
    hosts: u16,
    /// Leaves
    #[arg(long, default_value_t = 4)]
    leaves: u16,
    /// Hosts of each leaf
    #[arg(long, default_value_t = 8)]
    hosts_per_leaf: u16,
    /// Spines
    #[arg(long, default_value_t = 8)]
    spines: u16,
    /// The traffic
    #[arg(long, value_enum, default_value = "incast")]
    pattern: PatternName,
    /// Hosts that send in an incast, flows of a pair
    #[arg(long, default_value_t = 15)]
    senders: u16,
    /// Bytes of a message: 64K, 1M
    #[arg(long, default_value = "1M", value_parser = size)]
    size: u64,
    /// Messages of each flow
    #[arg(long, default_value_t = 1)]
    messages: u32,
    /// Messages of a flow that are under way at any time
    #[arg(long, default_value_t = 1)]
    at_once: u32,
    /// Congestion control: none, fixed, swift, timely, cubic, delay-ecn, eqds
    #[arg(long, default_value = "delay-ecn", value_delimiter = ',')]
    cc: Vec<String>,
    /// Path choice: round-robin, two-choices, skip-marked, recycled
    #[arg(long, default_value = "recycled", value_delimiter = ',')]
    choice: Vec<String>,
    /// Loss detection: order, time
    #[arg(long, default_value = "time", value_delimiter = ',')]
    loss_by: Vec<String>,
    /// Paths of each flow; 1 is one path by hash
    #[arg(long, default_value = "16", value_delimiter = ',')]
    paths: Vec<u16>,
    /// Run the algorithms side by side in one network: flows take them in turns
    #[arg(long)]
    beside: bool,
    /// Bytes of a chunk, which is a packet
    #[arg(long, default_value = "4K", value_parser = size)]
    chunk: u64,
    /// Chunks of a path after which the receiver acknowledges
    #[arg(long, default_value_t = 1)]
    ack_every: u32,
    /// Speed of the links, in Gbit/s
    #[arg(long, default_value_t = 100.0)]
    gbps: f64,
    /// Delay of a link, in microseconds
    #[arg(long, default_value_t = 1.0)]
    delay_us: f64,
    /// Speed of the switch's links to hosts, or of those between switches, as part of the others'
    #[arg(long, default_value_t = 1.0)]
    bottleneck: f64,
    /// Bytes that may wait at a port of a switch
    #[arg(long, default_value = "4M", value_parser = size)]
    queue: u64,
    /// Queues from which on some packets, and all, are marked (ECN): LOW,HIGH; off
    #[arg(long, default_value = "40K,160K", value_parser = marks)]
    mark: Marks,
    /// Part of the packets that is lost
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Losses in a row: the parts of packets that begin and end one, BEGIN,END
    #[arg(long, value_parser = pair)]
    bursts: Option<(f64, f64)>,
    /// Packets that are overtaken: their part, and the most microseconds, PART,US
    #[arg(long, value_parser = pair)]
    reorder: Option<(f64, f64)>,
    /// The first links of the fabric flap: PERIOD,DOWN in microseconds
    #[arg(long, value_parser = pair)]
    flap: Option<(f64, f64)>,
    /// The first links of the fabric are slow: part of their speed
    #[arg(long, default_value_t = 1.0)]
    slow: f64,
    /// How many links flap or are slow
    #[arg(long, default_value_t = 1)]
    faulty: u16,
    /// Flows that heed nothing, between random hosts
    #[arg(long, default_value_t = 0)]
    background: u16,
    /// The speed of each of these, as part of a link's
    #[arg(long, default_value_t = 0.5)]
    load: f64,
    /// Where random numbers begin
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run with so many seeds
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Write JSON to this file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Draw completion times and queues into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
    /// Measure the simulator's own speed
    #[arg(long)]
    pub(super) bench: bool,
}

/// Limits of marking; `None` for no marks.
type Marks = Option<(u64, u64)>;

impl SimArgs {
    /// The scenarios, each with the techniques of its flows.
    pub(super) fn simulations(&self) -> Result<Vec<(Scenario, Vec<Names>)>> {
        ensure!(self.runs > 0, "--runs must be above 0");
        let mut names = Vec::new();
        for cc in &self.cc {
            for choice in &self.choice {
                let of_loss = self.loss_by.iter();
                names.extend(of_loss.map(|loss| (choice.clone(), loss.clone(), cc.clone())));
            }
        }
        let groups: Vec<_> = match self.beside {
            true => vec![names],
            false => names.into_iter().map(|names| vec![names]).collect(),
        };
        let mut all = Vec::new();
        for paths in &self.paths {
            for group in &groups {
                for seed in self.seed..self.seed.saturating_add(self.runs) {
                    all.push((Scenario { paths: *paths, seed, ..self.scenario()? }, group.clone()));
                }
            }
        }
        Ok(all)
    }

    /// The title of the picture.
    pub(super) fn title(&self) -> String {
        let name = self.pattern.to_possible_value();
        let pattern = name.map_or_else(String::new, |name| name.get_name().to_owned());
        format!("uccl sim: {pattern}, messages of {} KiB", self.size.div_ceil(1024))
    }

    fn scenario(&self) -> Result<Scenario> {
        let topology = match self.network {
            Network::OneSwitch => Topology::OneSwitch { hosts: self.hosts },
            Network::LeafSpine => Topology::LeafSpine {
                leaves: self.leaves,
                hosts_per_leaf: self.hosts_per_leaf,
                spines: self.spines,
            },
        };
        let hosts = match self.network {
            Network::OneSwitch => u32::from(self.hosts),
            Network::LeafSpine => u32::from(self.leaves) * u32::from(self.hosts_per_leaf),
        };
        ensure!(hosts <= 16_384, "{hosts} hosts are too many; 16384 is the limit");
        let is_tiered = self.network == Network::LeafSpine;
        ensure!(!is_tiered || self.hosts_per_leaf > 0, "--hosts-per-leaf must be above 0");
        ensure!(!is_tiered || self.spines > 0, "--spines must be above 0");
        ensure!(self.paths.iter().all(|paths| *paths > 0), "--paths must be above 0");
        Ok(Scenario {
            topology,
            links: self.links(),
            pattern: match self.pattern {
                PatternName::Incast => Pattern::Incast { senders: self.senders },
                PatternName::Permutation => Pattern::Permutation,
                PatternName::AllToAll => Pattern::AllToAll,
                PatternName::Ring => Pattern::Ring,
                PatternName::Pair => Pattern::Pair { flows: self.senders },
            },
            message_bytes: self.size,
            messages: self.messages,
            at_once: self.at_once,
            chunk_len: u32::try_from(self.chunk)?,
            ack_every: self.ack_every,
            background_flows: self.background,
            background_load: self.load,
            ..Scenario::default()
        })
    }

    fn links(&self) -> Links {
        let ns = |us: f64| (us * 1e3) as u64;
        let flaps =
            self.flap.map(|(period, down)| Flaps { period_ns: ns(period), down_ns: ns(down) });
        let has_faulty = flaps.is_some() || self.slow < 1.0;
        Links {
            bytes_per_s: self.gbps * 1e9 / 8.0,
            delay_ns: ns(self.delay_us),
            bottleneck: self.bottleneck,
            queue_bytes: self.queue,
            mark: self.mark,
            faults: LinkFaults {
                loss: self.loss,
                bursts: self.bursts.map(|(begin, end)| Bursts { begin, end }),
                flaps: None,
                reordering: self.reorder.map(|(part, us)| ReorderFault { part, most_ns: ns(us) }),
            },
            fabric_faults: LinkFaults { flaps, ..LinkFaults::default() },
            faulty_links: if has_faulty { self.faulty } else { 0 },
            faulty_speed: self.slow,
        }
    }
}

/// Reads a size: 64, 4K, 1M, 2G.
fn size(text: &str) -> Result<u64, String> {
    let error = || format!("{text:?} is not a size: write 64, 4K or 1M");
    let shifts = [('K', 10), ('M', 20), ('G', 30)];
    let shift = shifts.iter().find(|(suffix, _)| text.to_ascii_uppercase().ends_with(*suffix));
    let digits = if shift.is_some() { &text[..text.len() - 1] } else { text };
    let number: u64 = digits.parse().map_err(|_| error())?;
    number.checked_mul(1 << shift.map_or(0, |(_, shift)| *shift)).ok_or_else(error)
}

fn marks(text: &str) -> Result<Marks, String> {
    if text == "off" {
        return Ok(None);
    }
    let (low, high) = text.split_once(',').ok_or("write LOW,HIGH or off")?;
    let (low, high) = (size(low)?, size(high)?);
    if low > high {
        return Err(format!("{low} is above {high}"));
    }
    Ok(Some((low, high)))
}

fn pair(text: &str) -> Result<(f64, f64), String> {
    let (first, second) = text.split_once(',').ok_or("write two numbers with a comma between")?;
    let number = |text: &str| match text.trim().parse::<f64>() {
        Ok(number) if number >= 0.0 => Ok(number),
        _ => Err(format!("{text:?} is not a number of 0 or more")),
    };
    Ok((number(first)?, number(second)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_marks_and_pairs_are_read() {
        assert_eq!([size("64"), size("4k"), size("2M")], [Ok(64), Ok(4096), Ok(2 << 20)]);
        assert!(size("K").is_err() && size("99999999999999999999").is_err() && size("").is_err());
        assert_eq!(marks("1K,2K"), Ok(Some((1024, 2048))));
        assert_eq!(marks("off"), Ok(None));
        assert!(marks("2K,1K").is_err() && marks("1K").is_err());
        assert_eq!(pair("0.5, 2"), Ok((0.5, 2.0)));
        assert!(pair("1").is_err() && pair("-1,2").is_err() && pair("nan,1").is_err());
    }
}
