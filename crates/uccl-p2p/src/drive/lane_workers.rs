//! The workers of a connection's lanes: each lane is given to one of them, and others help where
//! there is much to do.

use std::sync::{Arc, atomic::Ordering::*};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::core::{
    Core,
    connection::{Connection, attached_lane::AttachedLane},
    workers::{Kick, Workers},
};
use crate::error::{Error, Result};

/// Bytes of work that are worth one more thread to share it.
const WORTH_A_HELPER: u64 = 4 << 20;

impl Workers {
    /// Gives a connection's lanes to workers.
    pub(crate) fn attach(core: &Arc<Core>, conn: &Arc<Connection>) -> Result<()> {
        let this = &core.workers;
        let first = (conn.id.0 & 0xFFFF_FFFF) as usize;
        for lane in 0..conn.lanes.all.len() {
            let shard = (first + lane) % this.shards.len();
            Self::ensure(core, shard);
            let token = this.next_token.fetch_add(1, Relaxed);
            let attached =
                Arc::new(AttachedLane::new(conn, (lane, &conn.lanes.all[lane]), shard, token));
            let home = &this.shards[shard];
            home.lanes.lock().insert(token, Arc::clone(&attached));
            // Before it is watched, which may fail: the end of the connection detaches the lanes in
            // this list.
            conn.care.attach(Arc::clone(&attached));
            epoll::add(
                &home.epoll,
                conn.lanes.all[lane].interest().fd,
                EventData::new_u64(token),
                EventFlags::ONESHOT,
            )
            .map_err(|e| Error::os("watching a lane", e))?;
            if let Some(end) = conn.lanes.all[lane].interest().end {
                epoll::add(&home.epoll, end, EventData::new_u64(token), EventFlags::IN)
                    .map_err(|e| Error::os("watching a lane's peer", e))?;
            }
            home.kick(Kick::Lane(attached));
        }
        if conn.is_failed() {
            // The connection ended while it was being attached: its end has not detached all of
            // them.
            this.detach(&conn.care.take());
        }
        Ok(())
    }

    /// Makes other threads take part in a lane's work: one, or more where there is much to do. The
    /// lane's own worker comes last, because it makes progress on the lane anyway.
    fn call_help(core: &Arc<Core>, attached: &Arc<AttachedLane>) {
        let this = &core.workers;
        let count = this.shards.len();
        let wanted = (attached.link.load() / WORTH_A_HELPER).clamp(1, count as u64) as usize;
        let first = this.next_helper.fetch_add(wanted, Relaxed) % count;
        let others = (first..first + count).map(|at| at % count).filter(|at| *at != attached.shard);
        for index in others.chain([attached.shard]).take(wanted) {
            Self::ensure(core, index);
            this.shards[index].kick(Kick::Help(Arc::clone(attached)));
        }
    }
}

impl Connection {
    /// Wakes workers to take part, if there is work that several threads can share.
    pub(crate) fn call_help(&self) {
        if !self.lanes.wants_help() {
            return;
        }
        // The lane between two processes of a host is the first one.
        let host = |attached: &&Arc<AttachedLane>| attached.lane == 0;
        if let Some(attached) = self.care.find(host) {
            Workers::call_help(&self.core, &attached);
        }
    }
}
