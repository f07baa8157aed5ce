//! Findings on TCP.

use super::{Facts, Finding, Level};
use crate::{paths::fastest, probe::Cubic};

pub(super) fn sockets(facts: &Facts) -> Finding {
    match (&facts.loopback, &facts.any_interface) {
        (Ok(_), Ok(())) => Finding::fine("sockets", "TCP works on loopback"),
        (Err(error), _) => {
            Finding::new("sockets", Level::Broken, format!("no TCP on loopback: {error}"))
                .cost("processes of this host cannot connect")
                .remedy("bring loopback up: ip link set lo up")
        }
        (_, Err(error)) => {
            Finding::new("sockets", Level::Broken, format!("cannot listen: {error}"))
                .cost("no endpoint can start unless UCCL_P2P_BIND names an address that works")
                .remedy("let this process listen on TCP ports")
        }
    }
}

pub(super) fn congestion(facts: &Facts) -> Finding {
    const ABOUT: &str = "TCP congestion control";
    const COST: &str = "TCP on loopback runs at half the rate of cubic's or less";
    let congestion = &facts.topology.kernel.congestion;
    let default = congestion.default.as_deref().unwrap_or("unknown");
    match (default, &facts.loopback) {
        ("cubic", _) => Finding::fine(ABOUT, "cubic"),
        (_, Ok(Cubic::Works)) => Finding::fine(
            ABOUT,
            format!("{default}; connections on loopback choose cubic for themselves"),
        ),
        (_, Ok(Cubic::Forbidden)) => {
            let allowed = congestion.allowed.join(" ");
            Finding::new(
                ABOUT,
                Level::Slow,
                format!("{default}, and this process may not choose cubic"),
            )
            .cost(COST)
            .remedy(format!(
                "sysctl -w net.ipv4.tcp_allowed_congestion_control=\"{allowed} cubic\", \
                     or give the program CAP_NET_ADMIN"
            ))
        }
        _ => Finding::new(ABOUT, Level::Slow, format!("{default}, and the kernel has no cubic"))
            .cost(COST)
            .remedy("modprobe tcp_cubic"),
    }
}

/// A window for 64 Gbit/s at half a millisecond; kernels come with this much or more.
const GOOD_BUFFER: u64 = 4 << 20;

pub(super) fn socket_buffers(facts: &Facts) -> Finding {
    const ABOUT: &str = "TCP buffers";
    let kernel = &facts.topology.kernel;
    let limits = [
        ("net.ipv4.tcp_rmem", kernel.tcp_rmem_max_bytes, "4096 131072 67108864"),
        ("net.ipv4.tcp_wmem", kernel.tcp_wmem_max_bytes, "4096 16384 67108864"),
    ];
    let small: Vec<_> = limits
        .into_iter()
        .filter_map(|(name, most, good)| {
            Some((name, most.filter(|most| *most < GOOD_BUFFER)?, good))
        })
        .collect();
    if small.is_empty() {
        return Finding::fine(ABOUT, "grow far enough, or the kernel does not say");
    }
    let seen = small.iter().map(|(name, most, _)| format!("{name} ends at {} KiB", most >> 10));
    let remedy = small.iter().map(|(name, _, good)| format!("sysctl -w {name}=\"{good}\""));
    Finding::new(ABOUT, Level::Slow, seen.collect::<Vec<_>>().join(", "))
        .cost("one stream cannot fill a fast link over a long way (rate = buffer / round trip)")
        .remedy(remedy.collect::<Vec<_>>().join(" && "))
}

pub(super) fn network(facts: &Facts) -> Finding {
    const ABOUT: &str = "network";
    let Some(interface) = fastest(&facts.topology) else {
        return Finding::new(ABOUT, Level::Note, "no interface but loopback is up")
            .cost("other hosts cannot be reached")
            .remedy("ip link set <interface> up, and give it an address");
    };
    let name = &interface.name;
    let mtu = interface.mtu_bytes.unwrap_or_default();
    match (mtu, interface.speed_mbps) {
        (1..=1500, Some(10_000..)) => {
            Finding::new(ABOUT, Level::Slow, format!("{name} has mtu {mtu}"))
                .cost("six times the packets, and CPU, of jumbo frames")
                .remedy(format!(
                    "if the switches allow it: ip link set {name} mtu 9000, on every host"
                ))
        }
        _ => Finding::fine(ABOUT, format!("{name}, mtu {mtu}")),
    }
}
