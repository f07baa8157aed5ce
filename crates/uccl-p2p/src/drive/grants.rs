//! Makes the keys for one send, notification or ask.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_fabric::{mem::Span, region::Rights};
use uccl_wire::message::Source;

use super::{
    core::connection::{
        Connection,
        loans::{Grant, Grants, source_of},
    },
    regions::{Lease, Mr, contains},
};
use crate::error::{Error, Result};

impl Connection {
    /// Makes keys for pieces of registered memory: one per region, for the part of it that the
    /// pieces cover.
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
        Ok(Grant::new(region, table, Some(of)))
    }

    /// Makes a key for memory that is not registered.
    pub(crate) fn grant_private(&self, span: Span) -> Result<Grant> {
        let table = Arc::clone(&self.core.mrs.table);
        let region = table.insert(span, Rights::READ, None).map_err(no_key)?;
        Ok(Grant::new(region, table, None))
    }
}

fn no_key(e: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("cannot make a key for the peer: {e}"))
}

/// The part of a region that some pieces cover.
struct Part {
    lease: usize,
    span: Span,
}

/// The parts of regions that pieces lie in.
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

    /// The part that a piece is in; it grows if necessary. Pieces mostly follow each other in one
    /// region, or take turns among several, so the last part and the one after it are tried first.
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
