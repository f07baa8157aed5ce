//! An opened domain: one device of one provider, which all its channels and registrations share.

use std::{
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::{Mutex, MutexGuard};
use uccl_fabric::rail::RailError;

use super::{
    info::InfoList,
    library::Library,
    object::Object,
    raw,
    settings::{LibfabricSettings, Threading},
};

/// An opened domain.
pub(super) struct Domain {
    // Declared in the order in which they must be closed.
    domain: Object<raw::Domain>,
    fabric: Object<raw::Fabric>,
    pub(super) info: InfoList,
    pub(super) library: &'static Library,
    pub(super) settings: LibfabricSettings,
    /// The provider's name.
    pub(super) provider: String,
    pub(super) mr_mode: i32,
    serial: Option<Mutex<()>>,
    next_id: AtomicU64,
}

impl Domain {
    pub(super) fn open(
        library: &'static Library,
        info: InfoList,
        settings: &LibfabricSettings,
    ) -> Result<Self, RailError> {
        let mut info = info;
        let (provider, name) = (info.first().provider(), info.first().domain_name());
        let what = |call: &str| format!("opening {name} of {provider}: {call}");
        let fabric_attr: *mut raw::FabricAttr =
            info.parts().ok_or_else(|| RailError::os("fi_getinfo", libc::ENOMEM))?.fabric;
        // SAFETY: the attributes are the info's, which lives on; the call makes a fabric or fails.
        let fabric = unsafe {
            Object::<raw::Fabric>::made(|made| {
                (library.open_fabric)(fabric_attr, made, ptr::null_mut())
            })
        };
        let fabric = fabric.map_err(|code| library.error(what("fi_fabric"), code))?;
        // SAFETY: an open fabric's table is the provider's for as long.
        let open = unsafe { fabric.get().ops.as_ref() }.and_then(|ops| ops.domain);
        let open = open.ok_or_else(|| library.error(what("fi_domain"), libc::ENOSYS))?;
        // SAFETY: fabric and info live on; the call makes a domain or fails.
        let domain = unsafe {
            Object::<raw::Domain>::made(|made| {
                open(fabric.as_ptr(), info.as_ptr(), made, ptr::null_mut())
            })
        };
        let domain = domain.map_err(|code| library.error(what("fi_domain"), code))?;
        let mr_mode = info.first().mr_mode();
        if mr_mode & raw::FI_MR_ENDPOINT != 0 && mr_mode & raw::FI_MR_LOCAL != 0 {
            return Err(RailError::Unavailable(format!(
                "{provider} ties registrations to endpoints and demands them for local memory as well, which \
                 no known provider does and this link cannot"
            )));
        }
        let serial = (settings.threading == Threading::Domain).then(Mutex::default);
        Ok(Self {
            domain,
            fabric,
            info,
            library,
            settings: settings.clone(),
            provider,
            mr_mode,
            serial,
            next_id: AtomicU64::new(1),
        })
    }

    /// A lock to hold during each call into the provider. None if the provider itself is
    /// thread-safe.
    pub(super) fn serialize(&self) -> Option<MutexGuard<'_, ()>> {
        self.serial.as_ref().map(Mutex::lock)
    }

    /// Whether the provider demands this of memory registration.
    pub(super) fn has_mode(&self, mode: i32) -> bool {
        self.mr_mode & mode != 0
    }

    /// Whether the provider makes progress only while it is called.
    pub(super) fn is_manual(&self) -> bool {
        let attr = self.info.first().domain();
        attr.is_none_or(|attr| attr.data_progress != raw::FI_PROGRESS_AUTO)
    }

    /// A number that is unique in this domain.
    pub(super) fn unique(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn object(&self) -> &Object<raw::Domain> {
        &self.domain
    }

    pub(super) fn fabric(&self) -> &Object<raw::Fabric> {
        &self.fabric
    }

    /// The domain's table of calls that make objects.
    pub(super) fn ops(&self) -> Option<&raw::DomainOps> {
        // SAFETY: an open domain's table is the provider's for as long.
        unsafe { self.domain.get().ops.as_ref() }
    }

    /// The error for a failed call.
    pub(super) fn error(&self, call: &str, code: i32) -> RailError {
        let what = format!("{call} of {} ({})", self.provider, self.info.first().domain_name());
        self.library.error(what, code)
    }
}
