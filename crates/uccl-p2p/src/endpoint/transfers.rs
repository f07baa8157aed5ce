//! Transfers: how they are checked, begun, polled, waited for and ended.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use uccl_device::cuda;
use uccl_fabric::{
    mem::{RemoteSpan, Span},
    signal::Word,
};
use uccl_wire::{advert::Advert, message::MAX_IOVS, signal::SIGNAL_LEN};

use super::{
    CudaStream, Endpoint, Interrupt, Iov, NoInterrupt, Op, Outcome, Request, Signal, Status,
};
use crate::{
    drive::{
        core::connection::{
            Connection,
            care::Claim,
            deferred_transfers::{Mark, Start},
            transfer::{After, Fence, Hold, Plan, Transfer},
            transfers::Lookup,
        },
        regions::{self, Lease},
        timers, wait,
        work::Pieces,
    },
    error::{Error, Result},
    ids::{MrId, TransferId},
};

/// Most iovs of a read or a write: it is cut into operations that lanes take. Sends and recvs have
/// a lower limit, because their two sides compare whole lists.
const MAX_ONE_SIDED_IOVS: usize = 1 << 20;

/// This process's own copies have this many times as long to end as a peer has.
const OURS: u32 = 2;

/// A transfer that was begun.
pub(super) enum StartOutcome {
    /// It is over already.
    Done(Outcome),
    /// It goes on as this transfer.
    Transfer(Arc<Transfer>),
}

impl Endpoint {
    /// Starts a transfer.
    pub fn post(&self, request: &Request<'_>) -> Result<TransferId> {
        self.post_transfer(request).map(|transfer| transfer.id)
    }

