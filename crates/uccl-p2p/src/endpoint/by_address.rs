//! Reads and writes that name memory by its addresses, on both sides. The peer's lies in regions
//! that it [publishes](Endpoint::publish).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};
use uccl_wire::{
    advert::Advert,
    message::{MAX_RANGES, Range},
};

use super::{
    AddressPiece, AddressRequest, Endpoint, Interrupt, Op, Outcome, Request, SLICE, Status,
    TransferHandle, transfers::settle,
};
use crate::{
    drive::{
        addresses::{Addresses, Entry, RegionKey},
        core::connection::{
            Connection,
            transfer::{After, Kind, Plan},
        },
        timers,
    },
    error::{Error, Result},
    ids::{ConnId, MrId},
    types::Iov,
};

/// How often a transfer looks again for memory that was ended and registered anew, or for the rest
/// of the regions of a long request.
const MAX_LOOKS: usize = 64;
/// How long a transfer waits for room for its look-up.
const NAP: Duration = Duration::from_micros(200);

/// A request whose memory is known on both sides.
#[derive(Default)]
struct ResolvedRequest {
    iovs: SmallVec<[Iov; 1]>,
    adverts: SmallVec<[Advert; 1]>,
    /// The peer's regions that it uses, each once in a row.
    regions: SmallVec<[Entry<RegionKey>; 1]>,
}

/// The state of a transfer by address.
enum Step {
    /// To be looked up and posted.
    Begin,
    LookUp(TransferHandle),
    Move(TransferHandle, SmallVec<[Entry<RegionKey>; 1]>),
    Ended(Status),
}

struct Progress {
    step: Step,
    looks: usize,
    /// The ranges of the look-up that is under way, or of the last one.
    asked: Vec<Range>,
    /// The regions with which the peer refused the transfer, and its refusal.
    refused: Option<(SmallVec<[Entry<RegionKey>; 1]>, Error)>,
}

/// A read or write that names memory by its addresses. It goes on as long as
/// [`poll`](Self::poll) or [`wait`](Self::wait) are called: they look up the peer's regions, post
/// the transfer, and do both again if the peer has registered its memory anew meanwhile.
///
/// When it is dropped, the part that is under way goes on.
pub struct AddressTransfer {
    endpoint: Endpoint,
    conn: ConnId,
    op: Op,
    pieces: Box<[AddressPiece]>,
    begun: Instant,
    timeout: Option<Duration>,
    is_cancelled: AtomicBool,
    progress: Mutex<Progress>,
}

