//! Transfers that are checked once and posted as often as their caller likes.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_fabric::lane::OpKind;
use uccl_wire::advert::Advert;

use super::{
    Endpoint, Iov, Op, TransferHandle, TryOutcome,
    at_once::Single,
    transfers::{StartOutcome, check_counts, settle},
};
use crate::{
    drive::{
        core::connection::{
            Connection,
            deferred_transfers::Start,
            transfer::{After, Plan, Transfer},
        },
        work::Pieces,
    },
    error::{Error, Result},
    ids::{ConnId, MrId, TransferId},
};

/// A read or a write that was checked: the regions of its pieces were found, its adverts compared,
/// and neighbours merged. [`Endpoint::post_prepared`] and [`Endpoint::try_run_prepared`] post it,
/// at a cost that does not depend on the number of its pieces.
///
/// It keeps neither its regions nor a connection. A post after one of the regions was deregistered
/// is refused, and so is a post over a connection to another endpoint than that of the adverts.
#[derive(Debug)]
pub struct PreparedTransfer {
    op: Op,
    /// The endpoint that prepared it.
    by: u64,
    /// The endpoint that made the adverts, as adverts name it.
    of: u32,
    /// Each region once.
    regions: SmallVec<[MrId; 1]>,
    pieces: Pieces,
    bytes: u64,
}

impl PreparedTransfer {
    /// The bytes that each post of it moves.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Refuses a post by another endpoint, or over a connection to another peer.
    fn check(&self, by: u64, conn: &Connection) -> Result<()> {
        if by != self.by {
            return Err(Error::Invalid("another endpoint has prepared the transfer".into()));
        }
        if conn.peer.instance as u32 != self.of {
            return Err(Error::ForeignAdvert { iov: 0 });
        }
        Ok(())
    }
}

impl Endpoint {
    /// Checks a read or a write with one advert for each iov, for posts by
    /// [`post_prepared`](Self::post_prepared) or [`try_run_prepared`](Self::try_run_prepared). No
    /// byte moves, and no connection is needed.
    ///
    /// # Errors
    /// An iov is not inside its region or longer than its advert, a region is unknown, or two
    /// adverts are of different endpoints.
    pub fn prepare(&self, op: Op, iovs: &[Iov], adverts: &[Advert]) -> Result<PreparedTransfer> {
        self.here()?;
        if !matches!(op, Op::Read | Op::Write) {
            return Err(Error::Invalid(format!("a {op:?} cannot be prepared")));
        }
        check_counts(op, iovs.len(), adverts.len(), 1)?;
        let of = adverts.first().map_or(0, |advert| advert.instance);
        let checked = self.check(op, iovs, adverts, of)?;
        let mut regions: SmallVec<[MrId; 1]> =
            checked.leases.iter().map(|lease| lease.mr().id).collect();
        regions.sort_unstable();
        regions.dedup();
        let (by, bytes, pieces) = (self.instance(), checked.bytes, checked.pieces.share());
        Ok(PreparedTransfer { op, by, of, regions, pieces, bytes })
    }

    /// Starts a prepared transfer, as [`post`](Self::post) does. A notification is this post's
    /// alone.
    ///
    /// # Errors
    /// The same as those of `post`; [`Error::UnknownRegion`] if one of its regions has been
    /// deregistered since it was prepared.
    pub fn post_prepared(
        &self,
        conn: ConnId,
        prepared: &PreparedTransfer,
        notif: Option<&[u8]>,
    ) -> Result<TransferId> {
        let conn = self.usable_conn(conn)?;
        prepared.check(self.instance(), &conn)?;
        self.post_to(&conn, prepared, notif).map(|transfer| transfer.id)
    }

