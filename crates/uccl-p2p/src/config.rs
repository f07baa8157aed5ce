//! All settings of an endpoint.

mod ignored;
mod table;

use std::{net::IpAddr, str::FromStr, time::Duration};

use uccl_libfabric::LibfabricSettings;
use uccl_verbs::VerbsSettings;

pub use self::ignored::take_notices;
use self::table::{PER_ENDPOINT, SETTINGS, TWINS};
use crate::error::Error;
pub use uccl_device::Selection;

/// Which links may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Transport {
    /// The best link that both sides have.
    #[default]
    Auto,
    /// Memory of the same host; fails where that is not possible.
    Local,
    /// TCP, even between processes of one host.
    Tcp,
    /// RDMA verbs, even between processes of one host; fails where that is not possible.
    Verbs,
    /// libfabric with the provider that is set, or else the best, even between processes of one
    /// host; fails where that is not possible.
    Libfabric,
    /// libfabric's provider for HPE Slingshot; fails where that is not possible.
    Cxi,
    /// libfabric's provider for AWS EFA; fails where that is not possible.
    Efa,
    /// UDP, with TCP for messages and for all data where UDP does not pass; even between processes
    /// of one host.
    Udp,
    /// Named pipes between processes of one host, where both sides ask for them; fails where that
    /// is not possible. An example of how to write a link.
    Fifo,
}

impl Transport {
    /// Whether processes of one host may reach each other's memory.
    pub(crate) fn allows_local(self) -> bool {
        matches!(self, Self::Auto | Self::Local)
    }

    /// Whether a connection must have rails.
    #[must_use]
    pub fn needs_rails(self) -> bool {
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
            Self::Udp => "udp",
            Self::Fifo => "fifo",
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
    /// On every link over which data passes through a stream.
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
    /// A secret that both ends must prove to have before anything else is read.
    pub psk: Option<Vec<u8>>,
    /// Whether peers may look up the regions that this endpoint
    /// [publishes](crate::Endpoint::publish), by their addresses. Without it nothing is published.
    pub publish: bool,
    /// A peer that is silent for this long while something waits for it is lost. Connecting takes
    /// no longer than this either. Zero waits for ever.
    pub timeout: Duration,
    /// Deadline of a transfer (and of accept) for which the caller gives none; zero waits for ever.
    pub transfer_timeout: Duration,
    /// Which links may be used.
    pub transport: Transport,
    /// The network interfaces for the address that peers get; unset takes the interface that routes
    /// suggest.
    pub interfaces: Option<Selection>,
    /// The RDMA devices to choose from, where [`VerbsSettings::devices`] names none.
    pub rdma_devices: Option<Selection>,
    /// Number of TCP streams of a connection; 0 chooses.
    pub tcp_streams: usize,
    /// Most streams of connections that peers have opened; one source of connections gets at most
    /// half of them. Beyond that peers are refused.
    pub max_streams: usize,
    /// TCP congestion control; unset leaves the system's, except on loopback.
    pub tcp_congestion: Option<String>,
    /// When data is checksummed.
    pub checksum: Checksum,
    /// Whether `process_vm_readv/writev` may be used.
    pub cma: bool,
    /// Whether peers of this host may open our GPU memory.
    pub ipc: bool,
    /// Whether worker threads keep to CPUs of the GPU's NUMA node, among those that the process may
    /// use.
    pub numa_affinity: bool,
    /// How long a thread spins for more work before it sleeps. Where there are fewer than four
    /// processors, a worker spins for at most 10 microseconds on lanes that callers use as well.
    pub spin: Duration,
    /// How RDMA verbs are used.
    pub verbs: VerbsSettings,
    /// How libfabric is used.
    pub libfabric: LibfabricSettings,
    /// Whether this endpoint asks the owners of memory to copy to and from it wherever that is
    /// possible, and copies for peers that ask. Otherwise it asks only where the owner's GPUs reach
    /// memory that ours do not.
    pub ask_owners: bool,
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
            publish: false,
            timeout: Duration::from_secs(10),
            transfer_timeout: Duration::from_secs(600),
            transport: Transport::Auto,
            interfaces: None,
            rdma_devices: None,
            tcp_streams: 0,
            max_streams: 8192,
            tcp_congestion: None,
            checksum: Checksum::Auto,
            cma: true,
            ipc: true,
            numa_affinity: true,
            spin: Duration::from_micros(100),
            verbs: VerbsSettings::default(),
            libfabric: LibfabricSettings::default(),
            ask_owners: false,
        }
    }
}

