//! Copies that one process has the GPU's driver make between the two sides' kinds of memory, with
//! nothing of the engine in between.

use std::time::{Duration, Instant};

use anyhow::Result;
use uccl_device::cuda::{Context, Direction, Priority, Stream};

use super::{Row, Size, rate_of, sized};
use crate::{
    buffer::{GpuBuffer, HostBuffer},
    place::{self, Place, Places},
};

/// How many rows a size has.
pub(super) const ROWS: usize = 4;

pub(super) fn measure(
    places: Places,
    sizes: &[Size],
    time: Duration,
    row: &mut impl FnMut(Row),
) -> Result<()> {
    let longest = sizes.iter().max().map_or(1, |size| size.0);
    let len = usize::try_from(longest)?;
    let (mut lead, mut serve) = (Memory::new(places.lead, len)?, Memory::new(places.serve, len)?);
    // Host pages that were never written are all one page.
    lead.touch();
    serve.touch();
    let stream = stream(&lead, &serve)?;
    for (name, synchronised, to, from) in
        [("put", "put-sync", &serve, &lead), ("get", "get-sync", &lead, &serve)]
    {
        let copy = Copy { stream: &stream, to, from };
        for &size in sizes {
            for measured in [copy.queued(name, size, time)?, copy.waited(synchronised, size, time)?]
            {
                row(Row {
                    memory: Some(places.lead.to_string()),
                    peer_memory: Some(places.serve.to_string()),
                    ..measured
                });
            }
        }
    }
    Ok(())
}

enum Memory {
    Gpu(&'static Context, GpuBuffer),
    Host(HostBuffer),
}

impl Memory {
    fn new(place: Place, len: usize) -> Result<Self> {
        Ok(match place {
            // Memory that peers could map is no different to a GPU.
            Place::Heap | Place::Alloc => Self::Host(HostBuffer::heap(len)?),
            Place::Gpu(gpu) => {
                let context = place::context(gpu)?;
                Self::Gpu(context, GpuBuffer::new(context, len)?)
            }
            Place::Pinned(gpu) => Self::Host(HostBuffer::pinned(gpu, len)?),
        })
    }

    fn touch(&mut self) {
        if let Self::Host(buffer) = self {
            buffer.poison();
        }
    }

    fn context(&self) -> Option<&'static Context> {
        match self {
            Self::Gpu(context, _) => Some(context),
            Self::Host(_) => None,
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::Gpu(_, buffer) => buffer.address() as u64,
            Self::Host(buffer) => buffer.address() as u64,
        }
    }
}

/// A stream of the leading side's GPU, or else of the other's, which can reach both.
fn stream(lead: &Memory, serve: &Memory) -> Result<Stream> {
    let (mine, other) = match (lead.context(), serve.context()) {
        (Some(mine), other) => (mine, other),
        (None, Some(other)) => (other, None),
        (None, None) => anyhow::bail!("neither side is a GPU: there is no copy of one to measure"),
    };
    if let Some(other) = other {
        mine.enable_peer(other)?;
    }
    Ok(Stream::new(mine, Priority::Normal)?)
}

struct Copy<'a> {
    stream: &'a Stream,
    to: &'a Memory,
    from: &'a Memory,
}

impl Copy<'_> {
    fn enqueue(&self, size: Size) -> Result<()> {
        let direction = match (self.to, self.from) {
            (Memory::Gpu(..), Memory::Gpu(..)) => Direction::DeviceToDevice,
            (Memory::Gpu(..), Memory::Host(_)) => Direction::HostToDevice,
            (Memory::Host(_), _) => Direction::DeviceToHost,
        };
        let (to, from, len) = (self.to.address(), self.from.address(), usize::try_from(size.0)?);
        // SAFETY: both buffers are at least as long as the largest size, and of the kinds that the
        // direction names: two hosts are refused before. They outlive `self`, the Drop of which
        // waits for the stream. Copies of one stream follow each other, and nobody else touches
        // this memory.
        Ok(unsafe { self.stream.copy(to, from, len, direction) }?)
    }

    /// Measures copies one after the other, without a wait between them.
    fn queued(&self, op: &str, size: Size, time: Duration) -> Result<Row> {
        let (gb_per_s, count) = rate_of(size.0, time, |count| {
            let started = Instant::now();
            for _ in 0..count {
                self.enqueue(size)?;
            }
            self.stream.synchronize()?;
            Ok(started.elapsed())
        })?;
        Ok(Row { gb_per_s, count, ..Row::limit(op, size.0) })
    }

    /// Measures copies with a wait after each.
    fn waited(&self, op: &str, size: Size, time: Duration) -> Result<Row> {
        sized(op, size, time, || {
            self.enqueue(size)?;
            Ok(self.stream.synchronize()?)
        })
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        // After a failure copies may be under way, and the memory goes next.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use uccl_device::cuda::Gpus;

    use super::*;

    #[test]
    fn every_way_is_measured() {
        let places = Places { lead: Place::Gpu(0), serve: Place::Pinned(0) };
        let mut rows = Vec::new();
        let time = Duration::from_millis(2);
        let measured = measure(places, &[Size(4096)], time, &mut |row| rows.push(row));
        if let Some(reason) = Gpus::get().why_none() {
            eprintln!("skipped: lacks a GPU ({reason})");
            let error = measured.expect_err("no GPU").to_string();
            assert!(error.contains(reason), "{error}");
            return;
        }
        measured.expect("measured");
        let ops: Vec<_> = rows.iter().map(|row| row.op.as_str()).collect();
        assert_eq!(ops, ["put", "put-sync", "get", "get-sync"]);
        assert_eq!(rows.len(), ROWS);
        assert!(rows.iter().all(|row| row.gb_per_s.is_some_and(|rate| rate > 0.0)));
        assert_eq!(rows[1].memory.as_deref(), Some("gpu:0"));
    }

    #[test]
    fn two_hosts_have_no_gpu_copy() {
        let places = Places { lead: Place::Heap, serve: Place::Heap };
        assert!(measure(places, &[Size(64)], Duration::from_millis(1), &mut |_| {}).is_err());
    }
}
