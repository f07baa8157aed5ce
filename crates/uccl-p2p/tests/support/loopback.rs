//! Endpoints on the loopback interface.

use uccl_p2p::Config;

/// The settings of an endpoint on the loopback interface, at any free port.
pub(crate) fn on_loopback() -> Config {
    Config { bind: Some([127, 0, 0, 1].into()), port: Some(0), ..Config::default() }
}
