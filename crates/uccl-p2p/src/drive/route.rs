//! The routes of one-sided work, and the choice among them. A transfer that is posted (`plan.rs`),
//! a piece that its caller waits for (`endpoint/at_once.rs`), a transfer behind a stream
//! (`follow.rs`) and the answer to a caller that asks for the path all use this choice.

use std::sync::Arc;

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{HostLane, MessageLane, OpKind, RailLane},
    mem::RemoteSpan,
    signal::Word,
};
use uccl_wire::signal::Change;

use super::{core::connection::Connection, regions::Mr, work::Work};

/// Transfers are spread over lanes in pieces of at least this many bytes.
const STRIPE: u64 = 512 << 10;
/// Less is not worth two messages to the memory's owner: these take some microseconds, in which
/// copies through a locked buffer (8 to 10 GB/s) move about as much.
const MIN_BYTES: u64 = 64 << 10;

/// The route of work on one kind of local memory.
pub(crate) enum Route<'a> {
    /// One job of a GPU of ours, which changes the signal's word behind its copies.
    GpuAndSignal(&'a dyn HostLane),
    /// One operation of the first lane, which takes the signal along.
    StreamAndSignal,
    /// The peer copies the marked pieces. The others take the route that they have without it.
    Owner(Vec<bool>),
    /// One operation of the rail lane, which cuts and spreads it itself.
    Rails(&'a dyn RailLane),
    /// One operation of a stream, or of the lane between two processes of a host. That lane chooses
    /// among CPU, GPU and rings for each piece.
    Stream,
    /// Several operations, spread over the streams.
    Streams,
}

impl Connection {
    /// Chooses the route of work on one kind of memory. `word` is a signal that may go along with
    /// it: the route says whether it does.
    pub(crate) fn choose(&self, work: &Work, word: Option<&Word>) -> Route<'_> {
        if let Some(host) = word.and_then(|word| self.gpu_for(work, word)) {
            return Route::GpuAndSignal(host);
        }
        let marks = self.better_by_owner(work);
        if !marks.is_empty() {
            return Route::Owner(marks);
        }
        match self.choose_lanes(work) {
            Route::Stream if word.is_some() && self.takes_signal(work) => Route::StreamAndSignal,
            route => route,
        }
    }

    /// Chooses as [`choose`](Self::choose) does, for work that the peer does not copy.
    pub(super) fn choose_lanes(&self, work: &Work) -> Route<'_> {
        self.rails_for(work).map_or_else(|| self.choose_streams(work), Route::Rails)
    }

    /// Chooses as [`choose_lanes`](Self::choose_lanes) does, for work that no rail reaches. The
    /// streams reach any memory.
    pub(super) fn choose_streams(&self, work: &Work) -> Route<'_> {
        let is_one =
            self.stripes(work.len_bytes()) == 1 && work.pieces() <= self.most_pieces(work.memory);
        if is_one { Route::Stream } else { Route::Streams }
    }

    /// The path of long transfers between this memory of the peer's and a region of ours, in a word
    /// for people.
    pub(crate) fn path_from(&self, mr: &Mr, remote: RemoteSpan) -> &'static str {
        let (local, span) =
            ([mr.span].into(), RemoteSpan { len: remote.len.max(MIN_BYTES), ..remote });
        let work = Work { kind: OpKind::Write, memory: mr.kind, local, remote: [span].into() };
        let is_offered = self.core.config.ask_owners || mr.region.backing.is_some();
        match self.choose(&work, None) {
            Route::Owner(_) if is_offered => "owner",
            Route::Owner(_) => self.link_of(&self.choose_lanes(&work), &remote),
            route => self.link_of(&route, &remote),
        }
    }

    /// The link of a route over lanes.
    fn link_of(&self, route: &Route<'_>, remote: &RemoteSpan) -> &'static str {
        match (route, &self.lanes.host) {
            (Route::Rails(rails), _) => rails.link(),
            (_, Some(host)) => host.path_to(remote),
            (_, None) => self.lanes.all[0].caps().link,
        }
    }

    /// The path of transfers between this memory of the peer's and memory of ours that every lane
    /// reaches, in a word for people.
    pub(crate) fn path_to(&self, remote: &RemoteSpan) -> &'static str {
        self.link_of(&self.lanes.rails_up().map_or(Route::Stream, Route::Rails), remote)
    }

    /// The lane whose GPU makes all of a write and changes this word behind it, if one does. It
    /// does not add: for writers without a GPU the owner adds, by two copies, and an addition
    /// between these would be lost.
    fn gpu_for(&self, work: &Work, word: &Word) -> Option<&dyn HostLane> {
        let host = self.lanes.host.as_deref().filter(|_| matches!(word.change, Change::Set(_)))?;
        host.signals_by_gpu(work.memory, &work.remote, word).then_some(host)
    }

    /// Whether the first lane takes a signal along with a write that is one operation of it.
    ///
    /// No operation of the first lane is ever posted again, because the connection ends with it. So
    /// the word changes once.
    fn takes_signal(&self, work: &Work) -> bool {
        work.kind == OpKind::Write
            && self.peer.takes_signals
            && self.lanes.messages().carries_signal(work.memory, &work.remote)
    }

    /// Which pieces the peer is asked to copy, because its GPUs reach memory that ours do not.
    /// Empty if there are none.
    fn better_by_owner(&self, work: &Work) -> Vec<bool> {
        if self.core.config.ask_owners {
            return vec![true; work.pieces()];
        }
        let Some(host) = self.lanes.host.as_ref().filter(|_| work.len_bytes() >= MIN_BYTES) else {
            return Vec::new();
        };
        let marks = host.owner_copies(work.memory, &work.remote);
        let marked = work.local.iter().zip(&marks).filter(|(_, mark)| **mark);
        let bytes: u64 = marked.map(|(span, _)| span.len as u64).sum();
        if bytes < MIN_BYTES { Vec::new() } else { marks }
    }

    /// The number of streams over which this many bytes are spread.
    pub(super) fn stripes(&self, bytes: u64) -> u64 {
        (bytes / STRIPE).clamp(1, self.lanes.living_streams().count().max(1) as u64)
    }

    /// The most pieces of an operation on memory of this kind.
    pub(super) fn most_pieces(&self, memory: MemoryKind) -> usize {
        let most = |lane: &Arc<dyn MessageLane>| match memory.device() {
            Some(_) => lane.caps().max_gpu_pieces,
            None => lane.caps().max_pieces,
        };
        self.lanes.streams.iter().map(most).min().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use uccl_fabric::mem::Span;

    use super::*;
    use crate::{Config, Endpoint, NoInterrupt, Transport, drive::pair::on_loopback};

    fn name(route: &Route<'_>) -> &'static str {
        match route {
            Route::GpuAndSignal(_) => "GPU and signal",
            Route::StreamAndSignal => "stream and signal",
            Route::Owner(_) => "owner",
            Route::Rails(_) => "rails",
            Route::Stream => "stream",
            Route::Streams => "streams",
        }
    }

    /// The routes of this many pieces of this many bytes, without a signal and with one.
    fn routes(conn: &Connection, kind: OpKind, pieces: usize, len: u64) -> [&'static str; 2] {
        let local = (0..pieces).map(|_| Span { addr: 4096, len: len as usize }).collect();
        let span = RemoteSpan { addr: 4096, len, key: 1, slot: 1 };
        let remote = (0..pieces).map(|_| span).collect();
        let work = Work { kind, memory: MemoryKind::Host, local, remote };
        let word = Word { span: RemoteSpan { len: 8, ..span }, change: Change::Set(1) };
        [None, Some(&word)].map(|word| name(&conn.choose(&work, word)))
    }

    #[test]
    fn work_goes_to_one_stream_to_several_or_to_the_owner_of_the_memory() {
        for ask_owners in [false, true] {
            let settings =
                Config { transport: Transport::Tcp, tcp_streams: 3, ask_owners, ..on_loopback() };
            let [here, there] =
                [(); 2].map(|()| Endpoint::new(settings.clone()).expect("an endpoint"));
            let conn = here.connect(there.addr(), None, &mut NoInterrupt).expect("connected");
            let conn = here.core().conn(conn).expect("it is there");
            if ask_owners {
                assert_eq!(routes(&conn, OpKind::Write, 2, 8), ["owner"; 2]);
                // Only a signal: there is nothing to copy.
                assert_eq!(routes(&conn, OpKind::Write, 0, 0), ["stream", "stream and signal"]);
                continue;
            }
            let most = conn.most_pieces(MemoryKind::Host);
            let write = |pieces, len| routes(&conn, OpKind::Write, pieces, len);
            assert_eq!(write(1, 100), ["stream", "stream and signal"]);
            assert_eq!(write(most, 8), ["stream", "stream and signal"]);
            assert_eq!(write(most + 1, 8), ["streams"; 2], "more pieces than one operation takes");
            assert_eq!(write(1, 2 * STRIPE - 1), ["stream", "stream and signal"]);
            assert_eq!(write(1, 2 * STRIPE), ["streams"; 2], "long enough for two streams");
            assert_eq!(routes(&conn, OpKind::Read, 1, 100), ["stream"; 2]);
        }
    }
}
