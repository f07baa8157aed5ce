//! The address where an endpoint listens, and those of peers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use uccl_local::fdpass::FdListener;
use uccl_stream::tcp;
use uccl_wire::metadata::{Device, Metadata};

use super::Endpoint;
use crate::{
    config::Config,
    drive::places,
    error::{Error, Result},
    host_address::told_ip,
};

impl Endpoint {
    /// The information with which peers find this endpoint; its GPU is named by its index.
    pub fn metadata(&self) -> Metadata {
        let addr = self.addr();
        let device = Device::Gpu(self.config().gpu_index);
        Metadata { ip: addr.ip(), port: addr.port(), device }
    }

    /// The [`metadata`](Self::metadata), with the GPU's PCI address in place of its index, if there
    /// is such a GPU.
    pub fn metadata_by_pci(&self) -> Metadata {
        let metadata = self.metadata();
        match places::pci_address(self.config().gpu_index) {
            Some(bdf) => Metadata { device: Device::Bdf(bdf), ..metadata },
            None => metadata,
        }
    }
}

/// A peer's addresses, from its metadata (`10.0.0.1:28100?0`) or from a host and port
/// (`node7:28100`, `[fe80::1]:28100`). There are several, for [`Endpoint::connect_any`], if the
/// host is given by a name that has several.
///
/// # Errors
/// [`Error::Invalid`] gives the reason why the text is no address.
pub fn parse_address(text: &str) -> Result<Vec<SocketAddr>> {
    let (host, port) = host_and_port(text)?;
    resolve(&host, port)
}

/// A peer's address, as [`parse_address`] reads it, if its host is given by IP. Looks no name up,
/// which may block.
///
/// # Errors
/// [`Error::Invalid`] gives the reason why the text is no such address.
pub fn parse_ip_address(text: &str) -> Result<SocketAddr> {
    let (host, port) = host_and_port(text)?;
    literal(&host, port)?.ok_or_else(|| {
        Error::Invalid(format!("{host:?} is a name, and only an IP can be used without a look-up"))
    })
}

/// The host and the port in a peer's metadata, or in a text such as `node7:28100`.
fn host_and_port(text: &str) -> Result<(String, u16)> {
    if let Ok(metadata) = text.parse::<Metadata>() {
        return Ok((metadata.ip.to_string(), metadata.port));
    }
    let addr = text.split_once('?').map_or(text, |(addr, _)| addr);
    let parts = addr.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = parts.ok_or_else(|| {
        Error::Invalid(format!("{text:?} is not an endpoint's address, such as 10.0.0.1:28100"))
    })?;
    Ok((host.to_owned(), port))
}

/// The address of a port on a host that is given by IP; `None` if the host is given by name.
fn literal(host: &str, port: u16) -> Result<Option<SocketAddr>> {
    if port == 0 {
        return Err(Error::Invalid("nobody listens on port 0".into()));
    }
    let ip = without_brackets(host).parse::<IpAddr>();
    Ok(ip.ok().map(|ip| SocketAddr::new(ip, port)))
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

/// The addresses of a port on a host, in the order that the system prefers; there is at least one.
/// The host is given by name or by IP (IPv6 with or without brackets).
///
/// # Errors
/// [`Error::Invalid`]: the port is 0, or the host is not known.
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    if let Some(addr) = literal(host, port)? {
        return Ok(vec![addr]);
    }
    match (without_brackets(host), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>) {
        Ok(addrs) if addrs.is_empty() => Err(Error::Invalid(format!("{host:?} has no address"))),
        Ok(addrs) => Ok(addrs),
        Err(e) => Err(Error::Invalid(format!("{host:?} is no address: {e}"))),
    }
}

impl Config {
    /// The port on which the endpoint for a GPU listens by default.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such port.
    pub fn well_known_port(&self, gpu_index: i64) -> Result<u16> {
        i64::from(self.base_port)
            .checked_add(gpu_index)
            .filter(|_| gpu_index >= 0)
            .and_then(|port| u16::try_from(port).ok())
            .ok_or_else(|| {
                let base = self.base_port;
                Error::Invalid(format!("GPU {gpu_index} has no port: ports start at {base}"))
            })
    }
}

/// The GPU index that `name` stands for; 0 for a PCI address, which says nothing about ports.
pub fn gpu_index(name: &str) -> i64 {
    name.parse().unwrap_or(0)
}

/// Opens the listening socket, and returns the address at which peers find it.
pub(super) fn listen(config: &Config) -> Result<(std::net::TcpListener, SocketAddr)> {
    let any = |port| match config.bind {
        Some(ip) => SocketAddr::new(ip, port),
        None => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
    };
    let well_known = u16::try_from(u32::from(config.base_port) + config.gpu_index).unwrap_or(0);
    let ports = match config.port {
        Some(port) => vec![port],
        None => vec![well_known, 0],
    };
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrInUse);
    for port in ports {
        let opened = tcp::listen(any(port)).or_else(|e| match config.bind {
            // The kernel has no IPv6.
            None => tcp::listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
            Some(_) => Err(e),
        });
        match opened {
            Ok(listener) => {
                let bound = listener
                    .local_addr()
                    .map_err(|e| Error::os("asking for the listening address", e))?;
                let ip = told_ip(config)?;
                return Ok((listener, SocketAddr::new(ip, bound.port())));
            }
            Err(e) => last = e,
        }
    }
    let port = config.port.unwrap_or(well_known);
    Err(Error::os(format!("listening on {}", any(port)), last))
}

/// Listens for processes of this host. If that fails, they use TCP.
pub(super) fn listen_locally() -> (Option<FdListener>, String) {
    let mut name = [0; 16];
    if getrandom::fill(&mut name).is_err() {
        return (None, String::new());
    }
    let name = format!("uccl-p2p-{:032x}", u128::from_le_bytes(name));
    match FdListener::bind(name.as_bytes()) {
        Ok(listener) => (Some(listener), name),
        Err(e) => {
            tracing::debug!("processes of this host will use TCP: {e}");
            (None, String::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_found_by_their_metadata_and_by_their_addresses() {
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), 28100);
        for (text, ip) in [
            ("10.0.0.1:28100?0", "10.0.0.1"),
            ("10.0.0.1:28100?0000:4a:00.0", "10.0.0.1"),
            ("[fe80::1]:28100?3", "fe80::1"),
            ("10.0.0.1:28100", "10.0.0.1"),
            ("[::1]:28100", "::1"),
            ("10.0.0.1:28100?", "10.0.0.1"),
        ] {
            assert_eq!(parse_address(text).expect(text), [at(ip)]);
        }
        let local = parse_address("localhost:28100").expect("known");
        assert!(!local.is_empty() && local.iter().all(|addr| addr.ip().is_loopback()));
        for text in [
            "",
            "10.0.0.1",
            "10.0.0.1:0",
            "10.0.0.1:0?0",
            "10.0.0.1:65536",
            ":",
            "?0",
            "10.0.0.1:x?0",
        ] {
            assert!(matches!(parse_address(text), Err(Error::Invalid(_))), "{text}");
        }
    }

    #[test]
    fn ports_follow_the_gpu_index() {
        let config = Config { base_port: 28100, ..Config::default() };
        assert_eq!(config.well_known_port(7).expect("a port"), 28107);
        for gpu in [-1, 40_000, i64::MAX] {
            assert!(matches!(config.well_known_port(gpu), Err(Error::Invalid(_))), "{gpu}");
        }
        assert_eq!((gpu_index("5"), gpu_index("0000:4a:00.0"), gpu_index("")), (5, 0, 0));
    }
}
