//! An endpoint's hello in a handshake, and the decisions that follow from the peer's.

use std::net::SocketAddr;

use uccl_device::{HostIdentity, Process};
use uccl_local::cma;
use uccl_rma::Role;
use uccl_wire::handshake::{ChecksumPref, CmaProbe, Features, Hello, HelloKind, Psk};

use super::{
    core::{Core, connection::Peer},
    lanes::Agreement,
};
use crate::{
    config::{Checksum, Config, Transport},
    devices,
    error::{Error, Result},
};

/// Most TCP lanes of a connection.
pub(crate) const MAX_LANES: u16 = 63;
// Each lane has a bit of one word (`lost_lanes.rs`), the one over rails as well.
const _: () = assert!((MAX_LANES as u32) < u64::BITS);

/// The part of an endpoint's hello that is the same to every peer.
pub(crate) struct Greeting {
    host: uccl_wire::handshake::HostIdentity,
    hostname: String,
    listen_port: u16,
    uds_name: String,
    /// A peer that can read this from our memory can reach our memory.
    nonce: Box<[u8; 16]>,
}

impl Greeting {
    pub(crate) fn new(listen_port: u16, uds_name: String) -> Result<Self> {
        let identity = HostIdentity::of_this_process();
        let mut nonce = Box::new([0; 16]);
        getrandom::fill(&mut *nonce)
            .map_err(|e| Error::os("reading random bytes", std::io::Error::other(e)))?;
        let host = uccl_wire::handshake::HostIdentity {
            boot_id: uuid(identity.boot_id.as_deref().unwrap_or_default()),
            pid_ns: identity.pid_namespace.unwrap_or(0),
            net_ns: identity.net_namespace.unwrap_or(0),
            user_ns: identity.user_namespace.unwrap_or(0),
            mnt_ns: 0,
        };
        let hostname = identity.hostname.unwrap_or_default();
        let hostname = hostname.chars().filter(|c| c.is_ascii_graphic()).take(64).collect();
        Ok(Self { host, hostname, listen_port, uds_name, nonce })
    }

    pub(crate) fn hello(&self, core: &Core, kind: HelloKind, token: u128) -> Hello {
        let config = &core.config;
        let mut features = Features::CHECKSUM.with(Features::SIGNALS);
        if config.transport.allows_local() {
            features = features.with(Features::LOCAL).with(Features::SHARED_MEMORY);
        }
        if config.publish {
            features = features.with(Features::PUBLISHES);
        }
        if devices::possible(config) {
            features = features.with(Features::RAILS);
        }
        if config.transport == Transport::Fifo {
            features = features.with(Features::FIFO);
        }
        if config.cma {
            features = features.with(Features::CMA);
        }
        let probe = CmaProbe { addr: self.nonce.as_ptr() as u64, nonce: *self.nonce };
        Hello {
            kind,
            instance: core.instance,
            meant: 0,
            token,
            features,
            host: self.host,
            pid: std::process::id(),
            gpu_index: config.gpu_index,
            wanted_lanes: config.tcp_streams as u16,
            listen_port: self.listen_port,
            requested_port: 0,
            checksum: match config.checksum {
                Checksum::Auto => ChecksumPref::Auto,
                Checksum::On => ChecksumPref::On,
                Checksum::Off => ChecksumPref::Off,
            },
            device: String::new(),
            uds_name: self.uds_name.clone(),
            hostname: self.hostname.clone(),
            cma_probe: config.cma.then_some(probe),
        }
    }

    /// Whether the peer runs on this host's kernel.
    pub(crate) fn same_host(&self, peer: &Hello) -> bool {
        self.host.boot_id == peer.host.boot_id && self.host.boot_id != [0; 16]
    }

    /// Whether a local lane is wanted, and the peer's unix socket can be reached from here.
    pub(crate) fn local_possible(&self, core: &Core, peer: &Hello) -> bool {
        core.config.transport.allows_local()
            && self.same_host(peer)
            && self.host.net_ns == peer.host.net_ns
            && peer.features.contains(Features::LOCAL)
            && !peer.uds_name.is_empty()
    }

