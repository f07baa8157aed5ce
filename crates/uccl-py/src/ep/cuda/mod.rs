//! Calls of ranks with GPUs.

mod group;
mod low_latency;
mod normal;

pub(crate) use self::{
    group::PyCudaGroup,
    low_latency::{
        PyCudaCombine, PyCudaDispatch, PyCudaHandle, cuda_combine_scratch_len, cuda_records_len,
        cuda_scratch_len,
    },
    normal::{
        PyLaidOut, PyNormalCombine, PyNormalDispatch, PyNormalHandle, PyNormalKind, PyParts,
        cuda_layout, cuda_room_for,
    },
};
