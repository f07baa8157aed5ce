//! One attempt to open a stream.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use uccl_wire::{
    flow::{
        FlowHello, FlowWelcome, Status,
        greeting::{Caller, CallerStep, MOST_GREETING, RANDOM_LEN},
    },
    handshake::Psk,
};

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
    Greet { caller: Box<Caller>, bytes: Vec<u8>, sent: usize },
    Hear { caller: Box<Caller>, bytes: [u8; MOST_GREETING], filled: usize },
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
        introduction: &Introduction<'_>,
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
            let mut random = [0; RANDOM_LEN];
            getrandom::fill(&mut random).map_err(io::Error::other)?;
            let (caller, bytes) =
                Caller::new(introduction.psk.cloned(), &introduction.hello, random);
            self.step = Step::Greet { caller: Box::new(caller), bytes, sent: 0 };
            self.since = Instant::now();
        }
        loop {
            self.send()?;
            match self.hear()? {
                None => return Ok(None),
                Some(CallerStep::Send(bytes)) => self.go_on(bytes),
                Some(CallerStep::Done(welcome)) => {
                    return judge(welcome, introduction.instance).map(Some);
                }
            }
        }
    }

    /// Sends the next part of the greeting.
    fn send(&mut self) -> io::Result<()> {
        let Step::Greet { bytes, sent, .. } = &mut self.step else { return Ok(()) };
        // SAFETY: the bytes live through the call.
        let count = unsafe { socket::send(&self.stream, &[Span::of(bytes).after(*sent)]) }?;
        *sent += count.unwrap_or(0);
        if *sent == bytes.len()
            && let Step::Greet { caller, .. } = std::mem::replace(&mut self.step, Step::Connect)
        {
            self.step = Step::Hear { caller, bytes: [0; MOST_GREETING], filled: 0 };
        }
        Ok(())
    }

    /// Hears the next part of the answer.
    fn hear(&mut self) -> io::Result<Option<CallerStep>> {
        let Step::Hear { caller, bytes, filled } = &mut self.step else { return Ok(None) };
        let needed = caller.needed();
        let span = Span::of_mut(&mut bytes[..needed]).after(*filled);
        // SAFETY: the rest of the answer's own bytes, which nothing else uses.
        match unsafe { socket::recv(&self.stream, &[span]) }? {
            None => return Ok(None),
            Some(0) if caller.has_proved() => {
                return Err(io::Error::other(
                    "it closes the stream: its pre-shared key is another",
                ));
            }
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(count) => *filled += count,
        }
        if *filled < needed {
            return Ok(None);
        }
        caller.feed(&bytes[..needed]).map(Some).map_err(io::Error::other)
    }

    fn go_on(&mut self, bytes: Vec<u8>) {
        if let Step::Hear { caller, .. } = std::mem::replace(&mut self.step, Step::Connect) {
            self.step = Step::Greet { caller, bytes, sent: 0 };
        }
    }
}

/// The words of a greeting.
pub(crate) struct Introduction<'a> {
    pub(crate) hello: FlowHello,
    /// The process that is meant.
    pub(crate) instance: u64,
    pub(crate) psk: Option<&'a Psk>,
}

fn judge(welcome: FlowWelcome, instance: u64) -> io::Result<FlowWelcome> {
    match welcome.status {
        Status::Taken | Status::UnknownFlow if welcome.instance == instance => Ok(welcome),
        Status::Taken | Status::UnknownFlow | Status::UnknownKey => {
            Err(io::Error::other("another process listens there, or its listener is closed"))
        }
        Status::Full => Err(io::Error::other("too many connections wait there")),
        Status::NeedsSecret => Err(io::Error::other("only one of the ends has a pre-shared key")),
    }
}