    /// The options that the two ends have agreed on for their lanes, unless they use only the lane
    /// within their host.
    ///
    /// # Errors
    /// One end wants named pipes, and the other does not want them or cannot use them.
    pub(crate) fn agreed(
        &self,
        core: &Core,
        peer: &Hello,
        role: Role,
        token: u128,
    ) -> Result<Agreement> {
        let (config, same_host) = (&core.config, self.same_host(peer));
        let (ours, theirs) =
            (config.transport == Transport::Fifo, peer.features.contains(Features::FIFO));
        if ours != theirs || ours && !same_host {
            return Err(Error::Invalid(
                "named pipes are for two processes of one host that both ask for them (UCCL_P2P_TRANSPORT=fifo)".into(),
            ));
        }
        let checksum = checksum(config, peer, same_host);
        Ok(Agreement { role, token, checksum, rails: rails_possible(config, peer), fifo: ours })
    }

    /// The peer's process, if its memory can be reached. This is tried, not guessed.
    pub(crate) fn process(&self, core: &Core, peer: &Hello, pid: Option<i32>) -> Option<Process> {
        let probe = peer.cma_probe.filter(|_| core.config.cma)?;
        if self.host.pid_ns != peer.host.pid_ns {
            return None;
        }
        let process = Process::open(pid?).ok()?;
        match cma::probe(process.pid(), probe.addr, &probe.nonce) {
            Ok(true) => Some(process),
            Ok(false) => None,
            Err(e) => {
                tracing::debug!("process {} cannot be read from here: {e}", process.pid());
                None
            }
        }
    }
}

/// The engine's record of the peer.
pub(crate) fn peer_of(hello: &Hello, addr: SocketAddr, same_host: bool) -> Peer {
    let host = if hello.hostname.is_empty() { "?" } else { &hello.hostname };
    let name = format!("{host} (pid {}, gpu {}) at {addr}", hello.pid, hello.gpu_index);
    Peer {
        name: name.into(),
        addr,
        gpu_index: hello.gpu_index,
        instance: hello.instance,
        same_host,
        takes_signals: hello.features.contains(Features::SIGNALS),
        publishes: hello.features.contains(Features::PUBLISHES),
    }
}

/// Whether data between the two ends carries a checksum: where it crosses a network or one side
/// asks for it, unless one side forbids it.
pub(crate) fn checksum(config: &Config, peer: &Hello, same_host: bool) -> bool {
    match (config.checksum, peer.checksum) {
        (Checksum::Off, _) | (_, ChecksumPref::Off) => false,
        (Checksum::On, _) | (_, ChecksumPref::On) => true,
        (Checksum::Auto, ChecksumPref::Auto) => !same_host,
    }
}

/// Whether both ends may have rails.
pub(crate) fn rails_possible(config: &Config, peer: &Hello) -> bool {
    devices::possible(config) && peer.features.contains(Features::RAILS)
}

/// Number of TCP lanes of a connection: the larger number that one of the two asks for, or else a
/// suitable one.
pub(crate) fn lanes(config: &Config, peer: &Hello, same_host: bool) -> u16 {
    let asked = (config.tcp_streams as u16).max(peer.wanted_lanes);
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let chosen = match asked {
        // On one host the processors are the limit, and both ends use them.
        0 if same_host => (cpus / 4).clamp(1, 4) as u16,
        0 => cpus.clamp(1, 4) as u16,
        n => n,
    };
    chosen.clamp(1, MAX_LANES)
}

pub(crate) fn psk(config: &Config) -> Result<Option<Psk>> {
    config
        .psk
        .as_deref()
        .map(|secret| {
            Psk::new(secret).map_err(|e| Error::Config {
                name: "UCCL_P2P_PSK",
                value: "...".into(),
                reason: e.to_string(),
            })
        })
        .transpose()
}

/// The bytes of a UUID in its usual spelling; zeroes for anything else.
fn uuid(text: &str) -> [u8; 16] {
    let digits: Vec<u8> =
        text.bytes().filter_map(|c| char::from(c).to_digit(16)).map(|d| d as u8).collect();
    let mut out = [0; 16];
    if digits.len() == 32 {
        out.iter_mut().zip(digits.as_chunks().0).for_each(|(byte, [hi, lo])| *byte = hi << 4 | lo);
    }
    out
}
