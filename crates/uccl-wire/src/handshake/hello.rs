//! The hello: each end's description of itself.
//!
//! A fixed block of little-endian numbers, then fields as (u16 tag, u16 length, bytes). A reader
//! skips tags it does not know, so later versions can add fields.

use std::fmt;

use crate::cursor::{Reader, ShortInput};

use super::envelope::MAX_BODY_LEN;

/// Most bytes of [`Hello::device`].
pub const MAX_DEVICE_LEN: usize = 32;
/// Most bytes of [`Hello::uds_name`].
pub const MAX_UDS_NAME_LEN: usize = 64;
/// Most bytes of [`Hello::hostname`].
pub const MAX_HOSTNAME_LEN: usize = 64;

const TAG_DEVICE: u16 = 1;
const TAG_UDS_NAME: u16 = 2;
const TAG_HOSTNAME: u16 = 3;
const TAG_CMA_PROBE: u16 = 4;
const TAG_MEANT: u16 = 5;

/// The description that one end sends of itself. All of it is the peer's claim: nothing here is
/// proven, except, where a pre-shared key is set, that a peer which knows it has sent all this on
/// this stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hello {
    /// The purpose of the stream. The acceptor repeats the connector's.
    pub kind: HelloKind,
    /// Random number of the endpoint: a restarted one has another.
    pub instance: u64,
    /// The instance of the endpoint that the connector means; 0 where it knows an address only, and
    /// in the acceptor's hello.
    pub meant: u64,
    /// Names the connection; the acceptor makes it, the connector quotes it in
    /// [`HelloKind::JoinLane`]. 0 in the connector's hello.
    pub token: u128,
    /// The features that the sender supports.
    pub features: Features,
    /// The host and namespaces the sender runs in.
    pub host: HostIdentity,
    /// The sender's process id, as seen in its own pid namespace.
    pub pid: u32,
    /// Index of the sender's GPU; 0 where there is none.
    pub gpu_index: u32,
    /// Lanes the sender would like the connection to have; 0 leaves it to the peer.
    pub wanted_lanes: u16,
    /// The TCP port the sender listens on; 0 where it does not listen.
    pub listen_port: u16,
    /// The port the connector dialled; 0 in the acceptor's hello.
    pub requested_port: u16,
    /// Whether the sender wants checksums on stream data.
    pub checksum: ChecksumPref,
    /// PCI address of the sender's GPU (`0000:4a:00.0`); empty where there is none.
    pub device: String,
    /// Abstract Unix socket name the sender listens on; empty where there is none.
    pub uds_name: String,
    /// The sender's host name, for messages that people read.
    pub hostname: String,
    /// Where the peer may read to find out whether it can read the sender's memory.
    pub cma_probe: Option<CmaProbe>,
}

/// The purpose of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HelloKind {
    /// The first lane of a new connection.
    #[default]
    NewConnection,
    /// A further lane of the connection with this token.
    JoinLane {
        /// From the acceptor's hello on the connection's first lane.
        token: u128,
        /// Which lane; the first one is 0.
        lane_index: u16,
    },
}

/// An endpoint's features, as a set of bits. Bits that a reader does not know are kept.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Features(pub u64);

impl Features {
    /// Stream data can carry checksums.
    pub const CHECKSUM: Self = Self(1 << 0);
    /// Peers on this host may connect over the Unix socket of the hello.
    pub const LOCAL: Self = Self(1 << 1);
    /// The endpoint may read and write a same-host peer's memory with one copy between the
    /// processes.
    pub const CMA: Self = Self(1 << 2);
    /// Memory can be shared with same-host peers by passing descriptors.
    pub const SHARED_MEMORY: Self = Self(1 << 3);
    /// The endpoint may have devices that move memory one-sidedly, and will list them.
    pub const RAILS: Self = Self(1 << 4);
    /// Peers on this host are to use named pipes.
    pub const FIFO: Self = Self(1 << 5);
    /// The endpoint changes the word of a signal that comes with a write.
    pub const SIGNALS: Self = Self(1 << 6);
    /// The endpoint answers look-ups of its published regions.
    pub const PUBLISHES: Self = Self(1 << 7);

    /// Whether every bit of `other` is set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
    /// The bits set in both: the features that the two ends share.
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    /// The bits set in either.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({:#x})", self.0)
    }
}

