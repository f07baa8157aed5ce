//! The handshake: how two ends of a byte stream find out that they belong together.
//!
//! A state machine without I/O: bytes that arrive go in through [`Handshake::feed`], bytes to send
//! come out of [`Handshake::pending_output`]. Given the nonces it is deterministic.
//!
//! ```text
//! connector                                   acceptor
//!     PRELUDE {nonce, has key?}  ──────────▶
//!                                ◀──────────  PRELUDE {nonce, has key?}
//!     PROOF                      ──────────▶                              with a key only
//!                                ◀──────────  PROOF                       with a key only
//!     HELLO                      ──────────▶
//!                                ◀──────────  HELLO
//! ```
//!
//! Either end may send REFUSE {code, text} instead, and does so before it gives up on a peer. A
//! proof is HMAC-SHA256 under the pre-shared key of a label for the role and the bodies of both
//! PRELUDEs, the connector's first. The connector proves first: an acceptor shows nothing derived
//! from its key, and nothing of itself, to a peer that does not know the key.
//!
//! With a key, the two ends also share a key for this stream alone: HMAC-SHA256 under the
//! pre-shared key of another label and both PRELUDEs. Under it, each HELLO ends with a code over
//! the connector's HELLO, and in the acceptor's HELLO over that one too; all bytes after the
//! handshake travel in [records](crate::record), and [`Handshake::take_keys`] gives the keys of
//! these. So a relay on the path can change nothing. The connector's HELLO names the endpoint that
//! it means, if it knows: another endpoint, to which a relay may lead, refuses. Nothing is
//! encrypted.
//!
//! # Example
//! ```
//! use uccl_wire::handshake::{Handshake, Hello, Progress};
//!
//! let mut connector = Handshake::connector(None, &Hello::default(), [1; 32])?;
//! let mut acceptor = Handshake::acceptor(None, [2; 32]);
//! assert!(matches!(acceptor.feed(&connector.pending_output())?, Progress::NeedMore));
//! assert!(matches!(connector.feed(&acceptor.pending_output())?, Progress::NeedMore));
//! let Progress::PeerHello { peer, .. } = acceptor.feed(&connector.pending_output())? else {
//!     panic!("the connector's hello should have arrived");
//! };
//! acceptor.reply(&Hello { kind: peer.kind, token: 42, ..Hello::default() })?;
//! let Progress::Done { peer, .. } = connector.feed(&acceptor.pending_output())? else {
//!     panic!("the acceptor's hello should have arrived");
//! };
//! assert_eq!(peer.token, 42);
//! # Ok::<(), uccl_wire::handshake::HandshakeError>(())
//! ```

use std::fmt;

mod envelope;
mod hello;
mod psk;
mod refusal;

#[cfg(test)]
mod tests;

pub use self::{
    envelope::PROTOCOL_VERSION,
    hello::{
        ChecksumPref, CmaProbe, Features, Hello, HelloError, HelloKind, HostIdentity,
        MAX_DEVICE_LEN, MAX_HOSTNAME_LEN, MAX_UDS_NAME_LEN,
    },
    psk::{EmptyPsk, Psk, SessionKeys},
    refusal::{Refusal, RefuseCode},
};
use self::{
    envelope::{HEADER_LEN, Header, Kind, MAGIC, Prelude, message},
    psk::{PROOF_LEN, Session},
};

/// Bytes of a nonce.
pub const NONCE_LEN: usize = 32;

/// Which end of the stream this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The end that opened it.
    Connector,
    /// The end that listened.
    Acceptor,
}

/// How far a handshake has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Progress {
    /// All bytes were taken; more must come.
    NeedMore,
    /// Acceptor only: the peer has sent its hello. Answer with [`Handshake::reply`], which ends the
    /// handshake, or with [`Handshake::refuse`].
    PeerHello {
        /// The peer's hello.
        peer: Box<Hello>,
        /// How many of the bytes just fed were taken; the rest follows the handshake.
        consumed: usize,
    },
    /// Connector only: the handshake is over.
    Done {
        /// The peer's hello.
        peer: Box<Hello>,
        /// How many of the bytes just fed were taken; the rest follows the handshake.
        consumed: usize,
    },
}