impl std::fmt::Debug for AddressTransfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AddressTransfer").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// The adverts of the peer's published memory at these addresses, in their order: more than one
    /// where the range spans several regions. Asks the peer each time.
    ///
    /// # Errors
    /// Some of the range is not published, or the peer could not be asked.
    pub fn look_up(
        &self,
        conn: ConnId,
        addr: u64,
        len: u64,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Advert>> {
        let open = self.usable_conn(conn)?;
        let (mut at, mut left) = (addr, len);
        if addr.checked_add(len).is_none() {
            return Err(past_the_end(addr, len));
        }
        // A region that has ended may cover a new one in the list.
        open.looked_up.forget_range(addr, len);
        let mut adverts = Vec::new();
        while left > 0 {
            let range = Range { addr: at, len: left };
            let handle = self.begin_look_up(&open, &[range], self.deadline_of(timeout))?;
            loop {
                match handle.wait(Some(SLICE), interrupt) {
                    Ok(Status::Done(_)) => break,
                    Ok(Status::Failed(e)) => return Err(e),
                    Ok(Status::Pending) => {}
                    Err(e) => {
                        handle.cancel()?;
                        return Err(e);
                    }
                }
            }
            let before = left;
            open.looked_up.with(|known| {
                while left > 0
                    && let Some(region) = known.at(at)
                {
                    let len = region.left_at(at).min(left);
                    adverts.push(advert(&open, region.value, at, len));
                    (at, left) = (at + len, left - len);
                }
            });
            if left == before {
                return Err(open.not_published(&range, NO_REGION));
            }
        }
        Ok(adverts)
    }

    /// Moves bytes between memory of ours and published memory of the peer's, both named by their
    /// addresses, and waits for the end. The regions are looked up once and kept; a region that the
    /// peer has ended is looked up again.
    ///
    /// A piece may span several regions, on both sides.
    ///
    /// # Errors
    /// Memory of ours is not registered, memory of the peer's is not published, or as
    /// [`run`](Self::run). What was moved before an error is not known.
    pub fn run_by_address(
        &self,
        request: &AddressRequest<'_>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Outcome> {
        check(request)?;
        let open = self.usable_conn(request.conn)?;
        let mut refused = None;
        if let Ok(resolved) = self.resolve(&open, request.pieces)? {
            if resolved.iovs.is_empty() {
                return Ok(Outcome::default());
            }
            match self.run(&resolved.request(request.conn, request.op, request.timeout), interrupt)
            {
                Err(e @ Error::RemoteAccess { .. }) => {
                    open.looked_up.forget(&resolved.regions);
                    refused = Some((resolved.regions, e));
                }
                ended => return ended,
            }
        }
        let transfer = self.address_transfer(request, refused);
        match transfer.wait(None, interrupt) {
            Ok(Status::Done(outcome)) => Ok(outcome),
            Ok(Status::Failed(e)) => Err(e),
            Ok(Status::Pending) => Err(Error::Closed),
            Err(e) => {
                transfer.cancel()?;
                Err(e)
            }
        }
    }

    /// Starts what [`run_by_address`](Self::run_by_address) does, and returns at once.
    ///
    /// # Errors
    /// The request makes no sense, or the connection is lost. All else is the transfer's.
    pub fn post_by_address(&self, request: &AddressRequest<'_>) -> Result<AddressTransfer> {
        check(request)?;
        self.usable_conn(request.conn)?;
        let transfer = self.address_transfer(request, None);
        transfer.poll()?;
        Ok(transfer)
    }

    fn address_transfer(
        &self,
        request: &AddressRequest<'_>,
        refused: Option<(SmallVec<[Entry<RegionKey>; 1]>, Error)>,
    ) -> AddressTransfer {
        let progress = Progress { step: Step::Begin, looks: 0, asked: Vec::new(), refused };
        AddressTransfer {
            endpoint: self.clone(),
            conn: request.conn,
            op: request.op,
            pieces: request.pieces.into(),
            begun: Instant::now(),
            timeout: self.deadline_of(request.timeout),
            is_cancelled: AtomicBool::new(false),
            progress: Mutex::new(progress),
        }
    }

    /// Finds the memory of all pieces, on both sides. The inner error has the ranges of the peer's
    /// that are not known, at most as many as one look-up takes.
    fn resolve(
        &self,
        conn: &Connection,
        pieces: &[AddressPiece],
    ) -> Result<std::result::Result<ResolvedRequest, Vec<Range>>> {
        let (mut resolved, mut unknown) = (ResolvedRequest::default(), Vec::new());
        resolved.iovs.reserve(pieces.len());
        resolved.adverts.reserve(pieces.len());
        let mut find = |ours: &Addresses<MrId>, known: &Addresses<RegionKey>| -> Result<()> {
            let (mut here, mut there) = (None::<Entry<MrId>>, None::<Entry<RegionKey>>);
            for &AddressPiece { local, remote, len } in pieces {
                let (mut local, mut remote, mut left) = (local as u64, remote, len as u64);
                if local.checked_add(left).is_none() || remote.checked_add(left).is_none() {
                    return Err(past_the_end(local.max(remote), left));
                }
                while left > 0 {
                    if !here.is_some_and(|here| here.contains(local)) {
                        here = ours.at(local).copied();
                    }
                    let Some(here) = here else {
                        return Err(Error::Invalid(format!(
                            "{left} bytes at {local:#x} are not in memory that is registered here"
                        )));
                    };
                    if !there.is_some_and(|there| there.contains(remote)) {
                        there = known.at(remote).copied();
                        resolved.regions.extend(there);
                    }
                    let Some(there) = there else {
                        unknown.push(Range { addr: remote, len: left });
                        break;
                    };
                    let part = left.min(here.left_at(local)).min(there.left_at(remote));
                    let (ptr, len) = (local as usize, part as usize);
                    resolved.iovs.push(Iov { mr: here.value, ptr, len });
                    resolved.adverts.push(advert(conn, there.value, remote, part));
                    (local, remote, left) = (local + part, remote + part, left - part);
                }
                if unknown.len() == MAX_RANGES {
                    break;
                }
            }
            Ok(())
        };
        self.core().mrs.with_addresses(|ours| conn.looked_up.with(|known| find(ours, known)))?;
        Ok(if unknown.is_empty() { Ok(resolved) } else { Err(unknown) })
    }

    fn begin_look_up(
        &self,
        conn: &Arc<Connection>,
        ranges: &[Range],
        timeout: Option<Duration>,
    ) -> Result<TransferHandle> {
        let transfer = conn.admit(Plan {
            kind: Kind::LookUp,
            context: 0,
            conn: Arc::clone(conn),
            bytes: 0,
            timeout,
            leases: smallvec![],
            after: After::Publish,
            targets: smallvec![],
        })?;
        let hold = transfer.hold();
        transfer.expect_ops(1);
        let posted = conn.post_look_up(&transfer, ranges);
        let transfer = settle(hold, posted)?;
        self.core().workers.hurry();
        conn.kick_if_busy();
        Ok(self.handle_of(transfer))
    }
}

