//! The notes that the two ends exchange: they pair rails, make channels and give them up, ask for
//! keys and take them back.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_fabric::region::{RegionDescription, Rights};
use uccl_wire::{
    frame::Status,
    rails::{Grant, LANDING, MAX_RAILS, Note, PathId, RailOffer, RegionId},
};

use super::{RmaLane, Role};
use crate::{
    lent::{AnswerEvent, PendingAnswer, Step},
    path::Path,
    pinned::PinnedRegion,
    state::State,
};

/// How long a connection waits for the other paths once the first one works.
const LATECOMERS: Duration = Duration::from_millis(500);

impl RmaLane {
    /// Handles a note from the peer.
    pub(super) fn take(&self, state: &mut State, note: Note) -> Result<(), String> {
        match (note, self.role) {
            (Note::Offer(theirs), _) => return self.on_offer(state, &theirs),
            (Note::Open { id, rail, address }, Role::Acceptor) => {
                return self.on_open(state, id, rail, &address);
            }
            (Note::Opened { id, address }, Role::Connector) => {
                return self.on_opened(state, id, &address);
            }
            (Note::Refused { id, why }, Role::Connector) => {
                return self.on_refused(state, id, &why);
            }
            (Note::Ready(id), Role::Acceptor) => {
                let at = state.index_of(id)?;
                self.path_came_up(state, at);
            }
            (Note::Down(id), _) => return self.on_down(state, id),
            (Note::Settled, Role::Acceptor) => state.settled = true,
            (Note::Ask(region), _) => self.go_on(state, region, Step::Begun),
            (Note::Grant(region, grant), _) => {
                let State { keys, paths, .. } = state;
                keys.granted(region, grant, |id, key| import(paths, id, key));
                state.unpark();
            }
            (Note::Deny(region, status), _) => {
                state.keys.denied(region, status);
                state.unpark();
                self.pump(state);
                // Slots are reused, so a later operation has to ask again.
                state.keys.forget(region);
            }
            (Note::Revoke(region), _) => {
                if state.lent.releasing.contains(&region) {
                    return Err(format!("the end of {region:?}, which is ending"));
                }
                state.keys.forget(region);
                state.lent.releasing.push(region);
                state.release_if_unused(region);
            }
            (Note::Released(RegionId { slot, key }), _) => {
                if state.lent.by_slot.get(&slot) == Some(&(key, true)) {
                    state.lent.by_slot.remove(&slot);
                }
            }
            (Note::Stage { chunk, write, pieces }, _) => {
                return self.on_stage(state, chunk, write, &pieces);
            }
            (Note::Staged { chunk, status }, _) => return state.on_staged(chunk, status),
            (note, role) => return Err(format!("the {role:?} was told {note:?}")),
        }
        Ok(())
    }

    fn on_offer(&self, state: &mut State, theirs: &[RailOffer]) -> Result<(), String> {
        if std::mem::replace(&mut state.offered, true) {
            return Err("a second offer of rails".into());
        }
        match self.role {
            Role::Acceptor => {
                state.is_to_offer = true;
                self.offer_due(state);
            }
            Role::Connector => {
                let ours = self.rails.offer();
                let now = Instant::now();
                let pairs = pair(&ours, theirs).into_iter().enumerate();
                let path = |(n, (ours, their)): (usize, (usize, usize))| {
                    let path = Path::new(n as u16, ours, their as u16, Some(now));
                    path.to(&theirs[their].name)
                };
                state.paths = pairs.map(path).collect();
                self.open_due(state);
            }
        }
        Ok(())
    }

    /// Sends the offer of our rails that is due, as soon as they are open. True if it was sent.
    pub(super) fn offer_due(&self, state: &mut State) -> bool {
        let is_due = state.is_to_offer && self.rails.are_open();
        if is_due {
            state.is_to_offer = false;
            state.notes.push_back(Note::Offer(self.rails.offer()));
        }
        is_due
    }

    /// Starts to make our ends of the channels that are due for an attempt. True if there were any.
    pub(super) fn open_due(&self, state: &mut State) -> bool {
        if self.role == Role::Acceptor || state.paths.iter().all(|path| path.retry_at().is_none()) {
            return false;
        }
        let (now, mut opened) = (Instant::now(), false);
        let due = |path: &&mut Path| path.retry_at().is_some_and(|at| at <= now);
        for path in state.paths.iter_mut().filter(due) {
            opened = true;
            path.make(&self.rails);
        }
        opened
    }

