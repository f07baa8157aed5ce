//! Findings on NCCL over sockets. The package of Python knows which NCCL is there, and its plugin.

use std::env;

use uccl_device::{Interface, InterfaceKind, Selection, carriers};

use super::{Finding, Level};

/// The variables that select interfaces, the first of which wins.
const VARIABLES: [&str; 2] = ["UCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// The selection of the environment: the variable and its text.
pub(super) fn selection() -> Option<(&'static str, String)> {
    let set = |name: &&str| env::var(name).is_ok_and(|value| !value.trim().is_empty());
    let name = VARIABLES.into_iter().find(|name| set(name))?;
    Some((name, env::var(name).ok()?))
}

/// The interfaces that this project's plugin would use, and their speeds.
pub(super) fn interfaces(
    interfaces: &[Interface],
    selection: Option<&(&'static str, String)>,
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
    let seen = seen.join(", ");
    let is_known =
        |one: &&Interface| one.kind == InterfaceKind::Loopback || one.speed_mbps.is_some();
    if chosen.iter().any(is_known) {
        return Finding::fine(ABOUT, seen);
    }
    Finding::new(ABOUT, Level::Note, seen)
        .cost("NCCL plans with 10 Gbit/s: fewer channels and other protocols than a faster link wants")
        .remedy("UCCL_NCCL_SPEED_MBPS tells the plugin the speed, the same on every rank")
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
        let of = |text: &str| interfaces(&all, Some(&("NCCL_SOCKET_IFNAME", text.to_owned())));
        let found = of("=lo");
        assert_eq!((found.level, found.seen.as_str()), (Level::Fine, "lo (this host alone)"));
        assert!(of("=nosuchif0").seen.contains("NCCL_SOCKET_IFNAME==nosuchif0 takes"));
        assert_eq!(of("^").level, Level::Slow, "it selects nothing");
    }

    #[test]
    fn a_machine_without_addresses_is_told() {
        assert_eq!(interfaces(&[], None).level, Level::Note);
    }
}
