//! The protocol of the two sides: one JSON value a line, over a pipe pair or a TCP connection.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uccl_p2p::{Interrupt, wire::advert::Advert};

use super::{
    kinds::{ChecksumMode, Direction, OpKind, TransportKind},
    place::Places,
};

/// Both sides must be of one version.
pub(crate) const VERSION: u32 = 5;

/// The longest line: 64 bytes an advert, a hundred thousand adverts, and room.
const MAX_LINE: u64 = 32 << 20;

/// How long a side may take to answer beyond the time its work takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A request of the leading side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Look at your destination memory: does it hold the pattern of this seed, and nothing else?
    Check { seed: u64 },
    /// Close the endpoint.
    Close,
    /// Poison your destination memory, fill your source memory with the pattern of this seed.
    Fill { seed: u64 },
    /// Do your part of a phase.
    Go(Phase),
    /// Do your part of measuring a limit.
    Limit(LimitRequest),
    /// Start an endpoint and accept my connection.
    Open(EndpointOptions),
    /// Make the memory of a point; these are the adverts of mine.
    Prepare { point: Point, adverts: Vec<WireAdvert> },
    /// Let go of the memory of a point.
    Release,
}

/// An answer of the serving side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// The connection is there.
    Accepted,
    /// The first fault of the destination memory, if it has one.
    Checked { wrong: Option<String> },
    /// Done.
    Done,
    /// It did not work.
    Failed { error: String },
    /// The part of a phase is done.
    Finished { elapsed_ns: u64 },
    /// A limit's part is ready at this port.
    Listening { port: u16 },
    /// Memory of a limit.
    Mapped { pid: u32, address: u64 },
    /// The endpoint listens at this port; its GPU, if it was to have one, is of this name.
    Opened { port: u16, gpu: Option<String> },
    /// These are the adverts of my memory, slot by slot.
    Prepared { adverts: Vec<WireAdvert> },
    /// The part of a phase begins now.
    Ready,
}

/// The serving side's part in measuring a limit.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LimitRequest {
    /// Memory that the other may reach into; held until the next request, which must be a release.
    Memory { len: u64 },
    /// Ping-pong in the memory behind this process's file descriptor.
    Shared { pid: u32, fd: i32 },
    /// Send each message of 64 bytes back.
    TcpEcho,
    /// Receive and discard all bytes.
    TcpSink,
}

/// How an endpoint is to behave.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct EndpointOptions {
    pub(crate) transport: TransportKind,
    pub(crate) checksum: Option<ChecksumMode>,
    pub(crate) streams: Option<usize>,
    /// Both sides are on one host and listen on loopback alone.
    pub(crate) loopback: bool,
    pub(crate) timeout_ms: u64,
    /// The GPU that the endpoint serves, if it serves one.
    pub(crate) gpu: Option<u32>,
}

/// One point of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) op: OpKind,
    pub(crate) direction: Direction,
    pub(crate) places: Places,
    /// Bytes of one iov.
    pub(crate) size: u64,
    /// Iovs of one transfer.
    pub(crate) iovs: usize,
    /// Buffers of a side, each for one transfer.
    pub(crate) slots: usize,
    /// Transfers follow the order of a CUDA stream of the side that posts them.
    pub(crate) stream: bool,
}

impl Point {
    /// Whether both sides have transfers of their own.
    pub(crate) fn goes_both_ways(&self) -> bool {
        self.direction == Direction::Bi || self.op == OpKind::Pingpong
    }
}

/// A run of transfers of one point.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Phase {
    /// Transfers, each way.
    pub(crate) count: u64,
    /// Transfers outstanding at most.
    pub(crate) inflight: usize,
    /// Slots to take turns with.
    pub(crate) slots: usize,
    /// Notifications go back and forth rather than one way.
    pub(crate) ping_pong: bool,
    /// Notifications carry the pattern of this seed.
    pub(crate) seed: Option<u64>,
}

/// An advert as a line carries it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct WireAdvert(u64, u64, u64, u32, u32);

impl From<Advert> for WireAdvert {
    fn from(advert: Advert) -> Self {
        Self(advert.addr, advert.len, advert.key, advert.slot, advert.instance)
    }
}

impl From<WireAdvert> for Advert {
    fn from(WireAdvert(addr, len, key, slot, instance): WireAdvert) -> Self {
        Self { addr, len, key, slot, instance }
    }
}

/// The control connection to the other side: lines out and lines in.
pub(crate) struct Channel {
    reader: BufReader<File>,
    writer: File,
    patience: Duration,
}

impl Channel {
    pub(crate) fn new(reader: OwnedFd, writer: OwnedFd) -> Self {
        let reader = BufReader::new(File::from(reader));
        Self { reader, writer: File::from(writer), patience: PATIENCE }
    }