    /// Our end of a channel is made: has the peer make its own.
    pub(super) fn on_made(&self, state: &mut State, at: usize) {
        let State { paths, bell, notes, .. } = state;
        let path = &mut paths[at];
        path.watch(bell);
        if let Some(address) = path.address() {
            let address = address.to_vec();
            notes.push_back(Note::Open { id: path.id, rail: path.theirs, address });
        }
    }

    /// Our end of a channel could not be made. The peer does not know of the attempt.
    pub(super) fn on_not_made(&self, state: &mut State, at: usize, why: &str) {
        let State { paths, bell, .. } = state;
        paths[at].lose(why, bell);
        self.settle_path(state, at);
    }

    fn on_open(
        &self,
        state: &mut State,
        id: PathId,
        rail: u16,
        address: &[u8],
    ) -> Result<(), String> {
        let ours = usize::from(rail);
        if ours >= self.rails.all().len() {
            return Err(format!("a channel for rail {rail}, which was not offered"));
        }
        let paths = &mut state.paths;
        // Each rail has one path, so the peer cannot make more paths than there are rails.
        let known = paths.iter().position(|path| path.id.path == id.path || path.ours == ours);
        let at = known.unwrap_or_else(|| {
            paths.push(Path::new(id.path, ours, 0, None));
            paths.len() - 1
        });
        let path = &mut paths[at];
        if path.id.path != id.path || path.ours != ours || !path.is_idle() {
            return Err(format!("a channel for path {} and rail {rail}, which have one", id.path));
        }
        path.make_joined(id.attempt, &self.rails, address);
        Ok(())
    }

    fn on_opened(&self, state: &mut State, id: PathId, address: &[u8]) -> Result<(), String> {
        let at = state.index_of(id)?;
        let path = &mut state.paths[at];
        if path.is_dying() {
            return Ok(());
        }
        path.join(address);
        Ok(())
    }

    /// Our end is joined with the peer's. The accepting end sends its address; the connecting end
    /// sends a probe.
    pub(super) fn on_joined(&self, state: &mut State, at: usize) {
        let State { paths, bell, notes, .. } = state;
        let path = &mut paths[at];
        if self.role == Role::Connector {
            if let Err(e) = path.probe(self.silence.probe) {
                self.lose_path(state, at, &e.to_string());
            }
            return;
        }
        path.watch(bell);
        if let Some(address) = path.address() {
            notes.push_back(Note::Opened { id: path.id, address: address.to_vec() });
        }
    }

    pub(super) fn on_not_joined(&self, state: &mut State, at: usize, why: String) {
        if self.role == Role::Connector {
            return self.lose_path(state, at, &why);
        }
        let State { paths, bell, .. } = state;
        paths[at].lose(&why, bell);
        paths[at].refusal = Some(why);
    }

    /// Our end of a channel is gone: tells the peer.
    pub(super) fn on_gone(&self, state: &mut State, at: usize) {
        let State { paths, notes, .. } = state;
        let path = &mut paths[at];
        if let Some(why) = path.refusal.take() {
            // Nothing was ever requested on it, so the peer need not answer.
            path.settle(false);
            notes.push_back(Note::Refused { id: path.id, why });
            return;
        }
        notes.push_back(Note::Down(path.id));
        if path.peer_gone {
            self.settle_path(state, at);
        }
    }

    /// The peer makes no end for this channel: drops ours.
    fn on_refused(&self, state: &mut State, id: PathId, why: &str) -> Result<(), String> {
        let at = state.index_of(id)?;
        let State { paths, bell, .. } = state;
        let path = &mut paths[at];
        if path.is_idle() {
            return Ok(());
        }
        path.lose(&format!("the peer: {why}"), bell);
        if path.is_ending() {
            path.peer_gone = true;
        } else {
            self.settle_path(state, at);
        }
        Ok(())
    }

    fn on_down(&self, state: &mut State, id: PathId) -> Result<(), String> {
        let at = state.index_of(id)?;
        if state.paths[at].is_idle() {
            // We refused the channel, and the peer had given it up already.
            return Ok(());
        }
        if !state.paths[at].is_dying() {
            self.lose_path(state, at, "the peer has lost it");
        }
        if state.paths[at].is_ending() {
            // It is settled when ours has gone as well.
            state.paths[at].peer_gone = true;
        } else {
            self.settle_path(state, at);
        }
        Ok(())
    }

