//! GPU memory that is offered to the peers of this host.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, LazyLock},
};

use uccl_device::cuda::{Exporter, GpuError, GpuUuid, Gpus, MemoryExport, classify};
use uccl_wire::gpu_offer::{GpuOffer, MAX_OFFER_PIECES, Means};

use crate::mem::{Span, next_id};

/// One exporter for the process, because the driver has one handle per allocation and process.
static EXPORTER: LazyLock<Exporter> = LazyLock::new(Exporter::default);

/// An allocation on a GPU, or as much of one as a region needs, that peers can open.
#[derive(Debug)]
pub struct GpuShare {
    offer: GpuOffer,
    fds: Vec<OwnedFd>,
}

impl GpuShare {
    /// Exports the memory of `span`, which is device memory, so that peers can open it.
    ///
    /// # Errors
    /// [`GpuError::NotExportable`] for memory that no other process can open, otherwise the
    /// driver's error.
    pub fn of(span: Span) -> Result<Arc<Self>, GpuError> {
        let address = span.addr as u64;
        let gpu = gpu_of(address)?.0;
        let id = next_id().map_err(|e| not_exportable(address, e.to_string()))?;
        let share = match EXPORTER.export(address, span.len)? {
            MemoryExport::Legacy(export) => {
                let (base, len) = (export.base, export.len_bytes as u64);
                let means = Means::Handle(export.handle.0);
                Self { offer: GpuOffer { id, gpu, base, len, means }, fds: Vec::new() }
            }
            MemoryExport::Descriptors(pieces) if pieces.len() > MAX_OFFER_PIECES => {
                let why = format!("it is made of more than {MAX_OFFER_PIECES} pieces");
                return Err(not_exportable(address, why));
            }
            MemoryExport::Descriptors(pieces) => {
                let base = pieces.first().map_or(address, |piece| piece.base);
                let lens: Vec<u64> = pieces.iter().map(|piece| piece.len_bytes as u64).collect();
                let len = lens.iter().sum();
                let fds = pieces.into_iter().map(|piece| piece.fd).collect();
                Self {
                    offer: GpuOffer { id, gpu, base, len, means: Means::Descriptors(lens) },
                    fds,
                }
            }
        };
        Ok(Arc::new(share))
    }

    /// The id that peers use for it. Ids are never reused, nor shared with a
    /// [`SharedBuf`](crate::alloc::SharedBuf).
    #[must_use]
    pub fn id(&self) -> u32 {
        self.offer.id
    }

    /// Its whole address range, in this process.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { addr: self.offer.base as usize, len: self.offer.len as usize }
    }

    /// The description that peers receive.
    #[must_use]
    pub fn offer(&self) -> &GpuOffer {
        &self.offer
    }

    /// The descriptors that go with the offer.
    #[must_use]
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd).collect()
    }
}

/// The GPU that an address belongs to.
fn gpu_of(address: u64) -> Result<GpuUuid, GpuError> {
    let pointer = classify(address)?;
    match pointer.kind.device() {
        Some(device) => Ok(Gpus::get().device(device)?.uuid()),
        None => Err(not_exportable(address, format!("it is {} memory", pointer.kind))),
    }
}

fn not_exportable(address: u64, why: String) -> GpuError {
    GpuError::NotExportable { address, why }
}
