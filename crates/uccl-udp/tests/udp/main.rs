//! Rails over UDP, over real sockets of this host.

mod conformance;
mod flood;
mod lengths;
mod pair;
mod refusals;
mod relay;
