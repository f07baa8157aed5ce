//! Attempts that are taken for lost.

use super::{MultipathSender, PROBE, PathAttempt};
use crate::{
    multipath::Repeats,
    recovery::{AttemptView, Fate},
};

impl MultipathSender {
    /// Judges the attempts of a path before the largest number that has come.
    pub(super) fn find_losses(&mut self, at: usize, now_ns: u64) {
        let Some(progress) = self.paths[at].progress else { return };
        let is_proven = self.params.repeats == Repeats::OnlyWhenProven;
        let mut lost = std::mem::take(&mut self.lost);
        lost.clear();
        for (number, sent) in self.paths[at].waiting_before(progress.largest) {
            let view = AttemptView { number, sent_ns: sent.sent_ns };
            // Order alone proves. A guess counts only where a chunk may be under way twice.
            let fate = match is_proven {
                true => Fate::Lost,
                false => self.techniques.loss.judge(&view, &progress, now_ns),
            };
            match fate {
                Fate::Lost => lost.push((number, sent)),
                Fate::LostAt(at_ns) => self.due_ns = self.due_ns.min(at_ns),
                Fate::Waits => {}
            }
        }
        self.lose(at, now_ns, &lost);
        self.lost = lost;
        self.trim(at);
    }

    /// Takes the attempts of a silent path for lost, where a guess counts.
    pub(super) fn suspect(&mut self, at: usize, now_ns: u64, older_than_ns: u64) {
        if self.params.repeats == Repeats::OnlyWhenProven {
            return;
        }
        let mut lost = std::mem::take(&mut self.lost);
        lost.clear();
        let waiting = self.paths[at].waiting_before(u64::MAX);
        lost.extend(
            waiting.filter(|(_, sent)| sent.slot != PROBE && sent.sent_ns <= older_than_ns),
        );
        self.lose(at, now_ns, &lost);
        self.lost = lost;
    }

    fn lose(&mut self, at: usize, now_ns: u64, lost: &[(u64, PathAttempt)]) {
        let is_proven = self.params.repeats == Repeats::OnlyWhenProven;
        let mut bytes = 0;
        for (number, sent) in lost {
            self.paths[at].lose(*number, is_proven);
            if sent.slot == PROBE {
                continue;
            }
            bytes += u64::from(sent.len);
            self.in_flight -= u64::from(sent.len);
            let event = self.chunks.on_loss(sent.slot, at as u16);
            self.events.extend(event);
            if is_proven {
                self.chunks.forget(sent.slot);
            }
        }
        if !lost.is_empty() {
            self.techniques.control.on_loss(now_ns, bytes);
            self.techniques.choice.on_loss(at);
        }
    }

    /// Forgets attempts that are over.
    fn trim(&mut self, at: usize) {
        self.forgotten.clear();
        self.paths[at].trim(&mut self.forgotten);
        self.forgotten.iter().for_each(|slot| self.chunks.forget(*slot));
    }
}
