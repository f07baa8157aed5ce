//! Transfers of one piece for callers that wait for them. A piece is moved on the spot where that
//! takes no longer than making a transfer. Other pieces are posted, and become transfers only if
//! they have not ended after a moment.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use smallvec::{SmallVec, smallvec};
use uccl_fabric::{
    lane::{Completion, HostLane, LaneError, OpKind, OpName, Operation, PostOutcome, RailLane},
    mem::{RemoteSpan, Span},
    signal::Word,
};

use super::{
    Endpoint, LOOKS, Op, Outcome, Request,
    transfers::{StartOutcome, check_signal, remote_span, settle, word_of},
};
use crate::{
    drive::{
        core::connection::{
            Connection,
            talk::Piece,
            transfer::{After, Plan, Transfer},
            transfers::Room,
        },
        inline_op::InlineOp,
        regions::{Lease, contains, outside},
        route::Route,
        work::Work,
    },
    error::Result,
};

/// How often a call looks at rails before it makes a transfer of the operation: a device's answer
/// takes microseconds.
const LOOKS_BEFORE_A_TRANSFER: u32 = 1024;
/// How long a call waits for a GPU's copy before it makes a transfer of it.
const MOMENT: Duration = Duration::from_millis(1);

/// A piece that was posted.
struct PostedPiece<'a> {
    now: Arc<InlineOp>,
    name: OpName,
    /// For the transfer that it may become.
    room: Room<'a>,
}

/// One piece to read or write.
pub(super) struct Single {
    op: Op,
    kind: OpKind,
    conn: Arc<Connection>,
    lease: Lease,
    local: Span,
    remote: RemoteSpan,
    context: u32,
    signal: Option<(Word, bool)>,
    timeout: Option<Duration>,
}

impl Single {
    /// A piece without a signal.
    pub(super) fn plain(
        op: Op,
        kind: OpKind,
        conn: Arc<Connection>,
        lease: Lease,
        (local, remote): (Span, RemoteSpan),
    ) -> Self {
        Self { op, kind, conn, lease, local, remote, context: 0, signal: None, timeout: None }
    }

    fn work(&self) -> Work {
        let (local, remote) = ([self.local].into(), [self.remote].into());
        Work { kind: self.kind, memory: self.lease.mr().kind, local, remote }
    }

    /// Makes the bytes that rails have read into a GPU's memory visible to that GPU.
    fn shown(&self) -> Result<()> {
        match self.op {
            Op::Read => self.conn.show_gpu(self.lease.mr().kind),
            Op::Recv | Op::Send | Op::Write => Ok(()),
        }
    }

    /// The plan of the transfer that it becomes.
    fn plan(&self, after: After, endpoint: &Endpoint) -> Plan {
        Plan {
            kind: self.op.into(),
            context: self.context,
            conn: Arc::clone(&self.conn),
            bytes: self.local.len as u64,
            timeout: endpoint.deadline_of(self.timeout),
            leases: smallvec![self.lease.clone()],
            after,
            targets: SmallVec::new(),
        }
    }
}

impl Endpoint {
    /// Looks up and checks a request for one piece to read or write, without a notification or a
    /// stream. `None`: it is another kind of request.
    pub(super) fn single(&self, request: &Request<'_>) -> Result<Option<Single>> {
        let ([iov], [advert], None, None) =
            (request.iovs, request.adverts, request.notif, request.after)
        else {
            return Ok(None);
        };
        let kind = match request.op {
            Op::Read => OpKind::Read,
            Op::Write => OpKind::Write,
            Op::Recv | Op::Send => return Ok(None),
        };
        let conn = self.usable_conn(request.conn)?;
        let lease = conn.core.mrs.look_up(iov.mr, |mr| mr.lease())?;
        let local = Span { addr: iov.ptr, len: iov.len };
        if !contains(lease.mr().span, local) {
            return Err(outside(0, lease.mr(), local));
        }
        let remote = remote_span(&conn, 0, local, advert)?;
        let Request { op, timeout, context, signal, .. } = *request;
        if signal.is_some() {
            check_signal(request)?;
        }
        let signal = match &signal {
            Some(signal) => Some((word_of(&conn, request, signal)?, signal.strong)),
            None => None,
        };
        Ok(Some(Single { op, kind, conn, lease, local, remote, context, signal, timeout }))
    }

