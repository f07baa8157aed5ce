//! Every setting of an endpoint, in one struct read once.

use std::{net::IpAddr, str::FromStr, time::Duration};

use uccl_fabric::{
    libfabric::{Devices, LibfabricSettings, Threading},
    verbs::{ParseDeviceNameError, VerbsSettings},
};

use crate::error::Error;

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
    /// RDMA verbs, or nothing; even between processes of one host.
    Verbs,
    /// libfabric with whatever provider is set or best, or nothing; even between processes of one host.
    Libfabric,
    /// libfabric's provider for HPE Slingshot, or nothing.
    Cxi,
    /// libfabric's provider for AWS EFA, or nothing.
    Efa,
}

impl Transport {
    /// Whether processes of one host may reach each other's memory.
    pub(crate) fn allows_local(self) -> bool {
        matches!(self, Self::Auto | Self::Local)
    }

    /// Whether a connection without such devices is none.
    pub(crate) fn needs_rails(self) -> bool {
        matches!(self, Self::Verbs | Self::Libfabric | Self::Cxi | Self::Efa)
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
            Self::Libfabric => "libfabric",
            Self::Cxi => "cxi",
            Self::Efa => "efa",
        })
    }
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
    /// Most worker threads.
    pub num_cpus: usize,
    /// The address to listen on; unset listens on all.
    pub bind: Option<IpAddr>,
    /// The port to listen on; unset takes `base_port + gpu_index` if free, else any.
    pub port: Option<u16>,
    /// Where well-known ports start.
    pub base_port: u16,
    /// Both ends prove this secret before anything else is read.
    pub psk: Option<Vec<u8>>,
    /// A peer silent for this long while something waits for it is lost, and connecting takes no
    /// longer; zero waits for ever.
    pub timeout: Duration,
    /// Deadline of a transfer (and of accept) that names none; zero waits for ever.
    pub transfer_timeout: Duration,
    /// Which links may be used.
    pub transport: Transport,
    /// TCP streams of a connection; 0 chooses.
    pub tcp_streams: usize,
    /// TCP congestion control; unset leaves the system's, except on loopback.
    pub tcp_congestion: Option<String>,
    /// When data is checksummed.
    pub checksum: Checksum,
    /// Whether `process_vm_readv/writev` may be used.
    pub cma: bool,
    /// Whether peers of this host may open our GPU memory.
    pub ipc: bool,
    /// Whether worker threads keep to the CPUs of the NUMA node that the GPU is on, of those that the
    /// process may use.
    pub numa_affinity: bool,
    /// How long a worker spins for more work before it sleeps.
    pub spin: Duration,
    /// How RDMA verbs are used.
    pub verbs: VerbsSettings,
    /// How libfabric is used.
    pub libfabric: LibfabricSettings,
    /// Whether owners of memory are asked to copy wherever that can be asked, and do as they are asked: so
    /// that tests exercise it on machines without a GPU.
    #[doc(hidden)]
    pub always_ask_owners: bool,
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
            ipc: true,
            numa_affinity: true,
            spin: Duration::from_micros(100),
            verbs: VerbsSettings::default(),
            libfabric: LibfabricSettings::default(),
            always_ask_owners: false,
        }
    }
}

/// A setting, as the environment names it.
#[derive(Clone, Copy)]
pub struct Setting {
    /// The environment variable.
    pub name: &'static str,
    /// Its default, for people.
    pub default: &'static str,
    /// What it does, and in which unit.
    pub doc: &'static str,
    apply: fn(&mut Config, &str) -> Result<(), String>,
}

