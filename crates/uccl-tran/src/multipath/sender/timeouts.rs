//! Time: silent paths are probed, and given up in the end.

use super::{MultipathSender, PathLife};
use crate::multipath::{Attempt, Load, MultipathEvent, Repeats};

impl MultipathSender {
    /// When to call [`MultipathSender::on_timeout`] and [`MultipathSender::next`] if nothing
    /// happens before, in nanoseconds. It may be early.
    #[must_use]
    pub fn next_timeout_ns(&self) -> Option<u64> {
        (self.due_ns != u64::MAX).then_some(self.due_ns)
    }

    /// Call this when [`MultipathSender::next_timeout_ns`] has come. Earlier it does nothing.
    pub fn on_timeout(&mut self, now_ns: u64) {
        if now_ns < self.due_ns {
            return;
        }
        self.due_ns = u64::MAX;
        if self.chunks.is_idle() {
            return;
        }
        for at in 0..self.paths.len() {
            self.check_path(at, now_ns);
        }
        if self.pace_ns > now_ns {
            self.due_ns = self.due_ns.min(self.pace_ns);
        }
    }

    /// When the path has been silent for long enough to be probed.
    pub(super) fn probe_at_ns(&self, at: usize) -> u64 {
        let path = &self.paths[at];
        path.quiet_ns + self.probe_after_ns(at, path.silences)
    }

    fn probe_after_ns(&self, at: usize, silences: u32) -> u64 {
        let (rtt, params) = (&self.paths[at].rtt, &self.params);
        let held_ns = params.ack_delay_ns;
        params.tail_probe.after_ns(rtt.smoothed_ns, rtt.variation_ns, held_ns, silences)
    }

    fn check_path(&mut self, at: usize, now_ns: u64) {
        if self.paths[at].life != PathLife::Up {
            return;
        }
        self.find_losses(at, now_ns);
        if !self.paths[at].is_awaited() {
            return;
        }
        let dead_ns = self.paths[at].heard_ns + self.params.dead_after_ns;
        if now_ns >= dead_ns {
            self.give_up(at, now_ns);
            return;
        }
        if now_ns >= self.probe_at_ns(at) {
            self.on_silence(at, now_ns);
        }
        self.due_ns = self.due_ns.min(self.probe_at_ns(at)).min(dead_ns);
        self.refresh(at);
    }

    fn on_silence(&mut self, at: usize, now_ns: u64) {
        let once_ns = self.probe_after_ns(at, 0);
        self.suspect(at, now_ns, now_ns.saturating_sub(once_ns));
        let path = &mut self.paths[at];
        path.quiet_ns = now_ns;
        path.silences = path.silences.saturating_add(1);
        let is_long = path.silences == 2 && now_ns.saturating_sub(self.heard_ns) > once_ns;
        if !std::mem::replace(&mut path.is_probe_due, true) {
            self.probes.push_back(at as u16);
        }
        if is_long && !std::mem::replace(&mut self.is_silent, true) {
            self.techniques.control.on_silence(now_ns);
        }
    }

    fn give_up(&mut self, at: usize, now_ns: u64) {
        let path = at as u16;
        match self.params.repeats {
            Repeats::Harmless => self.close_path(now_ns, path),
            Repeats::OnlyWhenProven => self.paths[at].life = PathLife::Dead,
        }
        self.refresh(at);
        self.events.push_back(MultipathEvent::PathDead { path });
    }

    /// The next probe that is due.
    pub(super) fn next_probe(&mut self, now_ns: u64) -> Option<Attempt> {
        while let Some(path) = self.probes.pop_front() {
            let at = usize::from(path);
            let own = &mut self.paths[at];
            own.is_probe_due = false;
            if own.life == PathLife::Up
                && let Some(number) = own.push_probe(now_ns)
            {
                return Some(self.attempt(at, number, Load::Probe, now_ns));
            }
        }
        None
    }
}
