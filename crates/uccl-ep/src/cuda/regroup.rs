//! Ranks that come and go: those that are there meet anew, in new windows, and the group's calls
//! and graphs go on in them.

use std::sync::{Arc, atomic::Ordering};

use uccl_device::cuda::Stream;

use super::{
    group::Group,
    join::{Candidate, Rendezvous, may_be_direct, meet_directly, meet_via_host},
    occupancy::Occupancy,
    state::wait_for_stream,
};
use crate::shared::{
    error::{Error, Phase, Result},
    join::{Exchange, Position},
    rank_set::RankSet,
};

impl Group {
    /// The number of meetings of the ranks, with the last one.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether a rank is there, left out or not.
    #[must_use]
    pub fn has(&self, rank: usize) -> bool {
        self.present().has(rank)
    }

    /// Has all ranks that are there meet anew: each calls this with the same exchange. Ranks that
    /// give no bytes to it are left out. A rank that comes has made a group by itself, and calls
    /// this too.
    ///
    /// Waits for the calls on `streams`, of which none may be enqueued elsewhere. Windows are new,
    /// so no rank reads later writes of a rank that has gone or was stopped; the old ones are
    /// closed. A failed group is sound again. Calls and graphs go on with the ranks that have met,
    /// and no such rank is left out; a combine of an earlier dispatch fails.
    ///
    /// # Errors
    /// A call does not end, a rank's window cannot be reached, or ranks do not agree on the group.
    /// All ranks fail then, and the group stays as it is.
    pub fn regroup(
        &self,
        streams: &[Stream],
        occupancy: Occupancy,
        exchange: &mut Exchange<'_>,
    ) -> Result<()> {
        let _one = self.meeting.lock();
        let prepared = self.prepare_meeting(streams).map(|candidate| ((), candidate));
        let before = Arc::clone(&self.windows.lock());
        let (config, is_via_host) = (self.config(), self.is_via_host());
        let is_direct = self.is_reach_fixed() || may_be_direct(config, is_via_host, exchange)?;
        let ((), met) = match (is_direct, is_via_host) {
            (true, false) => meet_directly(config, prepared, exchange)??,
            (_, true) => {
                let host = before.host().map(|host| &**host);
                meet_via_host(config, prepared, host, exchange)?
            }
            (false, false) => {
                let why = "this rank's buffer is in its GPU's memory, and other ranks do not reach \
                           it: where ranks come and go, make all buffers with \
                           allow_nvlink_for_low_latency_mode=False";
                let prepared = prepared.and(Err(Error::invalid(why)));
                meet_via_host(config, prepared, None, exchange)?
            }
        };
        drop(before);
        self.enter(met, occupancy)
    }

    /// Waits for the calls of this rank, and finds its position.
    fn prepare_meeting(&self, streams: &[Stream]) -> Result<Candidate> {
        // The calls of a group without masks end together at the first late rank's deadline;
        // earlier work on a stream may wait for its peers too.
        let (rank, limit) = (self.rank(), 2 * self.config().timeout);
        streams.iter().try_for_each(|stream| wait_for_stream(stream, rank, limit))?;
        let calls = match streams.first() {
            Some(stream) => self.state.read_behind(stream, rank, limit)?.calls,
            None => return Err(Error::invalid("a meeting has the streams of calls")),
        };
        let position = Position { generation: self.generation(), next_call: calls + 1 };
        Ok(Candidate { context: self.context(), reports: Arc::clone(&self.reports), position })
    }

    /// Has later calls use these windows.
    fn enter(
        &self,
        Rendezvous { windows, position }: Rendezvous,
        occupancy: Occupancy,
    ) -> Result<()> {
        let mut current = self.windows.lock();
        // It writes to the reports.
        current.watch().iter().for_each(|watch| watch.end());
        self.reports.reset();
        let before = std::mem::replace(&mut *current, Arc::new(windows));
        let addresses = current.addresses(self.rank());
        self.set_occupancy(occupancy);
        let present = self.note_addresses(&addresses);
        self.state.begin(position, addresses, self.every_rank() - present)?;
        current.watch().iter().for_each(|watch| watch.begin());
        self.generation.store(position.generation, Ordering::Release);
        drop(current);
        drop(before);
        Ok(())
    }

    /// # Errors
    /// A call has failed; or ranks have met anew since `generation`, to which a handle or call
    /// belongs.
    pub(super) fn check_of(&self, generation: u32, phase: Phase) -> Result<()> {
        match self.generation() {
            is if is != generation => {
                Err(Error::Stale { phase, rank: self.rank(), of: generation, is })
            }
            _ => self.check(),
        }
    }

    /// The ranks that are left out behind the work on a stream.
    ///
    /// # Errors
    /// The work does not end in twice the group's timeout, or the driver refuses.
    pub fn masked(&self, stream: &Stream) -> Result<RankSet> {
        let limit = 2 * self.config().timeout;
        Ok(self.state.read_behind(stream, self.rank(), limit)?.masked)
    }
}
