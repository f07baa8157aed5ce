//! The functions that cpp/plugin.cpp calls: C's types in, NIXL's status out. No panic leaves these
//! functions.
//!
//! Their arguments are safe to use because only plugin.cpp calls them: pointers are to objects that
//! these functions made and that were not given back, bytes outlive the call, and places for
//! results exist.

use std::{
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    slice,
};

use uccl_p2p::{Config, Op, wire::named::NamedMessage};

use crate::{
    agent::{Agent, Piece},
    conn_info::ConnInfo,
    log,
    memory::Memory,
    params,
    status::{Error, Result, Status},
    transfer::Transfer,
    ucx,
};

/// A C++ array as a slice; the pointer of an empty one may be anything.
///
/// # Safety
/// `count` values must be there, and stay unchanged for as long as they are used.
unsafe fn many<'a, T>(first: *const T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's.
        count => unsafe { slice::from_raw_parts(first, count) },
    }
}

/// Bytes of the caller, for the length of the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    data: *const u8,
    len: usize,
}

impl Bytes {
    fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr(), len: bytes.len() }
    }

    /// # Safety
    /// They must be there, and stay unchanged for as long as they are used.
    unsafe fn as_slice<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's.
        unsafe { many(self.data, self.len) }
    }

    /// # Safety
    /// As [`Self::as_slice`].
    unsafe fn as_str<'a>(self) -> Result<&'a str> {
        // SAFETY: the caller's.
        let bytes = unsafe { self.as_slice() };
        std::str::from_utf8(bytes).map_err(|_| Error::Invalid(format!("{bytes:?} is not UTF-8")))
    }
}

#[repr(C)]
pub(crate) struct Param {
    name: Bytes,
    value: Bytes,
}

type Sink = unsafe extern "C" fn(*mut c_void, Bytes);
type PairSink = unsafe extern "C" fn(*mut c_void, Bytes, Bytes);

/// `nixlMetaDesc`.
#[repr(C)]
pub(crate) struct MetaDesc {
    addr: usize,
    len: usize,
    device: u64,
    metadata: *const Metadata,
}

/// `Memory` of cpp/plugin.cpp: a `nixlBackendMD`, and ours behind it.
#[repr(C)]
struct Metadata {
    virtuals: *const c_void,
    is_private: bool,
    memory: *const Memory,
}

#[repr(C)]
pub(crate) struct Descs {
    descs: *const MetaDesc,
    len: usize,
}

impl Descs {
    /// # Safety
    /// As [`Bytes::as_slice`].
    unsafe fn as_slice<'a>(&self) -> &'a [MetaDesc] {
        // SAFETY: the caller's.
        unsafe { many(self.descs, self.len) }
    }
}

#[repr(C)]
pub(crate) struct Estimate {
    duration_us: i64,
    error_us: i64,
}

/// Runs a call. Returns its status to NIXL, and logs the reason of a failure.
fn answer(what: &'static str, call: impl FnOnce() -> Result<Status>) -> c_int {
    answer_about(what, |_| true, call)
}

/// The same for a call about another agent: each kind of failure is logged once for each connection
/// to it.
fn answer_of(
    agent: &Agent,
    name: &[u8],
    what: &'static str,
    call: impl FnOnce() -> Result<Status>,
) -> c_int {
    answer_about(what, |status| agent.is_new_failure(name, status), call)
}

/// The same for a call about a transfer.
fn answer_for(
    transfer: &Transfer,
    what: &'static str,
    call: impl FnOnce() -> Result<Status>,
) -> c_int {
    answer_about(what, |status| transfer.remote.logged.is_new(status), call)
}

fn answer_about(
    what: &'static str,
    is_new: impl FnOnce(Status) -> bool,
    call: impl FnOnce() -> Result<Status>,
) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Error::Internal("a panic")));
    let status = result.unwrap_or_else(|e| {
        if is_new(e.status()) {
            tracing::error!("{what}: {e}");
        } else {
            tracing::debug!("{what}: {e}");
        }
        e.status()
    });
    status as c_int
}

fn done<T>(result: Result<T>) -> Result<Status> {
    result.map(|_| Status::Success)
}