    /// Begins a piece in the shortest way: a short piece to or from a process of this host is
    /// copied on this thread; a piece for a GPU or for rails is posted. `None`: it has to become a
    /// transfer right away, which also yields the owner's own error message.
    pub(super) fn begin_now(&self, single: &Single) -> Result<Option<StartOutcome>> {
        let Single { conn, local, remote, signal, context, .. } = single;
        let short = self.make_now(single)?;
        if short.is_some() {
            return Ok(short);
        }
        let is_free = |strong: &bool| !strong || conn.is_context_clear(*context);
        if local.len == 0 || signal.as_ref().is_some_and(|(_, strong)| !is_free(strong)) {
            return Ok(None);
        }
        let (work, word) = (single.work(), signal.map(|(word, _)| word));
        match (conn.choose(&work, word.as_ref()), &conn.lanes.host) {
            (Route::GpuAndSignal(host), _) => self.copy_now(single, host, work, word),
            (Route::Rails(rails), _) if word.is_none() => self.carry_now(single, rails, work),
            (Route::Stream, Some(host))
                if word.is_none() && host.is_copied_by_gpu(work.memory, remote) =>
            {
                self.copy_now(single, &**host, work, None)
            }
            _ => Ok(None),
        }
    }

    /// Moves a short piece, and changes its signal's word, if that takes no longer than starting a
    /// transfer. `None`: the caller has to start one.
    pub(super) fn make_now(&self, single: &Single) -> Result<Option<StartOutcome>> {
        match single.signal {
            Some((word, strong)) => self.signal_now(single, word, strong),
            None => Ok(copy_short(single).then(|| StartOutcome::Done(self.done_now(single)))),
        }
    }

    /// Copies a short piece, as [`copy_short`] does, and changes its signal's word.
    fn signal_now(
        &self,
        single: &Single,
        word: Word,
        strong: bool,
    ) -> Result<Option<StartOutcome>> {
        let conn = &single.conn;
        if strong && !conn.is_context_clear(single.context) {
            return Ok(None);
        }
        let Single { lease, local, remote, .. } = single;
        let Some(lane) = &conn.lanes.host else { return Ok(None) };
        if single.kind == OpKind::Write && lease.mr().kind.is_host_accessible() {
            // SAFETY: inside a region, which the lease keeps registered.
            let done = unsafe { lane.try_signalled(*local, remote, &word.span, word.change) };
            if let Some(Ok(())) = done {
                return Ok(Some(StartOutcome::Done(self.done_now(single))));
            }
        }
        // Before a byte moves: asking the owner to change the word may take a transfer.
        let room = conn.core.transfers.room()?;
        if !copy_short(single) {
            return Ok(None);
        }
        if let Some(Ok(())) = lane.try_signal(&word.span, word.change) {
            return Ok(Some(StartOutcome::Done(self.done_now(single))));
        }
        // Asks the owner, which changes the word or says why not.
        let transfer = conn.admit_in(room, single.plan(After::of(Some(word), None), self));
        let hold = transfer.hold();
        settle(hold, Ok(())).map(|transfer| Some(StartOutcome::Transfer(transfer)))
    }

    /// Makes a GPU copy one piece, and change a signal's word then, and waits a moment: most such
    /// copies end before a transfer could be made. `None`: the piece has to become a transfer right
    /// away, and its word has not changed.
    fn copy_now(
        &self,
        single: &Single,
        lane: &dyn HostLane,
        work: Work,
        word: Option<Word>,
    ) -> Result<Option<StartOutcome>> {
        let posted = self.post_now(single, work, |op| match word {
            // SAFETY: `post_now` keeps the memory.
            None => unsafe { lane.post(op) },
            // SAFETY: as above.
            Some(word) => unsafe { lane.post_signalled_by_gpu(op, word) },
        });
        let PostedPiece { now, name, room } = match posted? {
            Ok(under_way) => under_way,
            Err(over) => return Ok(over),
        };
        let _claim = single.conn.claim();
        let begun = Instant::now();
        while !now.has_ended() && begun.elapsed() < MOMENT {
            (0..LOOKS).take_while(|_| !now.has_ended()).for_each(|_| lane.progress_copies());
        }
        match now.result() {
            Some(Ok(())) => Ok(Some(StartOutcome::Done(self.done_now(single)))),
            Some(Err(_)) if word.is_none() => Ok(None),
            // With a signal, a failed copy is not tried again: a second attempt could change the
            // word twice.
            _ => {
                let successor = |transfer: &Arc<Transfer>| Arc::clone(transfer) as _;
                self.outlast(single, room, (0, name), &now, successor).map(Some)
            }
        }
    }

