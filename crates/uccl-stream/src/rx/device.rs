//! Receives payload for GPU memory into chunks of locked memory, and copies it from there to its
//! place.

use std::sync::atomic::Ordering::SeqCst;

use uccl_device::cuda::GpuError;
use uccl_fabric::{
    gpu::StepEnd,
    lane::{LaneError, OpError},
    mem::{Access, LocatedSpan, Span},
    pieces::Stretch,
    pipe::PipeRx,
    region::AccessError,
    status_of,
};
use uccl_wire::frame::{Kind, Status};

use super::{Rx, RxContext, ends::end_read};
use crate::{
    remote_of,
    upload::{End, InboundChunk, Purpose, Upload},
};

/// The places of the memory that a frame's descriptors name.
#[derive(Clone, Copy, Default)]
pub(super) struct Targets {
    /// A GPU that some of the memory is on.
    pub(super) device: Option<u32>,
    /// Some of the memory is the host's.
    pub(super) host: bool,
}

impl<P: PipeRx> Rx<P> {
    /// Whether GPUs copy, or change a word. Only a look shows their end.
    pub(crate) fn is_copying(&self) -> bool {
        !self.uploader.is_idle() || self.changing.is_some()
    }

    /// Whether a copy may be writing our region in this slot.
    pub(crate) fn touches(&mut self, slot: u32) -> bool {
        self.uploader.touches(slot)
    }

    /// Ends operations after their data has landed and the words of their signals have changed.
    /// True if any has ended.
    pub(super) fn land(&mut self, around: &RxContext<'_>) -> bool {
        let mut any = self.end_change(around);
        while self.changing.is_none() {
            let Some(StepEnd { what, result }) = self.uploader.ended() else { break };
            any = true;
            if let Err(e) = result {
                self.fail_landed(what.purpose, e, around);
            }
            match (what.purpose, what.end) {
                // All data of the write has landed.
                (Purpose::Write(op), Some(End::Ack(status, word))) => {
                    self.end_write(op, status, word, around);
                }
                (Purpose::Read(name), Some(end)) => end_read(name, end, around),
                _ => {}
            }
        }
        any
    }

    /// Data of an operation did not land.
    fn fail_landed(&mut self, purpose: Purpose, e: GpuError, around: &RxContext<'_>) {
        let op = match purpose {
            Purpose::Read(name) => return around.ops.lock().doom(name, OpError::from(e)),
            Purpose::Write(op) => op,
        };
        tracing::warn!("data of a peer's write could not be copied to a GPU: {e}");
        for upload in self.uploader.waiting_mut().filter(|upload| upload.purpose == purpose) {
            if let Some(End::Ack(status, _)) = &mut upload.end {
                *status = Status::Fault;
            }
        }
        if self.write.as_ref().is_some_and(|write| write.op == op) {
            self.fail_write(Status::Fault);
        }
    }

    /// Whether an operation, or data of it, waits for copies.
    pub(super) fn is_uploading(&self, purpose: Purpose) -> bool {
        self.uploader.waiting().any(|upload| upload.purpose == purpose)
    }

    /// Ends an operation when the copies under way have landed.
    pub(super) fn end_after_copies(&mut self, purpose: Purpose, end: End) {
        self.uploader.follow(Upload { purpose, end: Some(end) }, Ok(()));
    }

    /// Whether the current frame must wait for copies to end: it must not overtake them, and only
    /// copies to GPUs keep their order among themselves.
    pub(super) fn must_wait(&self, targets: &Result<Targets, AccessError>) -> bool {
        if self.uploader.is_idle() {
            return false;
        }
        match self.header.kind {
            Kind::Write => targets.as_ref().is_ok_and(|targets| targets.host),
            Kind::Read | Kind::Message | Kind::Fence => true,
            _ => false,
        }
    }

    /// The places of a write's destination memory.
    pub(super) fn targets(&self, around: &RxContext<'_>) -> Result<Targets, AccessError> {
        self.locate_all(Access::Write, around)
    }

    /// The places of the memory that the descriptors name.
    pub(super) fn locate_all(
        &self,
        access: Access,
        around: &RxContext<'_>,
    ) -> Result<Targets, AccessError> {
        let regions = around.regions.lock();
        let mut targets = Targets::default();
        for desc in &self.descs {
            match regions.locate(&remote_of(desc), access)?.device {
                Some(device) => targets.device = Some(device),
                None => targets.host = true,
            }
        }
        Ok(targets)
    }

    /// The GPU that is the destination of the current frame's payload, unless the payload is
    /// discarded.
    pub(super) fn device_wanting_data(&self) -> Option<u32> {
        let wanted = match self.header.kind {
            Kind::Write => self.write_ok(),
            _ => self.read.as_ref().is_some_and(|(_, target)| target.failed.is_none()),
        };
        self.device.filter(|_| wanted)
    }

