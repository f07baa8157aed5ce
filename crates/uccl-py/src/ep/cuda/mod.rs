//! Calls of ranks with GPUs.

mod group;
mod low_latency;
mod normal;

pub(crate) use self::{
    group::PyCudaGroup,
    low_latency::{
        PyLowLatencyCombine, PyLowLatencyDispatch, PyLowLatencyHandle, cuda_combine_scratch_len,
        cuda_records_len, cuda_scratch_len,
    },
    normal::{
        PyDispatchLayout, PyDispatchShape, PyNormalCombine, PyNormalDispatch, PyNormalHandle,
        PyRowLayout, PyWorkspaceLayout, PyZeroCopyView, cuda_layout, cuda_max_tokens,
    },
};
