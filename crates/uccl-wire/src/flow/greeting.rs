//! The greeting of a stream of flows, and the proof that both ends know a pre-shared key.
//!
//! ```text
//! caller                                      listener
//!     PRELUDE {random}           ──────────▶                              with a key only
//!                                ◀──────────  PRELUDE {random}            with a key only
//!     FlowHello [proof]          ──────────▶
//!                                ◀──────────  FlowWelcome [proof]
//! ```
//!
//! A prelude has [`PRELUDE_LEN`] bytes: `UFLP`, the version, three zeros and 32 random bytes. A
//! proof is HMAC-SHA256 under the key of a label for the side, the caller's prelude and hello, and
//! the listener's prelude, in the listener's proof with the welcome behind. So a proof is of no use
//! in another greeting, and nobody can change a hello or a welcome on its way. The caller proves
//! first: a listener shows nothing to strangers. No I/O.

use super::{FlowHello, FlowWelcome, FlowWireError, HELLO_LEN, Status, VERSION, WELCOME_LEN};
use crate::handshake::Psk;

/// Bytes of a prelude.
pub const PRELUDE_LEN: usize = 40;
/// Bytes of the random part of a prelude.
pub const RANDOM_LEN: usize = 32;
/// The most bytes that are read at a time.
pub const MOST_GREETING: usize = WELCOME_LEN + PROOF_LEN;

const PROOF_LEN: usize = 32;
const PRELUDE_MAGIC: [u8; 4] = *b"UFLP";
const WELCOME_MAGIC: [u8; 4] = super::WELCOME_MAGIC;
const HELLO_MAGIC: [u8; 4] = super::HELLO_MAGIC;

/// Why a greeting fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GreetingError {
    /// The bytes are no greeting.
    #[error(transparent)]
    Wire(#[from] FlowWireError),
    /// This end has a key, and the other has none.
    #[error("it shows no pre-shared key, and this process has one")]
    NoSecret,
    /// The other end has a key, and this one has none.
    #[error("it wants a pre-shared key, and this process has none")]
    NeedsSecret,
    /// The keys differ.
    #[error("it has another pre-shared key")]
    OtherSecret,
}

type Prelude = [u8; PRELUDE_LEN];

fn prelude(random: [u8; RANDOM_LEN]) -> Prelude {
    let mut bytes = [0; PRELUDE_LEN];
    bytes[..4].copy_from_slice(&PRELUDE_MAGIC);
    bytes[4] = VERSION;
    bytes[8..].copy_from_slice(&random);
    bytes
}

fn proof(psk: &Psk, label: &[u8; 20], parts: [&[u8]; 3], welcome: &[u8]) -> [u8; PROOF_LEN] {
    let [caller, hello, listener] = parts;
    psk.code(label, &[caller, hello, listener, welcome])
}

const CALLER: &[u8; 20] = b"uccl flow caller\0\0\0\0";
const LISTENER: &[u8; 20] = b"uccl flow listener\0\0";

/// The side that connects.
pub struct Caller {
    psk: Option<Psk>,
    hello: [u8; HELLO_LEN],
    own: Prelude,
    theirs: Option<Prelude>,
}

/// The next thing for a caller to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallerStep {
    /// Send these bytes, and read on.
    Send(Vec<u8>),
    /// The listener has answered.
    Done(FlowWelcome),
}

impl Caller {
    /// Begins to greet; also the first bytes to send.
    #[must_use]
    pub fn new(psk: Option<Psk>, hello: &FlowHello, random: [u8; RANDOM_LEN]) -> (Self, Vec<u8>) {
        let (hello, own) = (hello.encode(), prelude(random));
        let first = if psk.is_some() { own.to_vec() } else { hello.to_vec() };
        (Self { psk, hello, own, theirs: None }, first)
    }

    /// The number of bytes that [`Caller::feed`] takes next.
    #[must_use]
    pub fn needed(&self) -> usize {
        match (&self.psk, &self.theirs) {
            (None, _) => WELCOME_LEN,
            (Some(_), None) => PRELUDE_LEN,
            (Some(_), Some(_)) => WELCOME_LEN + PROOF_LEN,
        }
    }

    /// Whether the proof is on its way. A listener with another key closes the stream then.
    #[must_use]
    pub fn has_proved(&self) -> bool {
        self.theirs.is_some()
    }

