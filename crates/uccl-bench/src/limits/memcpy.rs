//! One thread copies between two buffers of its own.

use std::{hint::black_box, time::Duration};

use anyhow::Result;

use super::{Row, Size, sized};
use crate::buffer::HostBuffer;

pub(super) fn measure(size: Size, time: Duration) -> Result<Row> {
    let len = usize::try_from(size.0)?;
    let (mut source, mut destination) = (HostBuffer::heap(len)?, HostBuffer::heap(len)?);
    // Fresh zeroed pages are all one page until they are written.
    source.poison();
    destination.poison();
    sized("memcpy", size, time, || {
        let (from, to) = (black_box(source.as_mut_ptr()), black_box(destination.as_mut_ptr()));
        // SAFETY: two allocations of `len` bytes each that nobody else holds.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        black_box(to);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_measures() {
        let row = measure(Size(4096), Duration::from_millis(2)).expect("a row");
        assert!(row.gb_per_s.is_some_and(|rate| rate > 0.0) && row.count > 0);
        assert!(row.latency_us.is_some_and(|latency| latency.min <= latency.p99));
    }
}
