//! Settings of a process's flows.

use std::{net::IpAddr, ops::RangeInclusive, time::Duration};

use uccl_wire::handshake::Psk;

/// A network device: the addresses of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its name, for messages.
    pub name: String,
    /// Its addresses, the best first.
    pub addrs: Vec<IpAddr>,
}

/// Settings of a process's flows.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The devices that listeners and connections are for, by number. Other devices' addresses are
    /// used beside them. Without any there is one, the loopback interface.
    pub devices: Vec<Device>,
    /// The ports from which the process takes one to listen on; `0..=0` leaves the choice to the
    /// kernel.
    pub ports: RangeInclusive<u16>,
    /// Threads that carry large messages.
    pub threads: usize,
    /// The most streams for large messages from this process to each other one. Within a host all
    /// are used. Between hosts there are four at first, or one for each pair of addresses, and more
    /// while that helps.
    pub streams: usize,
    /// The longest message, in bytes, that the thread carries that posts it. Longer ones are cut
    /// into chunks for the streams that all flows share.
    pub small_max: usize,
    /// Whether messages of up to [`LOCAL_MAX`](Self::LOCAL_MAX) bytes go by rings in shared memory
    /// to processes of the same host. Both ends must ask for it. A ring has 1 MiB.
    pub local: bool,
    /// Bytes of a chunk.
    pub chunk_len: usize,
    /// The time for which a thread looks for work before it sleeps. Waking one takes 20 to 50
    /// microseconds; the default is 50 on hosts with 8 CPUs or more, else 0.
    pub spin: Duration,
    /// The longest time for which a peer may be out of reach while something is outstanding. Also
    /// the longest time that a connection may take.
    pub limit: Duration,
    /// A secret that every peer must prove to have, for each stream. Their bytes are not encrypted.
    pub psk: Option<Psk>,
}

impl Default for Settings {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            devices: Vec::new(),
            ports: 0..=0,
            threads: (cpus / 2).clamp(1, 4),
            streams: 8,
            small_max: 32 << 10,
            local: false,
            chunk_len: 128 << 10,
            spin: Duration::from_micros(if cpus >= 8 { 50 } else { 0 }),
            limit: Duration::from_secs(10),
            psk: None,
        }
    }
}

impl Settings {
    /// The longest message, in bytes, that goes by a ring.
    pub const LOCAL_MAX: usize = 128 << 10;

    /// The reason why these settings cannot be; `None` if they can.
    pub(crate) fn refusal(&self) -> Option<&'static str> {
        let checks = [
            (self.ports.is_empty(), "the range of ports is empty"),
            (!(1..=64).contains(&self.threads), "there are 1 to 64 threads"),
            (!(1..=256).contains(&self.streams), "there are 1 to 256 streams"),
            (self.small_max > 1 << 20, "a small message has at most 1 MiB"),
            (!((4 << 10)..=(4 << 20)).contains(&self.chunk_len), "a chunk has 4 KiB to 4 MiB"),
            (self.limit.is_zero(), "the limit is zero"),
            (self.spin > self.limit, "a thread looks for work for longer than the limit"),
            (self.devices.len() > usize::from(u16::MAX), "there are more than 65535 devices"),
            (self.devices.iter().any(|device| device.addrs.is_empty()), "a device has no address"),
        ];
        checks.iter().find(|(is_wrong, _)| *is_wrong).map(|(_, reason)| *reason)
    }
}
