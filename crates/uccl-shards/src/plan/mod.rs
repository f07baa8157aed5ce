//! The plan: from which rank, and from where in its memory, each target reads its bytes.
//!
//! It is a function of the layouts alone, so that every rank that knows them computes the same one.

pub mod area;
mod cells;
mod error;
mod fan_out;
pub mod layout;
mod pieces;
mod seats;
mod spread;

use self::{
    cells::{Cell, by_tensor, cells},
    layout::{Layout, Tensor},
    pieces::Draft,
    seats::Seats,
    spread::Loads,
};
pub use self::{error::PlanError, fan_out::FanOut};

/// A cell that may have several sources is cut into about this many parts of all bytes, unless
/// that makes them shorter than [`SHORTEST_CUT`] or longer than [`Options::cut_bytes`].
const PARTS: u64 = 64;
/// Bytes. A shorter read costs more for its start than for its bytes.
const SHORTEST_CUT: u64 = 1 << 18;

/// Cells that may have several sources are cut into about this many parts at most.
const MOST_PARTS: u64 = 1 << 16;
/// The most pieces of a plan, before they are merged.
const MOST_PIECES: usize = 1 << 26;

/// A rank that has bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Peer {
    /// The source with this index.
    Source(usize),
    /// The target with this index, which has read the bytes in an earlier step.
    Target(usize),
}

/// The choices of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// The most readers of one byte that read it from the same reader.
    pub fan_out: FanOut,
    /// The number of parts of the bytes that follow each other down a tree.
    pub waves: usize,
    /// The most bytes of a part, where several ranks may send it.
    pub cut_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { fan_out: FanOut::default(), waves: 8, cut_bytes: 16 << 20 }
    }
}

/// Consecutive bytes that are read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Piece {
    /// The buffer of the target.
    pub to_buffer: usize,
    /// Bytes from its start.
    pub to: u64,
    /// The buffer of the source.
    pub from_buffer: usize,
    /// Bytes from its start.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The pieces that are read from one rank in one step, by their place at the target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Read {
    /// The rank.
    pub from: Peer,
    /// The pieces. None touches another at both ends.
    pub pieces: Vec<Piece>,
}

/// Reads that may run at the same time.
///
/// A target begins step `n` when it has ended step `n - 1`, and every target that it reads from has
/// ended step `n - 1` too.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Step {
    /// The reads, one for each rank.
    pub reads: Vec<Read>,
}

/// The reads of one target.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct TargetPlan {
    /// The steps, in their order. A step may have no read.
    pub steps: Vec<Step>,
}

/// The reads of all targets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// By target.
    pub targets: Vec<TargetPlan>,
}

impl TargetPlan {
    /// Bytes that it reads.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.pieces().map(|(_, piece)| piece.len).sum()
    }

    /// All pieces with the rank that they are read from.
    pub fn pieces(&self) -> impl Iterator<Item = (Peer, &Piece)> {
        let reads = self.steps.iter().flat_map(|step| &step.reads);
        reads.flat_map(|read| read.pieces.iter().map(|piece| (read.from, piece)))
    }
}

/// Plans the reads that fill every slice of every target, each byte once, from sources with the
/// same elements, or from targets that have read them before.
///
/// # Errors
/// A slice is outside its tensor or its buffer, slices of a target share memory, or no source has
/// an element that a target needs.
pub fn plan(
    tensors: &[Tensor],
    sources: &[Layout],
    targets: &[Layout],
    options: &Options,
) -> Result<Plan, PlanError> {
    check(tensors, sources, targets)?;
    let parts = parts_of(tensors, sources, targets, options)?;
    let weight =
        |(_, cell, bytes): &(usize, Cell, u64)| u128::from(*bytes) * cell.readers.len() as u128;
    let total: u128 = parts.iter().map(weight).sum();
    let seats = Seats::new(sources, targets);
    let has_levels =
        |(_, cell, _): &(usize, Cell, u64)| options.fan_out.way(cell, &seats).has_levels();
    let waves = if parts.iter().any(has_levels) { options.waves.max(1) as u128 } else { 1 };
    let mut loads = Loads::new(&seats, (sources.len(), targets.len()));
    let mut draft = Draft::new(tensors, sources, targets);
    let mut done = 0_u128;
    for part in &parts {
        let (tensor, cell, bytes) = part;
        let wave = (done.saturating_mul(waves) / total.max(1)) as usize;
        done += weight(part);
        for choice in loads.spread(cell, *bytes, options.fan_out) {
            draft.add(*tensor, &cell.area, wave + choice.level, &choice)?;
        }
    }
    Ok(draft.plan())
}

fn check(tensors: &[Tensor], sources: &[Layout], targets: &[Layout]) -> Result<(), PlanError> {
    for (i, source) in sources.iter().enumerate() {
        source.check(tensors, &format!("source {i}"))?;
    }
    for (i, target) in targets.iter().enumerate() {
        let who = format!("target {i}");
        target.check(tensors, &who)?;
        target.check_apart(tensors, &who)?;
    }
    Ok(())
}

/// All cells with their tensor and their bytes; those that several ranks may send are cut.
fn parts_of(
    tensors: &[Tensor],
    sources: &[Layout],
    targets: &[Layout],
    options: &Options,
) -> Result<Vec<(usize, Cell, u64)>, PlanError> {
    let (held, wanted) = (by_tensor(tensors.len(), sources), by_tensor(tensors.len(), targets));
    let mut whole = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        for cell in cells(tensor, &held[index], &wanted[index])? {
            if cell.holders.is_empty() {
                return Err(missing(tensor, &cell));
            }
            let bytes = tensor.bytes_of(&cell.area).unwrap_or(0);
            whole.push((index, cell, bytes));
        }
    }
    let total = whole.iter().fold(0, |sum: u64, (_, _, bytes)| sum.saturating_add(*bytes));
    let longest = (total / PARTS).max(SHORTEST_CUT).min(options.cut_bytes.max(1));
    // Ranks may claim any length of memory.
    let longest = longest.max(total / MOST_PARTS);
    let mut parts = Vec::with_capacity(whole.len());
    for (index, cell, bytes) in whole {
        if cell.holders.len() == 1 && cell.readers.len() == 1 {
            parts.push((index, cell, bytes));
            continue;
        }
        let element_bytes = tensors[index].element_bytes;
        let mut areas = Vec::new();
        cell.area.cut(longest / element_bytes.max(1), &mut areas);
        for area in areas {
            let bytes = tensors[index].bytes_of(&area).unwrap_or(0);
            let (holders, readers) = (cell.holders.clone(), cell.readers.clone());
            parts.push((index, Cell { area, holders, readers }, bytes));
        }
    }
    Ok(parts)
}

fn missing(tensor: &Tensor, cell: &Cell) -> PlanError {
    let rank = cell.readers.first().map_or(0, |reader| reader.rank);
    PlanError::Missing {
        who: format!("target {rank}"),
        tensor: tensor.name.clone(),
        offsets: cell.area.offsets.clone(),
        sizes: cell.area.sizes.clone(),
    }
}
