//! The memory of a rank: which parts of which tensors lie where.

use super::{area::Area, error::PlanError};

/// A tensor of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Its name, for errors.
    pub name: String,
    /// Its global shape: elements by dimension. Without dimensions it is a scalar.
    pub shape: Vec<u64>,
    /// Bytes of an element.
    pub element_bytes: u64,
}

/// A position in a rank's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// The index of the buffer.
    pub buffer: usize,
    /// Bytes from its start.
    pub offset: u64,
}

/// A part of a tensor in a rank's memory, in row-major order without gaps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slice {
    /// The index of the tensor.
    pub tensor: usize,
    /// The elements.
    pub area: Area,
    /// Where the first element is.
    pub place: Place,
}

/// Where a rank is.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Seat {
    /// A text that ranks of one host share; `None` if the host is not known.
    pub host: Option<String>,
    /// The number of network devices of its host, at least one. Sources and readers with as many
    /// send and take equally fast.
    pub lanes: u32,
}

/// The memory of a rank. A tensor may be in no slice, in one, or in several.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Layout {
    /// Lengths in bytes of the buffers.
    pub buffers: Vec<u64>,
    /// The parts of tensors that lie in them.
    pub slices: Vec<Slice>,
    /// Where the rank is.
    pub seat: Seat,
}

impl Tensor {
    /// Bytes of a part of it; `None` if that overflows.
    pub(super) fn bytes_of(&self, area: &Area) -> Option<u64> {
        area.elements()?.checked_mul(self.element_bytes)
    }
}

impl Layout {
    /// Refuses slices outside their tensors or buffers. `who` names the rank in errors.
    pub(super) fn check(&self, tensors: &[Tensor], who: &str) -> Result<(), PlanError> {
        for slice in &self.slices {
            let Some(tensor) = tensors.get(slice.tensor) else {
                let (count, index) = (tensors.len(), slice.tensor);
                return Err(PlanError::UnknownTensor { who: who.into(), index, count });
            };
            let outside = |why: &str| PlanError::Outside {
                who: who.into(),
                tensor: tensor.name.clone(),
                why: why.into(),
            };
            if tensor.element_bytes == 0 {
                return Err(outside("its elements have no bytes"));
            }
            let Area { offsets, sizes } = &slice.area;
            let dims = tensor.shape.len();
            if offsets.len() != dims || sizes.len() != dims {
                return Err(outside(&format!("it has not the tensor's {dims} dimensions")));
            }
            let is_inside = |dim: usize| {
                let end = offsets[dim].checked_add(sizes[dim]);
                end.is_some_and(|end| end <= tensor.shape[dim])
            };
            if !(0..dims).all(is_inside) {
                return Err(outside(&format!(
                    "{sizes:?} elements at {offsets:?} are not inside the shape {:?}",
                    tensor.shape
                )));
            }
            let Place { buffer, offset } = slice.place;
            let room = self.buffers.get(buffer).copied().unwrap_or(0).checked_sub(offset);
            let bytes = tensor.bytes_of(&slice.area);
            if bytes.is_none() || bytes > room {
                return Err(outside(&format!("it is not inside buffer {buffer}")));
            }
        }
        Ok(())
    }

    /// Refuses slices that share bytes of memory: a read of one would overwrite the other.
    pub(super) fn check_apart(&self, tensors: &[Tensor], who: &str) -> Result<(), PlanError> {
        let spans = self.slices.iter().map(|slice| {
            let tensor = &tensors[slice.tensor];
            (slice.place, tensor.bytes_of(&slice.area).unwrap_or(0), tensor)
        });
        let mut spans: Vec<_> = spans.filter(|(_, len, _)| *len > 0).collect();
        spans.sort_by_key(|(place, ..)| *place);
        for pair in spans.windows(2) {
            let [(place, len, first), (next, _, second)] = pair else { continue };
            if place.buffer == next.buffer && place.offset + len > next.offset {
                return Err(PlanError::Overlap {
                    who: who.into(),
                    first: first.name.clone(),
                    second: second.name.clone(),
                });
            }
        }
        Ok(())
    }
}
