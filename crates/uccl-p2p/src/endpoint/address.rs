//! Where an endpoint listens, and what it tells peers of that.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use uccl_fabric::{fdpass::FdListener, tcp};

use crate::{
    config::Config,
    engine::places,
    error::{Error, Result},
};

/// Opens the listening socket, and says where peers find it.
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
            // A kernel without IPv6.
            None => tcp::listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
            Some(_) => Err(e),
        });
        match opened {
            Ok(listener) => {
                let bound = listener
                    .local_addr()
                    .map_err(|e| Error::os("asking for the listening address", e))?;
                let ip = told_ip(config);
                return Ok((listener, SocketAddr::new(ip, bound.port())));
            }
            Err(e) => last = e,
        }
    }
    let port = config.port.unwrap_or(well_known);
    Err(Error::os(format!("listening on {}", any(port)), last))
}

/// The address that an endpoint with these settings tells its peers: the one that it is bound to, or else one
/// that they reach this host at, on the NIC nearest to its GPU if they reach several equally well.
pub fn told_ip(config: &Config) -> IpAddr {
    let bound = config.bind.filter(|ip| !ip.is_unspecified());
    bound.unwrap_or_else(|| places::address_near(config.gpu_index, reachable_ip()))
}

/// The address that others would reach this host at: the one that the default route leaves from.
pub fn reachable_ip() -> IpAddr {
    let from = |bind: &str, to: &str| {
        let socket = UdpSocket::bind(bind).ok()?;
        // Chooses a route and an address; sends nothing.
        socket.connect(to).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    };
    from("0.0.0.0:0", "192.0.2.1:9")
        .or_else(|| from("[::]:0", "[2001:db8::1]:9"))
        .or_else(first_interface_ip)
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// An address of an interface that is up, on a host without a default route.
fn first_interface_ip() -> Option<IpAddr> {
    let machine = uccl_device::Topology::of_this_machine().ok()?;
    let up = machine.interfaces.iter().filter(|interface| interface.is_up());
    let link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let mut ips: Vec<IpAddr> = up.flat_map(|interface| interface.addresses.clone()).collect();
    ips.retain(|ip| !ip.is_loopback() && !link_local(ip));
    ips.sort_by_key(IpAddr::is_ipv6);
    ips.first().copied()
}

/// Listens for processes of this host; without it they use TCP.
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
