//! How one GPU reaches another's memory.

use serde::Serialize;

/// How one GPU reaches another's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GpuLink {
    /// It is the GPU's own memory.
    Itself,
    /// Over NVLink, with or without switches. This is concluded from atomic operations working on
    /// the other's memory, as PCIe does not carry those between GPUs.
    Nvlink,
    /// Over PCIe.
    Pcie,
    /// Not at all: copies go through the host's memory.
    None,
}
