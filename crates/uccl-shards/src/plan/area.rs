//! Boxes of elements: part of a tensor in each dimension.

/// A box of elements of a tensor. One without dimensions has one element.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Area {
    /// The first index, by dimension.
    pub offsets: Vec<u64>,
    /// The number of indices, by dimension.
    pub sizes: Vec<u64>,
}

/// An axis of a mesh of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Axis {
    /// The number of ranks along it.
    pub ranks: u64,
    /// The position of one of them.
    pub rank: u64,
    /// The dimension of the tensor that it cuts; `None`: its ranks are replicas.
    pub dim: Option<usize>,
}

/// Bytes of an area that are consecutive in two memories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// Bytes from the start of the first outer area.
    pub(crate) from: u64,
    /// Bytes from the start of the second outer area.
    pub(crate) to: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

impl Area {
    /// The number of elements; `None` if that overflows.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        self.sizes.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))
    }

    /// Whether it has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// The elements of one rank of a mesh, each axis of which cuts one dimension of a tensor, or
    /// none (a replica), as PyTorch's `chunk` and its `DTensor` do: all parts are equally long,
    /// except the last ones. Axes that cut the same dimension do so one after another. `None`: an
    /// axis cuts a dimension that there is not, or the rank is outside the mesh.
    #[must_use]
    pub fn of_rank(shape: &[u64], axes: &[Axis]) -> Option<Self> {
        let mut area = Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() };
        for axis in axes {
            if axis.rank >= axis.ranks {
                return None;
            }
            let Some(dim) = axis.dim else { continue };
            let (offset, size) = (area.offsets.get_mut(dim)?, area.sizes.get_mut(dim)?);
            let each = size.div_ceil(axis.ranks);
            let start = each.saturating_mul(axis.rank).min(*size);
            *offset += start;
            *size = each.min(*size - start);
        }
        Some(area)
    }

    /// The end in a dimension: the first index after it.
    pub(crate) fn end(&self, dim: usize) -> u64 {
        self.offsets[dim] + self.sizes[dim]
    }

    /// Whether every element of `inner` is in it. Both are of one tensor.
    #[must_use]
    pub fn contains(&self, inner: &Self) -> bool {
        (0..self.sizes.len())
            .all(|dim| self.offsets[dim] <= inner.offsets[dim] && inner.end(dim) <= self.end(dim))
    }

    /// The runs of this area between two outer areas that contain it, each of which lies in memory
    /// in row-major order, in the order of their bytes.
    pub(crate) fn runs(&self, from: &Self, to: &Self, element_bytes: u64) -> Vec<Run> {
        let dims = self.sizes.len();
        let inner = self.inner(from, to);
        let len = self.sizes[inner..].iter().product::<u64>() * element_bytes;
        let count = self.sizes[..inner].iter().product::<u64>();
        let (from_strides, to_strides) = (from.strides(element_bytes), to.strides(element_bytes));
        let start = |outer: &Self, strides: &[u64]| -> u64 {
            (0..dims).map(|dim| (self.offsets[dim] - outer.offsets[dim]) * strides[dim]).sum()
        };
        let first = Run { from: start(from, &from_strides), to: start(to, &to_strides), len };
        let mut index = vec![0_u64; inner];
        let mut runs = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        for _ in 0..count {
            let at =
                |strides: &[u64]| -> u64 { index.iter().zip(strides).map(|(i, s)| i * s).sum() };
            runs.push(Run {
                from: first.from + at(&from_strides),
                to: first.to + at(&to_strides),
                len,
            });
            for dim in (0..inner).rev() {
                index[dim] += 1;
                if index[dim] < self.sizes[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        runs
    }

    /// The number of [runs](Self::runs).
    pub(crate) fn run_count(&self, from: &Self, to: &Self) -> u64 {
        let outer = self.sizes[..self.inner(from, to)].iter();
        outer.fold(1, |product: u64, size| product.saturating_mul(*size))
    }

    /// The first dimension of a run: those after it are whole in both memories, so that their rows
    /// touch.
    fn inner(&self, from: &Self, to: &Self) -> usize {
        let is_cut = |dim: &usize| {
            self.sizes[*dim] != from.sizes[*dim] || self.sizes[*dim] != to.sizes[*dim]
        };
        (0..self.sizes.len()).rev().find(is_cut).unwrap_or(0)
    }

    /// Bytes from an index to the next, by dimension, in row-major order.
    fn strides(&self, element_bytes: u64) -> Vec<u64> {
        let mut strides = vec![element_bytes; self.sizes.len()];
        for dim in (1..self.sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * self.sizes[dim];
        }
        strides
    }

    /// Cuts it along its outermost dimension that has several indices, so that each part has at
    /// most `most` elements where one index of that dimension has no more.
    pub(crate) fn cut(self, most: u64, parts: &mut Vec<Self>) {
        let elements = self.elements().unwrap_or(u64::MAX);
        let Some(dim) = self.sizes.iter().position(|size| *size > 1) else {
            parts.push(self);
            return;
        };
        if elements <= most {
            parts.push(self);
            return;
        }
        let count = elements.div_ceil(most.max(1)).min(self.sizes[dim]);
        let each = self.sizes[dim].div_ceil(count);
        let mut done = 0;
        while done < self.sizes[dim] {
            let size = each.min(self.sizes[dim] - done);
            let mut part = self.clone();
            part.offsets[dim] += done;
            part.sizes[dim] = size;
            done += size;
            match size {
                1 => part.cut(most, parts),
                _ => parts.push(part),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(offsets: &[u64], sizes: &[u64]) -> Area {
        Area { offsets: offsets.to_vec(), sizes: sizes.to_vec() }
    }

    #[test]
    fn whole_rows_are_one_run() {
        let whole = area(&[0, 0], &[4, 6]);
        let rows = area(&[1, 0], &[2, 6]);
        let runs = rows.runs(&whole, &rows, 2);
        assert_eq!(runs, [Run { from: 12, to: 0, len: 24 }]);
    }

    #[test]
    fn columns_are_a_run_for_each_row() {
        let whole = area(&[0, 0], &[3, 6]);
        let columns = area(&[0, 2], &[3, 2]);
        let runs = columns.runs(&whole, &columns, 1);
        let expected = [(2, 0), (8, 2), (14, 4)].map(|(from, to)| Run { from, to, len: 2 });
        assert_eq!(runs, expected);
    }

    #[test]
    fn ranks_of_a_mesh_have_the_chunks_of_pytorch() {
        let axis = |ranks, rank, dim| Axis { ranks, rank, dim };
        let of = |shape: &[u64], axes: &[Axis]| Area::of_rank(shape, axes);
        // torch.chunk of 10 into 4: 3, 3, 3, 1; of 5 into 4: 2, 2, 1, and nothing.
        let last = of(&[10, 6], &[axis(4, 3, Some(0))]);
        assert_eq!(last, Some(area(&[9, 0], &[1, 6])));
        assert_eq!(of(&[5], &[axis(4, 3, Some(0))]), Some(area(&[5], &[0])));
        let both = [axis(2, 1, Some(1)), axis(3, 2, None), axis(2, 1, Some(1))];
        assert_eq!(of(&[4, 8], &both), Some(area(&[0, 6], &[4, 2])), "two axes, one dimension");
        assert_eq!(of(&[4], &[axis(2, 2, Some(0))]), None);
        assert_eq!(of(&[4], &[axis(2, 1, Some(1))]), None);
    }

    #[test]
    fn a_scalar_is_one_run() {
        let scalar = area(&[], &[]);
        assert_eq!(scalar.runs(&scalar, &scalar, 4), [Run { from: 0, to: 0, len: 4 }]);
    }

    #[test]
    fn parts_cover_an_area_once() {
        let mut parts = Vec::new();
        area(&[5, 1], &[3, 8]).cut(5, &mut parts);
        let elements: u64 = parts.iter().filter_map(Area::elements).sum();
        assert_eq!(elements, 24);
        assert!(parts.iter().all(|part| part.elements() <= Some(5)), "{parts:?}");
    }
}
