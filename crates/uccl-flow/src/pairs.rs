//! The pairs of addresses between two processes.

use std::net::{IpAddr, SocketAddr};

use uccl_wire::flow::Handle;

use crate::attempt::Route;

/// All pairs of addresses of two processes.
#[derive(Clone)]
pub(crate) struct Pairs {
    pub(crate) routes: Vec<Route>,
    /// From here on the kernel chooses this side's address.
    pub(crate) spare: usize,
    /// The processes are of one host.
    pub(crate) is_local: bool,
}

/// Streams between two hosts at first; more are tried.
const FIRST_STREAMS: usize = 4;

impl Pairs {
    /// Pairs of this side's addresses and the handle's: first each address with one of the other
    /// side's, by their order, so that few streams are enough for every device; then the others.
    pub(crate) fn new(own: &[IpAddr], handle: &Handle, is_local: bool) -> Self {
        let mut found = Vec::new();
        let theirs: Vec<_> = handle.sockets().collect();
        for class in [Class::Loopback4, Class::Loopback6, Class::Four, Class::Six] {
            let own: Vec<_> = own.iter().copied().filter(|ip| Class::of(*ip) == class).collect();
            let theirs: Vec<_> =
                theirs.iter().copied().filter(|to| Class::of(to.ip()) == class).collect();
            found.push(diagonals(&own, &theirs));
        }
        let longest = found.iter().map(Vec::len).max().unwrap_or(0);
        // The versions of IP take turns.
        let mut routes: Vec<Route> = (0..longest)
            .flat_map(|at| found.iter().filter_map(move |one| one.get(at)))
            .copied()
            .collect();
        let spare = routes.len();
        routes.extend(theirs.iter().map(|to| (None, *to)));
        let is_local = is_local || theirs.iter().all(|to| to.ip().is_loopback());
        Self { routes, spare, is_local }
    }

    /// Streams at first, of so many at most: one for each pair at least. Within a host streams cost
    /// and limit nothing, and all are used.
    pub(crate) fn first_streams(&self, most: usize) -> usize {
        if self.is_local { most } else { most.min(FIRST_STREAMS.max(self.spare)) }
    }
}

/// Addresses that may reach each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Loopback4,
    Loopback6,
    Four,
    Six,
}

impl Class {
    fn of(ip: IpAddr) -> Self {
        match (ip.is_loopback(), ip.is_ipv4()) {
            (true, true) => Self::Loopback4,
            (true, false) => Self::Loopback6,
            (false, true) => Self::Four,
            (false, false) => Self::Six,
        }
    }
}

fn diagonals(own: &[IpAddr], theirs: &[SocketAddr]) -> Vec<Route> {
    let mut found: Vec<Route> = Vec::new();
    let longest = own.len().max(theirs.len());
    for shift in 0..theirs.len() {
        for at in 0..longest {
            let (Some(from), Some(to)) =
                (own.get(at % own.len().max(1)), theirs.get((at + shift) % theirs.len()))
            else {
                return found;
            };
            if !found.contains(&(Some(*from), *to)) {
                found.push((Some(*from), *to));
            }
        }
    }
    found
}

/// Routes from this device's addresses to each of the handle's, and then those that the kernel
/// chooses.
pub(crate) fn routes(own: &[IpAddr], handle: &Handle) -> Vec<Route> {
    let mut found = Vec::new();
    for to in handle.sockets() {
        let fits = |ip: &&IpAddr| Class::of(**ip) == Class::of(to.ip());
        found.extend(own.iter().filter(fits).map(|ip| (Some(*ip), to)));
    }
    found.extend(handle.sockets().map(|to| (None, to)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(own: &[&str], theirs: &[&str]) -> Pairs {
        let parse = |text: &&str| text.parse::<IpAddr>().expect("an address");
        let handle = Handle {
            device: 0,
            instance: 1,
            nonce: [0; 16],
            network: [0; 16],
            addrs: theirs.iter().map(parse).collect(),
            port: 9,
        };
        Pairs::new(&own.iter().map(parse).collect::<Vec<_>>(), &handle, false)
    }

    fn texts(pairs: &Pairs) -> Vec<String> {
        let known = pairs.routes[..pairs.spare].iter();
        known.map(|(from, to)| format!("{}>{}", from.expect("bound"), to.ip())).collect()
    }

    #[test]
    fn the_first_pairs_use_every_address() {
        let found = pairs(&["10.0.0.1", "10.1.0.1"], &["10.0.0.2", "10.1.0.2"]);
        let wanted =
            ["10.0.0.1>10.0.0.2", "10.1.0.1>10.1.0.2", "10.0.0.1>10.1.0.2", "10.1.0.1>10.0.0.2"];
        assert_eq!(texts(&found), wanted);
        assert_eq!(found.routes.len(), 6);
        assert!(found.routes[4..].iter().all(|(from, _)| from.is_none()));
    }

    #[test]
    fn streams_begin_with_one_for_each_pair() {
        let one = pairs(&["10.0.0.1"], &["10.0.0.2"]);
        assert_eq!([2, 8, 64].map(|most| one.first_streams(most)), [2, 4, 4]);
        let many = ["10.0.0.1", "10.1.0.1", "10.2.0.1"];
        assert_eq!(pairs(&many, &many).first_streams(8), 8);
        assert_eq!(pairs(&["127.0.0.1"], &["127.0.0.1"]).first_streams(64), 64);
    }

    #[test]
    fn only_addresses_of_a_kind_are_pairs() {
        let found = pairs(&["10.0.0.1", "fd00::1", "127.0.0.1"], &["10.0.0.2", "fd00::2"]);
        assert_eq!(texts(&found), ["10.0.0.1>10.0.0.2", "fd00::1>fd00::2"]);
        assert_eq!(texts(&pairs(&["10.0.0.1"], &["fd00::2"])), [""; 0]);
        let found = pairs(&["10.0.0.1"], &["10.0.0.2", "10.1.0.2"]);
        assert_eq!(texts(&found), ["10.0.0.1>10.0.0.2", "10.0.0.1>10.1.0.2"]);
    }
}
