//! The connections of an endpoint: their ids, and announcements to all of them.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_fabric::{lane::HostLane, rail::RailError};

use super::{
    core::{Core, Devices, Entry, connection::Connection},
    regions::Mr,
};
use crate::{
    error::{Error, Result},
    ids::ConnId,
    types::ConnInfo,
};

/// Number of lost connections that are kept with their reason, for callers that ask.
const KEPT_LOST: usize = 1024;

impl Core {
    /// Adds a connection. `make` makes it, and gets the id that it will have.
    pub(crate) fn add_conn(
        &self,
        make: impl FnOnce(ConnId) -> Arc<Connection>,
    ) -> Result<Arc<Connection>> {
        let mut conns = self.conns.write();
        self.usable()?;
        conns.generation = conns.generation.wrapping_add(1).max(1);
        let generation = conns.generation;
        let entry = conns.slab.vacant_entry();
        let conn = make(ConnId(u64::from(generation) << 32 | entry.key() as u64));
        entry.insert(Entry::Open(Arc::clone(&conn)));
        Ok(conn)
    }

    pub(crate) fn conn(&self, id: ConnId) -> Result<Arc<Connection>> {
        match self.conns.read().slab.get(index(id)) {
            // It is being ended: its transfers may have failed already.
            Some(Entry::Open(conn)) if conn.id == id && conn.is_failed() => Err(conn.lost_error()),
            Some(Entry::Open(conn)) if conn.id == id => Ok(Arc::clone(conn)),
            Some(Entry::Lost(lost, e, _)) if *lost == id => Err(e.clone()),
            _ => Err(Error::UnknownConnection(id)),
        }
    }

    /// Information about a connection, including one that is lost.
    pub(crate) fn conn_info(&self, id: ConnId) -> Result<ConnInfo> {
        match self.conns.read().slab.get(index(id)) {
            Some(Entry::Open(conn)) if conn.id == id => Ok(conn.info()),
            Some(Entry::Lost(lost, _, info)) if *lost == id => Ok((**info).clone()),
            _ => Err(Error::UnknownConnection(id)),
        }
    }

    pub(crate) fn open_conns(&self) -> SmallVec<[Arc<Connection>; 8]> {
        let conns = self.conns.read();
        let open = conns.slab.iter().filter_map(|(_, entry)| match entry {
            Entry::Open(conn) => Some(Arc::clone(conn)),
            Entry::Lost(..) => None,
        });
        open.collect()
    }

    /// Replaces a lost connection by the reason for its loss. Does nothing if it was forgotten
    /// already: its slot may belong to another connection by now.
    pub(crate) fn conn_lost(&self, conn: &Connection, e: Error) {
        let lost = Entry::Lost(conn.id, e, Box::new(conn.info()));
        let mut conns = self.conns.write();
        let old = match conns.slab.get_mut(index(conn.id)) {
            Some(Entry::Open(open)) if open.id != conn.id => return,
            Some(entry @ Entry::Open(_)) => std::mem::replace(entry, lost),
            _ => return,
        };
        conns.lost.push_back(index(conn.id));
        if conns.lost.len() > KEPT_LOST
            && let Some(oldest) = conns.lost.pop_front()
        {
            conns.slab.try_remove(oldest);
        }
        drop(conns);
        drop(old);
        self.accepts.lock().waiting.retain(|accepted| accepted.conn != conn.id);
    }

    /// Forgets a connection. Returns true if it was there, open or lost.
    pub(crate) fn forget_conn(&self, id: ConnId) -> bool {
        let mut conns = self.conns.write();
        let known = match conns.slab.get(index(id)) {
            Some(Entry::Open(conn)) => conn.id == id,
            Some(Entry::Lost(lost, ..)) => *lost == id,
            None => false,
        };
        if known {
            conns.lost.retain(|lost| *lost != index(id));
            let entry = conns.slab.remove(index(id));
            drop(conns);
            drop(entry);
        }
        known
    }

    /// Offers all shared memory that is registered to a new peer of this host, which may then map
    /// it.
    pub(crate) fn offer_memory_to(&self, conn: &Connection) {
        for memory in self.mrs.shared_memory() {
            conn.lanes.host.iter().for_each(|lane| lane.offer(&memory));
        }
    }

    /// Called when a region has ended. Devices let go of it. Peers forget its memory, unless other
    /// regions lie in it. An error says why a device did not let go: it may still reach the memory.
    pub(crate) fn let_go_of_memory(&self, mr: &Mr) -> std::result::Result<(), RailError> {
        if let Some(Devices { rails, .. }) = self.rails.get() {
            rails.remove(mr.region.slot)?;
        }
        self.mrs.let_go(mr, |memory| self.for_each_host(|lane| lane.retract(memory.id())));
        Ok(())
    }

    /// Calls `each` with the lane to each peer of this host.
    pub(super) fn for_each_host(&self, each: impl Fn(&dyn HostLane)) {
        for conn in self.open_conns() {
            conn.lanes.host.iter().for_each(|lane| each(&**lane));
        }
    }
}