    /// Takes [`Caller::needed`] bytes.
    ///
    /// # Errors
    /// When they are no answer, or the listener does not know the key.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<CallerStep, GreetingError> {
        let Some(psk) = &self.psk else {
            let welcome = decode_welcome(bytes)?;
            return match welcome.status {
                Status::NeedsSecret => Err(GreetingError::NeedsSecret),
                _ => Ok(CallerStep::Done(welcome)),
            };
        };
        let Some(theirs) = &self.theirs else {
            if bytes.starts_with(&WELCOME_MAGIC) {
                return Err(GreetingError::NoSecret);
            }
            self.theirs = Some(decode_prelude(bytes)?);
            let theirs = self.theirs.as_ref().map_or(&[][..], |theirs| theirs);
            let proof = proof(psk, CALLER, [&self.own, &self.hello, theirs], &[]);
            return Ok(CallerStep::Send([&self.hello[..], &proof].concat()));
        };
        let (welcome, shown) = bytes.split_at_checked(WELCOME_LEN).ok_or(SHORT)?;
        let wanted = proof(psk, LISTENER, [&self.own, &self.hello, theirs], welcome);
        let welcome = decode_welcome(welcome)?;
        if !Psk::matches(&wanted, shown) {
            return Err(GreetingError::OtherSecret);
        }
        Ok(CallerStep::Done(welcome))
    }
}

/// The side that listens.
pub struct Callee {
    psk: Option<Psk>,
    own: Prelude,
    theirs: Option<Prelude>,
    /// The first bytes are a hello's.
    is_begun: bool,
    hello: Option<[u8; HELLO_LEN]>,
}

/// The next thing for a listener to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CalleeStep {
    /// Read until there are [`Callee::needed`] bytes, those that were fed among them.
    More,
    /// Send these bytes, and read as many others as are needed then.
    Send(Vec<u8>),
    /// The caller has greeted; [`Callee::answer`] makes the answer.
    Hello(FlowHello),
}

impl Callee {
    /// Awaits a greeting.
    #[must_use]
    pub fn new(psk: Option<Psk>, random: [u8; RANDOM_LEN]) -> Self {
        Self { psk, own: prelude(random), theirs: None, is_begun: false, hello: None }
    }

    /// The number of bytes that [`Callee::feed`] takes next.
    #[must_use]
    pub fn needed(&self) -> usize {
        match (&self.psk, &self.theirs) {
            (Some(_), Some(_)) => HELLO_LEN + PROOF_LEN,
            (None, _) if self.is_begun => HELLO_LEN,
            // It may be a hello too, which is longer.
            (Some(_) | None, _) => PRELUDE_LEN,
        }
    }

    /// Takes [`Callee::needed`] bytes.
    ///
    /// # Errors
    /// When they are no greeting, or the caller does not know the key. [`refusal`] has the bytes
    /// that tell the caller.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<CalleeStep, GreetingError> {
        let Some(psk) = &self.psk else {
            if bytes.starts_with(&PRELUDE_MAGIC) {
                return Err(GreetingError::NeedsSecret);
            }
            if !std::mem::replace(&mut self.is_begun, true) {
                return Ok(CalleeStep::More);
            }
            return Ok(CalleeStep::Hello(decode_hello(bytes)?));
        };
        let Some(theirs) = &self.theirs else {
            if bytes.starts_with(&HELLO_MAGIC) {
                return Err(GreetingError::NoSecret);
            }
            self.theirs = Some(decode_prelude(bytes)?);
            return Ok(CalleeStep::Send(self.own.to_vec()));
        };
        let (hello, shown) = bytes.split_at_checked(HELLO_LEN).ok_or(SHORT)?;
        let wanted = proof(psk, CALLER, [theirs, hello, &self.own], &[]);
        if !Psk::matches(&wanted, shown) {
            return Err(GreetingError::OtherSecret);
        }
        self.hello = hello.first_chunk().copied();
        Ok(CalleeStep::Hello(decode_hello(hello)?))
    }

    /// The bytes of an answer.
    #[must_use]
    pub fn answer(&self, welcome: &FlowWelcome) -> Vec<u8> {
        let mut bytes = welcome.encode().to_vec();
        if let (Some(psk), Some(theirs), Some(hello)) = (&self.psk, &self.theirs, &self.hello) {
            let proof = proof(psk, LISTENER, [theirs, hello, &self.own], &bytes);
            bytes.extend(proof);
        }
        bytes
    }
}

/// The answer to a caller whose greeting has failed; `None` if it would not understand one.
#[must_use]
pub fn refusal(error: &GreetingError, instance: u64) -> Option<[u8; WELCOME_LEN]> {
    let status = match error {
        GreetingError::NoSecret | GreetingError::NeedsSecret => Status::NeedsSecret,
        GreetingError::OtherSecret | GreetingError::Wire(_) => return None,
    };
    Some(FlowWelcome { status, key: [0; 16], instance, received: 0 }.encode())
}

const SHORT: FlowWireError = FlowWireError::Value { field: "length", value: 0 };

fn decode_prelude(bytes: &[u8]) -> Result<Prelude, FlowWireError> {
    let bytes: &Prelude = bytes.first_chunk().ok_or(SHORT)?;
    let mut reader = crate::cursor::Reader::new(bytes);
    super::check_mark(&mut reader, PRELUDE_MAGIC)?;
    super::check_zeros(&reader.array::<3>()?)?;
    Ok(*bytes)
}

