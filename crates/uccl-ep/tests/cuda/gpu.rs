//! A rank's memory on a GPU.

use std::{cell::RefCell, time::Duration};

use uccl_device::cuda::{
    Context, DeviceBuffer, Direction, Gpus, PinnedBuffer, Priority, Stream, wait_until_given_back,
};

/// Whether there is a GPU; prints the reason if there is none.
pub(crate) fn has_gpu() -> bool {
    let why = Gpus::get().why_none();
    if let Some(why) = why {
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        eprintln!("skipped: {name}: lacks a GPU ({why})");
    }
    why.is_none()
}

/// A stream, and memory that is kept until this is dropped: freeing waits for kernels, and they may
/// wait for other ranks.
pub(crate) struct Gpu {
    pub(crate) context: &'static Context,
    pub(crate) stream: Stream,
    kept: RefCell<Vec<DeviceBuffer>>,
    staging: RefCell<Vec<PinnedBuffer>>,
}

impl Gpu {
    /// For kernels of ranks that wait for each other. Memory that was dropped before is freed by
    /// now. Otherwise the driver would wait for the kernels of the first rank, and hold up those of
    /// the next.
    pub(crate) fn new() -> Self {
        assert!(wait_until_given_back(Duration::from_secs(60)), "memory is not given back");
        let context = Gpus::get().device(0).and_then(|gpu| gpu.context()).expect("a context");
        let stream = Stream::new(context, Priority::Normal).expect("a stream");
        Self { context, stream, kept: RefCell::default(), staging: RefCell::default() }
    }

    fn pinned(&self, len: usize) -> PinnedBuffer {
        PinnedBuffer::new(self.context, len.max(1)).expect("locked memory")
    }

    /// Memory with these bytes.
    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let len = size_of_val(values);
        let buffer = DeviceBuffer::new(self.context, len.max(16)).expect("memory");
        let address = buffer.address();
        self.kept.borrow_mut().push(buffer);
        self.write(address, values);
        address
    }

    /// Writes values to memory that has room for them.
    pub(crate) fn write<T: Copy>(&self, address: u64, values: &[T]) {
        let len = size_of_val(values);
        let pinned = self.pinned(len);
        // SAFETY: as many bytes; nobody else has them.
        unsafe { pinned.as_ptr().copy_from_nonoverlapping(values.as_ptr().cast(), len) };
        if len > 0 {
            // SAFETY: both live until the stream has been waited for.
            unsafe { self.stream.copy(address, pinned.address(), len, Direction::HostToDevice) }
                .expect("a copy");
        }
        self.stream.synchronize().expect("it ends well");
        self.staging.borrow_mut().push(pinned);
    }

    /// Memory with these integers, of 64 bits or of 32.
    pub(crate) fn upload_integers(&self, values: &[i32], is_64: bool) -> u64 {
        match is_64 {
            true => self.upload(&values.iter().map(|value| i64::from(*value)).collect::<Vec<_>>()),
            false => self.upload(values),
        }
    }

    /// The contents of memory, after the end of all enqueued work.
    pub(crate) fn download<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        let len = size_of_val(&values[..]);
        if len == 0 {
            return values;
        }
        let pinned = self.pinned(len);
        // SAFETY: both live until the stream has been waited for.
        unsafe { self.stream.copy(pinned.address(), address, len, Direction::DeviceToHost) }
            .expect("a copy");
        self.stream.synchronize().expect("it ends well");
        // SAFETY: as many bytes, which the copy has written.
        unsafe { values.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(pinned.as_ptr(), len) };
        self.staging.borrow_mut().push(pinned);
        values
    }
}
