//! Transfers of one piece that their caller waits for: made on the spot where that takes no longer than to make a
//! transfer of them, and then looked at for a moment.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use smallvec::{SmallVec, smallvec};
use uccl_fabric::{
    lane::{Completion, Lane, OpKind, OpName, Posted},
    mem::{RemoteSpan, Span},
};

use super::{
    Endpoint, LOOKS, Op, Outcome, Request,
    transfers::{Begun, remote_span, settle},
};
use crate::{
    engine::{
        connection::{Connection, Piece, RailLane, Transfer},
        deadline,
        now::Now,
        regions::{Lease, contains, outside},
        timers,
        transfer::{After, Carrier as _, Plan},
        work::Work,
    },
    error::Result,
};

/// Looks at rails before a transfer is made of what they carry: a device's answer takes microseconds.
const LOOKS_BEFORE_A_TRANSFER: u32 = 1024;
/// How long a call waits for a GPU's copy before it makes a transfer of it.
const MOMENT: Duration = Duration::from_millis(1);

/// One piece to be read or written.
pub(super) struct Single {
    op: Op,
    kind: OpKind,
    conn: Arc<Connection>,
    lease: Lease,
    local: Span,
    remote: RemoteSpan,
    timeout: Option<Duration>,
}

impl Single {
    fn work(&self) -> Work {
        let (local, remote) = (smallvec![self.local], smallvec![self.remote]);
        Work { kind: self.kind, memory: self.lease.mr().kind, local, remote }
    }
}