    pub(crate) fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let writer = stream.try_clone()?;
        Ok(Self::new(stream.into(), writer.into()))
    }

    /// Sets how long to wait for a silent peer from now on: `work` and `PATIENCE` beyond it.
    pub(crate) fn set_patience(&mut self, work: Duration) {
        self.patience = PATIENCE.saturating_add(work);
    }

    pub(crate) fn send<T: Serialize>(&mut self, message: &T) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.writer.write_all(&line).context(GONE)
    }

    /// The next message; `None` once the other side has hung up.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut line = Vec::new();
        (&mut self.reader).take(MAX_LINE).read_until(b'\n', &mut line).context(GONE)?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            bail!("the other side stopped in the middle of a message");
        }
        serde_json::from_slice(&line).map(Some).map_err(|error| {
            anyhow!("the other side does not speak uccl bench, or another version of it: {error}")
        })
    }

    /// The next message, which must come before patience ends.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        if self.reader.buffer().is_empty() && !self.readable_within(self.patience)? {
            bail!(
                "the other side has been silent for {:?}; look whether it still runs",
                self.patience
            );
        }
        self.next()?.ok_or_else(|| anyhow!(GONE))
    }

    /// A reply that is not a failure.
    pub(crate) fn reply(&mut self) -> Result<Reply> {
        match self.receive()? {
            Reply::Failed { error } => bail!("the other side failed: {error}"),
            reply => Ok(reply),
        }
    }

    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.send(request)?;
        self.reply()
    }

    /// Sends a request that is answered with [`Reply::Done`].
    pub(crate) fn order(&mut self, request: &Request) -> Result<()> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Stops waiting calls of the engine once the other side is gone.
    pub(crate) fn watch(&self) -> io::Result<HangUp> {
        Ok(HangUp { fd: self.reader.get_ref().as_fd().try_clone_to_owned()?, words: false })
    }

    /// Stops waiting calls of the engine once the other side is gone, or has sent a message.
    pub(crate) fn watch_words(&self) -> io::Result<HangUp> {
        Ok(HangUp { words: true, ..self.watch()? })
    }

    fn readable_within(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.reader.get_ref(), PollFlags::IN)];
            match poll(&mut fds, Some(&Timespec::try_from(left)?)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)).context(GONE),
            }
        }
    }
}

const GONE: &str = "the other side is gone; see what it printed";

pub(crate) fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow!("the other side gave an answer to another question: {reply:?}")
}

/// Whether the other side has hung up, or has sent a message if that is a reason to stop.
pub(crate) struct HangUp {
    fd: OwnedFd,
    words: bool,
}

impl Interrupt for HangUp {
    fn interrupted(&mut self) -> bool {
        let words = if self.words { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP | words)];
        let reasons = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | words;
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
            && fds[0].revents().intersects(reasons)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        let channel = |stream: UnixStream| {
            let writer = stream.try_clone().expect("a clone");
            Channel::new(stream.into(), writer.into())
        };
        (channel(a), channel(b))
    }

    #[test]
    fn messages_arrive_as_they_left() {
        let (mut a, mut b) = pair();
        let phase =
            Phase { count: 7, inflight: 2, slots: 2, ping_pong: false, seed: Some(u64::MAX) };
        a.send(&Request::Go(phase)).expect("sent");
        a.send(&Request::Close).expect("sent");
        assert!(matches!(b.receive(), Ok(Request::Go(got)) if got == phase));
        assert!(matches!(b.next(), Ok(Some(Request::Close))));
        let advert = Advert { addr: u64::MAX, len: 1, key: u64::MAX - 1, slot: 3, instance: 4 };
        b.send(&Reply::Prepared { adverts: vec![advert.into()] }).expect("sent");
        match a.reply().expect("a reply") {
            Reply::Prepared { adverts } => assert_eq!(Advert::from(adverts[0]), advert),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn failures_reach_the_asker() {
        let (mut a, mut b) = pair();
        b.send(&Reply::Failed { error: "no memory".into() }).expect("sent");
        let error = a.ask(&Request::Close).expect_err("a failure");
        assert!(error.to_string().contains("no memory"), "{error}");
    }

    #[test]
    fn nonsense_and_half_lines_are_errors() {
        let (mut a, mut b) = pair();
        b.writer.write_all(b"GET / HTTP/1.1\n{\"go\"").expect("written");
        assert!(a.receive::<Request>().is_err());
        drop(b);
        assert!(a.receive::<Request>().is_err());
    }

    #[test]
    fn hanging_up_is_seen() {
        let (mut a, mut b) = pair();
        let mut watch = a.watch().expect("a watch");
        let mut words = a.watch_words().expect("a watch");
        assert!(!watch.interrupted() && !words.interrupted());
        b.send(&Request::Close).expect("sent");
        assert!(!watch.interrupted() && words.interrupted());
        a.next::<Request>().expect("a word");
        assert!(!words.interrupted());
        drop(b);
        assert!(watch.interrupted());
        assert!(a.next::<Request>().expect("an end, not an error").is_none());
    }

    #[test]
    fn silence_ends() {
        let (mut a, _b) = pair();
        a.patience = Duration::from_millis(1);
        let error = a.receive::<Request>().expect_err("silence");
        assert!(error.to_string().contains("silent"), "{error}");
    }
}