    /// Both ends of a path's channel are gone, so nothing that was on it can land any more: its
    /// parts may be requested again.
    pub(super) fn settle_path(&self, state: &mut State, at: usize) {
        let orphans = state.paths[at].settle(self.role == Role::Connector);
        state.again.extend(orphans);
        self.say_if_useless(state, at);
        state.pass_on_releases();
    }

    /// Answers the peer's question about a region, with the steps up to `done` taken, or notes the
    /// event that the answer waits for. Slow work of devices is not done here: the connection goes
    /// on meanwhile.
    fn go_on(&self, state: &mut State, region: RegionId, done: Step) {
        match self.next_wait(state, region, done) {
            Ok(Some(awaits)) => state.lent.due.push(PendingAnswer { region, awaits }),
            Ok(None) => {
                let granted = self.grant(state, region);
                state.answer(region, granted);
            }
            Err(status) => state.answer(region, Err(status)),
        }
    }

    /// The next event that the answer about a region waits for. None: it need not wait.
    fn next_wait(
        &self,
        state: &mut State,
        region: RegionId,
        done: Step,
    ) -> Result<Option<AnswerEvent>, Status> {
        if region == LANDING {
            let area = state.landing.area().ok_or(Status::UnknownKey)?;
            let pinned = Arc::clone(area.pinned());
            let waits = done < Step::Exported && self.make_keys(state, &pinned, Rights::ALL);
            return Ok(waits.then_some(AnswerEvent::Keys(pinned)));
        }
        let described = self.regions.describe(region.slot, region.key)?;
        let (root, rights) = (described.region, described.rights);
        if self.rails.is_to_register(root) {
            return Ok(Some(AnswerEvent::Region(root)));
        }
        let pinned = self.rails.of_slot(root);
        if let Some(pinned) = &pinned {
            if done < Step::Narrowed && pinned.narrow(self.rails.all(), rights) {
                return Ok(Some(AnswerEvent::Narrow(Arc::clone(pinned), rights)));
            }
            if done < Step::Exported && self.make_keys(state, pinned, rights) {
                return Ok(Some(AnswerEvent::Keys(Arc::clone(pinned))));
            }
        }
        let is_reached = pinned.is_some_and(|pinned| {
            state.paths.iter_mut().any(|path| path.key_of(&pinned, rights).is_some())
        });
        let waits = done < Step::Landed && !is_reached && self.make_landing(state, described.kind);
        Ok(waits.then_some(AnswerEvent::Landing))
    }

    /// Starts to make the keys with which a peer that has these rights names the memory, where
    /// devices take long over that. True if keys for it are being made.
    fn make_keys(&self, state: &mut State, pinned: &Arc<PinnedRegion>, rights: Rights) -> bool {
        state.paths.iter_mut().for_each(|path| path.make_key(pinned, rights));
        state.paths.iter().any(|path| path.is_making_key(pinned))
    }

    /// Goes on with the questions when the devices are ready for them. True if there were any.
    pub(super) fn answer_due(&self, state: &mut State) -> bool {
        if state.lent.due.is_empty() {
            return false;
        }
        let due = std::mem::take(&mut state.lent.due);
        let is_over = |due: &PendingAnswer| match &due.awaits {
            AnswerEvent::Region(root) => !self.rails.is_to_register(*root),
            AnswerEvent::Narrow(pinned, rights) => !pinned.is_narrowing(*rights),
            AnswerEvent::Keys(pinned) => !state.paths.iter().any(|path| path.is_making_key(pinned)),
            AnswerEvent::Landing => !state.landing.is_making(),
        };
        let (over, still): (Vec<_>, Vec<_>) = due.into_iter().partition(is_over);
        state.lent.due = still;
        // In each case the region may have ended meanwhile.
        for PendingAnswer { region, awaits } in &over {
            self.go_on(state, *region, awaits.step());
        }
        !over.is_empty()
    }

    /// Makes the grant for a region. The caller holds the state's lock, so a later revoke of the
    /// region finds that it was lent.
    fn grant(&self, state: &mut State, region: RegionId) -> Result<Grant, Status> {
        if region == LANDING {
            return self.grant_landing(state);
        }
        let described = self.regions.describe(region.slot, region.key)?;
        let RegionDescription { span, rights, kind, region: root } = described;
        let pinned = self.rails.of_slot(root);
        let paths =
            pinned.map_or_else(Vec::new, |pinned| state.keys_of(&pinned, span.addr, rights));
        let staged = paths.is_empty() && self.has_landing_for(state, kind);
        if root == region.slot && (staged || !paths.is_empty()) {
            state.lent.by_slot.insert(region.slot, (region.key, false));
        }
        let (addr, len) = (span.addr as u64, span.len as u64);
        Ok(Grant { addr, len, read: rights.read, write: rights.write, staged, paths })
    }

