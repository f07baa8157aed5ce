//! Calls of ranks with GPUs.

mod group;
mod low_latency;
mod normal;

pub(crate) use self::{
    group::{PyCudaGroup, PyPoolHold},
    low_latency::{
        PyLowLatencyCombine, PyLowLatencyDispatch, PyLowLatencyHandle, PyLowLatencyWorkspace,
        cuda_combine_scratch_len,
    },
    normal::{
        PyDispatchLayout, PyDispatchPlan, PyDispatchResult, PyLayoutWorkspace, PyNormalCombine,
        PyNormalHandle, PyRowLayout, PyWorkspaceLayout, PyZeroCopyView, cuda_layout,
    },
};
