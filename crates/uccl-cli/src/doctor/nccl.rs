//! Findings on NCCL over sockets. The package of Python knows which NCCL is there, and its plugin.

use std::env;

use uccl_device::{Interface, InterfaceKind, Selection, carriers};
use uccl_nccl_abi::plan::{Generation, LOOPBACK_MBPS, UNKNOWN_MBPS, offered_mbps};

use super::{Finding, Level};

/// The variables that select interfaces, the first of which wins.
const VARIABLES: [&str; 2] = ["UCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// More channels than a fast device has.
const MANY_CHANNELS: u32 = 4;

/// The selection of the environment: the variable and its text.
pub(super) fn selection() -> Option<(&'static str, String)> {
    let set = |name: &&str| env::var(name).is_ok_and(|value| !value.trim().is_empty());
    let name = VARIABLES.into_iter().find(|name| set(name))?;
    Some((name, env::var(name).ok()?))
}

/// The speed that the environment tells this project's plugin, in Mbit/s.
pub(super) fn told_mbps() -> Option<u32> {
    env::var("UCCL_NCCL_SPEED_MBPS").ok()?.trim().parse().ok()
}

/// The interfaces that this project's plugin would use, their speeds, and NCCL's plan for them.
pub(super) fn interfaces(
    interfaces: &[Interface],
    selection: Option<&(&'static str, String)>,
    told_mbps: Option<u32>,
) -> Finding {
    const ABOUT: &str = "NCCL's interfaces";
    let chosen = match selection.map(|(name, text)| (name, text, text.trim().parse::<Selection>()))
    {
        Some((name, text, Err(error))) => {
            return Finding::new(ABOUT, Level::Slow, format!("{name}={text}: {error}"))
                .cost("this project's plugin for NCCL does not start")
                .remedy(format!("correct {name}, or unset it"));
        }
        Some((_, _, Ok(selection))) => carriers(interfaces, Some(&selection)),
        None => carriers(interfaces, None),
    };
    if chosen.is_empty() {
        let because =
            selection.map_or_else(String::new, |(name, text)| format!(" that {name}={text} takes"));
        let seen = format!("no interface{because} is up and has an address");
        return Finding::new(ABOUT, Level::Note, seen)
            .cost("this project's plugin for NCCL does not start")
            .remedy("give an interface an address, or select another one");
    }
    let seen: Vec<_> = chosen.iter().map(|one| shown(one)).collect();
    let known = chosen.iter().filter_map(|one| speed(one)).fold(0, u32::saturating_add);
    let is_known = known > 0 || told_mbps.is_some();
    let offered = || offered_mbps(if known > 0 { known } else { UNKNOWN_MBPS });
    let mbps = told_mbps.unwrap_or_else(offered);
    let plan = Generation::Hopper.plan(mbps);
    let ll_kib = plan.ll_max_bytes() >> 10;
    let seen = format!(
        "{}; NCCL hears of {mbps} Mbit/s: {} channels; without the tuner LL up to {ll_kib} KiB between two ranks",
        seen.join(", "),
        plan.channels
    );
    if plan.channels > MANY_CHANNELS {
        return Finding::new(ABOUT, Level::Slow, seen)
            .cost("so many channels have short messages, which cost processor time")
            .remedy(format!("UCCL_NCCL_SPEED_MBPS={}", offered_mbps(mbps)));
    }
    if is_known {
        return Finding::fine(ABOUT, seen);
    }
    Finding::new(ABOUT, Level::Note, seen)
        .cost("NCCL plans with 10 Gbit/s: fewer channels and other protocols than a faster link wants")
        .remedy("UCCL_NCCL_SPEED_MBPS tells the plugin the speed, the same on every rank")
}

/// The speed of an interface in Mbit/s, as the plugin takes it.
fn speed(interface: &Interface) -> Option<u32> {
    match interface.kind {
        InterfaceKind::Loopback => Some(LOOPBACK_MBPS),
        _ => interface.speed_mbps,
    }
}

fn shown(interface: &Interface) -> String {
    let name = &interface.name;
    match (interface.kind, interface.speed_mbps) {
        (InterfaceKind::Loopback, _) => format!("{name} (this host alone)"),
        (_, Some(speed)) => format!("{name} ({speed} Mbit/s)"),
        (_, None) => format!("{name} (the kernel does not know its speed)"),
    }
}

#[cfg(test)]
mod tests {
    use uccl_device::Topology;

    use super::*;

    #[test]
    fn loopback_of_this_machine_can_be_selected() {
        let all = Topology::of_this_machine().expect("a topology").interfaces;
        if !all.iter().any(|one| one.name == "lo" && one.is_up()) {
            eprintln!("skipped: lacks loopback: the selection of an interface");
            return;
        }
        let of = |text: &str, told| {
            interfaces(&all, Some(&("NCCL_SOCKET_IFNAME", text.to_owned())), told)
        };
        let found = of("=lo", None);
        let seen = "lo (this host alone); NCCL hears of 48000 Mbit/s: 2 channels; without the tuner LL \
                    up to 201 KiB between two ranks";
        assert_eq!((found.level, found.seen.as_str()), (Level::Fine, seen));
        let many = of("=lo", Some(80_000));
        assert!(many.seen.contains("80000 Mbit/s: 8 channels"), "{}", many.seen);
        assert_eq!((many.level, many.remedy.as_str()), (Level::Slow, "UCCL_NCCL_SPEED_MBPS=48000"));
        assert!(of("=nosuchif0", None).seen.contains("NCCL_SOCKET_IFNAME==nosuchif0 takes"));
        assert_eq!(of("^", None).level, Level::Slow, "it selects nothing");
    }

    #[test]
    fn a_machine_without_addresses_is_told() {
        assert_eq!(interfaces(&[], None, None).level, Level::Note);
    }
}