    /// On the connecting end: sends `Settled` when every path has been tried, or [`LATECOMERS`] has
    /// passed since the first came up.
    pub(super) fn settle(&self, state: &mut State) {
        if state.settled || self.role != Role::Connector || !state.offered {
            return;
        }
        let late = state.first_up.is_some_and(|at| at.elapsed() > LATECOMERS);
        if late || state.paths.iter().all(Path::is_settled) {
            state.settled = true;
            state.notes.push_back(Note::Settled);
            (0..state.paths.len()).for_each(|at| self.say_if_useless(state, at));
        }
    }

    /// Logs, once a path, why nothing has ever gone over it. Before the connection is settled it
    /// may still be that the peer is slow.
    pub(super) fn say_if_useless(&self, state: &mut State, at: usize) {
        if !state.settled || self.role != Role::Connector {
            return;
        }
        let path = &mut state.paths[at];
        let (ours, theirs) = (path.ours, path.their_name.clone());
        if let Some(why) = path.why_never() {
            self.rails.say_not_joined(ours, &theirs, why);
        }
    }
}

impl State {
    /// Answers the peer's question about a region.
    fn answer(&mut self, region: RegionId, granted: Result<Grant, Status>) {
        self.notes.push_back(match granted {
            Ok(grant) => Note::Grant(region, grant),
            Err(status) => Note::Deny(region, status),
        });
    }

    fn index_of(&self, id: PathId) -> Result<usize, String> {
        let at = self.paths.iter().position(|path| path.id == id);
        at.ok_or_else(|| format!("{id:?}, which there is not"))
    }
}

fn import(paths: &mut [Path], id: PathId, key: &[u8]) -> Option<u64> {
    let channel = paths.iter_mut().find_map(|path| path.channel_of(id))?;
    channel.import(key).inspect_err(|e| tracing::warn!("a peer's key is of no use: {e}")).ok()
}

/// Pairs our rails with the peer's: first those of the same network, then the others in order.
fn pair(ours: &[RailOffer], theirs: &[RailOffer]) -> Vec<(usize, usize)> {
    let mut partner = vec![None; ours.len()];
    let mut taken = vec![false; theirs.len()];
    let near = |a: &RailOffer, b: &RailOffer| !a.network.is_empty() && a.network == b.network;
    for same_network in [true, false] {
        for (i, our) in
            ours.iter().enumerate().filter(|(i, _)| partner[*i].is_none()).collect::<Vec<_>>()
        {
            let fits = |j: &usize| {
                let their = &theirs[*j];
                !taken[*j] && their.link == our.link && (!same_network || near(our, their))
            };
            if let Some(j) = (0..theirs.len()).find(fits) {
                (partner[i], taken[j]) = (Some(j), true);
            }
        }
    }
    let pairs = partner.into_iter().enumerate();
    pairs.filter_map(|(i, j)| Some((i, j?))).take(MAX_RAILS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rails(of: &[(&str, &str)]) -> Vec<RailOffer> {
        let offer = |(link, network): &(&str, &str)| RailOffer {
            name: String::new(),
            link: (*link).to_owned(),
            network: (*network).to_owned(),
        };
        of.iter().map(offer).collect()
    }

    #[test]
    fn rails_of_one_network_are_joined() {
        let ours = rails(&[("verbs", "a"), ("verbs", "b"), ("verbs", "c")]);
        let theirs = rails(&[("verbs", "c"), ("verbs", "x"), ("verbs", "a"), ("verbs", "y")]);
        assert_eq!(pair(&ours, &theirs), [(0, 2), (1, 1), (2, 0)]);
    }

    #[test]
    fn rails_of_other_links_are_not_joined() {
        let ours = rails(&[("verbs", ""), ("libfabric:tcp", "")]);
        let theirs = rails(&[("libfabric:tcp", ""), ("libfabric:shm", "")]);
        assert_eq!(pair(&ours, &theirs), [(1, 0)]);
        assert_eq!(pair(&ours, &[]), []);
    }
}
