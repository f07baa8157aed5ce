//! Tables of tuner plugins.

use std::ffi::{c_char, c_int, c_void};

use crate::{Logger, NcclResult};

/// The number of algorithms that [`Constants`] has room for.
pub const ALGORITHMS: usize = 7;
/// The number of protocols.
pub const PROTOCOLS: usize = 3;

/// Numbers of collective operations.
pub mod collective {
    use std::ffi::c_int;

    /// `ncclFuncBroadcast`.
    pub const BROADCAST: c_int = 0;
    /// `ncclFuncReduce`.
    pub const REDUCE: c_int = 1;
    /// `ncclFuncAllGather`.
    pub const ALL_GATHER: c_int = 2;
    /// `ncclFuncReduceScatter`.
    pub const REDUCE_SCATTER: c_int = 3;
    /// `ncclFuncAllReduce`.
    pub const ALL_REDUCE: c_int = 4;
}

/// Rows of a cost table.
pub mod algorithm {
    /// Trees.
    pub const TREE: usize = 0;
    /// Rings.
    pub const RING: usize = 1;
    /// Parallel aggregated trees.
    pub const PAT: usize = 6;
}

/// Columns of a cost table.
pub mod protocol {
    /// Low latency: a flag beside every 4 bytes.
    pub const LL: usize = 0;
    /// Low latency in lines of 128 bytes.
    pub const LL128: usize = 1;
    /// Buffers and counters.
    pub const SIMPLE: usize = 2;
}

/// `ncclNvlDomainInfo_v5_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvlDomains {
    /// The number of NVLink domains.
    pub count: c_int,
    /// The fewest ranks of a domain.
    pub min_ranks: c_int,
    /// The most ranks of a domain.
    pub max_ranks: c_int,
}

/// `ncclTunerConstants_v5_t`: NCCL's model, which a tuner may change.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// By algorithm and protocol, in microseconds.
    pub base_latencies: [[f64; PROTOCOLS]; ALGORITHMS],
    /// By NVLink, PCI and network.
    pub hardware_latencies: [[[f64; PROTOCOLS]; ALGORITHMS]; 3],
    /// By architecture and node count.
    pub ll_max_bandwidths: [[f64; 3]; 4],
    /// A channel's, of rings with LL128.
    pub ring_ll128_bandwidths: [[f64; 3]; 4],
    /// A channel's, of trees with LL128.
    pub tree_ll128_bandwidths: [[f64; 3]; 4],
    /// A channel's, of trees.
    pub tree_bandwidths: [[f64; 3]; 4],
    /// A channel's, of trees over NVLS.
    pub nvls_tree_bandwidths: [[f64; 3]; 4],
}

/// `init` of v4: ranks, nodes, logger, context.
pub type InitV4 = unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> NcclResult;
/// `init` of v5: context, communicator's id, ranks, nodes, logger, domains, constants.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Logger,
    *mut NvlDomains,
    *mut Constants,
) -> NcclResult;
/// `getCollInfo`: context, collective, bytes, pipelined operations, cost table (`float[algorithms]
/// [protocols]`, contiguous), algorithms, protocols, whether buffers are registered, channels.
pub type GetCollInfo = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> NcclResult;
/// `destroy` of v4, `finalize` of v5: context.
pub type End = unsafe extern "C" fn(*mut c_void) -> NcclResult;

/// A tuner's table, by its `init`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tuner<I> {
    /// The tuner's name.
    pub name: *const c_char,
    /// `init`.
    pub init: Option<I>,
    /// `getCollInfo`.
    pub get_coll_info: Option<GetCollInfo>,
    /// `destroy` or `finalize`.
    pub end: Option<End>,
}

// SAFETY: a table is constant: its name is a static text, all else are functions.
unsafe impl<I> Sync for Tuner<I> {}

/// `ncclTunerPlugin_v4`.
pub type TunerV4 = Tuner<InitV4>;
/// `ncclTunerPlugin_v5`.
pub type TunerV5 = Tuner<InitV5>;

const _: () = {
    assert!(size_of::<TunerV4>() == 4 * size_of::<usize>());
    assert!(size_of::<TunerV5>() == 4 * size_of::<usize>());
    assert!(size_of::<Constants>() == 8 * (21 + 63 + 5 * 12));
    assert!(size_of::<NvlDomains>() == 12);
};
