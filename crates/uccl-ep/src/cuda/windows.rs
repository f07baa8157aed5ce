//! The windows of a group's ranks: in GPU memory, or in the host's.

use std::sync::Arc;

use uccl_device::cuda::DeviceBuffer;

use super::{host_windows::HostWindows, params::Addresses, watch::Watch, window::Window};
use crate::shared::rank_set::{MAX_RANKS, RankSet};

/// The memory of the ranks' windows, as the ranks last met in it.
pub(super) enum Windows {
    /// In GPU memory; with the thread that watches the processes of other ranks, if there are any.
    Direct(Window, Option<Watch>),
    ViaHost(Box<HostWindows>),
}

impl Windows {
    /// Bytes of the pool.
    pub(super) fn pool_len(&self) -> usize {
        match self {
            Self::Direct(window, _) => window.pool_len(),
            Self::ViaHost(host_windows) => host_windows.pool_len(),
        }
    }

    /// Bytes of the words between the window's control words and its pool.
    pub(super) fn flags_len(&self) -> usize {
        match self {
            Self::Direct(window, _) => window.flags_len(),
            Self::ViaHost(_) => 0,
        }
    }

    /// The group of the CPU that has the windows, if they are in the host's memory.
    pub(super) fn host(&self) -> Option<&Arc<crate::Group>> {
        match self {
            Self::Direct(..) => None,
            Self::ViaHost(host_windows) => Some(host_windows.group()),
        }
    }

    /// The addresses that the kernels of rank `me` use.
    pub(super) fn addresses(&self, me: usize) -> Addresses {
        let window = match self {
            Self::Direct(window, _) => window,
            Self::ViaHost(host_windows) => return host_windows.addresses(),
        };
        let mut windows = [0; MAX_RANKS];
        windows.iter_mut().zip(window.addresses()).for_each(|(to, at)| *to = at);
        let (row_windows, staging) = (windows, windows[me]);
        let (far, mirrors, ring, ring_slots) = (RankSet::EMPTY, 0, 0, 0);
        Addresses { windows, row_windows, staging, far, mirrors, ring, ring_slots }
    }

    /// The thread that watches the peers, if there are any to watch.
    pub(super) fn watch(&self) -> Option<&Watch> {
        match self {
            Self::Direct(_, watch) => watch.as_ref(),
            Self::ViaHost(host_windows) => Some(host_windows.watch()),
        }
    }
}

/// The memory of a pool: it stays as long as this, also when ranks have met anew.
#[derive(Clone)]
pub struct PoolHold {
    _memory: PoolMemory,
}

#[derive(Clone)]
enum PoolMemory {
    Device { _buffer: Arc<DeviceBuffer> },
    Host { _windows: Arc<Windows> },
}

impl PoolHold {
    pub(super) fn of(windows: &Arc<Windows>) -> Self {
        let memory = match &**windows {
            Windows::Direct(window, _) => {
                PoolMemory::Device { _buffer: Arc::clone(window.memory()) }
            }
            Windows::ViaHost(_) => PoolMemory::Host { _windows: Arc::clone(windows) },
        };
        Self { _memory: memory }
    }
}
