//! Settings for RDMA verbs.

use std::{fmt, str::FromStr};

/// A device, or one port of it: `mlx5_0`, `mlx5_1:1`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct DeviceName {
    /// The device.
    pub device: String,
    /// Its port, from 1. None means all of its ports.
    pub port: Option<u8>,
}

impl DeviceName {
    /// Whether it names this port of this device.
    #[must_use]
    pub fn matches(&self, device: &str, port: u8) -> bool {
        self.device == device && self.port.is_none_or(|wanted| wanted == port)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.device),
            None => f.write_str(&self.device),
        }
    }
}

/// A text that names no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a device: write its name, or name:port with a port from 1")]
pub struct ParseDeviceNameError(String);

impl FromStr for DeviceName {
    type Err = ParseDeviceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseDeviceNameError(text.to_owned());
        let (device, port) = match text.split_once(':') {
            Some((device, port)) => {
                let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(error)?;
                (device, Some(port))
            }
            None => (text, None),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        // The name becomes a part of file paths.
        if device.is_empty() || device.starts_with('.') || !device.chars().all(plain) {
            return Err(error());
        }
        Ok(Self { device: device.to_owned(), port })
    }
}

/// Whether a device's writes to our memory may overtake each other on the PCI bus. Many machines
/// reach the speed of a fast NIC only if they may. When a write completes, all its bytes have
/// arrived in any case; but a program that polls memory must not conclude from one byte that the
/// bytes before it have arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RelaxedOrdering {
    /// The writes may not overtake each other.
    Never,
    /// The writes may overtake each other; a library that cannot ask for it is refused.
    Always,
    /// The writes may overtake each other, if the library can ask for it.
    Auto,
}

/// How RDMA verbs are used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsSettings {
    /// The library to load instead of `libibverbs.so.1`.
    pub library: Option<String>,
    /// The devices to use. Empty means all devices with an active port.
    pub devices: Vec<DeviceName>,
    /// The index, in each port's table, of the GID to use. `None` means the best one.
    pub gid_index: Option<u8>,
    /// The index, in each port's table, of the partition key to use.
    pub pkey_index: u16,
    /// InfiniBand's service level, 0 to 15.
    pub service_level: u8,
    /// Traffic class: over RoCE v2 the byte of the IP header with DSCP and ECN.
    pub traffic_class: u8,
    /// RDMA reads that a queue pair may have under way, 1 to 128; cut to the device's maximum.
    pub max_rd_atomic: u8,
    /// RDMA reads that a queue pair answers at a time, 1 to 128; cut to the device's maximum.
    pub max_dest_rd_atomic: u8,
    /// Whether the device retransmits (RC); else writes go over UC and are acknowledged by us.
    pub rc_mode: bool,
    /// Queue pairs of a channel, 1 to 16; `None`: 4 on a NIC, 1 on a software device.
    pub queue_pairs: Option<u8>,
    /// Requests in flight of a channel, 16 to 16384; cut to the device's maximum.
    pub depth: u32,
    /// How long the device waits for an acknowledgement: 4.096 us times 2 to the power of this, 1
    /// to 31.
    pub timeout: u8,
    /// How often the device retransmits, 0 to 7.
    pub retries: u8,
    /// The length of the parts that requests are cut into, in KiB, 4 to 1048576.
    pub chunk_kib: u32,
    /// Whether the device may reorder its writes to our memory on the PCI bus.
    pub relaxed_ordering: RelaxedOrdering,
}

impl Default for VerbsSettings {
    fn default() -> Self {
        Self {
            library: None,
            devices: Vec::new(),
            gid_index: None,
            pkey_index: 0,
            service_level: 0,
            traffic_class: 104,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            rc_mode: true,
            queue_pairs: None,
            depth: 1024,
            timeout: 14,
            retries: 7,
            chunk_kib: 512,
            relaxed_ordering: RelaxedOrdering::Auto,
        }
    }
}

/// A setting outside its range.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{setting} is {value}: it must be from {least} to {most}")]
pub struct SettingError {
    /// The setting, in words.
    pub setting: &'static str,
    /// The value it has.
    pub value: u64,
    /// The smallest value allowed.
    pub least: u64,
    /// The largest value allowed.
    pub most: u64,
}

impl VerbsSettings {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The first setting that is outside its own.
    pub fn validate(&self) -> Result<(), SettingError> {
        let within = |setting, value: u64, least, most| match value {
            value if (least..=most).contains(&value) => Ok(()),
            value => Err(SettingError { setting, value, least, most }),
        };
        within("the service level", self.service_level.into(), 0, 15)?;
        within("max_rd_atomic", self.max_rd_atomic.into(), 1, 128)?;
        within("max_dest_rd_atomic", self.max_dest_rd_atomic.into(), 1, 128)?;
        within("the number of queue pairs", self.queue_pairs.unwrap_or(1).into(), 1, 16)?;
        within("the number of requests in flight", self.depth.into(), 16, 16384)?;
        within("the acknowledgement timeout", self.timeout.into(), 1, 31)?;
        within("the number of retries", self.retries.into(), 0, 7)?;
        within("the chunk size in KiB", self.chunk_kib.into(), 4, 1 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_read_back() {
        for text in ["mlx5_0", "mlx5_1:1", "rocep3s0-1.2:2"] {
            let name: DeviceName = text.parse().expect(text);
            assert_eq!(name.to_string(), text);
        }
        for wrong in ["", ":1", "mlx5_0:", "mlx5_0:0", "mlx5_0:256", "../x", "a/b", "mlx5_0:1:1"] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong:?}");
        }
        let one: DeviceName = "mlx5_1:2".parse().expect("a name");
        assert!(one.matches("mlx5_1", 2) && !one.matches("mlx5_1", 1));
        assert!(!one.matches("mlx5_0", 2));
    }

    #[test]
    fn ranges_are_checked() {
        let default = VerbsSettings::default();
        assert_eq!(default.validate(), Ok(()));
        let wrong: [fn(&mut VerbsSettings); 7] = [
            |s| s.service_level = 16,
            |s| s.max_rd_atomic = 0,
            |s| s.queue_pairs = Some(17),
            |s| s.depth = 1,
            |s| s.timeout = 0,
            |s| s.retries = 8,
            |s| s.chunk_kib = 3,
        ];
        for change in wrong {
            let mut settings = default.clone();
            change(&mut settings);
            let error = settings.validate().expect_err("out of range");
            assert!(error.to_string().contains("must be from"), "{error}");
        }
    }
}
