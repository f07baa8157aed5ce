//! Cells of a tensor: the largest boxes that every slice of any rank contains or does not touch.

use std::collections::BTreeMap;

use super::{
    area::Area,
    error::PlanError,
    layout::{Layout, Tensor},
};

/// The most cells of one tensor.
const MOST: usize = 1 << 20;

/// A slice of a rank, by the index of the rank and that of the slice in its layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SliceId {
    pub(crate) rank: usize,
    pub(crate) slice: usize,
}

/// A box of a tensor, and the slices that contain it.
pub(crate) struct Cell {
    pub(crate) area: Area,
    pub(crate) holders: Vec<SliceId>,
    pub(crate) readers: Vec<SliceId>,
}

/// Slices of one tensor by their area: replicas are one entry.
pub(crate) type ByArea<'a> = BTreeMap<&'a Area, Vec<SliceId>>;

/// The slices of each tensor at these ranks; empty ones are left out.
pub(crate) fn by_tensor(tensors: usize, layouts: &[Layout]) -> Vec<ByArea<'_>> {
    let mut found: Vec<ByArea<'_>> = Vec::new();
    found.resize_with(tensors, BTreeMap::new);
    for (rank, layout) in layouts.iter().enumerate() {
        for (slice, it) in layout.slices.iter().enumerate().filter(|(_, it)| !it.area.is_empty()) {
            found[it.tensor].entry(&it.area).or_default().push(SliceId { rank, slice });
        }
    }
    found
}

/// The cells of a tensor that some target reads, in row-major order.
pub(crate) fn cells(
    tensor: &Tensor,
    sources: &ByArea<'_>,
    targets: &ByArea<'_>,
) -> Result<Vec<Cell>, PlanError> {
    let borders: Vec<Vec<u64>> =
        (0..tensor.shape.len()).map(|dim| borders(dim, sources, targets)).collect();
    let count = borders.iter().try_fold(1_usize, |product, borders| {
        product.checked_mul(borders.len() - 1).filter(|product| *product <= MOST)
    });
    if targets.is_empty() {
        return Ok(Vec::new());
    }
    let Some(count) = count else {
        return Err(PlanError::TooManyParts { tensor: tensor.name.clone(), most: MOST });
    };
    let mut index = vec![0_usize; borders.len()];
    let mut cells = Vec::new();
    for _ in 0..count {
        let along = |end: usize| index.iter().zip(&borders).map(move |(i, b)| b[*i + end]);
        let offsets: Vec<u64> = along(0).collect();
        let sizes = along(1).zip(&offsets).map(|(end, start)| end - start).collect();
        let area = Area { offsets, sizes };
        let containing = |slices: &ByArea<'_>| -> Vec<SliceId> {
            let outer = slices.iter().filter(|(outer, _)| outer.contains(&area));
            outer.flat_map(|(_, ids)| ids.iter().copied()).collect()
        };
        let readers = containing(targets);
        if !readers.is_empty() {
            cells.push(Cell { holders: containing(sources), readers, area });
        }
        for (i, borders) in index.iter_mut().zip(&borders).rev() {
            *i += 1;
            if *i + 1 < borders.len() {
                break;
            }
            *i = 0;
        }
    }
    Ok(cells)
}

/// The indices of a dimension where slices begin or end; at least two.
fn borders(dim: usize, sources: &ByArea<'_>, targets: &ByArea<'_>) -> Vec<u64> {
    let mut found: Vec<u64> = sources
        .keys()
        .chain(targets.keys())
        .flat_map(|area| [area.offsets[dim], area.end(dim)])
        .collect();
    found.sort_unstable();
    found.dedup();
    if found.len() < 2 {
        found = vec![0, 1];
    }
    found
}
