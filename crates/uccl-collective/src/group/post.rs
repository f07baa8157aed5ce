//! The messages of a call are posted.

use std::sync::Arc;

use super::Group;
use crate::{
    error::{Error, Result},
    memory::{Buffer, CallRegions},
    part::{CallOptions, Part},
    plan::{Message, Relay, RelayPlan},
    relays::Relays,
    work::{OpenCall, Work},
};

/// A call's kind and options.
#[derive(Clone, Copy)]
pub(super) struct Call {
    /// Whether the other ranks depend on it.
    pub(super) is_collective: bool,
    pub(super) options: CallOptions,
}

/// The messages of a call, as in a [`RelayPlan`].
#[derive(Clone, Copy)]
pub(super) struct Messages<'a> {
    direct: &'a [Message],
    received: &'a [Message],
    relays: &'a [Relay],
}

impl<'a> Messages<'a> {
    /// Those of a call in which each goes straight to its rank.
    pub(super) fn direct(direct: &'a [Message]) -> Self {
        Self { direct, received: &[], relays: &[] }
    }

    pub(super) fn of(plan: &'a RelayPlan) -> Self {
        Self { direct: &plan.direct, received: &plan.received, relays: &plan.relays }
    }

    fn len(&self) -> usize {
        self.direct.len() + self.received.len() + self.relays.len()
    }
}

impl Group {
    pub(super) fn post(
        &self,
        buffers: Vec<Buffer>,
        messages: Messages<'_>,
        call: Call,
    ) -> Result<Arc<Work>> {
        self.check_open()?;
        let lens: Vec<_> = buffers.iter().map(|buffer| (buffer.ptr(), buffer.len())).collect();
        let regions = CallRegions::of(&self.shared.endpoint, &self.registry, buffers)?;
        let posting = self.posting.lock();
        let (mut parts, mut failed) = (Vec::with_capacity(messages.len()), None);
        let direct = messages.direct.iter().map(|one| (one, self.shared.conn(one.peer)));
        let received = messages.received.iter();
        let received = received.map(|one| (one, self.shared.conn_of_relays(one.peer)));
        for (message, conn) in direct.chain(received) {
            let (peer, buffer) = (message.peer, message.piece.buffer);
            if self.needs_registration && !self.is_local(peer) && !regions.is_registered(buffer) {
                let (ptr, len) = lens[buffer];
                failed = Some(Error::NotRegistered { rank: peer, ptr, len });
                break;
            }
            let place = (&*self.shared, &regions);
            match conn.and_then(|conn| Part::post(place, conn, message, call.options)) {
                Ok(part) => parts.push(part),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        let relays = Relays::new(messages.relays, &self.shared, call.options);
        drop(posting);
        let has_relays = !relays.is_empty();
        let shared = Arc::clone(&self.shared);
        let id = self.ledger.next();
        let open = OpenCall { parts, relays, regions };
        let work = Arc::new(Work::new(id, shared, call.is_collective, open));
        if let Some(error) = failed {
            return Err(work.fail(error));
        }
        self.ledger.add(&work);
        if has_relays && let Err(error) = self.relayer.add(&work) {
            return Err(work.fail(error));
        }
        Ok(work)
    }
}
