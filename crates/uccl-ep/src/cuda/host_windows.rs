//! Windows in locked memory of the host, for ranks that do not reach each other's GPU memory.
//!
//! They belong to a [group of the CPU](crate::Group), which joins, maps the windows of near ranks
//! and connects to far ones; kernels make the calls. Kernels store into the windows of near ranks.
//! Data for a far rank goes into a mirror of its window, and then kernels push commands for this
//! rank's proxy, which copies it. A thread watches the peers, because kernels cannot.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Context, DeviceBuffer, HostRegistration};
use uccl_fabric::shm::Mapping;

use super::{params::Addresses, status::Reports, watch::Watch};
use crate::{
    host::group::Group,
    shared::{
        error::{Error, Result},
        rank_set::{MAX_RANKS, RankSet},
        view::control_len,
    },
};

/// A rank's window, and the GPU's access to those of its peers.
pub(super) struct HostWindows {
    watch: Watch,
    group: Arc<Group>,
    /// Each keeps its memory mapped until no kernel uses it any more, so the proxy carries the
    /// commands of the last kernels. They are dropped last, so that the last of them ends the
    /// group.
    _registrations: Vec<HostRegistration>,
    windows: [u64; MAX_RANKS],
    /// The staging copy, as long as a window: this rank's rows for itself, and data fetched from
    /// its own window.
    staging_copy: DeviceBuffer,
    far: RankSet,
    mirrors: u64,
    ring: u64,
    ring_slots: u64,
}

impl HostWindows {
    /// Makes a group's calls available to the kernels of a GPU; the host makes none.
    pub(super) fn new(
        group: Arc<Group>,
        context: &'static Context,
        reports: &Arc<Reports>,
    ) -> Result<Self> {
        let mut registrations = Vec::new();
        let mut lock = |memory: &Arc<Mapping>| {
            let address = memory.as_ptr().addr() as u64;
            let kept = DropOnThread(Some(Arc::clone(&group)));
            // SAFETY: the group keeps its windows, its mirrors and its ring mapped.
            let lock = unsafe { HostRegistration::new(context, address, memory.len(), kept) };
            registrations.push(lock?);
            Ok::<_, Error>(address)
        };
        let (mut windows, mut far) = ([0; MAX_RANKS], RankSet::EMPTY);
        let far_peers = group.window().far();
        let (mut mirrors, mut ring, mut ring_slots) = (0, 0, 0);
        if let Some(peers) = far_peers {
            let (memory, slots) = peers.ring();
            (mirrors, ring, ring_slots) = (lock(peers.outbox())?, lock(memory)?, slots);
        }
        for (rank, at) in windows.iter_mut().enumerate().take(group.ranks()) {
            if let Some(near) = group.window().near(rank) {
                *at = lock(near)?;
            } else if let Some(offset) = far_peers.and_then(|peers| peers.staging_offset(rank)) {
                *at = mirrors + offset as u64;
                far = far | RankSet::of(rank);
            }
            // Else the rank is absent.
        }
        let staging_copy =
            DeviceBuffer::new(context, control_len(group.ranks()) + group.pool_len())?;
        let watched = Arc::clone(&group);
        let watch = Watch::new(group.ranks(), Arc::clone(reports), move |rank| watched.loss(rank))?;
        Ok(Self {
            watch,
            group,
            _registrations: registrations,
            windows,
            staging_copy,
            far,
            mirrors,
            ring,
            ring_slots,
        })
    }

    /// Bytes of the pool.
    pub(super) fn pool_len(&self) -> usize {
        self.group.pool_len()
    }

    /// The group that owns the windows.
    pub(super) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The thread that watches the peers.
    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The addresses that kernels use.
    pub(super) fn addresses(&self) -> Addresses {
        let Self { windows, far, mirrors, ring, ring_slots, .. } = *self;
        let staging = self.staging_copy.address();
        let mut row_windows = windows;
        row_windows[self.group.rank()] = staging;
        Addresses { windows, row_windows, staging, far, mirrors, ring, ring_slots }
    }
}

/// A share of an object that may take long to end, as a group does while far peers receive earlier
/// data. The last share ends it on a thread of its own: the thread that drops the last share frees
/// GPU memory, for which others wait.
struct DropOnThread<T: Send + Sync + 'static>(Option<Arc<T>>);

/// The threads that end such objects. Each drop of a last share joins those that are over.
static ENDING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

impl<T: Send + Sync> Drop for DropOnThread<T> {
    fn drop(&mut self) {
        let Some(last) = self.0.take().and_then(Arc::into_inner) else { return };
        let end = move || drop(last);
        // If no thread can be started, it ends here.
        let begun = thread::Builder::new().name("uccl-ep-end".into()).spawn(end);
        let mut ending = ENDING.lock();
        for over in ending.extract_if(.., |thread| thread.is_finished()) {
            // A panic in it has been reported already.
            let _ = over.join();
        }
        ending.extend(begun);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Receiver, Sender, channel},
        time::Duration,
    };

    use super::*;

    /// Reports whether it was allowed to end in time.
    struct Slow {
        may_end: Mutex<Receiver<()>>,
        has_ended: Sender<bool>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let may_end = self.may_end.lock().recv_timeout(Duration::from_secs(20)).is_ok();
            let _ = self.has_ended.send(may_end);
        }
    }

    #[test]
    fn nobody_waits_for_the_end_of_the_last_share() {
        let ((go, may_end), (has_ended, ended)) = (channel(), channel());
        let slow = Arc::new(Slow { may_end: may_end.into(), has_ended });
        let shares = [DropOnThread(Some(Arc::clone(&slow))), DropOnThread(Some(slow))];
        drop(shares);
        go.send(()).unwrap();
        assert_eq!(ended.recv(), Ok(true));
    }
}