const NO_REGION: &str = "none of its published regions lies there";

fn past_the_end(addr: u64, len: u64) -> Error {
    Error::Invalid(format!("{len} bytes at {addr:#x} run past the end of the address space"))
}

fn check(request: &AddressRequest<'_>) -> Result<()> {
    match request.op {
        Op::Read | Op::Write => Ok(()),
        op => Err(Error::Invalid(format!("a {op:?} names no memory of the peer's"))),
    }
}

fn advert(conn: &Connection, region: RegionKey, addr: u64, len: u64) -> Advert {
    let RegionKey { key, slot } = region;
    Advert { addr, len, key, slot, instance: conn.peer.instance as u32 }
}

impl ResolvedRequest {
    fn request(&self, conn: ConnId, op: Op, timeout: Option<Duration>) -> Request<'_> {
        Request { timeout, ..Request::new(conn, op, &self.iovs, &self.adverts) }
    }
}

impl AddressTransfer {
    /// Its state. Asking makes progress. While another thread is in a call of this transfer, the
    /// answer is `Pending`.
    ///
    /// # Errors
    /// The calling process is a forked child of the one that started it.
    pub fn poll(&self) -> Result<Status> {
        let Some(mut progress) = self.progress.try_lock() else { return Ok(Status::Pending) };
        self.go_on(&mut progress, &mut TransferHandle::poll)
    }

