//! A protection domain: its queue pairs may reach the memory that is registered with it.

use std::{ptr::NonNull, sync::Arc};

use uccl_fabric::rail::RailError;

use super::{
    context::{Context, complain},
    ffi::{Verbs, abi, errno},
};

/// A protection domain of a device.
pub(super) struct Pd {
    raw: NonNull<abi::Pd>,
    context: Arc<Context>,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn new(context: Arc<Context>) -> Result<Arc<Self>, RailError> {
        // SAFETY: the context lives.
        let raw = unsafe { (context.verbs().alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| context.error("ibv_alloc_pd", errno()))?;
        Ok(Arc::new(Self { raw, context }))
    }

    pub(super) fn raw(&self) -> *mut abi::Pd {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn verbs(&self) -> &'static Verbs {
        self.context.verbs()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: queue pairs and memory regions hold it, so none is left; given back once.
        let returned = unsafe { (self.verbs().dealloc_pd)(self.raw()) };
        complain("ibv_dealloc_pd", returned);
    }
}
