//! Grants: a worker grants memory to the peer's worker of the same number, which alone uses it from
//! then on.

use std::{sync::atomic::Ordering::SeqCst, time::Duration};

use uccl_p2p::{Error, wire::advert::Advert};

use super::Worker;
use crate::{
    buffer::Use,
    content::Content,
    control::{ControlMessage, GrantId},
    end::notifs,
    history,
    pattern::Pattern,
    watch,
};

/// The most grants that a worker holds.
const MOST: usize = 10;

/// Memory of the peer that this worker may use.
pub(super) struct Grant {
    pub(super) id: GrantId,
    pub(super) advert: Advert,
    pub(super) content: Content,
    /// A transfer of this worker uses it.
    pub(super) busy: bool,
    /// A write was lost with its connection and may land until the owner learns of the loss. The
    /// content is unknown.
    pub(super) tainted: bool,
    /// The owner has revoked it.
    taken: bool,
}

impl Worker {
    pub(super) fn hear(&mut self, message: ControlMessage) {
        match message {
            ControlMessage::Grant { id, advert, content, .. } => self.take(id, &advert, content),
            ControlMessage::Return { id, content, .. } => self.take_back(id, content.as_ref()),
            ControlMessage::Revoked { id, .. } => self.forget(id),
            ControlMessage::Refused { id, why, .. } => self.judge_refusal(id, &why),
            _ => {}
        }
        let Some(peer) = *self.shared.peer.lock() else { return };
        let is_of_peer = |grant: &Grant| grant.advert.instance == peer.instance as u32;
        self.grants.retain(|grant| grant.busy || (is_of_peer(grant) && !grant.taken));
    }

    fn forget(&mut self, id: GrantId) {
        if let Some(grant) = self.grants.iter_mut().find(|grant| grant.id == id) {
            grant.taken = true;
        }
    }

    fn take(&mut self, id: GrantId, advert: &[u8], content: Content) {
        match Advert::decode(advert) {
            Ok(advert) => {
                let (busy, tainted, taken) = (false, false, false);
                self.grants.push(Grant { id, advert, content, busy, tainted, taken });
            }
            Err(e) => history::broken(format!("an advert cannot be read: {e}")),
        }
        if self.grants.len() > MOST {
            self.give_back();
        }
    }

    /// Grants a registered buffer to the peer.
    pub(super) fn grant(&mut self) {
        let Some(i) = self.some_buffer(|buffer| matches!(buffer.held, Use::Registered(_))) else {
            return;
        };
        let Some(mr) = self.buffers[i].held.mr() else { return };
        self.check(i, "before it is granted");
        let (addr, len) = (self.buffers[i].addr, self.buffers[i].len);
        let advert = match self.world.ep.advertise(mr, addr, len) {
            Ok(advert) => advert.encode().to_vec(),
            Err(Error::Closed | Error::UnknownRegion(_)) if self.is_going() => return,
            Err(e) => history::broken(format!("{mr} cannot be advertised: {e}")),
        };
        let stamp = self.shared.stamp();
        let buffer = &mut self.buffers[i];
        buffer.fill(0..len, Pattern::data(stamp));
        let id = self.shared.next_grant.fetch_add(1, SeqCst);
        let content = buffer.content.clone();
        buffer.content = Content::new(len, None);
        buffer.held = Use::Granted(mr, id);
        buffer.last = format!("granted as {id:x}");
        self.note(format!("grant {id:x}: {mr}, {addr:#x} + {len:#x}"));
        history::say(&ControlMessage::Grant { worker: self.number, id, advert, content });
    }

    fn granted(&self, id: GrantId) -> Option<usize> {
        let is = |held| matches!(held, Use::Granted(_, granted) if granted == id);
        self.buffers.iter().position(|buffer| is(buffer.held))
    }

    /// Takes a buffer back after the peer has returned its grant.
    fn take_back(&mut self, id: GrantId, content: Option<&Content>) {
        // The grant was revoked already, or its endpoint was closed.
        let Some(i) = self.granted(id) else { return };
        let Use::Granted(mr, _) = self.buffers[i].held else { return };
        self.note(format!("grant {id:x} comes back, {mr}, {}", content.is_some()));
        let Some(content) = content else { return self.deregister_buffer(i, mr) };
        let buffer = &mut self.buffers[i];
        buffer.check_is_data("returned");
        buffer.check_against(content, 0..buffer.len, "returned");
        buffer.held = Use::Registered(mr);
        buffer.last = format!("grant {id:x} came back");
        self.guard(i, 0..content.len());
    }

    /// Judges a refused access of the peer: the refusal is right only if the grant was revoked
    /// before.
    fn judge_refusal(&self, id: GrantId, why: &str) {
        if self.granted(id).is_some() && !self.is_going() {
            history::broken(format!("grant {id:x} was refused and is good: {why}"));
        }
    }

    /// Returns an idle grant to the peer, if there is one.
    pub(super) fn give_back(&mut self) {
        let idle: Vec<_> = (0..self.grants.len()).filter(|i| !self.grants[*i].busy).collect();
        if idle.is_empty() {
            return;
        }
        let at = idle[self.rng.usize(0..idle.len())];
        let grant = self.grants.swap_remove(at);
        self.say_return(grant);
    }

    pub(super) fn say_return(&self, grant: Grant) {
        self.note(format!("return {:x}, tainted: {}", grant.id, grant.tainted));
        let content = (!grant.tainted).then_some(grant.content);
        history::say(&ControlMessage::Return { worker: self.number, id: grant.id, content });
    }

    /// Sends a notification with a random payload, by one of the two calls.
    pub(super) fn notify(&mut self) {
        let Some(conn) = self.world.conn(&mut self.rng) else { return };
        let payload = notifs::noise(&mut self.rng, self.shared.stamp());
        let timeout = Duration::from_millis(self.rng.u64(1..1000));
        self.note(format!("notif of {} bytes over {conn}, within {timeout:?}", payload.len()));
        let ep = &self.world.ep;
        let sent = if self.rng.bool() {
            watch::call("run_notif", timeout, || {
                ep.run_notif(conn, &payload, Some(timeout), &mut uccl_p2p::NoInterrupt)
            })
        } else {
            watch::call("send_notif", timeout, || ep.send_notif(conn, &payload, Some(timeout)))
                .map(drop)
        };
        if let Err(e) = sent {
            self.note(format!("notif: {e}"));
            self.judge(&e);
        }
    }
}
