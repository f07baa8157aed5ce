//! Pieces of a plan, merged to the longest runs.

use std::collections::BTreeMap;

use super::{
    MOST_PIECES, Peer, Piece, Plan, PlanError, Read, Step, TargetPlan,
    area::Area,
    layout::{Layout, Tensor},
    spread::Choice,
};

/// A plan in the making.
pub(super) struct Draft<'a> {
    tensors: &'a [Tensor],
    sources: &'a [Layout],
    targets: &'a [Layout],
    /// By target: the pieces of each step and rank.
    reads: Vec<BTreeMap<(usize, Peer), Vec<Piece>>>,
    /// The number of pieces.
    count: u64,
}

impl<'a> Draft<'a> {
    pub(super) fn new(tensors: &'a [Tensor], sources: &'a [Layout], targets: &'a [Layout]) -> Self {
        let reads = vec![BTreeMap::new(); targets.len()];
        Self { tensors, sources, targets, reads, count: 0 }
    }

    /// Adds the bytes of an area of a tensor to a step. Fails if there are too many pieces.
    pub(super) fn add(
        &mut self,
        tensor: usize,
        area: &Area,
        step: usize,
        choice: &Choice,
    ) -> Result<(), PlanError> {
        let to = &self.targets[choice.reader.rank].slices[choice.reader.slice];
        let from = match choice.from {
            Peer::Source(rank) => &self.sources[rank].slices[choice.slice],
            Peer::Target(rank) => &self.targets[rank].slices[choice.slice],
        };
        self.count = self.count.saturating_add(area.run_count(&from.area, &to.area));
        if self.count > MOST_PIECES as u64 {
            let name = self.tensors[tensor].name.clone();
            return Err(PlanError::TooManyParts { tensor: name, most: MOST_PIECES });
        }
        let pieces = self.reads[choice.reader.rank].entry((step, choice.from)).or_default();
        let runs = area.runs(&from.area, &to.area, self.tensors[tensor].element_bytes);
        pieces.extend(runs.into_iter().filter(|run| run.len > 0).map(|run| Piece {
            to_buffer: to.place.buffer,
            to: to.place.offset + run.to,
            from_buffer: from.place.buffer,
            from: from.place.offset + run.from,
            len: run.len,
        }));
        Ok(())
    }

    pub(super) fn plan(self) -> Plan {
        let count = self.reads.iter().flat_map(BTreeMap::keys).map(|(step, _)| step + 1).max();
        let targets = self.reads.into_iter().map(|reads| {
            let mut steps = vec![Step::default(); count.unwrap_or(0)];
            for ((step, from), pieces) in reads {
                let pieces = merge(pieces);
                if !pieces.is_empty() {
                    steps[step].reads.push(Read { from, pieces });
                }
            }
            TargetPlan { steps }
        });
        Plan { targets: targets.collect() }
    }
}

/// Joins pieces that touch at both ends.
fn merge(mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.sort_unstable();
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match merged.last_mut() {
            Some(last) if touches(last, &piece) => last.len += piece.len,
            _ => merged.push(piece),
        }
    }
    merged
}

fn touches(last: &Piece, next: &Piece) -> bool {
    (last.to_buffer, last.from_buffer) == (next.to_buffer, next.from_buffer)
        && last.to + last.len == next.to
        && last.from + last.len == next.from
}
