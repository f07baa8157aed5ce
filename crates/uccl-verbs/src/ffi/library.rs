//! libibverbs, loaded at run time.

use std::{
    error::Error as _,
    ffi::{c_char, c_int, c_uint, c_void},
    sync::Mutex,
};

use libloading::Library;
use uccl_fabric::rail::RailError;

use super::abi::{
    AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp, QpAttr,
    QpInitAttr,
};

/// The library's name, unless the settings name another.
pub(crate) const DEFAULT_LIBRARY: &str = "libibverbs.so.1";

macro_rules! entry_points {
    (
        $library:ident;
        required { $( $name:ident ( $($type:ty),* ) $(-> $back:ty)? = $symbol:literal; )* }
        optional {
            $(
                $maybe:ident ( $($maybe_type:ty),* ) $(-> $maybe_back:ty)?
                    = $maybe_symbol:literal;
            )*
        }
    ) => {
        /// The functions found in the library, which stays loaded.
        pub(crate) struct $library {
            $( pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $back)?, )*
            $( pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_type),*) $(-> $maybe_back)?>, )*
        }

        impl $library {
            fn find_all(library: &'static ::libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // If a symbol has several versions, this finds the newest: version 1.1 or
                    // later, the layouts of which we know.
                    // SAFETY: the type is that of the function in the public header.
                    $( $name: unsafe { library.get($symbol.as_bytes()) }
                        .map(|symbol| *symbol).map_err(|_| $symbol)?, )*
                    // SAFETY: as above.
                    $( $maybe: unsafe { library.get($maybe_symbol.as_bytes()) }
                        .map(|symbol| *symbol).ok(), )*
                })
            }
        }
    };
}

entry_points! {
    Verbs;
    required {
        get_device_list(*mut c_int) -> *mut *mut Device = "ibv_get_device_list";
        free_device_list(*mut *mut Device) = "ibv_free_device_list";
        open_device(*mut Device) -> *mut Context = "ibv_open_device";
        close_device(*mut Context) -> c_int = "ibv_close_device";
        get_async_event(*mut Context, *mut AsyncEvent) -> c_int = "ibv_get_async_event";
        ack_async_event(*mut AsyncEvent) = "ibv_ack_async_event";
        query_device(*mut Context, *mut DeviceAttr) -> c_int = "ibv_query_device";
        // The function fills a struct that ends after `link_layer`, and leaves the fields after
        // that as they were.
        query_port(*mut Context, u8, *mut PortAttr) -> c_int = "ibv_query_port";
        alloc_pd(*mut Context) -> *mut Pd = "ibv_alloc_pd";
        dealloc_pd(*mut Pd) -> c_int = "ibv_dealloc_pd";
        reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr = "ibv_reg_mr";
        dereg_mr(*mut Mr) -> c_int = "ibv_dereg_mr";
        create_comp_channel(*mut Context) -> *mut CompChannel = "ibv_create_comp_channel";
        destroy_comp_channel(*mut CompChannel) -> c_int = "ibv_destroy_comp_channel";
        create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq =
            "ibv_create_cq";
        destroy_cq(*mut Cq) -> c_int = "ibv_destroy_cq";
        get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int =
            "ibv_get_cq_event";
        ack_cq_events(*mut Cq, c_uint) = "ibv_ack_cq_events";
        create_qp(*mut Pd, *mut QpInitAttr) -> *mut Qp = "ibv_create_qp";
        modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int = "ibv_modify_qp";
        destroy_qp(*mut Qp) -> c_int = "ibv_destroy_qp";
        wc_status_str(c_uint) -> *const c_char = "ibv_wc_status_str";
    }
    optional {
        fork_init() -> c_int = "ibv_fork_init";
        // Since 1.8. Registers with flags that kernels may ignore, such as relaxed ordering.
        reg_mr_iova2(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr = "ibv_reg_mr_iova2";
        // Since 1.12.
        reg_dmabuf_mr(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr = "ibv_reg_dmabuf_mr";
    }
}

/// The libraries that are loaded, by the name that they were asked for with.
static LOADED: Mutex<Vec<(String, &'static Verbs)>> = Mutex::new(Vec::new());

impl Verbs {
    /// Loads the library of this name, or [`DEFAULT_LIBRARY`]. It is loaded once and stays loaded.
    ///
    /// # Errors
    /// [`RailError::Unavailable`] when there is none, or when it is not libibverbs.
    pub(crate) fn load(name: Option<&str>) -> Result<&'static Self, RailError> {
        let name = name.filter(|name| !name.is_empty()).unwrap_or(DEFAULT_LIBRARY);
        let mut loaded = LOADED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, verbs)) = loaded.iter().find(|(known, _)| known == name) {
            return Ok(verbs);
        }
        // SAFETY: libibverbs's initialisers may run in any process.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            let error = error.source().map_or_else(|| error.to_string(), |why| why.to_string());
            RailError::Unavailable(format!(
                "RDMA verbs need {name}, which cannot be loaded ({error}): install libibverbs1 and \
                 ibverbs-providers (Debian) or rdma-core (others)"
            ))
        })?;
        // Its devices have threads and state of their own, so it is never unloaded.
        let library: &'static Library = Box::leak(Box::new(library));
        let verbs: &'static Self =
            Box::leak(Box::new(Self::find_all(library).map_err(|symbol| {
                RailError::Unavailable(format!("{name} has no {symbol}: it is not libibverbs"))
            })?));
        verbs.survive_fork();
        loaded.push((name.to_owned(), verbs));
        Ok(verbs)
    }

    /// Makes registered memory survive a fork.
    ///
    /// On kernels before 5.12, a fork marks registered pages as copy-on-write. Our next write to
    /// such a page moves us to a copy while the device keeps the original: data is then lost and
    /// nothing reports it. `ibv_fork_init` excludes the pages from children instead, at the cost of
    /// a system call for each registration. Newer kernels copy pinned pages for the child at the
    /// fork; libibverbs knows these kernels and then does nothing. Python programs fork, so the
    /// call is worth making. It is refused if memory was registered before.
    fn survive_fork(&self) {
        let Some(fork_init) = self.fork_init else { return };
        // SAFETY: it takes nothing, and may be called at any time.
        let errno = unsafe { fork_init() };
        if errno != 0 {
            tracing::debug!(errno, "ibv_fork_init refused: on kernels before 5.12, do not fork");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named_with_its_remedy() {
        let error = Verbs::load(Some("libno-such-verbs.so.1")).err().expect("not there");
        let RailError::Unavailable(said) = error else { panic!("{error}") };
        assert!(said.contains("libno-such-verbs.so.1") && said.contains("install"), "{said}");
        let error = Verbs::load(Some("libc.so.6")).err().expect("another library");
        assert!(error.to_string().contains("it is not libibverbs"), "{error}");
    }
}