/// Hands an object to C++.
///
/// # Safety
/// `to` takes a pointer.
unsafe fn give<T>(to: *mut *mut T, object: T) {
    // SAFETY: the caller's.
    unsafe { to.write(Box::into_raw(Box::new(object))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_options(to: *mut c_void, take: PairSink) {
    for name in Config::names() {
        // SAFETY: as the module says.
        unsafe { take(to, Bytes::of(name.as_bytes()), Bytes::of(b"")) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_create(
    name: Bytes,
    instead_of_ucx: bool,
    given: *const Param,
    count: usize,
    out: *mut *mut Agent,
) -> c_int {
    log::init();
    answer("cannot create the backend", || {
        // SAFETY: as the module says.
        let given = unsafe { many(given, count) };
        let pair = |param: &Param| {
            // SAFETY: as the module says.
            unsafe { Ok::<_, Error>((param.name.as_str()?, param.value.as_str()?)) }
        };
        let given = given.iter().map(pair).collect::<Result<Vec<_>>>()?;
        let config = match instead_of_ucx {
            false => params::config(given.into_iter())?,
            true => ucx::config(&given)?,
        };
        // SAFETY: as the module says.
        unsafe { give(out, Agent::new(name.as_slice(), config)?) };
        Ok(Status::Success)
    })
}

/// The backend has no memory views for kernels. NIXL has only a status for that.
#[unsafe(no_mangle)]
extern "C" fn uccl_nixl_refuse_view() {
    tracing::error!(
        "memory views for GPU kernels (nixl_ep) are UCX's alone: \
         unset NIXL_PLUGIN_DIR, or make its folder without --instead-of-ucx"
    );
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_destroy(agent: *mut Agent) {
    if agent.is_null() {
        return;
    }
    // SAFETY: as the module says; the last use of it.
    let agent = unsafe { Box::from_raw(agent) };
    let ended = catch_unwind(AssertUnwindSafe(|| {
        // NIXL asks for no status here, so the log has the error. The endpoint keeps for good the
        // memory that peers may still touch.
        if let Err(e) = agent.endpoint.close() {
            tracing::error!("the end of the backend: {e}");
        }
        drop(agent);
    }));
    if ended.is_err() {
        tracing::error!("a panic while the backend was destroyed");
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_conn_info(
    agent: &Agent,
    instead_of_ucx: bool,
    to: *mut c_void,
    take: Sink,
) -> c_int {
    answer("getConnInfo", || {
        let info = agent.conn_info().as_bytes(instead_of_ucx);
        // SAFETY: as the module says.
        unsafe { take(to, Bytes::of(&info)) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_load_conn_info(agent: &Agent, name: Bytes, info: Bytes) -> c_int {
    answer("loadRemoteConnInfo", || {
        // SAFETY: as the module says.
        let (name, info) = unsafe { (name.as_slice(), info.as_slice()) };
        agent.load_conn_info(name, ConnInfo::of(info)?);
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_connect(agent: &Agent, name: Bytes) -> c_int {
    // SAFETY: as the module says.
    let name = unsafe { name.as_slice() };
    answer_of(agent, name, "connect", || done(agent.connect(name)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_disconnect(agent: &Agent, name: Bytes) -> c_int {
    // SAFETY: as the module says.
    answer("disconnect", || done(agent.disconnect(unsafe { name.as_slice() })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_register(
    agent: &Agent,
    addr: usize,
    len: usize,
    vram: bool,
    out: *mut *mut Memory,
) -> c_int {
    answer("registerMem", || {
        // SAFETY: as the module says.
        unsafe { give(out, agent.register(addr, len, vram)?) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_deregister(
    agent: &Agent,
    memory: &Memory,
    was_last: &mut bool,
) -> c_int {
    answer("deregisterMem", || {
        *was_last = agent.deregister(memory)?;
        Ok(Status::Success)
    })
}

/// The number of an agent's region.
#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_region_number(memory: &Memory) -> u64 {
    match memory {
        Memory::Local(local) => local.number,
        Memory::Remote(_) => u64::MAX,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_public_data(memory: &Memory, to: *mut c_void, take: Sink) -> c_int {
    answer("getPublicData", || {
        // SAFETY: as the module says.
        unsafe { take(to, Bytes::of(&memory.advert().encode())) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_load_memory(
    addr: usize,
    len: usize,
    data: Bytes,
    out: *mut *mut Memory,
) -> c_int {
    answer("loadRemoteMD", || {
        // SAFETY: as the module says.
        unsafe { give(out, Memory::load(addr, len, data.as_slice())?) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_share_memory(memory: &Memory) -> *mut Memory {
    Box::into_raw(Box::new(Memory::Remote(*memory.advert())))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_unload_memory(memory: *mut Memory) {
    // SAFETY: as the module says; the last use of it.
    drop(unsafe { Box::from_raw(memory) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_query(
    agent: &Agent,
    addr: usize,
    len: usize,
    to: *mut c_void,
    take: PairSink,
) -> c_int {
    answer("queryMem", || {
        let Some(known) = agent.query(addr, len)? else { return Ok(Status::NotFound) };
        for (name, value) in known {
            // SAFETY: as the module says.
            unsafe { take(to, Bytes::of(name.as_bytes()), Bytes::of(value.as_bytes())) };
        }
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_prepare(
    agent: &Agent,
    write: bool,
    local: Descs,
    remote: Descs,
    name: Bytes,
    out: *mut *mut Transfer,
) -> c_int {
    // SAFETY: as the module says.
    let name = unsafe { name.as_slice() };
    answer_of(agent, name, "prepXfer", || {
        // SAFETY: as the module says.
        let (local, remote) = unsafe { (local.as_slice(), remote.as_slice()) };
        if local.len() != remote.len() {
            return Err(Error::Invalid(format!(
                "{} descriptors here and {} there",
                local.len(),
                remote.len()
            )));
        }
        let bare = |desc: &MetaDesc| desc.metadata.is_null();
        if local.iter().any(bare) || remote.iter().any(bare) {
            return Err(Error::Invalid("a descriptor has no metadata".into()));
        }
        // SAFETY: metadata that is there was made by this backend, and lives as long as the lists.
        let piece = |desc: &MetaDesc| unsafe {
            Piece { addr: desc.addr, len: desc.len, memory: &*(*desc.metadata).memory }
        };
        let pairs = local.iter().zip(remote).map(|(local, remote)| (piece(local), piece(remote)));
        let op = if write { Op::Write } else { Op::Read };
        // SAFETY: as the module says.
        unsafe { give(out, agent.prepare(op, name, pairs)?) };
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_post(
    agent: &Agent,
    transfer: &Transfer,
    message: Option<&Bytes>,
) -> c_int {
    answer_for(transfer, "postXfer", || {
        // SAFETY: as the module says.
        let framed =
            message.map(|message| agent.frame(unsafe { message.as_slice() })).transpose()?;
        transfer.post(&agent.endpoint, framed.as_deref())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_check(transfer: &Transfer) -> c_int {
    answer_for(transfer, "checkXfer", || transfer.check())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_cancel(transfer: &Transfer) -> c_int {
    answer_for(transfer, "releaseReqH", || done(transfer.cancel()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_release(transfer: *mut Transfer) {
    // SAFETY: as the module says; the last use of it.
    let transfer = unsafe { Box::from_raw(transfer) };
    answer_for(&transfer, "the end of a transfer", || done(transfer.cancel()));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_cost(transfer: &Transfer) -> Estimate {
    let (duration, error) = transfer.estimate();
    let micros = |time: std::time::Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    Estimate { duration_us: micros(duration), error_us: micros(error) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_take_notifs(
    agent: &Agent,
    to: *mut c_void,
    take: PairSink,
) -> c_int {
    answer("getNotifs", || {
        for arrived in agent.endpoint.take_notifs()? {
            let NamedMessage { name, message } = NamedMessage::decode(&arrived.payload);
            if name.is_empty() {
                tracing::warn!("dropped a notification that no agent sent");
                continue;
            }
            // SAFETY: as the module says.
            unsafe { take(to, Bytes::of(name), Bytes::of(message)) };
        }
        Ok(Status::Success)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uccl_nixl_notify(agent: &Agent, name: Bytes, message: Bytes) -> c_int {
    // SAFETY: as the module says.
    let (name, message) = unsafe { (name.as_slice(), message.as_slice()) };
    answer_of(agent, name, "genNotif", || done(agent.notify(name, message)))
}