    /// Receives payload into a chunk.
    pub(super) fn receive_for(
        &mut self,
        device: u32,
        around: &RxContext<'_>,
    ) -> Result<Option<(usize, usize)>, LaneError> {
        let Some(room) = self.room_for(device) else { return Ok(None) };
        let len = room.len.min(self.left as usize);
        self.iov.push(Span { len, ..room });
        let before = self.left;
        let counts = self.receive_into(true)?;
        self.filled((before - self.left) as usize);
        self.upload_if_full(around);
        Ok(counts)
    }

    /// The room for the next payload. `None`: copies must end first, or no chunk could be had, and
    /// the operation has failed.
    pub(super) fn room_for(&mut self, device: u32) -> Option<Span> {
        if self.filling.is_none() {
            if self.uploader.is_full() {
                self.stalled = true;
                return None;
            }
            match self.uploader.chunk(device) {
                Ok(chunk) => self.filling = Some(InboundChunk { chunk, len: 0, rest: self.rest }),
                Err(e) => self.fail_upload(e),
            }
        }
        self.filling.as_ref().map(InboundChunk::room)
    }

    /// Records that this many bytes were put into the room.
    fn filled(&mut self, len: usize) {
        if let Some(filling) = &mut self.filling {
            filling.len += len;
        }
    }

    pub(super) fn upload_if_full(&mut self, around: &RxContext<'_>) {
        if self.filling.as_ref().is_some_and(|filling| filling.room().len == 0) {
            self.upload(around);
        }
    }

    /// Copies payload from the staging buffer into a chunk that has room for it.
    pub(super) fn place_for_device(&mut self, from: usize, n: usize) {
        let Some(room) = self.device.and_then(|device| self.room_for(device)) else { return };
        let to = Span { len: n, ..room };
        // SAFETY: the caller has seen that there is room.
        unsafe { fill(to, &self.staging[from..from + n]) };
        self.filled(n);
    }

    /// Starts to copy the chunk that is being filled to the place of its bytes.
    pub(super) fn upload(&mut self, around: &RxContext<'_>) {
        let Some(InboundChunk { chunk, len, rest }) = self.filling.take() else { return };
        if self.device_wanting_data().is_none() {
            return;
        }
        let regions = around.regions.lock();
        if let Err(e) = self.locate_filled(&regions, len, rest) {
            return self.fail_write(status_of(e));
        }
        let (purpose, slots) = match (&self.read, self.header.kind) {
            (Some((name, _)), Kind::Data) => (Purpose::Read(*name), Stretch::default()),
            _ => (Purpose::Write(self.header.op), rest),
        };
        let slots = slots.parts(&self.descs[..]).map(|desc| desc.slot);
        around.copying.store(true, SeqCst);
        // SAFETY: the memory is in regions checked under the lock that is held, and counts as
        // touched until the copy has ended; or it is the memory of a read, which does not end
        // before the copy.
        unsafe { self.uploader.start(Upload { purpose, end: None }, chunk, &self.located, slots) };
        drop(regions);
    }

    /// Lists the memory that the first `len` bytes of `rest` are.
    fn locate_filled(
        &mut self,
        regions: &uccl_fabric::region::TableGuard<'_>,
        len: usize,
        mut rest: Stretch,
    ) -> Result<(), AccessError> {
        self.located.clear();
        if let (Some((_, target)), Kind::Data) = (&self.read, self.header.kind) {
            let device = target.device;
            let spans = rest.take_parts(&target.spans[..], len);
            self.located.extend(spans.map(|span| LocatedSpan { span, device }));
            return Ok(());
        }
        for desc in rest.take_parts(&self.descs[..], len) {
            self.located.push(regions.locate(&remote_of(&desc), Access::Write)?);
        }
        Ok(())
    }

    /// Fails the current operation: its data cannot be copied.
    fn fail_upload(&mut self, e: GpuError) {
        match &mut self.read {
            Some((_, target)) if self.header.kind == Kind::Data => {
                target.failed.get_or_insert(OpError::from(e));
            }
            _ => {
                tracing::warn!("data of a peer's write cannot be copied to a GPU: {e}");
                self.fail_write(Status::Fault);
            }
        }
    }
}

/// Copies `bytes` to memory that belongs to a caller.
///
/// # Safety
/// The span must be writable, and as long as `bytes`.
pub(super) unsafe fn fill(to: Span, bytes: &[u8]) {
    debug_assert_eq!(to.len, bytes.len());
    // SAFETY: as the caller promises; our staging buffer is ours alone.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.addr as *mut u8, bytes.len()) }
}
