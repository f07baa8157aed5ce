//! UDP at the address that peers get.

use std::{sync::Arc, time::Duration};

use uccl_fabric::rail::{Rail, RailError};
use uccl_udp::{UdpRail, UdpSettings};
use uccl_wire::handshake::Psk;

use crate::{config::Config, host_address::told_ip};

/// The silence after which a path is given up, where nothing waits for a peer for ever.
const SILENCE: Duration = Duration::from_secs(10);

/// Opens a rail at the address that the endpoint tells its peers.
pub(super) fn open(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let psk = config.psk.as_deref().map(Psk::new).transpose();
    let settings = UdpSettings {
        psk: psk.map_err(|e| RailError::Unavailable(e.to_string()))?,
        silence: if config.timeout.is_zero() { SILENCE } else { config.timeout },
        ..UdpSettings::default()
    };
    let ip = told_ip(config).map_err(|e| RailError::Unavailable(e.to_string()))?;
    Ok(vec![Arc::new(UdpRail::open(ip, settings)?)])
}