/// Why a handshake failed. Send [`Handshake::pending_output`] all the same: it informs the peer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer's first bytes are another protocol's.
    #[error("the peer does not speak this protocol: it began with {:?}", .first.escape_ascii().to_string())]
    Foreign {
        /// The bytes that should have been the magic.
        first: [u8; 4],
    },
    /// The peer speaks another version.
    #[error("the peer speaks protocol version {theirs}, this endpoint version {ours}")]
    Version {
        /// Ours.
        ours: u8,
        /// The peer's.
        theirs: u8,
    },
    /// A message that does not belong here.
    #[error("message kind {got} came where {want} was due")]
    UnexpectedMessage {
        /// The kind that came.
        got: u8,
        /// The expected message.
        want: &'static str,
    },
    /// A message has a length that its kind does not have.
    #[error("{kind} with a body of {len} bytes")]
    WrongLength {
        /// The message.
        kind: &'static str,
        /// Its length in bytes.
        len: usize,
    },
    /// Both ends play the same role, or the peer sends back our own bytes: a stream that is
    /// connected to itself does that.
    #[error("the peer is a mirror: it plays our role, or repeats our nonce")]
    Mirror,
    /// We have a pre-shared key, the peer has none.
    #[error("the peer has no pre-shared key, this endpoint requires one")]
    PskRequired,
    /// The peer has a pre-shared key, we have none.
    #[error("the peer requires a pre-shared key, this endpoint has none")]
    PskUnexpected,
    /// The peer's proof is wrong: it has another key.
    #[error("the peer does not have this endpoint's pre-shared key")]
    PskMismatch,
    /// The peer's hello does not carry its code.
    #[error("the peer's hello has no valid code: somebody changes the bytes on their way")]
    Forged,
    /// The hello cannot be sent or read.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// The peer refused us.
    #[error("refused by the peer: {text} ({code})")]
    Refused {
        /// Why, for programs.
        code: RefuseCode,
        /// Why, for people.
        text: String,
    },
    /// We refused the peer, with [`Handshake::refuse`].
    #[error("refused the peer: {0}")]
    RefusedByUs(Refusal),
    /// The call does not fit the state: a reply without a hello, or bytes after the end.
    #[error("{call} is not possible now: {state}")]
    WrongState {
        /// The call.
        call: &'static str,
        /// Where the handshake stands.
        state: &'static str,
    },
}

impl HandshakeError {
    /// The refusal to send to the peer, if one is due.
    fn refusal(&self) -> Option<Refusal> {
        let (code, text) = match self {
            Self::Foreign { .. } => (RefuseCode::Foreign, "this is a UCCL P2P endpoint".into()),
            Self::Version { ours, theirs } => (
                RefuseCode::Version,
                format!("this endpoint speaks protocol version {ours}, not {theirs}"),
            ),
            Self::PskRequired => {
                (RefuseCode::PskRequired, "this endpoint requires a pre-shared key".into())
            }
            Self::PskUnexpected => {
                (RefuseCode::PskUnexpected, "this endpoint has no pre-shared key".into())
            }
            Self::PskMismatch => {
                (RefuseCode::PskMismatch, "this endpoint has another pre-shared key".into())
            }
            Self::Forged => (RefuseCode::Forged, "no holder of the key has sent this".into()),
            Self::UnexpectedMessage { .. }
            | Self::WrongLength { .. }
            | Self::Mirror
            | Self::Hello(_) => (RefuseCode::Protocol, self.to_string()),
            Self::RefusedByUs(refusal) => return Some(refusal.clone()),
            Self::Refused { .. } | Self::WrongState { .. } => return None,
        };
        Some(Refusal { code, text })
    }
}

