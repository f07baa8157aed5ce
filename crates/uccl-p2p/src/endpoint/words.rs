//! Waiting for words of this endpoint's memory that peers change by signals.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Acquire},
    },
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{GpuError, Signal, Stream, WordWait},
};
use uccl_fabric::mem::Span;
use uccl_wire::signal::SIGNAL_LEN;

use super::{CudaStream, Endpoint, Interrupt, LOOKS, SLICE, Until};
use crate::{
    drive::{
        regions::{Lease, contains, outside},
        stream_waits::{Gate, LossCheck, SignalGate, Source, Wait},
        wait,
    },
    error::{Error, Result},
    ids::{ConnId, MrId},
};

/// How long a caller sleeps between two looks: a peer that changes a word in mapped memory wakes
/// nobody.
const NAP: Duration = Duration::from_micros(100);

impl Endpoint {
    /// Waits until a word meets `until`, and returns its value. The data that the signal announces
    /// is visible then. The word has eight bytes, at a multiple of eight, in a region of host
    /// memory.
    ///
    /// # Errors
    /// [`Error::Timeout`] when `timeout` has passed (by default the endpoint's for transfers; zero
    /// waits for ever). The call does not know which peer sends the signal:
    /// [`wait_word_from`](Self::wait_word_from) ends with a connection.
    pub fn wait_word(
        &self,
        mr: MrId,
        ptr: usize,
        until: Until,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<u64> {
        self.wait_word_of(None, (mr, ptr), until, timeout, interrupt)
    }

    /// Waits as [`wait_word`](Self::wait_word) does, for a word that the peer of this connection
    /// changes.
    ///
    /// # Errors
    /// Also the reason for which the connection was lost, if it is lost before the word meets
    /// `until`.
    pub fn wait_word_from(
        &self,
        conn: ConnId,
        (mr, ptr): (MrId, usize),
        until: Until,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<u64> {
        self.wait_word_of(Some(conn), (mr, ptr), until, timeout, interrupt)
    }

    fn wait_word_of(
        &self,
        conn: Option<ConnId>,
        (mr, ptr): (MrId, usize),
        until: Until,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<u64> {
        let lease = self.word(mr, ptr)?;
        if !lease.mr().kind.is_host_accessible() {
            let why = "the word is a GPU's: have a stream wait for it, or poll it in a kernel";
            return Err(Error::Invalid(why.into()));
        }
        // SAFETY: aligned, and in a region that the lease keeps registered.
        let word = unsafe { AtomicU64::from_ptr(ptr as *mut u64) };
        let look = || Some(word.load(Acquire)).filter(|value| until.is_met_by(*value));
        if let Some(value) = look() {
            return Ok(value);
        }
        let timeout = timeout.unwrap_or(self.config().transfer_timeout);
        let started = Instant::now();
        let mut asked = started;
        loop {
            let core = self.here()?;
            core.usable()?;
            let lost = conn.and_then(|conn| self.check_connection(conn).err());
            if let Some(value) = self.spin_for_word(started, &look) {
                return Ok(value);
            }
            // The last look was after the end of the connection: it has seen all changes that the
            // peer made before.
            if let Some(lost) = lost {
                return Err(lost);
            }
            if !timeout.is_zero() && started.elapsed() >= timeout {
                return Err(Error::Timeout(timeout));
            }
            core.open_conns().iter().for_each(|conn| conn.leave_to_workers());
            core.signalled.sleep(NAP);
            if let Some(value) = look() {
                return Ok(value);
            }
            if asked.elapsed() >= SLICE {
                asked = Instant::now();
                if interrupt.interrupted() {
                    return Err(Error::Interrupted);
                }
            }
        }
    }

    /// Looks at a word and makes progress, for as long as threads spin.
    fn spin_for_word(&self, started: Instant, look: &impl Fn() -> Option<u64>) -> Option<u64> {
        let conns = self.core().open_conns();
        let claims: SmallVec<[_; 8]> = conns.iter().map(|conn| conn.claim()).collect();
        while started.elapsed() < self.config().spin {
            for _ in 0..LOOKS {
                if let Some(value) = look() {
                    return Some(value);
                }
                conns.iter().for_each(|conn| {
                    conn.progress();
                });
            }
            claims.iter().for_each(|claim| claim.beat());
            if started.elapsed() >= wait::YIELD_AFTER {
                std::thread::yield_now();
            }
        }
        look()
    }

    /// Makes all later work on a stream wait until a word has reached a value. Words may wrap
    /// around: a word has reached the value if it is less than 2^63 ahead of it. The word must be
    /// in GPU memory or in locked host memory.
    ///
    /// The wait for a word in host memory has an end: the stream goes on as well when the
    /// endpoint's time for transfers is over (zero: never), and when the region is deregistered or
    /// the endpoint closed. The word itself shows whether it has reached the value. The wait for a
    /// word in a GPU's memory ends with the word only; until then its region cannot be
    /// deregistered. [`hold_stream_for_word_from`](Self::hold_stream_for_word_from) ends with a
    /// connection, too.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the driver does not let the stream wait for it.
    pub fn hold_stream_for_word(
        &self,
        stream: CudaStream,
        mr: MrId,
        ptr: usize,
        at_least: u64,
    ) -> Result<()> {
        let lease = self.stream_word(mr, ptr)?;
        let stream = stream.borrow()?;
        let gate = match lease.mr().kind.device() {
            Some(_) => Gate::Word(WordWait::of(&stream, ptr as u64, at_least).map_err(refused)?),
            None => Gate::Signal(Box::new(self.signal_gate(
                &stream,
                Source::Host(ptr),
                at_least,
                None,
            )?)),
        };
        self.here()?.held.add(Wait { lease, gate });
        Ok(())
    }

    /// The same as [`hold_stream_for_word`](Self::hold_stream_for_word), for a word that the peer
    /// of this connection changes. Wherever the word is, the stream goes on as well when the
    /// connection is lost, the endpoint's time for transfers is over (zero: never), the region is
    /// deregistered, or the endpoint is closed. The returned [`StreamWait`] says which of these
    /// happened.
    ///
    /// A word in a GPU's memory is looked at by short copies: the stream goes on some tens of
    /// microseconds later than one that looks by itself.
    ///
    /// # Errors
    /// Also the reason for which the connection was lost, if it is lost already and the stream does
    /// not wait.
    pub fn hold_stream_for_word_from(
        &self,
        conn: ConnId,
        stream: CudaStream,
        (mr, ptr): (MrId, usize),
        at_least: u64,
    ) -> Result<StreamWait> {
        let lease = self.stream_word(mr, ptr)?;
        let stream = stream.borrow()?;
        let core = self.here()?;
        let conn = core.conn(conn)?;
        let word = match lease.mr().kind.device() {
            Some(device) => core.held.glance(device, ptr, lease.clone())?,
            None => Source::Host(ptr),
        };
        let is_lost: LossCheck = Box::new(move || conn.is_failed().then(|| conn.lost_error()));
        let gate = self.signal_gate(&stream, word, at_least, Some(is_lost))?;
        let outcome = gate.outcome();
        core.held.add(Wait { lease, gate: Gate::Signal(Box::new(gate)) });
        Ok(StreamWait { outcome })
    }

    /// Makes a stream wait until the engine signals that the word has reached the value or that the
    /// wait is over.
    fn signal_gate(
        &self,
        stream: &Stream,
        word: Source,
        at_least: u64,
        is_lost: Option<LossCheck>,
    ) -> Result<SignalGate> {
        let signal = Signal::new(stream.context()).map_err(refused)?;
        signal.hold(stream).map_err(refused)?;
        Ok(SignalGate::new(word, at_least, self.config().transfer_timeout, is_lost, signal))
    }

    /// Checks that there is a word that streams can wait for, and keeps its region registered.
    fn stream_word(&self, mr: MrId, ptr: usize) -> Result<Lease> {
        let lease = self.word(mr, ptr)?;
        if lease.mr().kind == MemoryKind::Host {
            let why = "no stream can wait for the word: it is in host memory that is not locked";
            return Err(Error::Invalid(why.into()));
        }
        Ok(lease)
    }

    /// Checks that there is a word, and keeps its region registered.
    fn word(&self, mr: MrId, ptr: usize) -> Result<Lease> {
        let core = self.here()?;
        core.usable()?;
        let lease = core.mrs.look_up(mr, |mr| mr.lease())?;
        let span = Span { addr: ptr, len: SIGNAL_LEN as usize };
        if !contains(lease.mr().span, span) {
            return Err(outside(0, lease.mr(), span));
        }
        if !(ptr as u64).is_multiple_of(SIGNAL_LEN) {
            let why = format!("a word is at a multiple of {SIGNAL_LEN}: {ptr:#x} is none");
            return Err(Error::Invalid(why));
        }
        Ok(lease)
    }
}

fn refused(e: GpuError) -> Error {
    Error::Invalid(format!("stream: {e}"))
}

/// A stream's wait for a word, as [`Endpoint::hold_stream_for_word_from`] begins it. If this is
/// dropped, the wait goes on.
#[derive(Clone, Debug)]
pub struct StreamWait {
    outcome: Arc<OnceLock<Result<()>>>,
}

impl StreamWait {
    /// How the wait ended. `None`: it has not yet. `Ok`: the word has reached the value.
    ///
    /// An error says why the stream went on although the word was not seen to have reached it: the
    /// reason for which the connection was lost, [`Error::Timeout`], [`Error::UnknownRegion`] when
    /// the region was deregistered, or [`Error::Closed`].
    #[must_use]
    pub fn outcome(&self) -> Option<Result<()>> {
        self.outcome.get().cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering::Release},
        time::Duration,
    };

    use crate::{Error, NoInterrupt, Until, drive::pair::JoinedPair};

    #[test]
    fn a_caller_that_waits_for_a_peers_signal_is_told_that_the_peer_is_lost() {
        let pair = JoinedPair::by_tcp();
        let word = AtomicU64::new(0);
        let at = word.as_ptr() as usize;
        // SAFETY: an atomic, which stays until the endpoint has been closed.
        let mr = unsafe { pair.b.register(at, 8) }.expect("registered");
        let far = Some(Duration::from_secs(60));
        let wait = || {
            let until = Until::AtLeast(1);
            pair.b.wait_word_from(pair.to_a, (mr, at), until, far, &mut NoInterrupt)
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(wait);
            pair.a.disconnect(pair.to_b).expect("it was there");
            let told = waiting.join().expect("no panic");
            assert!(matches!(told, Err(Error::ConnectionLost { .. })), "{told:?}");
        });
        word.store(1, Release);
        assert_eq!(wait().expect("it was changed before"), 1);
        pair.close();
    }
}
