//! A channel's end, as the lane over rails uses it.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::event::{EventfdFlags, eventfd};
use socket2::SockAddr;
use uccl_fabric::rail::{Channel, Limits, RailError, Request, RequestEnd};
use uccl_tran::{
    ParamsError,
    control::LinkFacts,
    multipath::{MultipathParams, MultipathReceiver, MultipathSender, Repeats, Techniques},
    recovery::TailProbe,
};
use uccl_wire::datagram::{DatagramKeys, HEAD_LEN, UdpAddress};

use crate::{
    connection::{Connection, ConnectionParts, DEPTH, MAX_REQUEST, OPEN},
    device::Service,
    room::RoomLimit,
    settings::UdpSettings,
};

/// The lane cuts longer requests into parts of so many bytes.
const PART: u64 = 1 << 20;
/// Bytes of requests that keep a channel busy.
const WINDOW: u64 = 8 << 20;
/// The round trip that algorithms start from, in nanoseconds.
const BASE_RTT_NS: u64 = 100_000;
/// The shortest silence after which a path is probed: a scheduler may take as long.
const LEAST_PROBE_NS: u64 = 2_000_000;

/// An end of a channel.
pub(crate) struct UdpChannel {
    service: Arc<Service>,
    settings: Arc<UdpSettings>,
    /// The connection's place in the device.
    place: usize,
    ours: UdpAddress,
    address: Vec<u8>,
    bell: Arc<OwnedFd>,
}

/// The facts from which algorithms derive their constants.
pub(crate) fn link_facts(settings: &UdpSettings, datagram: u32) -> LinkFacts {
    LinkFacts {
        bytes_per_s: settings.bytes_per_s,
        base_rtt_ns: BASE_RTT_NS,
        chunk_len: chunk_len(datagram).into(),
    }
}

fn chunk_len(datagram: u32) -> u32 {
    datagram.saturating_sub(HEAD_LEN as u32).max(1)
}

impl UdpChannel {
    /// Makes an end with datagrams of at most this length.
    pub(crate) fn open(
        service: Arc<Service>,
        settings: Arc<UdpSettings>,
        ip: IpAddr,
        datagram: u32,
    ) -> Result<Self, RailError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| RailError::os("making an eventfd", e.raw_os_error()))?;
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce)
            .map_err(|e| RailError::Unavailable(format!("no random bytes: {e}")))?;
        let mut state = service.device.state.lock();
        let (ports, room) = state.ports();
        let full = || RailError::Unavailable("too many channels, or no random bytes".into());
        let (place, connection) = state.open().ok_or_else(full)?;
        drop(state);
        let has_key = settings.psk.is_some();
        let ours = UdpAddress { connection, nonce, has_key, room, datagram, ip, ports };
        let (address, bell) = (ours.encode(), Arc::new(bell));
        Ok(Self { service, settings, place, ours, address, bell })
    }

    /// The parts of a connection with this peer.
    fn parts(&self, peer: &UdpAddress, now_ns: u64) -> Result<ConnectionParts, RailError> {
        let (ours, settings) = (&self.ours, &self.settings);
        let paths = ours.ports.len().min(peer.ports.len());
        let chunk_len = chunk_len(ours.datagram.min(peer.datagram));
        let params = MultipathParams {
            paths: paths as u16,
            chunk_len,
            repeats: Repeats::Harmless,
            most_open: OPEN as u32,
            ack_every: 1,
            ack_delay_ns: 0,
            initial_rtt_ns: 10 * BASE_RTT_NS,
            tail_probe: TailProbe { least_ns: LEAST_PROBE_NS, ..TailProbe::default() },
            dead_after_ns: u64::try_from(settings.silence.as_nanos()).unwrap_or(u64::MAX / 4),
        };
        let facts = link_facts(settings, ours.datagram.min(peer.datagram));
        let named = Techniques::named(settings.techniques, &facts, paths as u16, ours.connection);
        let unknown = || RailError::Unavailable("an unknown technique".into());
        let mut techniques = named.ok_or_else(unknown)?;
        let most_bytes = (u64::from(peer.room) * paths as u64).max(2 * u64::from(chunk_len));
        techniques.control = Box::new(RoomLimit { control: techniques.control, most_bytes });
        let refused =
            |e: ParamsError| RailError::Unavailable(format!("beginning a connection: {e}"));
        let addr = |port: &u16| SockAddr::from(SocketAddr::new(peer.ip, *port));
        Ok(ConnectionParts {
            peer: peer.connection,
            to: peer.ports.iter().take(paths).map(addr).collect(),
            keys: DatagramKeys::new(settings.psk.as_ref(), ours, peer),
            sender: MultipathSender::new(params, techniques, now_ns).map_err(refused)?,
            receiver: MultipathReceiver::new(params).map_err(refused)?,
            chunk_len,
            bell: Arc::clone(&self.bell),
        })
    }

    /// Has the connection do something, and sends the result.
    fn with<T>(&self, act: impl FnOnce(&mut Connection, u64) -> T) -> Result<T, RailError> {
        let device = &self.service.device;
        let mut state = device.state.lock();
        let now_ns = device.now_ns();
        let Some(connection) = state.connection(self.place) else {
            return Err(RailError::Lost("it was not joined".into()));
        };
        if let Some(why) = connection.loss() {
            return Err(RailError::Lost(why.to_owned()));
        }
        let result = act(connection, now_ns);
        state.flush(self.place, now_ns);
        device.wake_if_late(&state);
        Ok(result)
    }
}