impl Endpoint {
    /// One piece to be read or written with nothing besides, looked up and checked.
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
        let (op, timeout) = (request.op, request.timeout);
        Ok(Some(Single { op, kind, conn, lease, local, remote, timeout }))
    }

    /// The way with the least on it: short pieces to or from a process of this host on this thread, what a GPU
    /// copies, and what rails carry. `None`: it takes the longer way, where the owner also refuses in its own words.
    pub(super) fn begin_now(&self, single: &Single) -> Result<Option<Begun>> {
        if let Some(outcome) = self.copy_short(single) {
            return Ok(Some(Begun::Done(outcome)));
        }
        let Single { conn, lease, local, remote, .. } = single;
        let memory = lease.mr().kind;
        match &conn.lanes[..] {
            _ if local.len == 0 => Ok(None),
            [lane] if lane.is_copied_by_gpu(memory, remote) => self.copy_now(single, &**lane),
            [_, _, ..] => self.carry_now(single),
            _ => Ok(None),
        }
    }

    /// Copies a short piece to or from a process of this host, on this thread.
    pub(super) fn copy_short(&self, single: &Single) -> Option<Outcome> {
        let Single { kind, conn, lease, local, remote, .. } = single;
        if !lease.mr().kind.is_host_accessible() {
            return None;
        }
        // SAFETY: inside a region, which the lease keeps registered.
        let copied = unsafe { conn.lanes[0].try_now(*kind, *local, remote) };
        matches!(copied, Some(Ok(()))).then(|| self.done_now(single))
    }

    /// Has a GPU copy one piece, and waits a moment: most such copies end before a transfer could be made.
    fn copy_now(&self, single: &Single, lane: &dyn Lane) -> Result<Option<Begun>> {
        let (now, name) = match self.post_now(single, single.work(), lane) {
            Ok(under_way) => under_way,
            Err(over) => return Ok(over),
        };
        let _claim = single.conn.claim();
        let begun = Instant::now();
        while !now.has_ended() && begun.elapsed() < MOMENT {
            (0..LOOKS).take_while(|_| !now.has_ended()).for_each(|_| lane.progress_copies());
        }
        match now.result() {
            Some(Ok(())) => Ok(Some(Begun::Done(self.done_now(single)))),
            Some(Err(_)) => Ok(None),
            None => {
                let heir = |transfer: &Arc<Transfer>| Arc::clone(transfer) as _;
                self.outlast(single, (0, name), &now, heir).map(Some)
            }
        }
    }

    /// Has rails carry one piece, and looks at them for a while. What does not end well by then goes on as a
    /// transfer's, so that what rails cannot do is done another way.
    fn carry_now(&self, single: &Single) -> Result<Option<Begun>> {
        let (conn, work) = (&single.conn, single.work());
        let rails = conn.rails_for(&work).filter(|_| !self.config().always_ask_owners);
        let Some(RailLane { lane, index }) = rails else { return Ok(None) };
        let (now, name) = match self.post_now(single, work.clone(), &**lane) {
            Ok(under_way) => under_way,
            Err(over) => return Ok(over),
        };
        conn.forward_notes();
        let _claim = conn.claim();
        // What waits for a word of the peer's is not seen here.
        let is_seen = |_: &u32| !now.has_ended() && lane.is_under_way();
        (0..LOOKS_BEFORE_A_TRANSFER).take_while(is_seen).for_each(|_| {
            conn.progress_lane(*index);
        });
        if let Some(Ok(())) = now.result() {
            return Ok(Some(Begun::Done(self.done_now(single))));
        }
        let heir = |transfer: &Arc<Transfer>| {
            Arc::new(Piece { transfer: Arc::clone(transfer), work, lane: *index }) as _
        };
        self.outlast(single, (*index as u16, name), &now, heir).map(Some)
    }

    /// Posts one piece on a lane. `Err`: it is over, or takes the longer way.
    fn post_now(
        &self,
        single: &Single,
        work: Work,
        lane: &dyn Lane,
    ) -> Result<(Arc<Now>, OpName), Option<Begun>> {
        let now = Arc::new(Now::default());
        // SAFETY: inside a region, which a lease keeps registered until the operation has ended: this one, or
        // that of the transfer that it becomes.
        match unsafe { lane.post(work.operation(Arc::clone(&now) as _)) } {
            Ok(Posted::Pending(name)) => Ok((now, name)),
            Ok(Posted::Done(Ok(()))) => Err(Some(Begun::Done(self.done_now(single)))),
            Ok(Posted::Done(Err(_))) | Err(_) => Err(None),
        }
    }

    /// Makes a transfer of what takes longer. Where there is no room for one, it is called off.
    fn outlast(
        &self,
        single: &Single,
        name: (u16, OpName),
        now: &Now,
        heir: impl FnOnce(&Arc<Transfer>) -> Arc<dyn Completion>,
    ) -> Result<Begun> {
        let admitted = single.conn.admit(Plan {
            kind: single.op.into(),
            conn: Arc::clone(&single.conn),
            bytes: single.local.len as u64,
            timeout: self.deadline_of(single.timeout),
            leases: smallvec![single.lease.clone()],
            after: After::Publish,
            targets: SmallVec::new(),
        });
        let transfer = match admitted {
            Ok(transfer) => transfer,
            Err(full) => {
                self.call_off(&single.conn, name, now);
                let ended_well = matches!(now.result(), Some(Ok(())));
                return if ended_well { Ok(Begun::Done(self.done_now(single))) } else { Err(full) };
            }
        };
        let hold = transfer.hold();
        transfer.expect_ops(1);
        transfer.body.lock().ops.push(name);
        now.hand_to(heir(&transfer));
        settle(hold, Ok(())).map(Begun::Under)
    }

    /// Ends what is under way. Its memory is let go only when it has ended; a peer that does not let it is given up.
    /// What even the end of the connection does not end, memory is kept for by its aftermath.
    fn call_off(&self, conn: &Arc<Connection>, (lane, name): (u16, OpName), now: &Now) {
        let (begun, patience) = (Instant::now(), timers::to_end(self.config()));
        while !now.has_ended() && !conn.has_ended() {
            if let Some(lane) = conn.lanes.get(usize::from(lane)) {
                lane.cancel(name);
            }
            conn.progress();
            let is_ours = || conn.is_ours(&[(lane, name)]);
            if begun.elapsed() > patience && !is_ours() {
                deadline::give_up(conn, "it did not confirm the end of an operation");
            }
            std::thread::yield_now();
        }
    }

    /// Counts a transfer that was made on the spot.
    fn done_now(&self, single: &Single) -> Outcome {
        let (counters, bytes) = (&self.core().counters, single.local.len as u64);
        counters.posted.fetch_add(1, Relaxed);
        counters.ended_well(Some(single.op), bytes);
        Outcome { bytes, checksummed: false }
    }
}