/// Whether an endpoint wants checksums on stream data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChecksumPref {
    /// On links that cross a network.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Shows whether two processes share a kernel, and which of its namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct HostIdentity {
    /// The kernel's boot id; all zero where it could not be read.
    pub boot_id: [u8; 16],
    /// Inode of the pid namespace: process ids mean the same in both.
    pub pid_ns: u64,
    /// Inode of the network namespace: abstract Unix sockets are reachable.
    pub net_ns: u64,
    /// Inode of the user namespace: permissions mean the same in both.
    pub user_ns: u64,
    /// Inode of the mount namespace. Not used yet.
    pub mnt_ns: u64,
}

/// Sixteen random bytes in the sender's memory, and their address: a process that reads them there
/// can read the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CmaProbe {
    /// Their address in the sender's process.
    pub addr: u64,
    /// The bytes that the peer finds there if it can read this process's memory.
    pub nonce: [u8; 16],
}

/// Why a hello cannot be sent or read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// It ends too early.
    #[error("the hello is cut short: {0}")]
    Truncated(#[from] ShortInput),
    /// A field is longer than it may be.
    #[error("the hello's {field} is {len} bytes long, at most {max} are allowed")]
    TooLong {
        /// Which field.
        field: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The most it may have.
        max: usize,
    },
    /// A text is not UTF-8, or has control characters.
    #[error("the hello's {field} is not printable text")]
    NotText {
        /// Which field.
        field: &'static str,
    },
    /// A field has a value that does not exist.
    #[error("the hello's {field} is {value}, which has no meaning")]
    UnknownValue {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u8,
    },
    /// A field has another length than its type.
    #[error("the hello's {field} is {len} bytes long, not {want}")]
    WrongLength {
        /// Which field.
        field: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The length it should have.
        want: usize,
    },
    /// A field is there twice.
    #[error("the hello has its {field} twice")]
    Duplicate {
        /// Which field.
        field: &'static str,
    },
}

impl Hello {
    /// The hello's bytes.
    ///
    /// # Errors
    /// A text is too long, or has control characters.
    pub fn encode(&self) -> Result<Vec<u8>, HelloError> {
        let mut out = Vec::with_capacity(384);
        self.encode_fixed(&mut out);
        put_text(&mut out, TAG_DEVICE, "device", &self.device, MAX_DEVICE_LEN)?;
        put_text(&mut out, TAG_UDS_NAME, "socket name", &self.uds_name, MAX_UDS_NAME_LEN)?;
        put_text(&mut out, TAG_HOSTNAME, "hostname", &self.hostname, MAX_HOSTNAME_LEN)?;
        if let Some(probe) = &self.cma_probe {
            let mut value = [0; CmaProbe::LEN];
            value[..8].copy_from_slice(&probe.addr.to_le_bytes());
            value[8..].copy_from_slice(&probe.nonce);
            put_field(&mut out, TAG_CMA_PROBE, &value);
        }
        if self.meant != 0 {
            put_field(&mut out, TAG_MEANT, &self.meant.to_le_bytes());
        }
        debug_assert!(out.len() <= MAX_BODY_LEN);
        Ok(out)
    }

    fn encode_fixed(&self, out: &mut Vec<u8>) {
        let (kind, join_token, lane_index) = match self.kind {
            HelloKind::NewConnection => (0u8, 0u128, 0u16),
            HelloKind::JoinLane { token, lane_index } => (1, token, lane_index),
        };
        let checksum = match self.checksum {
            ChecksumPref::Auto => 0u8,
            ChecksumPref::On => 1,
            ChecksumPref::Off => 2,
        };
        out.extend([kind, checksum]);
        out.extend(lane_index.to_le_bytes());
        out.extend(join_token.to_le_bytes());
        out.extend(self.token.to_le_bytes());
        out.extend(self.instance.to_le_bytes());
        out.extend(self.features.0.to_le_bytes());
        out.extend(self.host.boot_id);
        for namespace in [self.host.pid_ns, self.host.net_ns, self.host.user_ns, self.host.mnt_ns] {
            out.extend(namespace.to_le_bytes());
        }
        out.extend(self.pid.to_le_bytes());
        out.extend(self.gpu_index.to_le_bytes());
        out.extend(self.wanted_lanes.to_le_bytes());
        out.extend(self.listen_port.to_le_bytes());
        out.extend(self.requested_port.to_le_bytes());
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// The bytes end too early, or a field breaks its rules.
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        let mut r = Reader::new(bytes);
        let mut hello = Self::decode_fixed(&mut r)?;
        let mut seen = 0u32;
        while r.remaining() > 0 {
            let (tag, len) = (r.u16_le()?, r.u16_le()?);
            let value = r.take(len.into())?;
            hello.decode_field(&mut seen, tag, value)?;
        }
        Ok(hello)
    }

