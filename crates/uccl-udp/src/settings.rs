//! The settings of a rail.

use std::time::Duration;

use uccl_wire::handshake::Psk;

/// The settings of a rail.
#[derive(Clone, Debug)]
pub struct UdpSettings {
    /// Sockets, a path each: 1 to 64.
    pub paths: u16,
    /// The key of datagrams' codes. Both ends need the same.
    pub psk: Option<Psk>,
    /// The silence after which a path is given up, and a channel with its last path.
    pub silence: Duration,
    /// Techniques of path choice, loss and congestion control, by the names of
    /// [`uccl_tran::choice::CHOICE_NAMES`], [`uccl_tran::recovery::LOSS_NAMES`] and
    /// [`uccl_tran::control::CONTROL_NAMES`].
    pub techniques: [&'static str; 3],
    /// The speed of the interface in bytes per second, for the algorithms that start from it.
    pub bytes_per_s: f64,
    /// Most bytes of a datagram, its head included; the interface may take less.
    pub datagram: u32,
    /// Whether the kernel may cut and join datagrams (GSO, GRO), where it can.
    pub offload: bool,
}

impl Default for UdpSettings {
    fn default() -> Self {
        Self {
            paths: 8,
            psk: None,
            silence: Duration::from_secs(10),
            techniques: ["round-robin", "time", "cubic"],
            bytes_per_s: 1.25e9,
            datagram: 16_456,
            offload: true,
        }
    }
}
