//! The ranks that a reader reads from, and the transfers that it has prepared.

use std::time::Duration;

use uccl_p2p::{
    Change, ConnId, Endpoint, Iov, Op, PreparedTransfer, Request, Signal, Status, TransferHandle,
    TryOutcome,
};
use uccl_wire::advert::Advert;

use super::{
    bounds::Bounds,
    error::{Error, Result},
    manifest::Manifest,
    mark::Mark,
    memory::Memory,
    words::{Words, part},
};
use crate::plan::{Peer, Read};

/// Most pieces of one transfer.
const MOST_PIECES: usize = 1 << 18;

/// A rank that a reader reads from.
pub(crate) struct Link {
    pub(crate) peer: Peer,
    manifest: Manifest,
    /// Reads the rank's mark.
    glance: PreparedTransfer,
    /// The words that it reads it to.
    seen: usize,
    /// The reader's word there.
    taken: Advert,
}

impl Link {
    /// Prepares a link whose mark is read to word `seen` of `scratch`, for target `index`.
    pub(crate) fn new(
        endpoint: &Endpoint,
        (peer, manifest): (Peer, &Manifest),
        (scratch, seen): (&Words, usize),
        index: usize,
    ) -> Result<Self> {
        let short = || Error::Manifest("the words of a rank are too few".into());
        let mark = part(&manifest.mark.0, 0, 2).ok_or_else(short)?;
        let taken = part(&manifest.taken.0, index, 1).ok_or_else(short)?;
        let glance = endpoint.prepare(Op::Read, &[scratch.iov(seen, 2)], &[mark])?;
        Ok(Self { peer, manifest: manifest.clone(), glance, seen, taken })
    }

    /// The transfers of a read from this rank.
    pub(crate) fn prepare(
        &self,
        endpoint: &Endpoint,
        memory: &Memory,
        read: &Read,
    ) -> Result<Vec<PreparedTransfer>> {
        let mut prepared = Vec::new();
        for pieces in read.pieces.chunks(MOST_PIECES) {
            let iovs: Vec<Iov> = pieces
                .iter()
                .map(|piece| memory.iov(piece.to_buffer, piece.to, piece.len))
                .collect();
            let adverts = pieces.iter().map(|piece| {
                // The plan has found the piece inside the buffer.
                let whole = &self.manifest.buffers[piece.from_buffer].0;
                Advert { addr: whole.addr + piece.from, len: piece.len, ..*whole }
            });
            let adverts: Vec<Advert> = adverts.collect();
            prepared.push(endpoint.prepare(Op::Read, &iovs, &adverts)?);
        }
        Ok(prepared)
    }

    /// The connection to the rank, made when it is first needed.
    pub(crate) fn reach(&self, endpoint: &Endpoint, bounds: &mut Bounds<'_>) -> Result<ConnId> {
        let silence = endpoint.config().timeout;
        let time = if silence.is_zero() { bounds.left() } else { bounds.left().min(silence) };
        let time = Some(time.max(Duration::from_millis(1)));
        let reached = endpoint.reach(self.manifest.address, time, bounds);
        reached.map_err(|error| match bounds.left().is_zero() {
            // The call's time was over before the rank's.
            true if !matches!(error, uccl_p2p::Error::Interrupted) => {
                bounds.timeout(format!("{:?} is not reached: {error}", self.peer))
            }
            _ => bounds.error(error),
        })
    }

    /// The rank's mark; `None` while it changes.
    pub(crate) fn mark(
        &self,
        endpoint: &Endpoint,
        conn: ConnId,
        scratch: &Words,
        bounds: &mut Bounds<'_>,
    ) -> Result<Option<Mark>> {
        run(endpoint, &[(conn, &self.glance)], bounds)?;
        Ok(Mark::of([scratch.load(self.seen), scratch.load(self.seen + 1)]))
    }

    /// Tells the rank that this target has a version.
    pub(crate) fn take(
        &self,
        endpoint: &Endpoint,
        conn: ConnId,
        version: u64,
        bounds: &mut Bounds<'_>,
    ) -> Result<()> {
        let change = Change::Set(version);
        let signal = Some(Signal { advert: self.taken, change, strong: false });
        let request = Request { signal, ..Request::new(conn, Op::Write, &[], &[]) };
        finish(&[endpoint.post_held(&request)?], bounds)
    }
}

/// Runs prepared transfers side by side. When it returns, none of them moves a byte any more.
pub(crate) fn run(
    endpoint: &Endpoint,
    transfers: &[(ConnId, &PreparedTransfer)],
    bounds: &mut Bounds<'_>,
) -> Result<()> {
    let mut under_way = Vec::with_capacity(transfers.len());
    for (conn, prepared) in transfers {
        match endpoint.try_run_prepared(*conn, prepared, None) {
            Ok(TryOutcome::Done(_)) => {}
            Ok(TryOutcome::Under(handle)) => under_way.push(handle),
            Err(e) => {
                fence(&under_way)?;
                return Err(e.into());
            }
        }
    }
    finish(&under_way, bounds)
}

/// Waits for all, or ends all.
fn finish(handles: &[TransferHandle], bounds: &mut Bounds<'_>) -> Result<()> {
    for handle in handles {
        let left = bounds.left();
        let status = handle.wait(Some(left), bounds).map_err(|e| bounds.error(e));
        let ended = match status {
            Ok(Status::Done(_)) => Ok(()),
            Ok(Status::Failed(e)) => Err(e.into()),
            Ok(Status::Pending) => Err(bounds.timeout("a rank's bytes have not come".into())),
            Err(e) => Err(e),
        };
        if let Err(e) = ended {
            fence(handles)?;
            return Err(e);
        }
    }
    Ok(())
}

/// Ends transfers. Fails if memory may still be touched.
fn fence(handles: &[TransferHandle]) -> Result<()> {
    let mut fenced = Ok(());
    for handle in handles {
        if let Status::Failed(e @ uccl_p2p::Error::StillTouched { .. }) = handle.cancel()? {
            fenced = Err(e.into());
        }
    }
    fenced
}