/// A setting that the environment can change.
#[derive(Clone, Copy)]
pub struct Setting {
    /// The environment variable.
    pub name: &'static str,
    /// Its default, as text for people.
    pub default: &'static str,
    /// Its effect and its unit, as text for people.
    pub doc: &'static str,
    apply: fn(&mut Config, &str) -> Result<(), String>,
}

/// The prefix of all variables' names.
const PREFIX: &str = "UCCL_P2P_";

impl Setting {
    /// Variables of UCCL and NCCL that mean the same; they are read where this one is not set.
    #[must_use]
    pub fn twins(&self) -> &'static [&'static str] {
        let twins = TWINS.iter().find(|(name, _)| *name == self.name);
        twins.map(|(_, twins)| *twins).unwrap_or_default()
    }

    /// Its name without the prefix, in lower case.
    fn short(&self) -> String {
        self.name.strip_prefix(PREFIX).unwrap_or(self.name).to_ascii_lowercase()
    }

    fn change(&self, config: &mut Config, value: &str) -> Result<(), Error> {
        (self.apply)(config, value).map_err(|reason| refuse(self.name, value, reason))
    }

    /// Applies the value from the environment: of the first of its names that is set.
    fn read(
        &self,
        config: &mut Config,
        get: &impl Fn(&str) -> Option<String>,
    ) -> Result<(), Error> {
        let names = [self.name].into_iter().chain(self.twins().iter().copied());
        let set = |name| get(name).filter(|value| !value.is_empty()).map(|value| (name, value));
        match names.into_iter().find_map(set) {
            Some((name, value)) => {
                (self.apply)(config, &value).map_err(|e| refuse(name, &value, e))
            }
            None => Ok(()),
        }
    }
}

fn refuse(name: &'static str, value: &str, reason: String) -> Error {
    // A secret must not appear in a message.
    let value = if name.ends_with("PSK") { "..." } else { value };
    Error::Config { name, value: value.to_owned(), reason }
}

/// The error for a setting that does not exist. It lists those that do.
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
            "tcp" => Ok(Self::Tcp),
            "tcpx" => Err("there is no TCP-X here: set tcp for plain TCP, or auto for the best that there is".into()),
            "nccl" => Err("nothing is moved with NCCL here: set tcp for plain TCP, or auto for the best that there is".into()),
            "verbs" | "rdma" | "ib" => Ok(Self::Verbs),
            "libfabric" => Ok(Self::Libfabric),
            "cxi" => Ok(Self::Cxi),
            "efa" => Ok(Self::Efa),
            "udp" => Ok(Self::Udp),
            "fifo" => Ok(Self::Fifo),
            _ => Err("use auto, local, tcp, verbs, libfabric, cxi, efa, udp or fifo".into()),
        }
    }
}

impl Config {
    /// The defaults, changed by the environment. A variable that is set but empty counts as not
    /// set.
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
            setting.read(&mut config, &get)?;
        }
        Ok(config)
    }

    /// Changes one setting by its name, for programs and plugins that carry settings as text. The
    /// name is the environment variable's (`UCCL_P2P_TIMEOUT_MS`), or the same without its prefix,
    /// in lower case (`timeout_ms`). Also takes `gpu_index` and `port`, which have no variable
    /// because they differ between the endpoints of a process.
    ///
    /// # Errors
    /// [`Error::Config`] says why the value is refused, [`Error::Invalid`] that there is no such
    /// setting. Then nothing has changed.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let mut settings = SETTINGS.iter().chain(PER_ENDPOINT);
        match settings.find(|setting| setting.name == name || setting.short() == name) {
            Some(setting) if value.is_empty() => {
                Err(refuse(setting.name, value, "it is empty".into()))
            }
            Some(setting) => setting.change(self, value),
            None => Err(unknown(name)),
        }
    }

    /// The short names of all settings that [`Self::set`] can change.
    pub fn names() -> impl Iterator<Item = String> {
        SETTINGS.iter().chain(PER_ENDPOINT).map(Setting::short)
    }

    /// Every setting that the environment can change.
    #[must_use]
    pub fn settings() -> &'static [Setting] {
        SETTINGS
    }
}