    /// Waits for its end, for at most `timeout`. The transfer goes on after that, when it is asked
    /// again.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll), or the wait was interrupted.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn Interrupt) -> Result<Status> {
        let until = timers::end_of(timeout);
        loop {
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            if let Some(mut progress) = self.progress.try_lock_for(left.min(SLICE)) {
                let mut look =
                    |handle: &TransferHandle| handle.wait(Some(left.min(SLICE)), interrupt);
                let status = self.go_on(&mut progress, &mut look)?;
                let is_waiting = matches!(progress.step, Step::Begin);
                drop(progress);
                if !matches!(status, Status::Pending) {
                    return Ok(status);
                }
                if is_waiting {
                    std::thread::sleep(NAP);
                }
            }
            if left.is_zero() {
                return Ok(Status::Pending);
            }
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Ends it, as [`Endpoint::cancel`] does.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    pub fn cancel(&self) -> Result<Status> {
        self.is_cancelled.store(true, Release);
        let mut progress = self.progress.lock();
        let status = match &progress.step {
            Step::Begin => Status::Failed(Error::Cancelled { by: "the caller".into() }),
            Step::LookUp(handle) => match handle.cancel()? {
                // The bytes have not been posted.
                Status::Failed(e) => Status::Failed(e),
                _ => Status::Failed(Error::Cancelled { by: "the caller".into() }),
            },
            Step::Move(handle, _) => handle.cancel()?,
            Step::Ended(status) => status.clone(),
        };
        progress.step = Step::Ended(status.clone());
        Ok(status)
    }

    /// Takes all steps that are possible now. `look` asks about the transfer of a step.
    fn go_on(
        &self,
        progress: &mut Progress,
        look: &mut dyn FnMut(&TransferHandle) -> Result<Status>,
    ) -> Result<Status> {
        loop {
            let status = match &progress.step {
                Step::Ended(status) => return Ok(status.clone()),
                Step::Begin => Ok(None),
                Step::LookUp(handle) | Step::Move(handle, _) => look(handle).map(Some),
            }?;
            let step = std::mem::replace(&mut progress.step, Step::Begin);
            progress.step = match (step, status) {
                (step, Some(Status::Pending)) => {
                    progress.step = step;
                    return Ok(Status::Pending);
                }
                _ if self.is_cancelled.load(Acquire) => {
                    Step::Ended(Status::Failed(Error::Cancelled { by: "the caller".into() }))
                }
                (Step::Move(_, regions), Some(Status::Failed(e @ Error::RemoteAccess { .. }))) => {
                    if let Ok(open) = self.endpoint.usable_conn(self.conn) {
                        open.looked_up.forget(&regions);
                    }
                    progress.looks += 1;
                    progress.refused = Some((regions, e));
                    Step::Begin
                }
                (Step::Move(..), Some(ended)) | (_, Some(ended @ Status::Failed(_))) => {
                    Step::Ended(ended)
                }
                _ => match self.begin(progress) {
                    Ok(step) => step,
                    Err(Error::Full { .. }) => return Ok(Status::Pending),
                    Err(e) => Step::Ended(Status::Failed(e)),
                },
            };
        }
    }

    /// Posts the transfer, or the look-up that it needs first.
    fn begin(&self, progress: &mut Progress) -> Result<Step> {
        let open = self.endpoint.usable_conn(self.conn)?;
        let timeout = self.time_left(&open)?;
        match self.endpoint.resolve(&open, &self.pieces)? {
            Ok(resolved) if resolved.iovs.is_empty() => {
                Ok(Step::Ended(Status::Done(Outcome::default())))
            }
            Ok(resolved) => {
                if let Some((regions, e)) = &progress.refused
                    && (*regions == resolved.regions || progress.looks >= MAX_LOOKS)
                {
                    // The regions are as they were, so the peer has another reason; or they change
                    // all the time.
                    return Err(e.clone());
                }
                progress.refused = None;
                progress.asked.clear();
                let request = resolved.request(self.conn, self.op, timeout);
                let handle = self.endpoint.post_held(&request)?;
                Ok(Step::Move(handle, resolved.regions))
            }
            Err(unknown) => {
                if unknown == progress.asked || progress.looks >= MAX_LOOKS {
                    // The answer has brought nothing.
                    return Err(open.not_published(&unknown[0], NO_REGION));
                }
                let handle = self.endpoint.begin_look_up(&open, &unknown, timeout)?;
                progress.looks += 1;
                progress.asked = unknown;
                Ok(Step::LookUp(handle))
            }
        }
    }

    fn time_left(&self, conn: &Connection) -> Result<Option<Duration>> {
        let Some(timeout) = self.timeout else { return Ok(None) };
        match timeout.checked_sub(self.begun.elapsed()).filter(|left| !left.is_zero()) {
            Some(left) => Ok(Some(left)),
            None => Err(Error::DeadlineExceeded {
                after: timeout,
                peer: Some(Arc::clone(&conn.peer.name)),
            }),
        }
    }
}