impl Channel for UdpChannel {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError> {
        let peer = UdpAddress::decode(peer).map_err(|e| RailError::Peer(e.to_string()))?;
        let words = |has: bool| if has { "a pre-shared key" } else { "no pre-shared key" };
        if peer.has_key != self.ours.has_key {
            let (theirs, ours) = (words(peer.has_key), words(self.ours.has_key));
            return Err(RailError::Peer(format!("an address with {theirs}; this end has {ours}")));
        }
        if peer.ip.is_ipv4() != self.ours.ip.is_ipv4() {
            return Err(RailError::Peer(format!("{}, and this is {}", peer.ip, self.ours.ip)));
        }
        let device = &self.service.device;
        let connection = Connection::new(self.parts(&peer, device.now_ns())?);
        device.state.lock().join(self.place, connection);
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits { max_bytes: MAX_REQUEST, chunk_bytes: PART, depth: DEPTH, window_bytes: WINDOW }
    }

    fn probe(&mut self, tag: u64) -> Result<(), RailError> {
        self.with(|connection, now_ns| connection.ping(now_ns, tag))
    }

    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError> {
        self.with(|connection, now_ns| {
            requests.iter().take_while(|request| connection.post(now_ns, request)).count()
        })
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        let device = &self.service.device;
        let Some(mut state) = device.poll() else { return Ok(()) };
        device.wake_if_late(&state);
        let Some(connection) = state.connection(self.place) else { return Ok(()) };
        connection.take_ended(ended);
        connection.loss().map_or(Ok(()), |why| Err(RailError::Lost(why.to_owned())))
    }

    fn import(&mut self, key: &[u8]) -> Result<u64, RailError> {
        let key: [u8; 8] =
            key.try_into().map_err(|_| RailError::Peer("no key of a region".into()))?;
        Ok(u64::from_le_bytes(key))
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        let mut state = self.service.device.state.lock();
        let Some(connection) = state.connection(self.place) else { return Ok(true) };
        match connection.loss() {
            Some(why) => Err(RailError::Lost(why.to_owned())),
            None => Ok(connection.arm()),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }
}

impl Drop for UdpChannel {
    /// The lock waits for copies that are being made; no later datagram finds the connection.
    fn drop(&mut self) {
        self.service.device.state.lock().close(self.place);
    }
}
