//! A transfer: prepared once, posted as often as NIXL likes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_p2p::{
    Endpoint, Iov, Op, Request, Status as Stand, TransferId, Tried, wire::advert::Advert,
};

use crate::{
    remote::Remote,
    status::{Error, Result, Status},
};

/// Checked descriptors, and what became of the last post.
pub(crate) struct Transfer {
    remote: Arc<Remote>,
    op: Op,
    iovs: Vec<Iov>,
    adverts: Vec<Advert>,
    bytes: u64,
    posted: Mutex<Posted>,
}

enum Posted {
    Not,
    Under(TransferId, Instant),
    Ended,
}

impl Transfer {
    pub(crate) fn new(remote: Arc<Remote>, op: Op, pieces: (Vec<Iov>, Vec<Advert>)) -> Self {
        let (iovs, adverts) = pieces;
        let bytes = iovs.iter().map(|iov| iov.len as u64).sum();
        Self { remote, op, iovs, adverts, bytes, posted: Mutex::new(Posted::Not) }
    }

    /// Starts it. The notification is this post's alone: the next one has its own, or none.
    pub(crate) fn post(&self, endpoint: &Endpoint, notif: Option<&[u8]>) -> Result<Status> {
        let mut posted = self.posted.lock();
        if let Posted::Under(id, _) = *posted
            && matches!(endpoint.poll(id)?, Stand::Pending)
        {
            return Err(Error::StillActive);
        }
        *posted = Posted::Not;
        let conn = self.remote.conn(endpoint)?;
        let request = Request { notif, ..Request::new(conn, self.op, &self.iovs, &self.adverts) };
        let started = Instant::now();
        match endpoint.try_run(&request)? {
            Tried::Done(_) => Ok(self.ended(&mut posted, started)),
            Tried::Under(id) => {
                *posted = Posted::Under(id, started);
                self.look(&mut posted, endpoint)
            }
        }
    }

    /// How it stands; looking moves it along.
    pub(crate) fn check(&self, endpoint: &Endpoint) -> Result<Status> {
        self.look(&mut self.posted.lock(), endpoint)
    }

    fn look(&self, posted: &mut Posted, endpoint: &Endpoint) -> Result<Status> {
        let (id, started) = match *posted {
            Posted::Under(id, started) => (id, started),
            Posted::Ended => return Ok(Status::Success),
            Posted::Not => return Err(Error::Invalid("the transfer has not been posted".into())),
        };
        match endpoint.poll(id)? {
            Stand::Pending => Ok(Status::InProgress),
            Stand::Failed(e) => Err(e.into()),
            Stand::Done(_) => Ok(self.ended(posted, started)),
        }
    }

    fn ended(&self, posted: &mut Posted, started: Instant) -> Status {
        *posted = Posted::Ended;
        self.remote.cost.lock().learn(self.bytes, started.elapsed());
        Status::Success
    }

    /// Ends it: no byte of it lands in either side's memory any more.
    pub(crate) fn cancel(&self, endpoint: &Endpoint) {
        if let Posted::Under(id, _) = *self.posted.lock() {
            // One that ended by itself, well or badly, has nothing left to be said.
            let _how_it_ended = endpoint.cancel(id);
        }
    }

    /// How long it will take, and by how much that may be wrong.
    pub(crate) fn estimate(&self) -> (Duration, Duration) {
        self.remote.cost.lock().estimate(self.bytes)
    }
}
