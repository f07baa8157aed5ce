//! Variables of the environment.

use std::{env, net::IpAddr, ops::RangeInclusive, str::FromStr, time::Duration};

use uccl_device::Selection;
use uccl_flow::Psk;

use crate::fault::Fault;

/// Seconds for which a peer may be silent. Jobs outlive a link that is away for less.
const TIMEOUT_SECS: u64 = 30;

/// The settings of this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The interfaces to use, with the variable that says so.
    pub(crate) interfaces: Option<(&'static str, Selection)>,
    pub(crate) family: Family,
    /// One device for each interface, instead of one over all.
    pub(crate) device_each: bool,
    /// Mbit/s of a device, in place of the kernel's figure.
    pub(crate) speed_mbps: Option<u32>,
    pub(crate) timeout: Duration,
    pub(crate) ports: RangeInclusive<u16>,
    /// Streams to each peer process, and threads; `uccl-flow` decides without.
    pub(crate) streams: Option<usize>,
    pub(crate) threads: Option<usize>,
    /// Rings in shared memory to processes of the same host.
    pub(crate) is_local: bool,
    /// KiB of the longest message that NCCL's own thread carries, and of a chunk of a longer one.
    pub(crate) small_kib: Option<usize>,
    pub(crate) chunk_kib: Option<usize>,
    /// The secret that peers must prove to have.
    pub(crate) psk: Option<Psk>,
    /// Whether NCCL finds the one-sided tables.
    pub(crate) has_rma: bool,
}

/// Versions of IP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    Any,
    V4,
    V6,
}

impl Family {
    pub(crate) fn takes(self, ip: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::V4 => ip.is_ipv4(),
            Self::V6 => ip.is_ipv6(),
        }
    }
}

impl Settings {
    pub(crate) fn from_env() -> Result<Self, Fault> {
        Self::from(|name| env::var(name).ok())
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Self, Fault> {
        // An empty variable is none, as for NCCL.
        let get = |name| get(name).filter(|value| !value.trim().is_empty());
        Ok(Self {
            interfaces: interfaces(&get)?,
            family: read(&get, "NCCL_SOCKET_FAMILY", |text| match text {
                "AF_INET" => Ok(Family::V4),
                "AF_INET6" => Ok(Family::V6),
                _ => Err("it is AF_INET or AF_INET6".into()),
            })?
            .unwrap_or(Family::Any),
            device_each: read(&get, "UCCL_NCCL_DEVICES", |text| match text {
                "one" => Ok(false),
                "each" => Ok(true),
                _ => Err("it is one or each".into()),
            })?
            .unwrap_or(false),
            speed_mbps: read(&get, "UCCL_NCCL_SPEED_MBPS", number(1..=10_000_000))?,
            timeout: Duration::from_secs(
                read(&get, "UCCL_NCCL_TIMEOUT_SECS", number(1..=86_400))?.unwrap_or(TIMEOUT_SECS),
            ),
            ports: read(&get, "UCCL_NCCL_PORTS", ports)?.unwrap_or(0..=0),
            streams: read(&get, "UCCL_NCCL_STREAMS", number(1..=256))?,
            threads: read(&get, "UCCL_NCCL_THREADS", number(1..=64))?,
            is_local: read(&get, "UCCL_NCCL_LOCAL", number(0..=1_u8))? == Some(1),
            small_kib: read(&get, "UCCL_NCCL_SMALL_KB", number(0..=1024))?,
            chunk_kib: read(&get, "UCCL_CHUNK_SIZE_KB", number(4..=4096))?,
            psk: get("UCCL_NCCL_PSK").and_then(|secret| Psk::new(secret.as_bytes()).ok()),
            has_rma: read(&get, "UCCL_NCCL_RMA", number(0..=1_u8))? == Some(1),
        })
    }
}

fn interfaces(
    get: &impl Fn(&'static str) -> Option<String>,
) -> Result<Option<(&'static str, Selection)>, Fault> {
    for name in ["UCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] {
        if let Some(selection) = read(get, name, |text| text.parse::<Selection>())? {
            return Ok(Some((name, selection)));
        }
    }
    Ok(None)
}

/// Reads a variable, if it is set.
fn read<T>(
    get: &impl Fn(&'static str) -> Option<String>,
    name: &'static str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, Fault> {
    let Some(value) = get(name) else { return Ok(None) };
    match parse(value.trim()) {
        Ok(parsed) => Ok(Some(parsed)),
        Err(reason) => Err(Fault::Variable { name, value, reason }),
    }
}

/// Parses a number of a range.
fn number<T: FromStr + PartialOrd + std::fmt::Display>(
    range: RangeInclusive<T>,
) -> impl FnOnce(&str) -> Result<T, String> {
    move |text| match text.parse() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => Err(format!("it is a number from {} to {}", range.start(), range.end())),
    }
}

/// Parses `5000` or `5000-5100`.
fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err("it is a port, or the first and the last of several: 5000-5100".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings, Fault> {
        Settings::from(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn variables_are_read() {
        assert_eq!(with("UCCL_NCCL_PORTS", "5000-5100").expect("ports").ports, 5000..=5100);
        assert_eq!(with("UCCL_NCCL_PORTS", "5000").expect("a port").ports, 5000..=5000);
        assert!(with("UCCL_NCCL_DEVICES", "each").expect("devices").device_each);
        assert!(with("UCCL_NCCL_LOCAL", "1").expect("rings").is_local);
        assert_eq!(with("UCCL_NCCL_SMALL_KB", "64").expect("KiB").small_kib, Some(64));
        assert_eq!(with("UCCL_CHUNK_SIZE_KB", "256").expect("KiB").chunk_kib, Some(256));
        assert_eq!(with("UCCL_NCCL_SPEED_MBPS", "25000").expect("speed").speed_mbps, Some(25000));
        let own = with("UCCL_NCCL_TIMEOUT_SECS", "7").expect("a time").timeout;
        assert_eq!(own, Duration::from_secs(7));
        assert_eq!(with("NCCL_SOCKET_FAMILY", "AF_INET6").expect("IPv6").family, Family::V6);
        let (name, selection) = with("NCCL_SOCKET_IFNAME", "^docker,lo")
            .expect("interfaces")
            .interfaces
            .expect("a selection");
        assert_eq!((name, selection.takes("eth0", None)), ("NCCL_SOCKET_IFNAME", true));
        let secret = with("UCCL_NCCL_PSK", "a secret").expect("a key");
        assert!(secret.psk.is_some() && !format!("{secret:?}").contains("a secret"));
        assert!(with("NCCL_SOCKET_IFNAME", " ").expect("nothing").interfaces.is_none());
    }

    #[test]
    fn a_variable_that_cannot_be_is_named() {
        for (name, value) in [
            ("UCCL_NCCL_PORTS", "9-5"),
            ("UCCL_NCCL_PORTS", "0"),
            ("UCCL_NCCL_DEVICES", "two"),
            ("UCCL_NCCL_SPEED_MBPS", "-1"),
            ("UCCL_NCCL_TIMEOUT_SECS", "0"),
            ("NCCL_SOCKET_FAMILY", "IPv4"),
            ("UCCL_SOCKET_IFNAME", "^"),
            ("UCCL_NCCL_LOCAL", "yes"),
        ] {
            let error = with(name, value).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{name}={value}: ")), "{error}");
        }
    }
}
