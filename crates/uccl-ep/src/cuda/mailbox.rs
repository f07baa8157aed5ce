//! The report of a dispatch in flight, from a kernel to the host: its counts.

use std::sync::atomic::{Ordering, fence};

use uccl_device::cuda::{Context, GpuError, PinnedBuffer};

use super::params::HostMailbox;

/// Host memory that kernels write to, one at a time.
pub(super) struct CountsMailbox {
    memory: PinnedBuffer,
    ticket: u64,
}

/// The right of one kernel to write to the mailbox.
#[derive(Clone, Copy, Default)]
pub(super) struct Ticket {
    /// The address of the mailbox; 0: the kernel writes no report.
    pub(super) mailbox: u64,
    /// The number that the kernel writes last. No other kernel has written it.
    pub(super) number: u64,
}

impl CountsMailbox {
    pub(super) fn new(context: &'static Context) -> Result<Self, GpuError> {
        Ok(Self { memory: PinnedBuffer::new(context, size_of::<HostMailbox>())?, ticket: 0 })
    }

    /// A ticket for the next kernel.
    pub(super) fn next_ticket(&mut self) -> Ticket {
        self.ticket += 1;
        Ticket { mailbox: self.memory.address(), number: self.ticket }
    }

    /// The report, once the kernel with the last ticket has written all of it.
    pub(super) fn read(&self) -> Option<HostMailbox> {
        let place: *const HostMailbox = self.memory.as_ptr().cast();
        // SAFETY: the memory is that long and page-aligned. The ticket is written once, after all
        // else.
        let ticket = unsafe { (&raw const (*place).ticket).read_volatile() };
        fence(Ordering::Acquire);
        // SAFETY: any bytes are valid, and no kernel writes until there is a next ticket.
        (ticket == self.ticket).then(|| unsafe { place.read_volatile() })
    }
}