    /// Does a prepared transfer at once or starts it, as [`try_run_held`](Self::try_run_held) does.
    /// A notification is this post's alone.
    ///
    /// # Errors
    /// The same as those of `try_run_held`; [`Error::UnknownRegion`] if one of its regions has been
    /// deregistered since it was prepared.
    pub fn try_run_prepared(
        &self,
        conn: ConnId,
        prepared: &PreparedTransfer,
        notif: Option<&[u8]>,
    ) -> Result<TryOutcome<TransferHandle>> {
        let conn = self.usable_conn(conn)?;
        prepared.check(self.instance(), &conn)?;
        let single = match notif {
            None => self.single_of(&conn, prepared)?,
            Some(_) => None,
        };
        let made = match single {
            Some(single) => self.make_now(&single)?,
            None => None,
        };
        Ok(match made {
            Some(StartOutcome::Done(outcome)) => TryOutcome::Done(outcome),
            Some(StartOutcome::Transfer(transfer)) => TryOutcome::Under(self.handle_of(transfer)),
            None => TryOutcome::Under(self.handle_of(self.post_to(&conn, prepared, notif)?)),
        })
    }

    /// Posts a prepared transfer over a connection to its peer.
    fn post_to(
        &self,
        conn: &Arc<Connection>,
        prepared: &PreparedTransfer,
        notif: Option<&[u8]>,
    ) -> Result<Arc<Transfer>> {
        // A worker that wakes leaves the work to a caller that mostly comes back for it, instead of
        // taking this call's processor.
        let _claim = conn.claim();
        let transfer = self.start_prepared(conn, prepared, notif)?;
        self.core().workers.hurry();
        conn.kick_if_untended();
        Ok(transfer)
    }

    /// A prepared transfer of one piece; `None` if it has several.
    fn single_of(
        &self,
        conn: &Arc<Connection>,
        prepared: &PreparedTransfer,
    ) -> Result<Option<Single>> {
        let PreparedTransfer { op, pieces, regions, .. } = prepared;
        let ([local], [remote], [region]) = (&pieces.local[..], &pieces.remote[..], &regions[..])
        else {
            return Ok(None);
        };
        let kind = if *op == Op::Read { OpKind::Read } else { OpKind::Write };
        let lease = self.core().mrs.look_up(*region, |mr| mr.lease())?;
        Ok(Some(Single::plain(*op, kind, Arc::clone(conn), lease, (*local, *remote))))
    }

