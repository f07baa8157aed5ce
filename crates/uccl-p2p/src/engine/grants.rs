//! Keys that are made for one send, notification or ask, and revoked with it.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_fabric::{
    mem::Span,
    region::{Region, RegionTable, Rights},
};
use uccl_wire::message::Source;

use super::{
    aftermath::Lent,
    connection::Connection,
    regions::{Lease, Mr, contains},
    transfer::Transfer,
};
use crate::error::{Error, Result};

/// The grants of one message.
pub(crate) type Grants = SmallVec<[Grant; 1]>;

/// A key that the peer reaches some of our memory with; revoked when dropped.
pub(crate) struct Grant {
    pub(crate) region: Region,
    table: Arc<RegionTable>,
    /// The slot of the region that the memory is a part of, if it is registered.
    part_of: Option<u32>,
}

impl Grant {
    /// Ends it, for a peer that may be in the middle of an access: what is to be watched until it is not. Where the
    /// memory is the caller's, the transfer does not end before: the caller may change it then, and a peer that still
    /// reads would take the change for what was sent.
    pub(crate) fn end(self, transfer: &Arc<Transfer>) -> Option<Lent> {
        let revoked = self.table.revoke(self.region.slot, self.region.key).ok()?;
        let hold = self.part_of.map(|_| transfer.hold());
        Some(Lent { part_of: self.part_of, revoked, hold, _payload: None })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // The peer has answered or is gone, so it is at nothing.
        drop(self.table.revoke(self.region.slot, self.region.key));
    }
}

impl Connection {
    /// Makes keys for pieces of registered memory: one a region, for as much of it as the pieces cover.
    pub(crate) fn grant(
        &self,
        leases: &[Lease],
        spans: &[Span],
        rights: Rights,
    ) -> Result<(Vec<Source>, Grants)> {
        let covers = Covers::of(leases, spans)?;
        let grants =
            covers.parts.iter().map(|part| self.lend(leases[part.lease].mr(), part, rights));
        let grants = grants.collect::<Result<Grants>>()?;
        let sources = spans.iter().zip(&covers.of_span);
        let sources = sources.map(|(span, part)| source_of(&grants[*part].region, *span)).collect();
        Ok((sources, grants))
    }

    fn lend(&self, mr: &Mr, part: &Part, rights: Rights) -> Result<Grant> {
        let table = Arc::clone(&self.core.mrs.table);
        let backing = mr.backing_of(part.span);
        let of = mr.region.slot;
        let region = table.insert_part(of, mr.kind, part.span, rights, backing).map_err(no_key)?;
        Ok(Grant { region, table, part_of: Some(of) })
    }

    /// Makes a key for memory that is not registered.
    pub(crate) fn grant_private(&self, span: Span) -> Result<Grant> {
        let table = Arc::clone(&self.core.mrs.table);
        let region = table.insert(span, Rights::READ, None).map_err(no_key)?;
        Ok(Grant { region, table, part_of: None })
    }
}

fn no_key(e: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("cannot make a key for the peer: {e}"))
}

pub(crate) fn source_of(region: &Region, span: Span) -> Source {
    Source { addr: span.addr as u64, len: span.len as u64, key: region.key, slot: region.slot }
}

/// What some pieces cover of a region.
struct Part {
    lease: usize,
    span: Span,
}

/// Which regions pieces lie in.
struct Covers {
    parts: SmallVec<[Part; 1]>,
    /// Which part each piece is in.
    of_span: SmallVec<[usize; 1]>,
}

impl Covers {
    fn of(leases: &[Lease], spans: &[Span]) -> Result<Self> {
        let mut covers = Self { parts: SmallVec::new(), of_span: SmallVec::new() };
        let mut last = 0;
        for span in spans {
            last = covers.part_of(leases, *span, last)?;
            covers.of_span.push(last);
        }
        Ok(covers)
    }

    /// The part that a piece is in, which it may make longer. Pieces mostly follow each other in one region,
    /// or go round several: the last part and the one after it are looked at first.
    fn part_of(&mut self, leases: &[Lease], span: Span, last: usize) -> Result<usize> {
        let holds = |part: &Part| contains(leases[part.lease].mr().span, span);
        let near = (last..last + 2).find(|at| self.parts.get(*at).is_some_and(holds));
        let at = near.or_else(|| self.parts.iter().position(holds));
        if let Some(at) = at {
            let part = &mut self.parts[at].span;
            let end = (part.addr + part.len).max(span.addr + span.len);
            let start = part.addr.min(span.addr);
            *part = Span { addr: start, len: end - start };
            return Ok(at);
        }
        let lease = leases.iter().position(|lease| contains(lease.mr().span, span));
        let lease = lease.ok_or_else(|| Error::Invalid("an iov outside its region".into()))?;
        self.parts.push(Part { lease, span });
        Ok(self.parts.len() - 1)
    }
}
