//! A window that the peer's sockets have room for.

use uccl_tran::control::{AckSample, CongestionControl};

/// An algorithm, and a limit that it does not know: the kernel drops datagrams for which a socket
/// has no room.
#[derive(Debug)]
pub(crate) struct RoomLimit {
    pub(crate) control: Box<dyn CongestionControl>,
    pub(crate) most_bytes: u64,
}

impl CongestionControl for RoomLimit {
    fn on_ack(&mut self, ack: &AckSample) {
        self.control.on_ack(ack);
    }

    fn on_loss(&mut self, now_ns: u64, bytes: u64) {
        self.control.on_loss(now_ns, bytes);
    }

    fn on_undo(&mut self, now_ns: u64) {
        self.control.on_undo(now_ns);
    }

    fn on_silence(&mut self, now_ns: u64) {
        self.control.on_silence(now_ns);
    }

    fn on_send(&mut self, now_ns: u64, len: u64) {
        self.control.on_send(now_ns, len);
    }

    fn window_bytes(&self) -> u64 {
        self.control.window_bytes().min(self.most_bytes)
    }

    fn bytes_per_s(&self) -> Option<f64> {
        self.control.bytes_per_s()
    }

    /// By the algorithm's own rule too.
    fn allows(&self, in_flight_bytes: u64, len: u64) -> bool {
        let fits = in_flight_bytes == 0 || in_flight_bytes.saturating_add(len) <= self.most_bytes;
        fits && self.control.allows(in_flight_bytes, len)
    }
}