/// Every setting. The README's table is made from this.
const SETTINGS: &[Setting] = &[
    Setting {
        name: "UCCL_CHUNK_SIZE_KB",
        default: "512; over UC what losses suggest",
        doc: "What is moved by RDMA is cut into pieces of so many KiB, which spread over devices",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.chunk_kib = n),
    },
    Setting {
        name: "UCCL_CXI_CQ_SIZE",
        default: "8192 for cxi; else the provider's",
        doc: "Completions that a queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.cq_size = Some(n)),
    },
    Setting {
        name: "UCCL_CXI_DEVICE_INDEX",
        default: "for cxi the GPU's index modulo their number; else all",
        doc: "Which of libfabric's domains is used, by its place among all",
        apply: |config, value| {
            fabric(config, value, |fabric, n| fabric.devices = Devices::Index(n))
        },
    },
    Setting {
        name: "UCCL_CXI_DOMAIN",
        default: "as UCCL_CXI_DEVICE_INDEX",
        doc: "Which of libfabric's domains are used, by name, with commas between them: `cxi0,cxi1`",
        apply: |config, value| {
            let names = value.split(',').map(|name| name.trim().to_owned()).collect();
            config.libfabric.devices = Devices::Named(names);
            config.libfabric.validate().map_err(|e| e.to_string())
        },
    },
    Setting {
        name: "UCCL_CXI_RX_QUEUE_SIZE",
        default: "4096 for cxi; else the provider's",
        doc: "Operations that a receive queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.rx_size = Some(n)),
    },
    Setting {
        name: "UCCL_CXI_THREADING",
        default: "safe",
        doc: "Who keeps threads apart in libfabric: `safe` (the provider), `domain` (this library, by one lock a device)",
        apply: |config, value| {
            config.libfabric.threading = match value {
                "safe" => Threading::Safe,
                "domain" => Threading::Domain,
                _ => return Err("use safe or domain".into()),
            };
            Ok(())
        },
    },
    Setting {
        name: "UCCL_CXI_TX_QUEUE_SIZE",
        default: "4096 for cxi; else the provider's",
        doc: "Operations that a send queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.tx_size = Some(n)),
    },
    Setting {
        name: "UCCL_IBV_SO",
        default: "libibverbs.so.1",
        doc: "The library for RDMA verbs, by name or path",
        apply: |config, value| {
            config.verbs.library = Some(value.to_owned());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_IB_PCI_RELAXED_ORDERING",
        default: "0",
        doc: "`1` lets RDMA devices reorder their writes to memory on the PCI bus",
        apply: |config, value| flag(value).map(|on| config.verbs.relaxed_ordering = on),
    },
    Setting {
        name: "UCCL_LIBFABRIC_PROVIDER",
        default: "the best that there is",
        doc: "Which provider `UCCL_P2P_TRANSPORT=libfabric` uses, as `fi_info` writes it: `tcp`, `tcp;ofi_rxm`",
        apply: |config, value| {
            config.libfabric.provider = Some(value.to_owned());
            config.libfabric.validate().map_err(|e| e.to_string())
        },
    },
    Setting {
        name: "UCCL_LIBFABRIC_SO",
        default: "libfabric.so.1",
        doc: "The library for libfabric, by name or path, or the folder that it is in",
        apply: |config, value| {
            config.libfabric.library = Some(value.into());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_BASE_PORT",
        default: "28100",
        doc: "Where well-known ports start: an endpoint listens on this plus its GPU index if that is free, else on any port",
        apply: |config, value| number(value).map(|port| config.base_port = port),
    },
    Setting {
        name: "UCCL_P2P_BIND",
        default: "all",
        doc: "The address to listen on; `127.0.0.1` keeps an endpoint to its own host",
        apply: |config, value| {
            let ip = value.parse().map_err(|_| "not an IP address".to_owned())?;
            config.bind = Some(ip);
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_CHECKSUM",
        default: "auto",
        doc: "When streams carry a CRC-32C of their data: `auto` (across a network), `on`, `off`",
        apply: |config, value| {
            config.checksum = match value {
                "auto" => Checksum::Auto,
                "on" | "1" => Checksum::On,
                "off" | "0" => Checksum::Off,
                _ => return Err("use auto, on or off".into()),
            };
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_DISABLE_CMA",
        default: "0",
        doc: "`1` does without `process_vm_readv` and `process_vm_writev`: the same host then uses shared memory",
        apply: |config, value| flag(value).map(|disable| config.cma = !disable),
    },
    Setting {
        name: "UCCL_P2P_DISABLE_IPC",
        default: "0",
        doc: "`1` keeps other processes from opening this one's GPU memory (CUDA IPC): it then passes through host memory, on the same host too",
        apply: |config, value| flag(value).map(|disable| config.ipc = !disable),
    },
    Setting {
        name: "UCCL_P2P_MAX_INFLIGHT_OPS",
        default: "256; 32 for cxi",
        doc: "Operations of libfabric that a connection has in flight on each device; more than the default is cut to it",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.max_inflight = n),
    },
    Setting {
        name: "UCCL_P2P_NUM_CPUS",
        default: "the machine's, at most 4",
        doc: "Most worker threads of an endpoint",
        apply: |config, value| match number(value)? {
            0 => Err("at least one is needed".into()),
            n => {
                config.num_cpus = n;
                Ok(())
            }
        },
    },
    Setting {
        name: "UCCL_P2P_NUMA_AFFINITY",
        default: "1",
        doc: "`0` lets worker threads run on every CPU that the process may use; else they keep to those on the NUMA node of the endpoint's GPU, if these suffice",
        apply: |config, value| flag(value).map(|near| config.numa_affinity = near),
    },
    Setting {
        name: "UCCL_P2P_PSK",
        default: "none",
        doc: "A secret that both ends must prove before anything else is read; use 16 random bytes or more",
        apply: |config, value| {
            config.psk = Some(value.as_bytes().to_vec());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_RDMA_DEV",
        default: "the nearest to the GPU; all that are up, without one",
        doc: "RDMA devices to use, with commas between them, each with a port if not all of its ports are meant: `mlx5_0,mlx5_1:1`",
        apply: |config, value| {
            let names = value.split(',').map(|name| name.trim().parse());
            config.verbs.devices =
                names.collect::<Result<_, _>>().map_err(|e: ParseDeviceNameError| e.to_string())?;
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_RDMA_GID_INDEX",
        default: "the best",
        doc: "Which GID of a port is used, by its place in the port's table; else RoCE v2 over IPv4 before IPv6 before link-local",
        apply: |config, value| number(value).map(|index| config.verbs.gid_index = Some(index)),
    },
    Setting {
        name: "UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC",
        default: "16",
        doc: "RDMA reads that a queue pair answers at a time, at most as many as the device takes",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.max_dest_rd_atomic = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_MAX_RD_ATOMIC",
        default: "16",
        doc: "RDMA reads that a queue pair has under way, at most as many as the device takes",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.max_rd_atomic = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_PKEY_INDEX",
        default: "0",
        doc: "Which partition key of a port is used, by its place in the port's table",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.pkey_index = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_QPS",
        default: "4; 1 on a software device",
        doc: "Queue pairs of a connection on each RDMA device, 1 to 16",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.queue_pairs = Some(n)),
    },
    Setting {
        name: "UCCL_P2P_RDMA_RETRY_COUNT",
        default: "7",
        doc: "How often an RDMA device sends again before it gives up, 0 to 7",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.retries = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_SL",
        default: "0",
        doc: "Service level of RDMA packets, 0 to 15",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.service_level = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_TC",
        default: "104",
        doc: "Traffic class of RDMA packets: over RoCE v2 the byte with DSCP and ECN",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.traffic_class = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_TIMEOUT",
        default: "14",
        doc: "How long an RDMA device waits for an acknowledgement: 4.096 us times two to the power of this, 1 to 31",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.timeout = n),
    },
    Setting {
        name: "UCCL_P2P_SPIN_US",
        default: "100",
        doc: "Microseconds that a thread spins for more work before it sleeps",
        apply: |config, value| number(value).map(|us| config.spin = Duration::from_micros(us)),
    },
    Setting {
        name: "UCCL_P2P_TCP_CONGESTION",
        default: "the system's; cubic on loopback",
        doc: "TCP congestion control",
        apply: |config, value| {
            config.tcp_congestion = Some(value.to_owned());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_TCP_STREAMS",
        default: "chosen",
        doc: "TCP streams of a connection, 1 to 64",
        apply: |config, value| match number(value)? {
            n @ 0..=64 => {
                config.tcp_streams = n;
                Ok(())
            }
            _ => Err("at most 64".into()),
        },
    },
    Setting {
        name: "UCCL_P2P_TIMEOUT_MS",
        default: "10000",
        doc: "Milliseconds after which a silent peer that something waits for is lost, and a connect fails; 0 waits for ever",
        apply: |config, value| number(value).map(|ms| config.timeout = Duration::from_millis(ms)),
    },
    Setting {
        name: "UCCL_P2P_TRANSFER_TIMEOUT_MS",
        default: "600000",
        doc: "Deadline in milliseconds of a transfer, and of accept, that names none; 0 waits for ever",
        apply: |config, value| {
            number(value).map(|ms| config.transfer_timeout = Duration::from_millis(ms))
        },
    },
    Setting {
        name: "UCCL_P2P_TRANSPORT",
        default: "auto",
        doc: "Which links may be used: `auto` (the best that both sides have), `local` (same-host memory), `tcp`, `verbs` (RDMA; also `ib`), `libfabric`, and of its providers `cxi` and `efa`. All but `auto` mean that link or nothing",
        apply: |config, value| {
            config.transport = value.parse()?;
            Ok(())
        },
    },
    Setting {
        name: "UCCL_RCMODE",
        default: "1",
        doc: "`0` sends RDMA writes over unreliable connections (UC), which this library makes reliable; reads take reliable ones (RC) all the same",
        apply: |config, value| flag(value).map(|rc| config.verbs.rc_mode = rc),
    },
];

/// What the environment cannot change, because it differs between the endpoints of a process.
const PER_ENDPOINT: &[Setting] = &[
    Setting {
        name: "gpu_index",
        default: "0",
        doc: "The GPU that the endpoint serves",
        apply: |config, value| number(value).map(|index| config.gpu_index = index),
    },
    Setting {
        name: "port",
        default: "the base port plus the GPU's index if free, else any",
        doc: "The port to listen on; 0 takes any",
        apply: |config, value| number(value).map(|port| config.port = Some(port)),
    },
];

/// What the names of all variables begin with.
const PREFIX: &str = "UCCL_P2P_";

impl Setting {
    /// Its name without the prefix, in lower case.
    fn short(&self) -> String {
        self.name.strip_prefix(PREFIX).unwrap_or(self.name).to_ascii_lowercase()
    }

    fn change(&self, config: &mut Config, value: &str) -> Result<(), Error> {
        (self.apply)(config, value).map_err(|reason| self.refuse(value, reason))
    }

    fn refuse(&self, value: &str, reason: String) -> Error {
        // A secret does not belong in a message.
        let value = if self.name.ends_with("PSK") { "..." } else { value };
        Error::Config { name: self.name, value: value.to_owned(), reason }
    }
}

/// Names the settings that there are, for want of this one.
fn unknown(name: &str) -> Error {
    let names: Vec<_> = Config::names().collect();
    let name: String = name.chars().take(80).collect();
    Error::Invalid(format!("no setting is called {name:?}; there are {}", names.join(", ")))
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "local" => Ok(Self::Local),
            // What upstream calls its links over plain sockets.
            "tcp" | "tcpx" | "nccl" => Ok(Self::Tcp),
            "verbs" | "rdma" | "ib" => Ok(Self::Verbs),
            "libfabric" => Ok(Self::Libfabric),
            "cxi" => Ok(Self::Cxi),
            "efa" => Ok(Self::Efa),
            _ => Err("use auto, local, tcp, verbs, libfabric, cxi or efa".into()),
        }
    }
}

impl Config {
    /// The defaults, changed by the environment. A variable that is set but empty counts as not set.
    ///
    /// # Errors
    /// [`Error::Config`] names the variable that is not understood.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_vars(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut config = Self::default();
        for setting in SETTINGS {
            if let Some(value) = get(setting.name).filter(|value| !value.is_empty()) {
                setting.change(&mut config, &value)?;
            }
        }
        Ok(config)
    }

    /// Changes one setting by its name, as programs and plugins that carry settings as text do: the environment
    /// variable (`UCCL_P2P_TIMEOUT_MS`) or what follows its prefix, in lower case (`timeout_ms`). Beside those,
    /// `gpu_index` and `port`, which differ between the endpoints of a process and so have no variable.
    ///
    /// # Errors
    /// [`Error::Config`] says why the value will not do, [`Error::Invalid`] that there is no such setting. Then
    /// nothing has changed.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let mut settings = SETTINGS.iter().chain(PER_ENDPOINT);
        match settings.find(|setting| setting.name == name || setting.short() == name) {
            Some(setting) if value.is_empty() => Err(setting.refuse(value, "it is empty".into())),
            Some(setting) => setting.change(self, value),
            None => Err(unknown(name)),
        }
    }

    /// The short name of everything that [`Self::set`] changes.
    pub fn names() -> impl Iterator<Item = String> {
        SETTINGS.iter().chain(PER_ENDPOINT).map(Setting::short)
    }

    /// Every setting that the environment can change.
    #[must_use]
    pub fn settings() -> &'static [Setting] {
        SETTINGS
    }
}

