//! Which path leads to another host, as the engine chooses among devices.

use uccl_device::Topology;
use uccl_p2p::{Config, Transport};

use super::{Path, TRANSPORT, fastest};
use crate::{
    rdma::{Rdma, VerbsDevice},
    units::gbits,
};

/// The best path to another host that the settings allow.
pub(super) fn other_host(topology: &Topology, rdma: &Rdma, config: &Config) -> Path {
    match config.transport {
        Transport::Local => {
            Path::none(format!("{TRANSPORT}=local allows this host's memory alone"))
        }
        Transport::Fifo => Path::none(format!("{TRANSPORT}=fifo allows named pipes alone")),
        Transport::Udp => Path::new(
            "udp",
            format!("{TRANSPORT}=udp, where the peer asks for it too; TCP where it does not pass"),
        ),
        Transport::Tcp => tcp(topology, &format!("{TRANSPORT}=tcp allows nothing else")),
        Transport::Auto => best(topology, rdma, config),
        forced => forced_devices(rdma, config, forced),
    }
}

/// As `auto` has it: Slingshot's devices, else those of verbs, else EFA's, else TCP.
fn best(topology: &Topology, rdma: &Rdma, config: &Config) -> Path {
    // EFA's devices are among those of verbs, which cannot use them.
    let efa = |why| match topology.rdma.is_empty() {
        true => Err(why),
        false => provided(rdma, "efa").map_err(|_| why),
    };
    let devices = provided(rdma, "cxi").or_else(|_| verbs(rdma, config)).or_else(efa);
    match devices {
        Err(why) => tcp(topology, if topology.rdma.is_empty() { "no RDMA device" } else { &why }),
        Ok(path) => {
            let rest = match fastest(topology) {
                Some(interface) => format!("TCP over {}", interface.name),
                None => "TCP".to_owned(),
            };
            let why = format!(
                "{}, if the peer has such devices too; {rest} if not, and when they fail",
                path.why
            );
            Path { why, ..path }
        }
    }
}

/// The path through the devices that the setting demands, without a fallback.
fn forced_devices(rdma: &Rdma, config: &Config, transport: Transport) -> Path {
    let found = match transport {
        Transport::Verbs => verbs(rdma, config),
        Transport::Cxi => provided(rdma, "cxi"),
        Transport::Efa => provided(rdma, "efa"),
        _ => match &config.libfabric.provider {
            Some(provider) => provided(rdma, provider),
            None => best_provider(rdma),
        },
    };
    let forced = format!("{TRANSPORT}={transport} allows nothing else");
    match found {
        Ok(path) => Path { why: format!("{}; {forced}", path.why), ..path },
        Err(why) => Path::none(format!("{why}; {forced}")),
    }
}

/// Through the devices of verbs that the settings leave, or why there are none.
fn verbs(rdma: &Rdma, config: &Config) -> Result<Path, String> {
    let listed = rdma.verbs.as_ref().map_err(Clone::clone)?;
    let named = &config.verbs.devices;
    let wanted = |device: &&VerbsDevice| {
        named.is_empty() || named.iter().any(|name| name.device == device.name)
    };
    let usable: Vec<_> = rdma.usable().into_iter().filter(wanted).collect();
    if usable.is_empty() {
        return Err(match (listed.len(), named.is_empty()) {
            (0, _) => "libibverbs shows no device".to_owned(),
            (_, true) => "no RDMA device can be used".to_owned(),
            (_, false) => "none of UCCL_P2P_RDMA_DEV's devices can be used".to_owned(),
        });
    }
    let names: Vec<_> = usable.iter().map(|device| device.name.as_str()).collect();
    let nearest = match named.is_empty() && names.len() > 1 {
        true => " (of a GPU the nearest)",
        false => "",
    };
    Ok(Path::new("verbs", format!("RDMA over {}{nearest}", names.join(", "))))
}

fn provided(rdma: &Rdma, provider: &str) -> Result<Path, String> {
    rdma.libfabric.as_ref().map_err(Clone::clone)?;
    let Some(found) = rdma.provider(provider) else {
        return Err(format!("libfabric offers no {provider}"));
    };
    let why = format!("libfabric's {provider} over {}", found.domains.join(", "));
    Ok(Path::new("libfabric", why))
}

fn best_provider(rdma: &Rdma) -> Result<Path, String> {
    let listed = rdma.libfabric.as_ref().map_err(Clone::clone)?;
    match listed.providers.is_empty() {
        true => Err("libfabric offers no provider that moves memory one-sidedly".to_owned()),
        false => Ok(Path::new("libfabric", "the best of libfabric's providers")),
    }
}

fn tcp(topology: &Topology, without: &str) -> Path {
    let Some(interface) = fastest(topology) else {
        return Path::none("no network interface is up; bring one up to reach other hosts");
    };
    let speed = match interface.speed_mbps {
        Some(mbps) => format!(", {}", gbits(mbps)),
        None => String::new(),
    };
    Path::new("tcp", format!("over {}{speed}; {without}", interface.name))
}