/// The message that is due next.
enum State {
    Prelude,
    /// `answer` is our own proof, sent once the peer's is right.
    Proof {
        want: [u8; PROOF_LEN],
        answer: Option<[u8; PROOF_LEN]>,
    },
    Hello,
    Reply,
    Done,
    Failed(HandshakeError),
}

/// One end of a handshake. The [module](self) has the sequence of messages.
pub struct Handshake {
    role: Role,
    psk: Option<Psk>,
    prelude: Prelude,
    /// The connector's hello, on either end. The acceptor's comes with [`Self::reply`].
    hello: Vec<u8>,
    /// The key of this stream, if there is a key at all, from the PRELUDEs on.
    session: Option<Session>,
    state: State,
    /// The message that is arriving; never more than one header and one body.
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Handshake {
    /// The end that opened the stream. `nonce` must be random.
    ///
    /// # Errors
    /// The hello cannot be sent: a text in it is too long or not printable.
    pub fn connector(
        psk: Option<Psk>,
        hello: &Hello,
        nonce: [u8; NONCE_LEN],
    ) -> Result<Self, HelloError> {
        let mut this = Self::new(Role::Connector, psk, nonce);
        this.hello = hello.encode()?;
        this.send(Kind::Prelude, &this.prelude.encode());
        Ok(this)
    }

    /// The end that listened. `nonce` must be random.
    pub fn acceptor(psk: Option<Psk>, nonce: [u8; NONCE_LEN]) -> Self {
        Self::new(Role::Acceptor, psk, nonce)
    }

    fn new(role: Role, psk: Option<Psk>, nonce: [u8; NONCE_LEN]) -> Self {
        let prelude = Prelude { nonce, has_psk: psk.is_some(), role };
        Self {
            role,
            psk,
            prelude,
            hello: Vec::new(),
            session: None,
            state: State::Prelude,
            input: Vec::new(),
            output: Vec::new(),
        }
    }

    /// Takes the bytes that are to be sent now, also after an error.
    pub fn pending_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Whether the handshake is over and went well.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// The keys for the bytes that follow the handshake, once and when it [is over](Self::is_done).
    /// `None` without a pre-shared key.
    pub fn take_keys(&mut self) -> Option<SessionKeys> {
        self.session.take_if(|_| matches!(self.state, State::Done)).map(|key| key.keys(self.role))
    }

    /// Takes bytes that arrived, in pieces of any size.
    ///
    /// # Errors
    /// The peer refused us, or was refused: then every later call gives the same error. Bytes after
    /// the end of the handshake are [`HandshakeError::WrongState`].
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Progress, HandshakeError> {
        let fed = bytes.len();
        self.open("feed")?;
        loop {
            let Some(body) = self.next_message(&mut bytes)? else {
                return Ok(Progress::NeedMore);
            };
            let hello = self.on_message(body).map_err(|e| self.fail(e))?;
            let consumed = fed - bytes.len();
            if let Some(peer) = hello {
                let peer = Box::new(peer);
                return Ok(match self.role {
                    Role::Connector => Progress::Done { peer, consumed },
                    Role::Acceptor => Progress::PeerHello { peer, consumed },
                });
            }
        }
    }

    /// Acceptor, after [`Progress::PeerHello`]: answers it, and ends the handshake well.
    ///
    /// # Errors
    /// No hello has come, or ours cannot be sent (a text is too long or not printable); another can
    /// be tried then.
    pub fn reply(&mut self, hello: &Hello) -> Result<(), HandshakeError> {
        match &self.state {
            State::Reply => {}
            State::Failed(e) => return Err(e.clone()),
            state => {
                return Err(HandshakeError::WrongState { call: "reply", state: state.name() });
            }
        }
        let mut body = hello.encode()?;
        if let Some(session) = &self.session {
            body.extend(session.hello_tag(Role::Acceptor, &self.hello, &body));
        }
        self.send(Kind::Hello, &body);
        self.state = State::Done;
        Ok(())
    }

    /// Gives up on the peer and sends it the reason, at any time before the end.
    pub fn refuse(&mut self, refusal: Refusal) {
        if !matches!(self.state, State::Done | State::Failed(_)) {
            self.fail(HandshakeError::RefusedByUs(refusal));
        }
    }

    /// Refuses a call that cannot take bytes in this state.
    fn open(&self, call: &'static str) -> Result<(), HandshakeError> {
        match &self.state {
            State::Failed(e) => Err(e.clone()),
            state @ (State::Reply | State::Done) => {
                Err(HandshakeError::WrongState { call, state: state.name() })
            }
            _ => Ok(()),
        }
    }

    /// Moves bytes into the message that is arriving; its body once it is whole.
    fn next_message(&mut self, bytes: &mut &[u8]) -> Result<Option<Vec<u8>>, HandshakeError> {
        // The magic alone first, so that a foreign client is turned away by its first four bytes.
        if !self.fill(MAGIC.len(), bytes) {
            return Ok(None);
        }
        if let Some(first) = self.input.first_chunk::<4>().copied()
            && first != MAGIC
        {
            return Err(self.fail(HandshakeError::Foreign { first }));
        }
        if !self.fill(HEADER_LEN, bytes) {
            return Ok(None);
        }
        let Some(header) = self.input.first_chunk().map(Header::decode) else {
            return Ok(None);
        };
        let kind = self.check(header).map_err(|e| self.fail(e))?;
        if !self.fill(HEADER_LEN + header.len, bytes) {
            return Ok(None);
        }
        let body = self.input.split_off(HEADER_LEN);
        self.input.clear();
        if kind == Kind::Refuse {
            return Err(self.fail(refused(&body)));
        }
        Ok(Some(body))
    }

    /// Moves bytes until the message that is arriving has `want`; whether it has.
    fn fill(&mut self, want: usize, bytes: &mut &[u8]) -> bool {
        let missing = want.saturating_sub(self.input.len()).min(bytes.len());
        let (taken, rest) = bytes.split_at(missing);
        self.input.extend_from_slice(taken);
        *bytes = rest;
        self.input.len() >= want
    }

    /// Whether a message with this header may come now; before its body is waited for.
    fn check(&self, header: Header) -> Result<Kind, HandshakeError> {
        let kind = Kind::of(header.kind);
        if header.version != PROTOCOL_VERSION && kind != Some(Kind::Refuse) {
            return Err(HandshakeError::Version { ours: PROTOCOL_VERSION, theirs: header.version });
        }
        let want = self.state.wants();
        let kind = kind
            .filter(|&kind| kind == want || kind == Kind::Refuse)
            .ok_or(HandshakeError::UnexpectedMessage { got: header.kind, want: want.name() })?;
        if !kind.allows(header.len) {
            return Err(HandshakeError::WrongLength { kind: kind.name(), len: header.len });
        }
        Ok(kind)
    }

    /// Takes a whole message of the kind that is due. The hello, if it was one.
    fn on_message(&mut self, body: Vec<u8>) -> Result<Option<Hello>, HandshakeError> {
        match &self.state {
            State::Prelude => self.on_prelude(&body).map(|()| None),
            State::Proof { want, answer } => {
                if !Psk::matches(want, &body) {
                    return Err(HandshakeError::PskMismatch);
                }
                if let Some(answer) = *answer {
                    self.send(Kind::Proof, &answer);
                }
                self.greet();
                Ok(None)
            }
            _ => {
                let hello = self.untampered(&body)?;
                let peer = Hello::decode(hello)?;
                if self.role == Role::Acceptor {
                    self.hello = hello.to_vec();
                }
                self.state = match self.role {
                    Role::Connector => State::Done,
                    Role::Acceptor => State::Reply,
                };
                Ok(Some(peer))
            }
        }
    }

    /// The peer's hello without its code, which is checked.
    fn untampered<'a>(&self, body: &'a [u8]) -> Result<&'a [u8], HandshakeError> {
        let Some(session) = &self.session else { return Ok(body) };
        let (hello, tag) = body.split_last_chunk::<PROOF_LEN>().ok_or(HandshakeError::Forged)?;
        let want = match self.role {
            Role::Connector => session.hello_tag(Role::Acceptor, &self.hello, hello),
            Role::Acceptor => session.hello_tag(Role::Connector, hello, &[]),
        };
        if Psk::matches(&want, tag) { Ok(hello) } else { Err(HandshakeError::Forged) }
    }

    fn on_prelude(&mut self, body: &[u8]) -> Result<(), HandshakeError> {
        let theirs = Prelude::decode(body)
            .ok_or(HandshakeError::WrongLength { kind: Kind::Prelude.name(), len: body.len() })?;
        if theirs.role == self.role || theirs.nonce == self.prelude.nonce {
            return Err(HandshakeError::Mirror);
        }
        match (self.prelude.has_psk, theirs.has_psk) {
            (true, false) => return Err(HandshakeError::PskRequired),
            (false, true) => return Err(HandshakeError::PskUnexpected),
            _ => {}
        }
        let ours = self.prelude.encode();
        if self.role == Role::Acceptor {
            self.send(Kind::Prelude, &ours);
        }
        let Some(psk) = &self.psk else {
            self.greet();
            return Ok(());
        };
        match self.role {
            Role::Connector => {
                self.session = Some(psk.session(&ours, body));
                let proof = psk.proof(Role::Connector, &ours, body);
                let want = psk.proof(Role::Acceptor, &ours, body);
                self.state = State::Proof { want, answer: None };
                self.send(Kind::Proof, &proof);
            }
            Role::Acceptor => {
                self.session = Some(psk.session(body, &ours));
                let want = psk.proof(Role::Connector, body, &ours);
                let answer = Some(psk.proof(Role::Acceptor, body, &ours));
                self.state = State::Proof { want, answer };
            }
        }
        Ok(())
    }

    /// The peer may know our identity now: the connector sends its hello, the acceptor waits for
    /// one.
    fn greet(&mut self) {
        if self.role == Role::Connector {
            let mut hello = self.hello.clone();
            if let Some(session) = &self.session {
                hello.extend(session.hello_tag(Role::Connector, &self.hello, &[]));
            }
            self.send(Kind::Hello, &hello);
        }
        self.state = State::Hello;
    }

    fn send(&mut self, kind: Kind, body: &[u8]) {
        self.output.extend(message(kind, body));
    }

    /// Gives up for good, and sends the peer a refusal if one is due.
    fn fail(&mut self, error: HandshakeError) -> HandshakeError {
        if let Some(refusal) = error.refusal() {
            self.send(Kind::Refuse, &refusal.encode());
        }
        self.state = State::Failed(error.clone());
        self.input = Vec::new();
        error
    }
}

/// Without the proofs, which belong in no log.
impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake")
            .field("role", &self.role)
            .field("state", &self.state.name())
            .finish_non_exhaustive()
    }
}

impl State {
    /// The message that is due.
    fn wants(&self) -> Kind {
        match self {
            Self::Prelude => Kind::Prelude,
            Self::Proof { .. } => Kind::Proof,
            Self::Hello | Self::Reply | Self::Done | Self::Failed(_) => Kind::Hello,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Prelude => "the peer's PRELUDE is due",
            Self::Proof { .. } => "the peer's PROOF is due",
            Self::Hello => "the peer's HELLO is due",
            Self::Reply => "the answer to the peer's HELLO is due",
            Self::Done => "the handshake is over",
            Self::Failed(_) => "the handshake has failed",
        }
    }
}

/// The error of a REFUSE body. Its length has been checked with its header.
fn refused(body: &[u8]) -> HandshakeError {
    match Refusal::decode(body) {
        Some(Refusal { code, text }) => HandshakeError::Refused { code, text },
        None => HandshakeError::WrongLength { kind: Kind::Refuse.name(), len: body.len() },
    }
}