fn number<T: FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| "not a number in range".to_owned())
}

/// A number among what can be set about RDMA verbs, which say themselves what they take.
fn rdma<T: FromStr>(
    config: &mut Config,
    value: &str,
    set: impl FnOnce(&mut VerbsSettings, T),
) -> Result<(), String> {
    let mut verbs = config.verbs.clone();
    set(&mut verbs, number(value)?);
    verbs.validate().map_err(|e| e.to_string())?;
    config.verbs = verbs;
    Ok(())
}

/// The same for libfabric.
fn fabric(
    config: &mut Config,
    value: &str,
    set: impl FnOnce(&mut LibfabricSettings, usize),
) -> Result<(), String> {
    let mut fabric = config.libfabric.clone();
    set(&mut fabric, number(value)?);
    fabric.validate().map_err(|e| e.to_string())?;
    config.libfabric = fabric;
    Ok(())
}

fn flag(value: &str) -> Result<bool, String> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("use 0 or 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Config, Error> {
        Config::from_vars(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn the_environment_changes_settings() {
        let config = with("UCCL_P2P_TRANSPORT", "tcp").expect("understood");
        assert_eq!(config.transport, Transport::Tcp);
        assert!(!with("UCCL_P2P_DISABLE_CMA", "1").expect("understood").cma);
        assert!(!with("UCCL_P2P_NUMA_AFFINITY", "0").expect("understood").numa_affinity);
        let config = with("UCCL_P2P_TIMEOUT_MS", "250").expect("understood");
        assert_eq!(config.timeout, Duration::from_millis(250));
        assert_eq!(with("UCCL_P2P_BIND", "").expect("empty is unset").bind, None);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (name, value) in [
            ("UCCL_P2P_TRANSPORT", "smoke"),
            ("UCCL_P2P_NUM_CPUS", "0"),
            ("UCCL_P2P_TCP_STREAMS", "65"),
            ("UCCL_P2P_BIND", "nowhere"),
            ("UCCL_P2P_DISABLE_CMA", "yes"),
        ] {
            let refused = with(name, value);
            assert!(matches!(refused, Err(Error::Config { name: named, .. }) if named == name));
        }
    }

    #[test]
    fn one_setting_is_changed_by_either_name() {
        let mut config = Config::default();
        config.set("UCCL_P2P_TIMEOUT_MS", "250").expect("a variable");
        assert_eq!(config.timeout, Duration::from_millis(250));
        config.set("timeout_ms", "0").expect("its short name");
        assert_eq!(config.timeout, Duration::ZERO);
        config.set("disable_cma", "1").expect("a flag");
        assert!(!config.cma);
        config.set("gpu_index", "3").expect("an endpoint's own");
        config.set("port", "4711").expect("an endpoint's own");
        assert_eq!((config.gpu_index, config.port), (3, Some(4711)));
    }

    #[test]
    fn every_setting_has_a_short_name() {
        for setting in Config::settings() {
            let short = setting.name.trim_start_matches("UCCL_P2P_").to_lowercase();
            // Both names mean the same one: an empty value is refused in its name.
            for name in [setting.name, &short] {
                let refused = Config::default().set(name, "");
                assert!(
                    matches!(refused, Err(Error::Config { name: named, .. }) if named == setting.name)
                );
            }
        }
    }

    #[test]
    fn what_cannot_be_set_changes_nothing() {
        let mut config = Config::default();
        for name in ["", "TIMEOUT_MS", "UCCL_P2P_timeout_ms", "UCCL_P2P_PORT", "uccl_p2p_bind"] {
            let refused = config.set(name, "1").expect_err("no such setting").to_string();
            assert!(refused.contains("timeout_ms, ") && refused.ends_with("port"), "{refused}");
        }
        for (name, value) in [("timeout_ms", "-1"), ("port", "65536"), ("transport", "smoke")] {
            let refused = config.set(name, value).expect_err("not understood");
            assert!(matches!(refused, Error::Config { .. }), "{refused}");
        }
        let refused = config.set("psk", "").expect_err("an empty secret").to_string();
        assert!(refused.contains("..."), "{refused}");
        assert_eq!(format!("{config:?}"), format!("{:?}", Config::default()));
    }
}
