//! The lanes of a connection, by their kind.

use std::sync::Arc;

use uccl_fabric::lane::{HostLane, Lane, MessageLane, RailLane};

/// Lanes to one peer.
pub(crate) struct Links {
    /// TCP streams, or the one lane between two processes of a host. The first carries messages;
    /// when it dies, the connection ends.
    pub(crate) streams: Vec<Arc<dyn MessageLane>>,
    /// The first stream, if it is between two processes of a host.
    pub(crate) host: Option<Arc<dyn HostLane>>,
    /// The lane over all rails.
    pub(crate) rails: Option<Arc<dyn RailLane>>,
}

impl Links {
    /// The one lane between two processes of a host.
    pub(crate) fn within_host(lane: Arc<impl HostLane + 'static>) -> Self {
        Self { streams: vec![Arc::clone(&lane) as _], host: Some(lane), rails: None }
    }

    /// All lanes in the order of their indices; the rail lane comes last.
    pub(crate) fn lanes(&self) -> Vec<Arc<dyn Lane>> {
        let streams = self.streams.iter().map(|lane| Arc::clone(lane) as Arc<dyn Lane>);
        streams.chain(self.rails.iter().map(|lane| Arc::clone(lane) as _)).collect()
    }
}