    fn decode_fixed(r: &mut Reader<'_>) -> Result<Self, HelloError> {
        let (kind, checksum) = (r.u8()?, r.u8()?);
        let (lane_index, token) = (r.u16_le()?, r.u128_le()?);
        let kind = match kind {
            0 => HelloKind::NewConnection,
            1 => HelloKind::JoinLane { token, lane_index },
            value => return Err(HelloError::UnknownValue { field: "kind", value }),
        };
        let checksum = match checksum {
            0 => ChecksumPref::Auto,
            1 => ChecksumPref::On,
            2 => ChecksumPref::Off,
            value => return Err(HelloError::UnknownValue { field: "checksum", value }),
        };
        Ok(Self {
            kind,
            checksum,
            token: r.u128_le()?,
            instance: r.u64_le()?,
            features: Features(r.u64_le()?),
            host: HostIdentity {
                boot_id: r.array()?,
                pid_ns: r.u64_le()?,
                net_ns: r.u64_le()?,
                user_ns: r.u64_le()?,
                mnt_ns: r.u64_le()?,
            },
            pid: r.u32_le()?,
            gpu_index: r.u32_le()?,
            wanted_lanes: r.u16_le()?,
            listen_port: r.u16_le()?,
            requested_port: r.u16_le()?,
            ..Self::default()
        })
    }

    fn decode_field(&mut self, seen: &mut u32, tag: u16, value: &[u8]) -> Result<(), HelloError> {
        let field = match tag {
            TAG_DEVICE => "device",
            TAG_UDS_NAME => "socket name",
            TAG_HOSTNAME => "hostname",
            TAG_CMA_PROBE => "probe",
            TAG_MEANT => "meant endpoint",
            _ => return Ok(()),
        };
        if *seen & 1 << tag != 0 {
            return Err(HelloError::Duplicate { field });
        }
        *seen |= 1 << tag;
        match tag {
            TAG_DEVICE => self.device = get_text(field, value, MAX_DEVICE_LEN)?,
            TAG_UDS_NAME => self.uds_name = get_text(field, value, MAX_UDS_NAME_LEN)?,
            TAG_HOSTNAME => self.hostname = get_text(field, value, MAX_HOSTNAME_LEN)?,
            TAG_CMA_PROBE => self.cma_probe = Some(CmaProbe::decode(field, value)?),
            _ => {
                let wrong = HelloError::WrongLength { field, len: value.len(), want: 8 };
                self.meant = u64::from_le_bytes(value.try_into().map_err(|_| wrong)?);
            }
        }
        Ok(())
    }
}

impl CmaProbe {
    const LEN: usize = 24;

    fn decode(field: &'static str, value: &[u8]) -> Result<Self, HelloError> {
        if value.len() != Self::LEN {
            return Err(HelloError::WrongLength { field, len: value.len(), want: Self::LEN });
        }
        let mut r = Reader::new(value);
        Ok(Self { addr: r.u64_le()?, nonce: r.array()? })
    }
}

fn put_field(out: &mut Vec<u8>, tag: u16, value: &[u8]) {
    out.extend(tag.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(value);
}

fn put_text(
    out: &mut Vec<u8>,
    tag: u16,
    field: &'static str,
    text: &str,
    max: usize,
) -> Result<(), HelloError> {
    check_text(field, text, max)?;
    if !text.is_empty() {
        put_field(out, tag, text.as_bytes());
    }
    Ok(())
}

fn get_text(field: &'static str, value: &[u8], max: usize) -> Result<String, HelloError> {
    // The length first: a long value is refused before it is looked at.
    if value.len() > max {
        return Err(HelloError::TooLong { field, len: value.len(), max });
    }
    let text = std::str::from_utf8(value).map_err(|_| HelloError::NotText { field })?;
    check_text(field, text, max)?;
    Ok(text.to_owned())
}

fn check_text(field: &'static str, text: &str, max: usize) -> Result<(), HelloError> {
    if text.len() > max {
        return Err(HelloError::TooLong { field, len: text.len(), max });
    }
    // Texts reach logs and terminals.
    if text.chars().any(char::is_control) {
        return Err(HelloError::NotText { field });
    }
    Ok(())
}