    fn start_prepared(
        &self,
        conn: &Arc<Connection>,
        prepared: &PreparedTransfer,
        notif: Option<&[u8]>,
    ) -> Result<Arc<Transfer>> {
        let plan = Plan {
            kind: prepared.op.into(),
            context: 0,
            conn: Arc::clone(conn),
            bytes: prepared.bytes,
            timeout: self.deadline_of(None),
            leases: self.core().mrs.lease_all(&prepared.regions)?,
            after: After::of(None, notif.map(<[u8]>::to_vec)),
            targets: SmallVec::new(),
        };
        let transfer = conn.admit(plan)?;
        let hold = transfer.hold();
        let start = Start::OneSided(prepared.op, prepared.pieces.clone());
        let posted = conn.begin(&transfer, start, None);
        settle(hold, posted)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        slice,
        thread::sleep,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::{NoInterrupt, Status, Transport, drive::pair::JoinedPair};

    /// Longer than anything takes that has to happen.
    const FAR: Duration = Duration::from_secs(20);
    const PIECES: usize = 300;
    const LEN: usize = 24;
    const STRIDE: usize = 32;

    /// Memory of both ends of a connection, in pieces with gaps between them.
    struct Both {
        pair: JoinedPair,
        mine: Vec<u8>,
        theirs: Vec<u8>,
        iovs: Vec<Iov>,
        adverts: Vec<Advert>,
    }

    impl Both {
        fn new(by: Transport) -> Self {
            let pair = JoinedPair::by(by);
            let (mine, theirs) = (vec![1_u8; PIECES * STRIDE], vec![2_u8; PIECES * STRIDE]);
            let [here, there] = [(&pair.a, &mine), (&pair.b, &theirs)].map(|(end, memory)| {
                // SAFETY: only looked at while nothing is under way, until the end is closed.
                unsafe { end.register(memory.as_ptr() as usize, memory.len()) }.expect("registered")
            });
            let at = |memory: &[u8], i| memory.as_ptr() as usize + i * STRIDE;
            let iovs = (0..PIECES).map(|i| Iov { mr: here, ptr: at(&mine, i), len: LEN }).collect();
            let adverts = (0..PIECES)
                .map(|i| pair.b.advertise(there, at(&theirs, i), LEN).expect("advertised"))
                .collect();
            Self { pair, mine, theirs, iovs, adverts }
        }

        fn prepared(&self, op: Op) -> PreparedTransfer {
            self.pair.a.prepare(op, &self.iovs, &self.adverts).expect("it is right")
        }

        fn run(&self, prepared: &PreparedTransfer, notif: Option<&[u8]>) -> Result<()> {
            match self.pair.a.try_run_prepared(self.pair.to_b, prepared, notif)? {
                TryOutcome::Done(_) => Ok(()),
                TryOutcome::Under(transfer) => match transfer.wait(None, &mut NoInterrupt)? {
                    Status::Failed(e) => Err(e),
                    Status::Done(_) | Status::Pending => Ok(()),
                },
            }
        }

        /// The bytes of the other end's memory that are in pieces, and those that are in gaps.
        fn seen(&self) -> (Vec<u8>, Vec<u8>) {
            let theirs = std::hint::black_box(&self.theirs);
            let (pieces, gaps): (Vec<_>, Vec<_>) =
                theirs.chunks(STRIDE).map(|part| part.split_at(LEN)).unzip();
            (pieces.concat(), gaps.concat())
        }
    }

    #[test]
    fn each_post_moves_the_bytes_of_its_time() {
        for by in [Transport::Local, Transport::Tcp] {
            let mut both = Both::new(by);
            let write = both.prepared(Op::Write);
            assert_eq!(write.len_bytes(), (PIECES * LEN) as u64);
            for round in 5..9 {
                both.mine.fill(round);
                let notif = (round % 2 == 0).then_some(slice::from_ref(&round));
                both.run(&write, notif).expect("it arrives");
                let (pieces, gaps) = both.seen();
                assert!(pieces.iter().all(|byte| *byte == round), "{by:?} {round}");
                assert!(gaps.iter().all(|byte| *byte == 2), "{by:?} {round}");
            }
            let heard = both.pair.b.take_notifs().expect("it is open");
            let heard: Vec<_> = heard.iter().map(|notif| notif.payload.to_vec()).collect();
            assert_eq!(heard, [[6], [8]], "each post has its own or none");
            both.pair.close();
        }
    }

    /// Workers leave lanes to callers that come again and again.
    #[test]
    fn a_post_ends_though_its_caller_does_not_come_back() {
        for by in [Transport::Local, Transport::Tcp] {
            let both = Both::new(by);
            let write = both.prepared(Op::Write);
            let post = || match both.pair.a.try_run_prepared(both.pair.to_b, &write, None) {
                Ok(TryOutcome::Under(transfer)) => transfer,
                other => panic!("{other:?}"),
            };
            for _ in 0..10 {
                for _ in 0..50 {
                    let transfer = post();
                    while matches!(transfer.poll(), Ok(Status::Pending)) {}
                }
                let (transfer, begun) = (post(), Instant::now());
                while matches!(transfer.status(), Ok(Status::Pending)) {
                    assert!(begun.elapsed() < FAR, "{by:?}: no worker comes");
                    sleep(Duration::from_millis(1));
                }
                let ended = transfer.status().expect("ours");
                assert!(matches!(ended, Status::Done(_)), "{by:?}: {ended:?}");
            }
            both.pair.close();
        }
    }

    #[test]
    fn a_post_has_an_id_as_any_transfer() {
        for by in [Transport::Local, Transport::Tcp] {
            let mut both = Both::new(by);
            let write = both.prepared(Op::Write);
            for round in 5..8 {
                both.mine.fill(round);
                let posted = both.pair.a.post_prepared(both.pair.to_b, &write, None);
                let ended = both.pair.a.wait(posted.expect("posted"), None, &mut NoInterrupt);
                assert!(matches!(ended, Ok(Status::Done(_))), "{by:?}: {ended:?}");
                assert!(both.seen().0.iter().all(|byte| *byte == round), "{by:?} {round}");
            }
            let a = &both.pair.a;
            a.deregister(both.iovs[0].mr).expect("nothing uses it");
            let refused = a.post_prepared(both.pair.to_b, &write, None);
            assert!(matches!(refused, Err(Error::UnknownRegion(_))), "{refused:?}");
            both.pair.close();
        }
    }

    #[test]
    fn a_region_that_was_deregistered_is_refused_at_the_next_post() {
        for (by, count) in [(Transport::Local, 1), (Transport::Local, PIECES), (Transport::Tcp, 2)]
        {
            let both = Both::new(by);
            let (mr, a) = (both.iovs[0].mr, &both.pair.a);
            let (iovs, adverts) = (&both.iovs[..count], &both.adverts[..count]);
            let write = a.prepare(Op::Write, iovs, adverts).expect("it is right");
            both.run(&write, None).expect("it is registered");
            a.deregister(mr).expect("nothing uses it");
            let before = both.seen();
            let (ptr, len) = (both.mine.as_ptr() as usize, both.mine.len());
            // SAFETY: as above. The same memory has another region now.
            unsafe { a.register(ptr, len) }.expect("registered");
            let refused = both.run(&write, None);
            assert!(matches!(refused, Err(Error::UnknownRegion(known)) if known == mr));
            assert_eq!(both.seen(), before);
            both.pair.close();
        }
    }

    #[test]
    fn a_region_of_the_peers_that_was_deregistered_is_refused() {
        for by in [Transport::Local, Transport::Tcp] {
            let both = Both::new(by);
            let write = both.prepared(Op::Write);
            both.run(&write, None).expect("it is registered");
            let there = both.pair.b.region_holding(both.theirs.as_ptr() as usize, 1);
            both.pair.b.deregister(there.expect("it is registered")).expect("it is let go");
            let before = both.seen();
            let refused = both.run(&write, None);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{by:?}: {refused:?}");
            assert_eq!(both.seen(), before, "{by:?}");
            both.pair.close();
        }
    }

    #[test]
    fn a_connection_that_was_lost_is_found_at_the_post() {
        let both = Both::new(Transport::Tcp);
        let write = both.prepared(Op::Write);
        both.pair.a.disconnect(both.pair.to_b).expect("it was there");
        assert!(both.run(&write, None).is_err());
        both.pair.a.deregister(both.iovs[0].mr).expect("a prepared transfer keeps no region");
        both.pair.close();
    }

    /// Ids of regions and of connections are numbers that another endpoint may have given too.
    #[test]
    fn a_transfer_is_posted_by_its_endpoint_to_its_peer_alone() {
        let (both, other) = (Both::new(Transport::Tcp), Both::new(Transport::Tcp));
        let write = both.prepared(Op::Write);
        let refused = other.run(&write, None);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        let to_others = both.pair.a.prepare(Op::Write, &both.iovs, &other.adverts);
        let refused = both.run(&to_others.expect("it may be known later"), None);
        assert!(matches!(refused, Err(Error::ForeignAdvert { .. })), "{refused:?}");
        let mut adverts = both.adverts.clone();
        adverts[7] = other.adverts[7];
        let refused = both.pair.a.prepare(Op::Write, &both.iovs, &adverts).map(drop);
        assert!(matches!(refused, Err(Error::ForeignAdvert { iov: 7 })), "{refused:?}");
        both.pair.close();
        other.pair.close();
    }

    #[test]
    fn mistakes_are_refused_when_it_is_prepared() {
        let both = Both::new(Transport::Tcp);
        let a = &both.pair.a;
        let mut long = both.iovs.clone();
        long[3].len = LEN + 1;
        let refused = a.prepare(Op::Read, &long, &both.adverts).map(drop);
        assert!(matches!(refused, Err(Error::OutsideAdvert { iov: 3, .. })), "{refused:?}");
        let mut beyond = both.iovs.clone();
        beyond[3].ptr = both.mine.as_ptr() as usize + both.mine.len() - 1;
        let refused = a.prepare(Op::Read, &beyond, &both.adverts).map(drop);
        assert!(matches!(refused, Err(Error::OutsideRegion { iov: 3, .. })), "{refused:?}");
        for refused in [
            a.prepare(Op::Send, &both.iovs, &[]),
            a.prepare(Op::Write, &both.iovs, &both.adverts[1..]),
            a.prepare(Op::Write, &[], &[]),
        ] {
            assert!(matches!(refused.map(drop), Err(Error::Invalid(_))));
        }
        both.pair.close();
    }
}