fn index(id: ConnId) -> usize {
    (id.0 & 0xFFFF_FFFF) as usize
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::Ordering::Relaxed,
        time::{Duration, Instant},
    };

    use crate::{
        Acceptance, Config, Endpoint, Iov, NoInterrupt, Op, Request, Status, Transport,
        drive::{
            core::{MAX_ACCEPTS, NOTIF_LIMIT},
            pair::on_loopback,
        },
    };

    #[test]
    fn peers_that_have_ended_are_not_watched_any_more() {
        let config = || Config { transport: Transport::Local, ..on_loopback() };
        let (a, b) = (Endpoint::new(config()), Endpoint::new(config()));
        let (a, b) = (a.expect("an endpoint"), b.expect("an endpoint"));
        for _ in 0..3 {
            let conn = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
            b.accept(None, &mut NoInterrupt).expect("accepted");
            a.disconnect(conn).expect("it was there");
        }
        let begun = Instant::now();
        // A worker does it; nobody calls anything.
        while [&a, &b].iter().any(|ep| !ep.core().aftermaths.is_empty()) {
            assert!(begun.elapsed() < Duration::from_secs(20), "peers are watched for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn empty_notifications_count_too() {
        let ends = [on_loopback(), on_loopback()]
            .map(|config| Endpoint::new(config).expect("an endpoint"));
        let conn = ends[0].connect(ends[1].addr(), None, &mut NoInterrupt).expect("connected");
        ends[1].core().notif_bytes.store(NOTIF_LIMIT, Relaxed);
        let send = || ends[0].send_notif(conn, b"", None).expect("posted");
        let is_there = |id| !matches!(ends[0].poll(id).expect("known"), Status::Pending);
        let sent = [send(), send()];
        until("the first fits", || is_there(sent[0]));
        // A send that follows them is answered after them.
        let mut memory = [[0_u64; 2]; 2];
        let iovs = [0, 1].map(|at| {
            let (ptr, len) = (memory[at].as_mut_ptr() as usize, 16);
            // SAFETY: the memory outlives the endpoints' use of it.
            let mr = unsafe { ends[at].register(ptr, len) }.expect("registered");
            [Iov { mr, ptr, len }]
        });
        let back = ends[1].core().open_conns()[0].id;
        let recv = Request::new(back, Op::Recv, &iovs[1], &[]);
        ends[1].post(&recv).expect("posted");
        let send = Request::new(conn, Op::Send, &iovs[0], &[]);
        ends[0].run(&send, &mut NoInterrupt).expect("sent");
        assert!(!is_there(sent[1]), "the second must wait for the first to be taken");
        assert_eq!(ends[1].take_notifs().expect("ours").len(), 1);
        until("there is room again", || is_there(sent[1]));
        assert_eq!(ends[1].take_notifs().expect("ours").len(), 1);
    }

    #[test]
    fn connections_that_end_do_not_wait_for_accept() {
        let ends = [on_loopback(), on_loopback()]
            .map(|config| Endpoint::new(config).expect("an endpoint"));
        let waiting = || ends[1].core().accepts.lock().waiting.len();
        let connect = || ends[0].connect(ends[1].addr(), None, &mut NoInterrupt);
        let first = connect().expect("connected");
        let second = connect().expect("connected");
        until("both are offered", || waiting() == 2);
        ends[0].disconnect(first).expect("it was there");
        until("the first has left", || waiting() == 1);
        let accepted = ends[1].accept(None, &mut NoInterrupt).expect("the second");
        ends[1].check_connection(accepted.conn).expect("it lives");
        ends[0].check_connection(second).expect("it lives");
    }

    #[test]
    fn so_many_connections_wait_for_accept_and_no_more() {
        let ends = [on_loopback(), on_loopback()]
            .map(|config| Endpoint::new(config).expect("an endpoint"));
        let waits = |at: usize| Acceptance {
            conn: crate::ConnId(at as u64),
            ip: [127, 0, 0, 1].into(),
            gpu_index: 0,
        };
        let full = (0..MAX_ACCEPTS).map(waits).collect();
        ends[1].core().accepts.lock().waiting = full;
        let connect = || ends[0].connect(ends[1].addr(), None, &mut NoInterrupt);
        let refused = connect().expect_err("there is no place").to_string();
        assert!(refused.contains("accept"), "{refused}");
        ends[1].accept(None, &mut NoInterrupt).expect("one of them");
        connect().expect("there is a place");
    }

    #[test]
    fn a_connection_that_ends_late_leaves_its_successor_alone() {
        let ends = [on_loopback(), on_loopback()]
            .map(|config| Endpoint::new(config).expect("an endpoint"));
        let connect = || {
            let conn = ends[0].connect(ends[1].addr(), None, &mut NoInterrupt).expect("connected");
            ends[1].accept(None, &mut NoInterrupt).expect("accepted");
            conn
        };
        let core = ends[0].core();
        let first = core.conn(connect()).expect("it is there");
        ends[0].disconnect(first.id).expect("it was there");
        let second = connect();
        assert_eq!(super::index(first.id), super::index(second), "they have the same place");
        core.conn_lost(&first, first.lost_to("too late"));
        ends[0].check_connection(second).expect("the second has not ended");
    }
}
