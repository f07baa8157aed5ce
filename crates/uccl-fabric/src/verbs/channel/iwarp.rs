//! Joining queue pairs over iWARP, where each is a TCP connection that the connection manager makes.
//!
//! The end whose address is asked for first makes the connections, and says port 0. The other reads that, listens on
//! a port of its own from then on, and its address tells where. So whoever connects is also who sends first,
//! as MPA (RFC 5044) demands: a probe. siw makes a connection while its caller waits, so over siw whoever connects
//! first finds out, by plain TCP, whether anybody is there. A random token proves that a connection comes from who was told the address.

use std::{
    fmt,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use uccl_device::MemoryKind;
use uccl_wire::iwarp::{IwarpAddress, Request, TOKEN_LEN};

use super::{
    knock::Knock,
    queue::{Fence, SendQueue},
};
use crate::{
    mem::Span,
    region::Rights,
    rma::rail::{RailError, Registration as _},
    verbs::{
        cm::{Event, Events, Id, Terms, What},
        cq::Cq,
        ffi::Cm,
        mr::Reach,
        pd::Pd,
        qp::Path,
        registration::VerbsRegistration,
    },
};

/// Where an iWARP device is, and by what it is joined.
#[derive(Clone, Copy)]
pub(in crate::verbs) struct Place {
    pub(in crate::verbs) cm: &'static Cm,
    pub(in crate::verbs) ip: IpAddr,
    /// Whether it is siw, which connects over this host's TCP, and has its callers wait meanwhile: for minutes, where
    /// nobody answers.
    pub(in crate::verbs) is_software: bool,
}

/// A port that the kernel picked may be in use by TCP: so often another is tried.
const MOST_PORTS: u32 = 8;

/// Requests that may wait beside the expected ones.
const BACKLOG: i32 = 16;

/// Connections of one channel's queue pairs.
pub(super) struct Connections {
    /// Of each queue pair, in order.
    of: Vec<Connection>,
    listener: Option<Id>,
    /// Where the peer finds out whether we are there, and its port. siw's own does not stand being tried.
    door: Option<(TcpListener, u16)>,
    events: Arc<Events>,
    /// Of `events` and of the completion queue.
    both: OwnedFd,
    place: Place,
    device: String,
    token: [u8; TOKEN_LEN],
    /// The peer's end, once it is known.
    peer: Option<IwarpAddress>,
    reads: (u8, u8),
    words: Words,
}

#[derive(Default)]
struct Connection {
    id: Option<Id>,
    /// Whether the peer can be asked without waiting for it.
    knock: Option<Knock>,
    is_up: bool,
}

impl Connections {
    pub(super) fn new(pd: &Arc<Pd>, cq: &Cq, place: Place, path: &Path) -> Result<Self, RailError> {
        let events = Events::new(place.cm)?;
        let both = watch(&[events.fd(), cq.fd()])
            .map_err(|errno| RailError::os("epoll_create", errno.raw_os_error()))?;
        let mut token = [0; TOKEN_LEN];
        getrandom::fill(&mut token)
            .map_err(|error| RailError::Unavailable(format!("no random numbers: {error}")))?;
        Ok(Self {
            of: Vec::new(),
            listener: None,
            door: None,
            events,
            both,
            place,
            device: pd.context().name().to_owned(),
            token,
            peer: None,
            reads: (path.reads_asked, path.reads_answered),
            words: Words::new(pd)?,
        })
    }

    /// What the peer's end must know, of so many queue pairs; it makes the connections unless a port is given.
    pub(super) fn address(&self, queue_pairs: usize, port: u16) -> Vec<u8> {
        let (fence_addr, fence_key) = self.words.lent();
        IwarpAddress {
            queue_pairs: u8::try_from(queue_pairs).unwrap_or(u8::MAX),
            reads_answered: self.reads.1,
            ip: self.place.ip,
            port,
            token: self.token,
            fence_addr,
            fence_key,
            knock_port: self.door.as_ref().map_or(0, |(_, port)| *port),
        }
        .encode()
    }

    /// How to learn that what was written has arrived at this peer.
    pub(super) fn fence(&self, peer: &IwarpAddress) -> Fence {
        let (local, local_key) = self.words.own();
        let (remote_addr, remote_key) = (peer.fence_addr, peer.fence_key);
        Fence { local, local_key, remote_addr, remote_key }
    }

    /// Begins to join as many queue pairs with the peer's. Says on which port it waits for the peer, if it does.
    pub(super) fn begin(
        &mut self,
        queue_pairs: usize,
        peer: &IwarpAddress,
    ) -> Result<Option<u16>, RailError> {
        let ours = self.place.ip;
        if ours.is_ipv4() != peer.ip.is_ipv4() {
            let why = format!("the address {} of an iWARP port; ours is {ours}", peer.ip);
            return Err(RailError::Peer(why));
        }
        self.reads.0 = self.reads.0.min(peer.reads_answered);
        self.peer = Some(peer.clone());
        let mut of = Vec::new();
        of.resize_with(queue_pairs, Connection::default);
        if peer.port == 0 {
            self.of = of;
            return self.listen().map(Some);
        }
        for connection in &mut of {
            let id = Id::new(&self.events)?;
            id.resolve(ours, SocketAddr::new(peer.ip, peer.port))?;
            connection.id = Some(id);
        }
        self.of = of;
        Ok(None)
    }

    fn listen(&mut self) -> Result<u16, RailError> {
        let backlog = BACKLOG + i32::try_from(self.of.len()).unwrap_or(0);
        let mut tried = 0;
        loop {
            let id = Id::new(&self.events)?;
            tried += 1;
            match id.listen(self.place.ip, backlog) {
                Ok(port) => {
                    self.check_device(&id)?;
                    self.listener = Some(id);
                    self.door = Some(self.open_door()?);
                    return Ok(port);
                }
                Err(RailError::Os { errno: libc::EADDRINUSE, .. }) if tried < MOST_PORTS => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn open_door(&self) -> Result<(TcpListener, u16), RailError> {
        let listener = TcpListener::bind((self.place.ip, 0));
        let with_port = listener.and_then(|listener| {
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        });
        with_port.map_err(|error| {
            let what = format!("listening on {}", self.place.ip);
            RailError::os(what, error.raw_os_error().unwrap_or(libc::EIO))
        })
    }

    /// The kernel finds the device by its address; it must be the one that our queue pairs are on.
    fn check_device(&self, id: &Id) -> Result<(), RailError> {
        match id.device() {
            Some(device) if device == self.device => Ok(()),
            other => Err(RailError::Lost(format!(
                "{} belongs to {}, not to {}",
                self.place.ip,
                other.as_deref().unwrap_or("no RDMA device"),
                self.device
            ))),
        }
    }

    /// Whether all are connected.
    pub(super) fn are_up(&self) -> bool {
        !self.of.is_empty() && self.of.iter().all(|connection| connection.is_up)
    }

    /// What to sleep on.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.both.as_fd()
    }

    /// Takes what has happened, without blocking.
    ///
    /// # Errors
    /// A connection cannot be made, or is lost.
    pub(super) fn turn(&mut self, queues: &[SendQueue]) -> Result<(), RailError> {
        while let Some(event) = self.events.next()? {
            self.take(event, queues)?;
        }
        if !self.are_up() {
            for (index, queue) in queues.iter().enumerate() {
                self.ask_if_answered(index, queue)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, event: Event, queues: &[SendQueue]) -> Result<(), RailError> {
        if let What::Request(id, private) = event.what {
            self.requested(id, &private, queues);
            return Ok(());
        }
        let is_of =
            |connection: &Connection| connection.id.as_ref().is_some_and(|id| id.is_of(&event));
        let Some(index) = self.of.iter().position(is_of) else {
            // The listener's, or that of a request which was refused.
            return Ok(());
        };
        let (Some(connection), Some(queue)) = (self.of.get(index), queues.get(index)) else {
            return Ok(());
        };
        let Some(id) = &connection.id else { return Ok(()) };
        let lost = |why: String| self.lost(why);
        match event.what {
            What::AddressResolved => {
                self.check_device(id)?;
                id.resolve_route().map_err(|error| lost(error.to_string()))?;
            }
            What::RouteResolved => match self.peer.as_ref().and_then(door_of) {
                Some(door) if self.place.is_software => self.knock(index, door)?,
                _ => self.ask(index, queue)?,
            },
            What::Established => self.of[index].is_up = true,
            What::Lost(why) => return Err(lost(why)),
            What::Removed => {
                return Err(RailError::Gone(format!("{}: it was removed", self.device)));
            }
            What::Request(..) | What::Other => {}
        }
        Ok(())
    }

    fn lost(&self, why: impl fmt::Display) -> RailError {
        RailError::Lost(format!("{}: {why}", self.device))
    }

    /// Finds out whether anybody is there to be asked.
    fn knock(&mut self, index: usize, door: SocketAddr) -> Result<(), RailError> {
        let Some(connection) = self.of.get_mut(index) else { return Ok(()) };
        let begun = Knock::begin(self.place.ip, door);
        let watched = begun.and_then(|knock| {
            epoll::add(&self.both, &knock, EventData::new_u64(0), EventFlags::OUT)?;
            Ok(connection.knock.insert(knock))
        });
        watched.map(drop).map_err(|error| self.lost(error))
    }

    fn ask_if_answered(&mut self, index: usize, queue: &SendQueue) -> Result<(), RailError> {
        let Some(connection) = self.of.get_mut(index) else { return Ok(()) };
        let Some(knock) = &connection.knock else { return Ok(()) };
        if knock.is_answered().map_err(|error| self.lost(error))? {
            self.of[index].knock = None;
            self.ask(index, queue)?;
        }
        Ok(())
    }

    /// Asks the peer for the connection of this queue pair.
    fn ask(&self, index: usize, queue: &SendQueue) -> Result<(), RailError> {
        let id = self.of.get(index).and_then(|connection| connection.id.as_ref());
        let (Some(id), Some(peer)) = (id, &self.peer) else { return Ok(()) };
        let request = Request { token: peer.token, queue_pair: index as u8 };
        let asked = id.connect(&self.terms(queue), &request.encode());
        asked.map_err(|error| self.lost(error))
    }

    /// Grants a request if it is one of those expected: anybody may send one.
    fn requested(&mut self, id: Id, private: &[u8], queues: &[SendQueue]) {
        let expected = Request::decode(private).filter(|request| request.token == self.token);
        let index = expected.map(|request| usize::from(request.queue_pair));
        let free = index.filter(|&index| self.of.get(index).is_some_and(|of| of.id.is_none()));
        let queue = free.and_then(|index| Some((index, queues.get(index)?)));
        let Some((index, queue)) = queue else {
            tracing::warn!(device = self.device, "a connection that nobody expects is refused");
            return id.reject();
        };
        match id.accept(&self.terms(queue)) {
            Ok(()) => self.of[index].id = Some(id),
            Err(error) => tracing::warn!(device = self.device, %error, "a connection failed"),
        }
    }

    fn terms(&self, queue: &SendQueue) -> Terms {
        let (reads_asked, reads_answered) = self.reads;
        Terms { qp_num: queue.qp().name().number, reads_asked, reads_answered }
    }
}

/// Where it can be found out whether this peer is there.
fn door_of(peer: &IwarpAddress) -> Option<SocketAddr> {
    (peer.knock_port != 0).then(|| SocketAddr::new(peer.ip, peer.knock_port))
}

fn watch(fds: &[BorrowedFd<'_>]) -> Result<OwnedFd, rustix::io::Errno> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN)?;
    }
    Ok(epoll)
}

/// Two words that only devices touch: the peer reads the first, our own writes to the second what it has read of
/// the peer's.
struct Words {
    // Before the memory that it is of.
    registration: VerbsRegistration,
    words: Box<[u64; 2]>,
}

const WORD: usize = size_of::<u64>();

impl Words {
    fn new(pd: &Arc<Pd>) -> Result<Self, RailError> {
        let mut words = Box::new([0; 2]);
        let span = Span { addr: words.as_mut_ptr().expose_provenance(), len: 2 * WORD };
        // Over iWARP what our own reads bring is written as a peer's write is.
        let reach = Reach { rights: Rights::ALL, relaxed: false };
        let registration = VerbsRegistration::new(pd, span, MemoryKind::Host, reach)?;
        Ok(Self { registration, words })
    }

    fn addr(&self) -> usize {
        self.words.as_ptr().addr()
    }

    fn lent(&self) -> (u64, u32) {
        (self.addr() as u64, self.registration.rkey())
    }

    fn own(&self) -> (Span, u64) {
        (Span { addr: self.addr() + WORD, len: WORD }, self.registration.local_key())
    }
}
