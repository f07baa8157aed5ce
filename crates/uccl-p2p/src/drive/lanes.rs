//! Makes the lanes between two endpoints after their handshake, over the links that they have
//! agreed on.

use std::{env, sync::Arc};

use uccl_fabric::{gpu::CopyBy, lane::MessageLane, pipe::Pipe};
use uccl_rma::Role;
use uccl_stream::{
    StreamLane, StreamOptions,
    sealed::SealedPipe,
    tcp::{TcpOptions, TcpPipe},
};

use super::{core::Core, links::Links, socket::Socket};
use crate::error::{Error, Result};

/// The options that the two ends have agreed on.
pub(crate) struct Agreement {
    /// The role of this end.
    pub(crate) role: Role,
    /// A number that only the two ends of this connection know.
    pub(crate) token: u128,
    /// Whether data carries a checksum.
    pub(crate) checksum: bool,
    /// Whether there are rails beside the streams.
    pub(crate) rails: bool,
    /// Whether bytes go through named pipes instead of sockets.
    pub(crate) fifo: bool,
}

/// Makes lanes over connected sockets, or over named pipes in their place.
pub(crate) fn make(core: &Arc<Core>, sockets: Vec<Socket>, agreed: &Agreement) -> Result<Links> {
    let streams = if agreed.fifo {
        let agreed_over = sockets.into_iter().next().ok_or_else(|| {
            Error::Invalid("named pipes without the socket of their handshake".into())
        })?;
        vec![over_fifos(core, agreed_over, agreed)?]
    } else {
        let streams = sockets.into_iter().map(|socket| over_tcp(core, socket, agreed));
        streams.collect::<Result<_>>()?
    };
    let rails = agreed.rails.then(|| core.rail_lane(agreed.role)).transpose()?;
    Ok(Links { streams, host: None, rails: rails.map(|lane| lane as _) })
}

fn over_tcp(core: &Arc<Core>, socket: Socket, agreed: &Agreement) -> Result<Arc<dyn MessageLane>> {
    let config = &core.config;
    let options = TcpOptions { congestion: config.tcp_congestion.clone(), timeout: config.timeout };
    let Socket { tcp, keys } = socket;
    let pipe = TcpPipe::new(tcp, &options);
    let pipe = pipe.map_err(|e| Error::os("setting up a TCP lane", e))?;
    Ok(match keys {
        None => stream(core, pipe, agreed),
        Some(keys) => stream(core, SealedPipe::over(pipe, keys.sealer, keys.opener), agreed),
    })
}

fn over_fifos(
    core: &Arc<Core>,
    socket: Socket,
    agreed: &Agreement,
) -> Result<Arc<dyn MessageLane>> {
    let (folder, name) = (env::temp_dir(), format!("uccl-{:032x}", agreed.token));
    let pipe = match agreed.role {
        Role::Acceptor => uccl_fifo::offer(&folder, &name, socket.tcp.into()),
        Role::Connector => uccl_fifo::join(&folder, &name, socket.tcp.into()),
    };
    let io = |e| Error::os(format!("opening named pipes in {}", folder.display()), e);
    Ok(stream(core, pipe.map_err(io)?, agreed))
}

/// Makes a lane over a byte stream.
fn stream<P: Pipe>(
    core: &Core,
    (pipe, tx, rx): (P, P::Tx, P::Rx),
    agreed: &Agreement,
) -> Arc<dyn MessageLane> {
    let (regions, checksum) = (Arc::clone(&core.mrs.table), agreed.checksum);
    let options = StreamOptions { regions, checksum, copy_by: CopyBy::default() };
    Arc::new(StreamLane::new(pipe, tx, rx, options))
}