#[cfg(test)]
mod tests {
    use uccl_verbs::RelaxedOrdering;

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
        assert!(with("UCCL_P2P_ASK_OWNERS", "1").expect("understood").ask_owners);
        let config = with("UCCL_P2P_TIMEOUT_MS", "250").expect("understood");
        assert_eq!(config.timeout, Duration::from_millis(250));
        assert_eq!(with("UCCL_P2P_BIND", "").expect("empty is unset").bind, None);
    }

    #[test]
    fn relaxed_ordering_is_asked_for_where_it_can_be_unless_set() {
        let set =
            |value| with("UCCL_IB_PCI_RELAXED_ORDERING", value).map(|c| c.verbs.relaxed_ordering);
        assert_eq!(Config::default().verbs.relaxed_ordering, RelaxedOrdering::Auto);
        for (value, expected) in [
            ("", RelaxedOrdering::Auto),
            ("0", RelaxedOrdering::Never),
            ("1", RelaxedOrdering::Always),
            ("2", RelaxedOrdering::Auto),
        ] {
            assert_eq!(set(value).expect("understood"), expected, "{value:?}");
        }
        for value in ["3", "-1", "auto"] {
            let refused = set(value);
            assert!(matches!(refused, Err(Error::Config { .. })), "{value}: {refused:?}");
        }
    }

    #[test]
    fn other_names_count_where_the_first_is_not_set() {
        let both = |own: &'static str, twin: &'static str| {
            Config::from_vars(move |asked| match asked {
                "UCCL_P2P_RDMA_SL" => Some(own.to_owned()),
                "UCCL_IB_SERVICE_LEVEL" => Some(twin.to_owned()),
                _ => None,
            })
        };
        assert_eq!(both("", "5").expect("the twin").verbs.service_level, 5);
        assert_eq!(both("3", "5").expect("its own").verbs.service_level, 3);
        let refused = both("", "99");
        assert!(
            matches!(refused, Err(Error::Config { name: "UCCL_IB_SERVICE_LEVEL", .. })),
            "{refused:?}"
        );
        assert!(!with("UCCL_PIN_TO_NUMA", "0").expect("understood").numa_affinity);
        assert_eq!(
            with("UCCL_ROCE_TRAFFIC_CLASS", "8").expect("understood").verbs.traffic_class,
            8
        );
        let hcas = with("NCCL_IB_HCA", "^mlx5_1").expect("understood").rdma_devices;
        assert!(hcas.is_some_and(|some| some.takes("mlx5_0", None) && !some.takes("mlx5_1", None)));
        let interfaces = with("NCCL_SOCKET_IFNAME", "=eth0").expect("understood").interfaces;
        assert!(
            interfaces.is_some_and(|some| some.takes("eth0", None) && !some.takes("eth01", None))
        );
    }

    #[test]
    fn links_that_are_not_there_are_not_replaced_in_silence() {
        for link in ["tcpx", "nccl"] {
            let refused = with("UCCL_P2P_TRANSPORT", link).expect_err("there is none").to_string();
            assert!(
                refused.contains("UCCL_P2P_TRANSPORT") && refused.contains("set tcp"),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_setting_that_is_not_understood_is_named() {
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
            // Both names are of the same setting: an error about an empty value names its variable.
            for name in [setting.name, &short] {
                let refused = Config::default().set(name, "");
                assert!(
                    matches!(refused, Err(Error::Config { name: named, .. }) if named == setting.name)
                );
            }
        }
    }

    #[test]
    fn a_setting_that_cannot_be_set_changes_nothing() {
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
