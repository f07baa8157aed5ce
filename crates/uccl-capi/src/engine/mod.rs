//! UCCL's engine interface. `include/uccl_engine.h` declares it; the functions here have the names
//! that a C++ compiler gives them.
//!
//! rustc exports only functions that Rust defines, so these are written here and not in C++. A
//! return type is no part of a symbol: where a caller's header has `void`, it ignores the `int`
//! here, and a `bool` it reads from an `int` of 0 or 1.
// The top of the header states the safety rules for all functions.
#![allow(clippy::missing_safety_doc)]

mod connections;
mod cxx;
mod memory;
mod notifs;
mod text;
mod transfers;

use std::{
    ffi::{c_char, c_int},
    ptr::null_mut,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use uccl_p2p::{ConnId, Endpoint};

pub use self::{
    connections::*,
    cxx::{FifoItem, NotifyMsg, UcclConn, UcclEngine, Vector},
    memory::*,
    notifs::*,
    text::NotifyMsgV,
    transfers::*,
};
use crate::{
    api::environment,
    args::Out,
    failure::{self, Answer, Failure, run},
    handles::Handles,
};

/// An engine of this process.
struct Engine {
    core: Endpoint,
    /// Whether accept must return without a connection.
    stopped: AtomicBool,
}

/// A connection of an engine of this process.
struct Conn {
    core: Endpoint,
    engine: usize,
    id: ConnId,
    is_local: bool,
}

static ENGINES: Handles<Engine> = Handles::new();
static CONNS: Handles<Conn> = Handles::new();

fn engine(handle: *const UcclEngine) -> Answer<Arc<Engine>> {
    ENGINES.get(handle).ok_or_else(|| Failure::no_handle("engine"))
}

fn conn(handle: *const UcclConn) -> Answer<Arc<Conn>> {
    CONNS.get(handle).ok_or_else(|| Failure::no_handle("connection"))
}

/// 0, or a negative status.
fn code(work: impl FnOnce() -> Answer) -> c_int {
    match run(work) {
        Ok(()) => 0,
        Err(status) => status as c_int,
    }
}

/// A handle for the caller, or NULL.
fn handle<T>(work: impl FnOnce() -> Answer<*mut T>) -> *mut T {
    run(work).unwrap_or(null_mut())
}

/// A condition, as 0 or 1.
fn flag(work: impl FnOnce() -> Answer<bool>, if_failed: bool) -> c_int {
    run(work).unwrap_or(if_failed).into()
}

/// `uccl_engine_create`
#[unsafe(export_name = "_Z18uccl_engine_createib")]
pub extern "C" fn create(num_cpus: c_int, _in_python: bool) -> *mut UcclEngine {
    handle(|| {
        let mut config = environment()?;
        if let Ok(num_cpus @ 1..) = usize::try_from(num_cpus) {
            config.num_cpus = num_cpus;
        }
        let core = Endpoint::new(config)?;
        Ok(ENGINES.add(Engine { core, stopped: AtomicBool::new(false) }))
    })
}

/// `uccl_engine_destroy`
#[unsafe(export_name = "_Z19uccl_engine_destroyP11uccl_engine")]
pub extern "C" fn destroy(engine: *mut UcclEngine) -> c_int {
    code(|| {
        let ended = self::engine(engine)?;
        ended.stopped.store(true, SeqCst);
        CONNS.retain(|conn| conn.engine != engine.addr());
        // If peers may still touch its memory, the handle stays valid, and the same call waits
        // again. Programs written for upstream's library ignore the result, so the error is
        // printed, too.
        ended.core.close().inspect_err(|e| eprintln!("uccl_engine_destroy: {e}"))?;
        ENGINES.remove(engine).map(drop).ok_or_else(|| Failure::no_handle("engine"))
    })
}

/// `uccl_engine_get_metadata`
#[unsafe(export_name = "_Z24uccl_engine_get_metadataP11uccl_enginePPc")]
pub unsafe extern "C" fn get_metadata(
    engine: *mut UcclEngine,
    metadata: *mut *mut c_char,
) -> c_int {
    code(|| {
        // SAFETY: a place for a pointer.
        let out = unsafe { Out::new(metadata, "metadata") }?;
        let text = self::engine(engine)?.core.metadata_by_pci().to_string();
        out.put(cxx::new_text(&text)?);
        Ok(())
    })
}

/// `uccl_engine_last_error`
#[unsafe(export_name = "_Z22uccl_engine_last_errorv")]
pub extern "C" fn last_error() -> *const c_char {
    failure::last()
}
