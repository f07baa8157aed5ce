//! The list of behaviours.

mod closing;
mod connecting;
mod faults;
mod grouped;
mod layout;
mod lifecycle;
mod links;
mod low_latency;
mod many;
mod messages;
mod order;
mod rma;
mod strangers;
pub(crate) mod tuner;

use anyhow::Result;

use crate::rank::Rank;

/// The tables that a behaviour is checked with, each by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Over {
    Library,
    Nets,
    Tuners,
    Rmas,
}

/// A behaviour that is checked.
pub(crate) struct Behaviour {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) over: Over,
    pub(crate) ranks: usize,
    /// The ranks, two, are in network namespaces of their own.
    pub(crate) is_apart: bool,
    /// Every rank runs it; returns a text about the extent of the check.
    pub(crate) run: fn(&mut Rank) -> Result<String>,
}

const fn of_nets(
    name: &'static str,
    about: &'static str,
    ranks: usize,
    run: fn(&mut Rank) -> Result<String>,
) -> Behaviour {
    Behaviour { name, about, over: Over::Nets, ranks, is_apart: false, run }
}

const fn of_hosts(
    name: &'static str,
    about: &'static str,
    run: fn(&mut Rank) -> Result<String>,
) -> Behaviour {
    Behaviour { name, about, over: Over::Nets, ranks: 2, is_apart: true, run }
}

const fn of_rmas(
    name: &'static str,
    about: &'static str,
    ranks: usize,
    run: fn(&mut Rank) -> Result<String>,
) -> Behaviour {
    Behaviour { name, about, over: Over::Rmas, ranks, is_apart: false, run }
}

/// All behaviours, in the order in which they are checked.
pub(crate) const BEHAVIOURS: &[Behaviour] = &[
    Behaviour {
        name: "layout",
        about: "no function is missing; all versions have the same devices, with valid properties",
        over: Over::Library,
        ranks: 1,
        is_apart: false,
        run: layout::layout,
    },
    of_nets("contexts", "two communicators that end in either order", 1, lifecycle::contexts),
    of_nets("init-again", "init fails once, and works later", 1, lifecycle::init_again),
    of_nets("reload", "loaded and unloaded 100 times; no thread is left", 1, lifecycle::reload),
    of_nets("connect", "each side alone, both orders, a copied handle", 2, connecting::connect),
    of_nets("peers", "64 connects at once, each to its listener", 2, connecting::peers),
    of_nets("listener", "several connects to one listener in turn", 2, connecting::listener),
    of_nets("sizes", "0 B to 64 MiB, odd addresses, longer receives", 2, messages::sizes),
    of_nets("too-long", "a send that is longer than its receive fails", 2, messages::too_long),
    of_nets("order", "receives before and after their sends", 2, order::order),
    of_nets("backpressure", "more requests than 32 are refused or kept", 2, order::backpressure),
    of_nets("grouped", "receives in groups, by tags", 2, grouped::grouped),
    of_nets("preset", "receives without need of a completion (LL)", 2, low_latency::preset),
    of_nets("flags", "no flag lands before its data (LL)", 2, low_latency::flags),
    of_nets("thousand", "1000 communicators", 2, many::thousand),
    of_nets("threads", "two contexts, four threads; a moved communicator", 2, many::threads),
    of_nets("ring", "four processes, 32 requests each, flush", 4, many::ring),
    of_nets("bootstrap", "heap memory, no sizes, one thread", 4, many::bootstrap),
    of_nets("leaks", "20 rounds leave no thread, descriptor or mapping", 2, lifecycle::leaks),
    of_nets("close", "close with requests in flight; no byte lands later", 2, closing::alive),
    of_nets("close-dead", "the same with a peer that was killed", 3, closing::dead),
    of_nets("close-stopped", "the same with a peer that was stopped", 2, closing::stopped),
    of_nets("killed", "a killed peer is an error, in each phase", 6, faults::killed),
    of_nets("paused", "a peer that stops for a moment is no error", 2, faults::paused),
    of_nets("stopped", "a peer that stops for long is an error", 2, faults::stopped),
    of_nets("strangers", "connections of strangers hold nobody up", 2, strangers::strangers),
    of_nets(
        "old-handle",
        "the handle of a closed listener reaches nobody",
        2,
        strangers::old_handle,
    ),
    of_hosts("cut-for-long", "a link that is gone is an error at both ends", links::cut_for_long),
    of_hosts("cut", "a link that is cut for a moment is no error", links::cut),
    Behaviour {
        name: "tuner",
        about: "10,000 random calls: the same on all ranks, -1 untouched",
        over: Over::Tuners,
        ranks: 2,
        is_apart: false,
        run: tuner::tuner,
    },
    of_rmas("rma-layout", "no function is missing; valid properties", 1, rma::layout),
    of_rmas("rma-ends", "contexts in either order; no thread or descriptor left", 2, rma::ends),
    of_rmas("rma-join", "a rank that does not come, or dies, is an error in time", 3, rma::join),
    of_rmas("rma-put", "0 B to 16 MiB, odd offsets, signals behind their bytes", 2, rma::put),
    of_rmas("rma-signal", "increments and sums, to itself too, exactly once", 2, rma::signals),
    of_rmas("rma-get", "gets of all sizes, and a flush", 2, rma::get),
    of_rmas("rma-strong", "signals by themselves, behind long puts", 2, rma::strong),
    of_rmas("rma-order", "8 contexts, 4 ranks at random: signals behind all puts", 4, rma::order),
    of_rmas("rma-regions", "the same memory twice, parts of it, beside puts", 2, rma::regions),
    of_rmas("rma-close", "close with operations under way; no byte lands later", 2, rma::close),
    of_rmas("rma-close-dead", "the same with a rank that was killed", 3, rma::close_dead),
    of_rmas("rma-close-stopped", "the same with a rank that was stopped", 2, rma::close_stopped),
    of_rmas("rma-streams", "TCP streams that end: no signal comes twice", 2, rma::streams),
    of_rmas("rma-killed", "a killed rank is an error, idle or not", 4, rma::killed),
    Behaviour {
        name: "rma-cut",
        about: "a link that is cut for a moment: signals exactly once",
        over: Over::Rmas,
        ranks: 2,
        is_apart: true,
        run: rma::cut,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_different() {
        for (at, one) in BEHAVIOURS.iter().enumerate() {
            assert!(BEHAVIOURS[at + 1..].iter().all(|other| other.name != one.name));
            assert!(one.ranks > 0, "{}", one.name);
        }
    }
}
