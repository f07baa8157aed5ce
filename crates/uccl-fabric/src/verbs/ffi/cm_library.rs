//! librdmacm, found at run time.

use std::{
    error::Error as _,
    ffi::{c_int, c_void},
    sync::OnceLock,
};

use libloading::Library;

use super::{
    cm_abi::{CmEvent, CmId, ConnParam, EventChannel},
    library::entry_points,
};
use crate::rma::rail::RailError;

const LIBRARY: &str = "librdmacm.so.1";

entry_points! {
    Cm;
    required {
        create_event_channel() -> *mut EventChannel = "rdma_create_event_channel";
        destroy_event_channel(*mut EventChannel) = "rdma_destroy_event_channel";
        get_event(*mut EventChannel, *mut *mut CmEvent) -> c_int = "rdma_get_cm_event";
        ack_event(*mut CmEvent) -> c_int = "rdma_ack_cm_event";
        create_id(*mut EventChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int = "rdma_create_id";
        destroy_id(*mut CmId) -> c_int = "rdma_destroy_id";
        bind_addr(*mut CmId, *const libc::sockaddr) -> c_int = "rdma_bind_addr";
        listen(*mut CmId, c_int) -> c_int = "rdma_listen";
        // In network byte order.
        get_src_port(*mut CmId) -> u16 = "rdma_get_src_port";
        resolve_addr(*mut CmId, *const libc::sockaddr, *const libc::sockaddr, c_int) -> c_int =
            "rdma_resolve_addr";
        resolve_route(*mut CmId, c_int) -> c_int = "rdma_resolve_route";
        connect(*mut CmId, *const ConnParam) -> c_int = "rdma_connect";
        accept(*mut CmId, *const ConnParam) -> c_int = "rdma_accept";
        reject(*mut CmId, *const c_void, u8) -> c_int = "rdma_reject";
    }
    optional {}
}

impl Cm {
    /// The library, which is loaded once and stays.
    ///
    /// # Errors
    /// [`RailError::Unavailable`] when there is none.
    pub(crate) fn load() -> Result<&'static Self, RailError> {
        static LOADED: OnceLock<Result<Cm, String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Self::open(LIBRARY));
        loaded.as_ref().map_err(|why| RailError::Unavailable(why.clone()))
    }

    fn open(name: &str) -> Result<Self, String> {
        // SAFETY: librdmacm's initialisers are made to run in any process.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            let error = error.source().map_or_else(|| error.to_string(), |why| why.to_string());
            format!(
                "iWARP needs {name}, which cannot be loaded ({error}): install librdmacm1 (Debian) or \
                 librdmacm (others)"
            )
        })?;
        // It keeps devices open for itself: it is never unloaded.
        let library: &'static Library = Box::leak(Box::new(library));
        Self::find_all(library)
            .map_err(|symbol| format!("{name} has no {symbol}: it is not librdmacm"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named_with_its_remedy() {
        let said = Cm::open("libno-such-cm.so.1").err().expect("not there");
        assert!(said.contains("libno-such-cm.so.1") && said.contains("install"), "{said}");
        let said = Cm::open("libc.so.6").err().expect("another library");
        assert!(said.contains("it is not librdmacm"), "{said}");
    }
}