fn decode_hello(bytes: &[u8]) -> Result<FlowHello, FlowWireError> {
    FlowHello::decode(bytes.first_chunk().ok_or(SHORT)?)
}

fn decode_welcome(bytes: &[u8]) -> Result<FlowWelcome, FlowWireError> {
    FlowWelcome::decode(bytes.first_chunk().ok_or(SHORT)?)
}

#[cfg(test)]
mod tests {
    use super::{super::Purpose, *};

    const HELLO: FlowHello =
        FlowHello { purpose: Purpose::Bulk, key: [3; 16], instance: 4, flow: 5, chunk_len: 6 };
    const WELCOME: FlowWelcome =
        FlowWelcome { status: Status::Taken, key: [7; 16], instance: 8, received: 9 };

    fn psk(secret: &str) -> Option<Psk> {
        Psk::new(secret.as_bytes()).ok()
    }

    /// A greeting of two ends; `change` changes what the wire carries, by its turn.
    fn greet(
        secrets: [&str; 2],
        change: impl Fn(usize, &mut Vec<u8>),
    ) -> (Result<FlowHello, GreetingError>, Result<FlowWelcome, GreetingError>) {
        let (mut caller, mut wire) = Caller::new(psk(secrets[0]), &HELLO, [1; 32]);
        let mut callee = Callee::new(psk(secrets[1]), [2; 32]);
        let mut heard = Err(GreetingError::OtherSecret);
        for turn in 0.. {
            change(2 * turn, &mut wire);
            let mut step = callee.feed(&wire[..callee.needed()]);
            if step == Ok(CalleeStep::More) {
                step = callee.feed(&wire[..callee.needed()]);
            }
            let back = match step {
                Ok(CalleeStep::More) => panic!("it has all"),
                Ok(CalleeStep::Send(bytes)) => bytes,
                Ok(CalleeStep::Hello(hello)) => {
                    heard = Ok(hello);
                    callee.answer(&WELCOME)
                }
                Err(error) => {
                    heard = Err(error);
                    match refusal(&error, 8) {
                        Some(bytes) => bytes.to_vec(),
                        None => return (heard, Err(error)),
                    }
                }
            };
            let mut back = back;
            change(2 * turn + 1, &mut back);
            match caller.feed(&back[..caller.needed().min(back.len())]) {
                Ok(CallerStep::Send(bytes)) => wire = bytes,
                Ok(CallerStep::Done(welcome)) => return (heard, Ok(welcome)),
                Err(error) => return (heard, Err(error)),
            }
        }
        unreachable!("the loop returns")
    }

    #[test]
    fn ends_with_one_key_or_none_meet() {
        for secret in ["", "a secret of the job"] {
            assert_eq!(greet([secret; 2], |_, _| {}), (Ok(HELLO), Ok(WELCOME)));
        }
    }

    #[test]
    fn ends_that_differ_are_told_why() {
        use GreetingError::{NeedsSecret, NoSecret, OtherSecret};
        assert_eq!(greet(["", "one"], |_, _| {}), (Err(NoSecret), Err(NeedsSecret)));
        assert_eq!(greet(["one", ""], |_, _| {}), (Err(NeedsSecret), Err(NoSecret)));
        assert_eq!(greet(["one", "two"], |_, _| {}), (Err(OtherSecret), Err(OtherSecret)));
    }

    #[test]
    fn no_byte_of_a_greeting_can_be_changed() {
        let lens = [PRELUDE_LEN, PRELUDE_LEN, HELLO_LEN + PROOF_LEN, WELCOME_LEN + PROOF_LEN];
        for (turn, len) in lens.into_iter().enumerate() {
            for at in 0..len {
                let change = |now: usize, bytes: &mut Vec<u8>| {
                    if now == turn {
                        bytes[at] ^= 1;
                    }
                };
                let (heard, answered) = greet(["one"; 2], change);
                assert!(answered.is_err(), "byte {at} of turn {turn}: {heard:?}");
                assert!(turn == 3 || heard.is_err(), "byte {at} of turn {turn}: {heard:?}");
            }
        }
    }

    #[test]
    fn a_proof_is_good_for_one_greeting() {
        let (mut caller, _) = Caller::new(psk("one"), &HELLO, [1; 32]);
        let mut callee = Callee::new(psk("one"), [2; 32]);
        callee.feed(&prelude([1; 32])).expect("a prelude");
        let Ok(CallerStep::Send(proof)) = caller.feed(&prelude([2; 32])) else {
            panic!("the caller proves")
        };
        let mut other = Callee::new(psk("one"), [9; 32]);
        other.feed(&prelude([1; 32])).expect("a prelude");
        assert_eq!(other.feed(&proof), Err(GreetingError::OtherSecret));
        assert_eq!(callee.feed(&proof), Ok(CalleeStep::Hello(HELLO)));
    }
}
