//! Regions that are found by address: ours that we publish, and the peer's that were looked up.
//!
//! An answer carries the key of each region, which opens it until it ends. The asker keeps the
//! answer with its connection. A key that is kept too long is refused as any other stale key, on
//! every lane; then the asker drops it and asks again. So the owner does not need to know its
//! askers.

use std::{collections::HashSet, sync::Arc};

use uccl_fabric::lane::OpError;
use uccl_wire::{
    frame::Status,
    message::{MAX_FOUND, Range, Ranges, Source, Sources},
};

use super::{
    addresses::{Addresses, RegionKey},
    core::connection::{Connection, talk::Talk, transfer::Transfer},
};
use crate::error::{Error, Result};

/// Most steps of the search for one answer: a peer may name the same regions again and again.
const MAX_STEPS: usize = 2 * MAX_FOUND;
/// The regions that cover the ranges, each once. A range with a gap is covered up to the gap.
fn covering(published: &Addresses<RegionKey>, ranges: impl Iterator<Item = Range>) -> Vec<Source> {
    let (mut found, mut seen, mut steps) = (Vec::new(), HashSet::new(), 0);
    for Range { mut addr, len } in ranges {
        let end = addr.saturating_add(len);
        while addr < end && steps < MAX_STEPS && found.len() < MAX_FOUND {
            steps += 1;
            let Some(region) = published.at(addr) else { break };
            let RegionKey { key, slot } = region.value;
            if seen.insert(slot) {
                found.push(Source { addr: region.addr, len: region.len, key, slot });
            }
            addr += region.left_at(addr);
        }
    }
    found
}

impl Connection {
    /// Asks the peer for its published regions in these ranges. The answer ends one operation of
    /// the transfer.
    pub(crate) fn post_look_up(&self, transfer: &Arc<Transfer>, ranges: &[Range]) -> Result<()> {
        self.check_publishes(ranges)?;
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        self.check_open(session)?;
        message.clear();
        session.look_ups.send(ranges.iter().copied(), Arc::clone(transfer), message)?;
        self.send_message(&[message]);
        Ok(())
    }

    /// Refuses to ask a peer that publishes nothing, or does not know the question: it would end
    /// the connection.
    fn check_publishes(&self, ranges: &[Range]) -> Result<()> {
        match (self.peer.publishes, ranges.first()) {
            (false, Some(range)) => {
                Err(self.not_published(range, "its endpoint does not publish regions"))
            }
            _ => Ok(()),
        }
    }

    /// The error about memory of the peer's that is not published.
    pub(crate) fn not_published(&self, range: &Range, reason: &'static str) -> Error {
        let peer = Arc::clone(&self.peer.name);
        Error::NotPublished { peer, addr: range.addr, len: range.len, reason }
    }

    /// Answers the peer's look-up.
    pub(super) fn answer_look_up(&self, id: u64, ranges: Ranges<'_>) {
        let (status, found) = match self.core.config.publish {
            true => {
                let found = |published: &_| covering(published, ranges.iter());
                (Status::Ok, self.core.mrs.with_published(found))
            }
            false => (Status::Denied, Vec::new()),
        };
        self.tell(|session, out| session.look_ups.answer(id, status, found.into_iter(), out));
    }

    /// Handles the peer's answer to a look-up.
    pub(super) fn look_up_ended(
        &self,
        transfer: &Arc<Transfer>,
        status: Status,
        regions: Sources<'_>,
    ) {
        match status {
            Status::Ok => self.looked_up.add(regions.iter()),
            refused => transfer.note_error(transfer.op_error(OpError::Remote(refused))),
        }
        transfer.op_ended();
    }
}

#[cfg(test)]
mod tests {
    use smallvec::SmallVec;

    use super::*;
    use crate::{
        NoInterrupt, Status,
        drive::{
            addresses::Entry,
            core::connection::transfer::{After, Kind, Plan},
            pair::JoinedPair,
        },
    };

    fn published(regions: &[(u64, u64)]) -> Addresses<RegionKey> {
        let mut published = Addresses::default();
        for (number, &(addr, len)) in (0..).zip(regions) {
            let value = RegionKey { key: u64::from(number), slot: number };
            published.insert(u64::from(number), Entry { addr, len, value });
        }
        published
    }

    fn slots(published: &Addresses<RegionKey>, ranges: &[(u64, u64)]) -> Vec<u32> {
        let ranges = ranges.iter().map(|&(addr, len)| Range { addr, len });
        covering(published, ranges).into_iter().map(|source| source.slot).collect()
    }

    #[test]
    fn a_range_finds_the_regions_that_cover_it() {
        let published = published(&[(100, 50), (150, 50), (300, 10)]);
        assert_eq!(slots(&published, &[(120, 10)]), [0]);
        assert_eq!(slots(&published, &[(120, 60)]), [0, 1], "it spans two regions");
        assert_eq!(slots(&published, &[(120, 60), (140, 1)]), [0, 1], "each once");
        assert_eq!(slots(&published, &[(199, 200)]), [1], "up to the gap");
        assert_eq!(slots(&published, &[(99, 10)]), [0; 0]);
        assert_eq!(slots(&published, &[(120, 0)]), [0; 0], "nothing is wanted");
        assert_eq!(slots(&published, &[(0, u64::MAX)]), [0; 0], "the range begins in a gap");
        assert_eq!(slots(&published, &[(300, u64::MAX)]), [2]);
    }

    /// A peer could have this side search for minutes with one message.
    #[test]
    fn the_work_for_one_answer_is_bounded() {
        let regions: Vec<_> = (0..2 * MAX_FOUND as u64).map(|at| (at, 1)).collect();
        let published = published(&regions);
        let all = (0, u64::MAX);
        assert_eq!(slots(&published, &[all]).len(), MAX_FOUND);
        let half = (0, MAX_FOUND as u64 / 2);
        assert_eq!(slots(&published, &[half, half, half, half, all]).len(), MAX_FOUND / 2);
    }

    /// A peer that asks all the same, as a hostile one may.
    #[test]
    fn an_endpoint_that_does_not_publish_denies_its_regions() {
        let p = JoinedPair::by_tcp();
        let memory = Box::new([0_u8; 64]);
        let addr = memory.as_ptr() as usize;
        // SAFETY: only looked up, until the endpoint is closed.
        let mr = unsafe { p.b.register(addr, memory.len()) }.expect("registered");
        p.b.core().mrs.publish(mr).expect("it is registered");
        let conn = p.a.core().conn(p.to_b).expect("a connection");
        let plan = Plan {
            kind: Kind::LookUp,
            context: 0,
            conn: Arc::clone(&conn),
            bytes: 0,
            timeout: None,
            leases: SmallVec::new(),
            after: After::Publish,
            targets: SmallVec::new(),
        };
        let transfer = conn.admit(plan).expect("there is room");
        transfer.expect_ops(1);
        let range = Range { addr: addr as u64, len: 64 };
        conn.tell(|session, out| {
            session.look_ups.send([range].into_iter(), Arc::clone(&transfer), out)
        })
        .expect("there is room");
        transfer.op_ended();
        let ended = p.a.wait(transfer.id, None, &mut NoInterrupt).expect("it is known");
        assert!(matches!(ended, Status::Failed(Error::RemoteAccess { .. })), "{ended:?}");
        assert!(conn.looked_up.with(|known| known.at(range.addr).is_none()), "it has the key");
        drop((transfer, conn));
        p.a.check_connection(p.to_b).expect("it lives");
        p.close();
    }
}