    pub(super) fn post_transfer(&self, request: &Request<'_>) -> Result<Arc<Transfer>> {
        let after = request.after.map(CudaStream::mark).transpose()?;
        let transfer = self.start(self.usable_conn(request.conn)?, request, after)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer)
    }

    /// Waits for the end of a transfer. The caller has to claim the connection before it posts the
    /// transfer: a worker that sees no claim consumes the events that the caller is about to wait
    /// for.
    pub(super) fn finish(
        &self,
        claim: Claim<'_>,
        transfer: &Arc<Transfer>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Outcome> {
        if let Err(interrupted) = wait::wait(claim, transfer, None, interrupt) {
            end(transfer);
            return Err(interrupted.into());
        }
        match transfer.status() {
            Status::Done(outcome) => Ok(outcome),
            Status::Failed(e) => Err(e),
            Status::Pending => Err(Error::Closed),
        }
    }

    /// The state of a transfer. Asking about an unfinished one makes progress on its connection.
    pub fn poll(&self, transfer: TransferId) -> Result<Status> {
        match self.here()?.transfers.find(transfer)? {
            Lookup::Ended(status) => Ok(status),
            Lookup::Live(transfer) => {
                if !transfer.finished() {
                    let _claim = transfer.conn.claim();
                    transfer.conn.progress();
                }
                Ok(transfer.status())
            }
        }
    }

    /// Waits for a transfer's end, for at most `timeout`. The transfer goes on after that.
    pub fn wait(
        &self,
        transfer: TransferId,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Status> {
        match self.here()?.transfers.find(transfer)? {
            Lookup::Ended(status) => Ok(status),
            Lookup::Live(transfer) => {
                let until = timers::end_of(timeout);
                wait::wait(transfer.conn.claim(), &transfer, until, interrupt)?;
                Ok(transfer.status())
            }
        }
    }

    /// Makes all later work on a stream wait until the transfer has ended, with success or failure.
    /// The stream goes on soon after the transfer's deadline at the latest.
    ///
    /// Does not block the caller, with one exception: where the process has fewer hardware queues
    /// than usual (`CUDA_DEVICE_MAX_CONNECTIONS` below 8), the call itself waits for a transfer
    /// that this process stages through host memory. The copies that such a transfer needs later
    /// could stand behind the stream's wait, for ever.
    pub fn hold_stream(&self, transfer: TransferId, stream: CudaStream) -> Result<()> {
        let Lookup::Live(transfer) = self.here()?.transfers.find(transfer)? else { return Ok(()) };
        let stream = stream.borrow()?;
        if transfer.conn.lead_stream(&transfer, &stream) {
            return Ok(());
        }
        if cuda::has_few_queues() && transfer.conn.may_stage(&transfer) {
            // Its deadline ends it.
            wait::wait(transfer.conn.claim(), &transfer, None, &mut NoInterrupt)?;
            return Ok(());
        }
        let signal = cuda::Signal::new(stream.context());
        let held = signal.and_then(|signal| signal.hold(&stream).map(|()| signal));
        transfer.keep(held.map_err(|e| Error::Invalid(format!("stream: {e}")))?);
        Ok(())
    }

    /// Ends a transfer. When this returns, no byte of it lands in either side's memory any more;
    /// the status says whether it had finished before.
    ///
    /// A peer that does not confirm that within the endpoint's timeout is given up with its
    /// connection ([`check_connection`](Self::check_connection) reports that). Then the promise
    /// holds for this side only: bytes that had reached the peer may land there until it knows of
    /// the end. Where memory of this side may still be touched as well, the status is
    /// [`Error::StillTouched`]. The same holds for a copy by this process that does not end, for
    /// example on a hung GPU: the connection ends after twice that timeout.
    pub fn cancel(&self, transfer: TransferId) -> Result<Status> {
        Ok(match self.here()?.transfers.find(transfer)? {
            Lookup::Ended(status) => status,
            Lookup::Live(transfer) => end(&transfer),
        })
    }

    /// Ends every unfinished transfer that uses a region, as [`Self::cancel`] does, so that the
    /// region can be deregistered. Returns how many there were.
    pub fn cancel_all_using(&self, mr: MrId) -> Result<usize> {
        let mut using = self.here()?.transfers.unfinished(|_| true);
        using
            .retain(|transfer| transfer.body.lock().leases.iter().any(|lease| lease.mr().id == mr));
        for transfer in &using {
            end(transfer);
        }
        Ok(using.len())
    }

    pub(super) fn deadline_of(&self, timeout: Option<Duration>) -> Option<Duration> {
        Some(timeout.unwrap_or(self.config().transfer_timeout)).filter(|timeout| !timeout.is_zero())
    }

    /// Checks a request and posts it; it begins when the mark is reached. A request that is refused
    /// has moved no byte.
    pub(crate) fn start(
        &self,
        conn: Arc<Connection>,
        request: &Request<'_>,
        after: Option<Box<dyn Mark>>,
    ) -> Result<Arc<Transfer>> {
        check_shape(request)?;
        let word = request.signal.map(|signal| word_of(&conn, request, &signal)).transpose()?;
        let Request { op, iovs, adverts, .. } = *request;
        let checked = self.check(op, iovs, adverts, conn.peer.instance as u32)?;
        let CheckedRequest { leases, spans, pieces, bytes } = checked;
        let notif = request.notif.map(<[u8]>::to_vec);
        let plan = Plan {
            kind: request.op.into(),
            context: request.context,
            conn: Arc::clone(&conn),
            bytes: if request.op == Op::Recv { 0 } else { bytes },
            timeout: self.deadline_of(request.timeout),
            leases,
            after: After::of(word, notif),
            targets: if request.op == Op::Recv { spans.clone() } else { SmallVec::new() },
        };
        let is_strong = request.signal.is_some_and(|signal| signal.strong);
        let (transfer, earlier) = match is_strong {
            true => conn.admit_strong(plan).map(|(transfer, earlier)| (transfer, Some(earlier)))?,
            false => (conn.admit(plan)?, None),
        };
        let start = match request.op {
            Op::Read | Op::Write => Start::OneSided(request.op, pieces),
            Op::Send => Start::Send(spans),
            Op::Recv => Start::Recv,
        };
        let hold = transfer.hold();
        let followed = earlier.map_or(Ok(()), |earlier| conn.follow(&transfer, earlier));
        let posted = followed.and_then(|()| conn.begin(&transfer, start, after));
        settle(hold, posted)
    }

    /// Compares every iov with its region, and with its advert, which must be of the peer of this
    /// instance.
    pub(super) fn check(
        &self,
        op: Op,
        iovs: &[Iov],
        adverts: &[Advert],
        peer: u32,
    ) -> Result<CheckedRequest> {
        let one_sided = matches!(op, Op::Read | Op::Write);
        let mut checked = CheckedRequest::default();
        match one_sided {
            true => checked.pieces.reserve(iovs.len()),
            false => checked.spans.reserve(iovs.len()),
        }
        let mut last = None;
        self.core().mrs.resolve(iovs, op == Op::Recv, |i, mr, span| {
            if last != Some(mr.id) {
                last = Some(mr.id);
                checked.lease(&mr);
            }
            checked.bytes += span.len as u64;
            if one_sided {
                checked.pieces.push(mr.id, span, span_of(peer, i, span, &adverts[i])?);
            } else {
                checked.spans.push(span);
            }
            Ok(())
        })?;
        Ok(checked)
    }
}

/// The same as [`Endpoint::cancel`], for a transfer that has been looked up. It always succeeds.
///
/// Copies that this process makes end soon, unless a GPU or a device hangs. Then only the end of
/// the connection ends the transfer, and its aftermath knows the memory that is still touched.
pub(super) fn end(transfer: &Arc<Transfer>) -> Status {
    let (started, patience) = (Instant::now(), timers::to_end(&transfer.conn.core.config));
    while !transfer.finished() {
        transfer.conn.fence(transfer, Fence::Cancel);
        let soon = Instant::now() + Duration::from_millis(5);
        let claim = transfer.conn.claim();
        if let Ok(true) = wait::wait(claim, transfer, Some(soon), &mut NoInterrupt) {
            break;
        }
        let late = started.elapsed();
        if late > patience && transfer.waits_for_peer() {
            let reason = "it did not confirm the end of a transfer";
            transfer.conn.fail(transfer.conn.lost_to(reason));
        } else if late > OURS * patience {
            let reason = "a copy that this process makes over the connection does not end";
            transfer.conn.fail(transfer.conn.lost_to(reason));
        }
    }
    transfer.status()
}

/// The results of checking a request.
#[derive(Default)]
pub(super) struct CheckedRequest {
    pub(super) leases: SmallVec<[Lease; 1]>,
    /// Local memory of a send or a recv.
    spans: SmallVec<[Span; 1]>,
    /// Both sides' memory of a read or a write.
    pub(super) pieces: Pieces,
    pub(super) bytes: u64,
}

impl CheckedRequest {
    fn lease(&mut self, mr: &regions::ListedMr<'_>) {
        // A second lease does no harm. Callers that take turns among a few regions get one lease of
        // each.
        if !self.leases.iter().rev().take(8).any(|lease| lease.mr().id == mr.id) {
            self.leases.push(mr.lease());
        }
    }
}

/// Ends the post itself. If it failed, the transfer fails at once. If the connection has ended
/// meanwhile, the transfer ends too.
pub(super) fn settle(hold: Hold, posted: Result<()>) -> Result<Arc<Transfer>> {
    let transfer = Arc::clone(hold.transfer());
    if let Err(e) = posted {
        transfer.publish(Err(e.clone()));
        return Err(e);
    }
    transfer.op_ended();
    drop(hold);
    Ok(transfer)
}

fn check_shape(request: &Request<'_>) -> Result<()> {
    let least = if request.signal.is_some() { 0 } else { 1 };
    check_signal(request)?;
    check_counts(request.op, request.iovs.len(), request.adverts.len(), least)?;
    if request.op == Op::Recv && request.notif.is_some() {
        return Err(Error::Invalid("a receive cannot carry a notification".into()));
    }
    Ok(())
}

/// Refuses more or fewer iovs than an operation has, and a number of adverts that does not fit.
pub(super) fn check_counts(op: Op, iovs: usize, adverts: usize, least: usize) -> Result<()> {
    let one_sided = matches!(op, Op::Read | Op::Write);
    let most = if one_sided { MAX_ONE_SIDED_IOVS } else { MAX_IOVS };
    if iovs < least || iovs > most {
        let why = format!("{iovs} iovs: a {op:?} has {least} to {most}");
        return Err(Error::Invalid(why));
    }
    let needed = if one_sided { iovs } else { 0 };
    if adverts != needed {
        let why = format!("{adverts} adverts for {iovs} iovs of a {op:?}: {needed} are needed");
        return Err(Error::Invalid(why));
    }
    Ok(())
}

/// Refuses a signal with anything but a write: only a write makes bytes visible at the peer.
pub(super) fn check_signal(request: &Request<'_>) -> Result<()> {
    if request.signal.is_some() && request.op != Op::Write {
        return Err(Error::Invalid("only a write carries a signal".into()));
    }
    Ok(())
}

/// The word of a signal, as the peer addresses it.
pub(super) fn word_of(conn: &Connection, request: &Request<'_>, signal: &Signal) -> Result<Word> {
    let Signal { advert, change, .. } = *signal;
    if advert.len < SIGNAL_LEN || !advert.addr.is_multiple_of(SIGNAL_LEN) {
        return Err(Error::Invalid(format!(
            "the word of a signal has {SIGNAL_LEN} bytes at a multiple of as many: the advert is of {} bytes at {:#x}",
            advert.len, advert.addr
        )));
    }
    let here = Span { addr: 0, len: SIGNAL_LEN as usize };
    if conn.lanes.host.is_none() {
        conn.check_signals()?;
    }
    // The index in an error about a foreign advert: the signal's advert counts as the one after the
    // iovs'.
    Ok(Word { span: remote_span(conn, request.iovs.len(), here, &advert)?, change })
}

pub(super) fn remote_span(
    conn: &Connection,
    iov: usize,
    local: Span,
    advert: &Advert,
) -> Result<RemoteSpan> {
    span_of(conn.peer.instance as u32, iov, local, advert)
}

/// The memory of an advert, which must be of the peer of this instance.
fn span_of(peer: u32, iov: usize, local: Span, advert: &Advert) -> Result<RemoteSpan> {
    if advert.instance != peer {
        return Err(Error::ForeignAdvert { iov });
    }
    if local.len as u64 > advert.len {
        return Err(Error::OutsideAdvert { iov, len: local.len, advertised: advert.len });
    }
    Ok(RemoteSpan { addr: advert.addr, len: local.len as u64, key: advert.key, slot: advert.slot })
}
