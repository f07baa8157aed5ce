//! One attempt to open a stream.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use uccl_wire::flow::{FlowHello, FlowWelcome, HELLO_LEN, Status, WELCOME_LEN};

use crate::socket::{self, Span};

/// An attempt without any answer ends after this time. A fresh one asks at once, where the kernel
/// would wait longer each time.
const SILENCE: Duration = Duration::from_millis(500);
/// The longest time from the connection to its answer.
const ANSWER: Duration = Duration::from_secs(2);

/// A pair of addresses: this side's, if one is bound, and the peer's.
pub(crate) type Route = (Option<IpAddr>, SocketAddr);

/// A stream that is being opened.
pub(crate) struct Attempt {
    pub(crate) stream: TcpStream,
    pub(crate) to: SocketAddr,
    since: Instant,
    step: Step,
}

enum Step {
    Connect,
    Greet { hello: [u8; HELLO_LEN], sent: usize },
    Hear { welcome: [u8; WELCOME_LEN], filled: usize },
}

impl Attempt {
    pub(crate) fn begin((from, to): Route) -> io::Result<Self> {
        let stream = socket::begin_connect(from, to)?;
        Ok(Self { stream, to, since: Instant::now(), step: Step::Connect })
    }

    /// Whether it is connected and has begun to greet.
    pub(crate) fn has_greeted(&self) -> bool {
        !matches!(self.step, Step::Connect)
    }

    /// Goes on as far as it can; the answer, once it has come, and the stream is taken or the flow
    /// has ended there.
    pub(crate) fn step(
        &mut self,
        hello: &FlowHello,
        instance: u64,
        may_greet: bool,
    ) -> io::Result<Option<FlowWelcome>> {
        let patience = if self.has_greeted() { ANSWER } else { SILENCE };
        if self.since.elapsed() > patience {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if matches!(self.step, Step::Connect) {
            if !socket::is_connected(&self.stream)? || !may_greet {
                return Ok(None);
            }
            let hello = hello.encode();
            (self.step, self.since) = (Step::Greet { hello, sent: 0 }, Instant::now());
        }
        if let Step::Greet { hello, sent } = &mut self.step {
            // SAFETY: the bytes live through the call.
            let count = unsafe { socket::send(&self.stream, &[Span::of(hello).after(*sent)]) }?;
            *sent += count.unwrap_or(0);
            if *sent < HELLO_LEN {
                return Ok(None);
            }
            self.step = Step::Hear { welcome: [0; WELCOME_LEN], filled: 0 };
        }
        let Step::Hear { welcome, filled } = &mut self.step else { return Ok(None) };
        let span = Span::of_mut(welcome).after(*filled);
        // SAFETY: the rest of the answer's own bytes, which nothing else uses.
        match unsafe { socket::recv(&self.stream, &[span]) }? {
            None => return Ok(None),
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(count) => *filled += count,
        }
        if *filled < WELCOME_LEN {
            return Ok(None);
        }
        let welcome = FlowWelcome::decode(welcome).map_err(io::Error::other)?;
        match welcome.status {
            Status::Taken | Status::UnknownFlow if welcome.instance == instance => {
                Ok(Some(welcome))
            }
            Status::Taken | Status::UnknownFlow | Status::UnknownKey => {
                Err(io::Error::other("another process listens there, or its listener is closed"))
            }
            Status::Full => Err(io::Error::other("too many connections wait there")),
            Status::NeedsSecret => Err(io::Error::other("it wants a pre-shared key")),
        }
    }
}