    /// Posts one piece on the rails, and looks at them for a while. If it has not succeeded by
    /// then, it becomes a transfer, which takes another way where the rails cannot move it.
    fn carry_now(
        &self,
        single: &Single,
        lane: &dyn RailLane,
        work: Work,
    ) -> Result<Option<StartOutcome>> {
        let conn = &single.conn;
        let place = conn.lanes.rails_place();
        // SAFETY: `post_now` keeps the memory.
        let posted = self.post_now(single, work.clone(), |op| unsafe { lane.post(op) });
        let PostedPiece { now, name, room } = match posted? {
            Ok(under_way) => under_way,
            Err(over) => return over.map(|over| single.shown().map(|()| over)).transpose(),
        };
        conn.forward_notes();
        let _claim = conn.claim();
        // Stops when the operation waits for a message from the peer, which cannot be seen here.
        let is_seen = |_: &u32| !now.has_ended() && lane.is_under_way();
        (0..LOOKS_BEFORE_A_TRANSFER).take_while(is_seen).for_each(|_| {
            conn.progress_lane(place);
        });
        if let Some(Ok(())) = now.result() {
            single.shown()?;
            return Ok(Some(StartOutcome::Done(self.done_now(single))));
        }
        let successor = |transfer: &Arc<Transfer>| {
            Arc::new(Piece { transfer: Arc::clone(transfer), work, lane: place }) as _
        };
        self.outlast(single, room, (place as u16, name), &now, successor).map(Some)
    }

    /// Posts one piece by a lane's `post`. The inner `Err`: it has been done, or (`None`) has to
    /// become a transfer right away.
    ///
    /// The piece is inside a region, which a lease keeps registered until the operation has ended:
    /// this one, or that of the transfer that it becomes. There is room for that transfer before
    /// the piece is posted.
    fn post_now<'a>(
        &self,
        single: &'a Single,
        work: Work,
        post: impl FnOnce(Operation) -> Result<PostOutcome, LaneError>,
    ) -> Result<Result<PostedPiece<'a>, Option<StartOutcome>>> {
        let room = single.conn.core.transfers.room()?;
        let now = Arc::new(InlineOp::default());
        Ok(match post(work.operation(Arc::clone(&now) as _)) {
            Ok(PostOutcome::Pending(name)) => Ok(PostedPiece { now, name, room }),
            Ok(PostOutcome::Done(Ok(()))) => Err(Some(StartOutcome::Done(self.done_now(single)))),
            Ok(PostOutcome::Done(Err(_))) | Err(_) => Err(None),
        })
    }

    /// Makes a transfer of an operation that takes longer.
    fn outlast(
        &self,
        single: &Single,
        room: Room<'_>,
        name: (u16, OpName),
        now: &InlineOp,
        successor: impl FnOnce(&Arc<Transfer>) -> Arc<dyn Completion>,
    ) -> Result<StartOutcome> {
        let transfer = single.conn.admit_in(room, single.plan(After::Publish, self));
        let hold = transfer.hold();
        transfer.expect_ops(1);
        transfer.body.lock().ops.push(name);
        now.hand_to(successor(&transfer));
        settle(hold, Ok(())).map(StartOutcome::Transfer)
    }

    /// Counts a transfer that was done on the spot.
    fn done_now(&self, single: &Single) -> Outcome {
        let (counters, bytes) = (&self.core().counters, single.local.len as u64);
        counters.posted.fetch_add(1, Relaxed);
        counters.ended_well(Some(single.op), bytes);
        Outcome { bytes, checksummed: false }
    }
}

/// Copies a short piece to or from a process of this host, on this thread.
fn copy_short(single: &Single) -> bool {
    let Single { kind, conn, lease, local, remote, .. } = single;
    let Some(lane) = &conn.lanes.host else { return false };
    if !lease.mr().kind.is_host_accessible() {
        return false;
    }
    // SAFETY: inside a region, which the lease keeps registered.
    let copied = unsafe { lane.try_now(*kind, *local, remote) };
    matches!(copied, Some(Ok(())))
}
