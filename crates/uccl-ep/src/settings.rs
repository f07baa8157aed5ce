//! Settings of expert parallelism, from the environment.
//!
//! They are read when a buffer is made, all at once: a value that is not understood is an error
//! before ranks wait for each other.

use std::{fmt, str::FromStr, time::Duration};

use crate::{Error, Result, cuda::RESERVED};

/// The memory that a rank's tensors are in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// Host memory: `cpu`.
    Host,
    /// A GPU's memory: `cuda`, the current GPU, or `cuda:1`.
    Gpu(Option<u32>),
}

impl FromStr for Device {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match (text, text.strip_prefix("cuda:")) {
            ("cpu", _) => Ok(Self::Host),
            ("cuda", _) => Ok(Self::Gpu(None)),
            (_, Some(index)) => Ok(Self::Gpu(Some(decimal(index).ok_or(())?))),
            _ => Err(()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Gpu(None) => f.write_str("cuda"),
            Self::Gpu(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

/// The settings of a buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The device, for callers that cannot pass one; unset leaves the choice to the caller.
    pub device: Option<Device>,
    /// The number of this rank's node; unset takes the host and its process namespace.
    pub node: Option<u64>,
    /// Multiprocessors that launches leave to other kernels.
    pub reserved_sms: u32,
    /// The time that a call waits for its peers.
    pub timeout: Duration,
    /// Tokens of each rank for which a size hint has room, in each of two calls.
    pub tokens_at_once: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            device: None,
            node: None,
            reserved_sms: RESERVED,
            timeout: Duration::from_secs(100),
            tokens_at_once: 2048,
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
    /// The values that it may have, as text for people.
    pub allowed: &'static str,
    /// Sets the value; `None` if it is not allowed.
    apply: fn(&mut Settings, &str) -> Option<()>,
}

/// Every setting. The table of docs/settings.md is made from this.
const SETTINGS: &[Setting] = &[
    Setting {
        name: "UCCL_EP_DEVICE",
        default: "by the ranks' group and the first tensor",
        doc: "Where a buffer's tensors are, if the caller passes no `device`: `cpu`, `cuda` or `cuda:1`",
        allowed: "cpu, cuda or cuda:N",
        apply: |settings, value| {
            settings.device = Some(value.parse().ok()?);
            Some(())
        },
    },
    Setting {
        name: "UCCL_EP_NODE",
        default: "by host and process namespace",
        doc: "The number of the rank's node. Ranks of one host with different numbers reach each other over the network, as in tests",
        allowed: "a number from 0 to 2^64 - 1",
        apply: |settings, value| {
            settings.node = Some(decimal(value)?);
            Some(())
        },
    },
    Setting {
        name: "UCCL_EP_RESERVED_SMS",
        default: "3",
        doc: "Multiprocessors that launches leave to other kernels",
        allowed: "a number of multiprocessors",
        apply: |settings, value| {
            settings.reserved_sms = decimal(value)?;
            Some(())
        },
    },
    Setting {
        name: "UCCL_EP_TIMEOUT_SECS",
        default: "100",
        doc: "Seconds that a call of expert parallelism waits for its peers, unless the buffer is made with timeouts of its own",
        allowed: "a number of seconds, more than 0",
        apply: |settings, value| {
            let timeout = Duration::try_from_secs_f64(value.trim().parse().ok()?).ok()?;
            settings.timeout = Some(timeout).filter(|timeout| !timeout.is_zero())?;
            Some(())
        },
    },
    Setting {
        name: "UCCL_EP_TOKENS_AT_ONCE",
        default: "2048",
        doc: "`Config.get_nvl_buffer_size_hint` has room for two calls with so many tokens of each rank. On GPUs a round of a call may use all of it: 4096 tokens of each rank. More go in further rounds. The same on all ranks",
        allowed: "a number of tokens, more than 0",
        apply: |settings, value| {
            settings.tokens_at_once = Some(decimal(value)?).filter(|tokens| *tokens > 0)?;
            Some(())
        },
    },
];

/// A number of decimal digits alone.
fn decimal<T: FromStr>(text: &str) -> Option<T> {
    let is_decimal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_decimal.then(|| text.parse().ok()).flatten()
}

impl Settings {
    /// The defaults, changed by the environment. A variable that is set but empty counts as not
    /// set.
    ///
    /// # Errors
    /// [`Error::Invalid`] says the variable that is not understood, its value, and the allowed
    /// values.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut settings = Self::default();
        for Setting { name, allowed, apply, .. } in SETTINGS {
            let Some(value) = get(name).filter(|value| !value.is_empty()) else { continue };
            let invalid = || Error::Invalid(format!("{name} is {allowed}, not '{value}'"));
            apply(&mut settings, &value).ok_or_else(invalid)?;
        }
        Ok(settings)
    }

    /// All settings, as the documentation lists them.
    pub fn table() -> impl Iterator<Item = &'static Setting> {
        SETTINGS.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Settings, String> {
        let get = |asked: &str| (asked == name).then(|| value.to_owned());
        Settings::from_vars(get).map_err(|e| e.to_string())
    }

    #[test]
    fn an_environment_without_settings_gives_the_defaults() {
        let settings = Settings::from_vars(|_| None).ok();
        assert_eq!(settings, Some(Settings::default()));
        for setting in Settings::table() {
            assert_eq!(read(setting.name, ""), Ok(Settings::default()), "{}", setting.name);
        }
    }

    #[test]
    fn each_variable_changes_its_setting() {
        let default = Settings::default;
        for (name, value, expected) in [
            ("UCCL_EP_DEVICE", "cpu", Settings { device: Some(Device::Host), ..default() }),
            ("UCCL_EP_DEVICE", "cuda", Settings { device: Some(Device::Gpu(None)), ..default() }),
            (
                "UCCL_EP_DEVICE",
                "cuda:12",
                Settings { device: Some(Device::Gpu(Some(12))), ..default() },
            ),
            (
                "UCCL_EP_NODE",
                "18446744073709551615",
                Settings { node: Some(u64::MAX), ..default() },
            ),
            ("UCCL_EP_RESERVED_SMS", "0", Settings { reserved_sms: 0, ..default() }),
            (
                "UCCL_EP_TIMEOUT_SECS",
                "0.5",
                Settings { timeout: Duration::from_millis(500), ..default() },
            ),
            ("UCCL_EP_TOKENS_AT_ONCE", "1", Settings { tokens_at_once: 1, ..default() }),
        ] {
            assert_eq!(read(name, value), Ok(expected), "{name}={value}");
        }
    }

    #[test]
    fn a_value_that_is_not_understood_is_named_with_those_that_are() {
        for (name, values) in [
            ("UCCL_EP_DEVICE", &["gpu", "cuda:", "cuda:x", "cuda:+1", "CPU"][..]),
            ("UCCL_EP_NODE", &["-1", "18446744073709551616", "one", "+1", " 1"]),
            ("UCCL_EP_RESERVED_SMS", &["-1", "4294967296", "few", "1.5"]),
            ("UCCL_EP_TIMEOUT_SECS", &["0", "-1", "nan", "inf", "1e400", "soon"]),
            ("UCCL_EP_TOKENS_AT_ONCE", &["0", "-1", "many", "1e3"]),
        ] {
            let setting = Settings::table().find(|setting| setting.name == name);
            let allowed = setting.map(|setting| setting.allowed).unwrap_or_default();
            for value in values {
                let expected = format!("{name} is {allowed}, not '{value}'");
                let said = read(name, value).err().unwrap_or_default();
                assert!(said.ends_with(&expected), "{said:?}");
            }
        }
    }

    #[test]
    fn a_device_is_written_as_it_is_read() {
        for device in [Device::Host, Device::Gpu(None), Device::Gpu(Some(3))] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
    }

    #[test]
    fn the_table_is_in_order() {
        let names: Vec<_> = Settings::table().map(|setting| setting.name).collect();
        assert!(names.is_sorted() && names.iter().all(|name| name.starts_with("UCCL_EP_")));
    }
}
