//! A rank's state in its GPU's memory, which kernels keep, and the addresses that a meeting of the
//! ranks changes. Graphs know where both are, so they stay there as long as the group.

use std::{
    mem::{size_of, zeroed},
    slice, thread,
    time::{Duration, Instant},
};

use uccl_device::cuda::{Context, DeviceBuffer, Direction, PinnedBuffer, Priority, Stream};

use super::params::{Addresses, Own};
use crate::shared::{
    error::{Error, Phase, Result},
    join::Position,
    rank_set::RankSet,
};

/// The offset of the addresses behind the state: they share no cache line with words that change.
const ADDRESSES_AT: usize = size_of::<Own>().next_multiple_of(128);
/// The time between two looks at a stream.
const NAP: Duration = Duration::from_micros(200);

/// The state and the addresses.
pub(super) struct State {
    memory: DeviceBuffer,
    context: &'static Context,
}

impl State {
    /// Memory without contents.
    pub(super) fn new(context: &'static Context) -> Result<Self> {
        let memory = DeviceBuffer::new(context, ADDRESSES_AT + size_of::<Addresses>())?;
        Ok(Self { memory, context })
    }

    /// The address of the state.
    pub(super) fn own(&self) -> u64 {
        self.memory.address()
    }

    /// The address of the addresses.
    pub(super) fn addresses(&self) -> u64 {
        self.memory.address() + ADDRESSES_AT as u64
    }

    /// Begins a generation at this position, with these addresses and ranks left out. No call is
    /// under way.
    pub(super) fn begin(
        &self,
        position: Position,
        addresses: Addresses,
        masked: RankSet,
    ) -> Result<()> {
        // SAFETY: a struct of integers, of which zero is one.
        let empty = unsafe { zeroed::<Own>() };
        let (calls, first) = (position.next_call.saturating_sub(1), position.next_call);
        let own = Own { calls, first, masked, ..empty };
        let mut staged = PinnedBuffer::new(self.context, self.memory.len_bytes())?;
        // SAFETY: no other code uses the memory.
        let bytes = unsafe { staged.as_mut_slice() };
        bytes.fill(0);
        bytes[..size_of::<Own>()].copy_from_slice(bytes_of(&own));
        bytes[ADDRESSES_AT..][..size_of::<Addresses>()].copy_from_slice(bytes_of(&addresses));
        let stream = Stream::new(self.context, Priority::Normal)?;
        let (to, from, len) = (self.memory.address(), staged.address(), self.memory.len_bytes());
        // SAFETY: no kernel uses the state, and both live until the stream has been waited for.
        unsafe { stream.copy(to, from, len, Direction::HostToDevice)? };
        Ok(stream.synchronize()?)
    }

    /// Reads the state behind the work on a stream, for which it waits until `limit`. `rank` is
    /// named in the error.
    pub(super) fn read_behind(&self, stream: &Stream, rank: usize, limit: Duration) -> Result<Own> {
        let staged = PinnedBuffer::new(self.context, size_of::<Own>())?;
        wait_for_stream(stream, rank, limit)?;
        let copies = Stream::new(self.context, Priority::Normal)?;
        let (to, from) = (staged.address(), self.memory.address());
        // SAFETY: both are that long, and live until the stream has been waited for.
        unsafe { copies.copy(to, from, size_of::<Own>(), Direction::DeviceToHost)? };
        copies.synchronize()?;
        // SAFETY: the copy has ended; the memory is page-aligned, and any bytes are a state.
        Ok(unsafe { staged.as_ptr().cast::<Own>().read() })
    }
}

/// Waits for the present work on a stream until `limit`.
pub(super) fn wait_for_stream(stream: &Stream, rank: usize, limit: Duration) -> Result<()> {
    let began = Instant::now();
    while !stream.is_idle()? {
        let waited = began.elapsed();
        if waited > limit {
            return Err(Error::Overdue { phase: Phase::Join, rank, awaited: Vec::new(), waited });
        }
        thread::sleep(NAP);
    }
    Ok(())
}

fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: the structs of kernels are integers without padding.
    unsafe { slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}
