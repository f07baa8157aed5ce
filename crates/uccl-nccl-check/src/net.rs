//! One way to call network tables of all versions, with the time that each call takes.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr::null_mut,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uccl_nccl_abi::{
    CommConfig, HANDLE_BYTES, NcclResult, OPTIONAL_RECV_COMPLETION, memory,
    net::{IrecvV10, IsendV10},
    properties::{PropertiesHead, PropertiesV8, PropertiesV9, PropertiesV11},
};

use crate::{
    library::{NetTable, with_table},
    log,
};

/// Properties of a device, of any version.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) pci_path: Option<String>,
    pub(crate) guid: u64,
    pub(crate) memory: i32,
    pub(crate) speed_mbps: i32,
    pub(crate) port: i32,
    pub(crate) latency_us: f32,
    pub(crate) max_comms: i32,
    pub(crate) max_recvs: i32,
    pub(crate) device_type: i32,
    pub(crate) device_version: i32,
    /// The physical devices' numbers; empty in v8.
    pub(crate) physical: Vec<i32>,
    /// The longest messages of sends and of collectives in bytes; none in v8.
    pub(crate) longest_bytes: Option<[u64; 2]>,
}

/// Bytes that name a listen communicator.
pub(crate) type Handle = [u8; HANDLE_BYTES];

/// A pointer of the plugin's. Plugins let their objects go from thread to thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pointer(pub(crate) *mut c_void);
// SAFETY: NCCL moves all objects of a plugin between threads; nothing here looks behind the
// pointer.
unsafe impl Send for Pointer {}

/// The two kinds of communicators that carry data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Send,
    Recv,
}

/// A communicator of one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comm {
    pub(crate) side: Side,
    pub(crate) at: Pointer,
}

/// The longest call of each kind that must not block.
#[derive(Default)]
pub(crate) struct Slowest(Mutex<Option<(&'static str, Duration)>>);

impl Slowest {
    pub(crate) fn get(&self) -> Option<(&'static str, Duration)> {
        *self.0.lock()
    }

    pub(crate) fn timed<T>(&self, name: &'static str, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = call();
        let took = start.elapsed();
        let mut slowest = self.0.lock();
        if slowest.is_none_or(|(_, known)| known < took) {
            *slowest = Some((name, took));
        }
        value
    }
}

/// Listens by a function of a table, which gets memory for a handle, as long as the interface asks
/// for, and the place of the communicator.
pub(crate) fn listen_by(
    listen: impl FnOnce(*mut c_void, *mut *mut c_void) -> Result<NcclResult>,
) -> Result<(Handle, Pointer)> {
    let (mut handle, mut comm) = ([0; HANDLE_BYTES], null_mut());
    well("listen", listen(handle.as_mut_ptr().cast(), &raw mut comm)?)?;
    ensure!(!comm.is_null(), "listen gives no communicator");
    Ok((handle, Pointer(comm)))
}

/// A table, and the calls that were made through it.
#[derive(Clone)]
pub(crate) struct Net {
    table: NetTable,
    slowest: Arc<Slowest>,
}

/// The missing function of a table.
macro_rules! function {
    ($self:ident, $name:ident) => {
        with_table!($self.table, table => table.$name)
            .with_context(|| format!("{} is null", stringify!($name)))?
    };
}

impl Net {
    pub(crate) fn new(table: NetTable) -> Self {
        Self { table, slowest: Arc::default() }
    }

    /// The call that took longest of those that must return at once.
    pub(crate) fn slowest(&self) -> Option<(&'static str, Duration)> {
        self.slowest.get()
    }

    fn timed<T>(&self, name: &'static str, call: impl FnOnce() -> T) -> T {
        self.slowest.timed(name, call)
    }

    /// Begins a communicator; returns its context, null before v11.
    pub(crate) fn init(&self, id: u64) -> Result<Pointer> {
        let mut context = null_mut();
        let config = CommConfig { traffic_class: -1 };
        let log = log::logger();
        // SAFETY: the functions are called as NCCL does; the settings live for the call alone, as
        // NCCL's do.
        let result = unsafe {
            match self.table {
                NetTable::V8(table) => table.init.context("init is null")?(log),
                NetTable::V9(table) => table.init.context("init is null")?(log),
                NetTable::V10(table) => table.init.context("init is null")?(log, None),
                NetTable::V11(table) => {
                    table.init.context("init is null")?(&mut context, id, &config, log, None)
                }
                NetTable::V12(table) => {
                    table.init.context("init is null")?(&mut context, id, &config, log, None)
                }
            }
        };
        well("init", result)?;
        Ok(Pointer(context))
    }

    /// Ends a communicator; before v11 plugins are not told.
    pub(crate) fn finalize(&self, context: Pointer) -> Result<()> {
        let function = match self.table {
            NetTable::V11(table) => table.finalize,
            NetTable::V12(table) => table.finalize,
            _ => return Ok(()),
        };
        // SAFETY: the context is that of `init`.
        well("finalize", unsafe { function.context("finalize is null")?(context.0) })
    }

    pub(crate) fn devices(&self) -> Result<i32> {
        let mut count = 0;
        let function = function!(self, devices);
        // SAFETY: the count outlives the call.
        well("devices", unsafe { function(&mut count) })?;
        Ok(count)
    }

    pub(crate) fn properties(&self, device: i32) -> Result<Properties> {
        match self.table {
            NetTable::V8(table) => properties_v8(device, table.get_properties),
            NetTable::V9(table) => properties_v9(device, table.get_properties),
            NetTable::V10(table) => properties_v9(device, table.get_properties),
            NetTable::V11(table) => properties_v11(device, table.get_properties),
            NetTable::V12(table) => properties_v11(device, table.get_properties),
        }
    }

    /// Listens; returns the handle and the listen communicator.
    pub(crate) fn listen(&self, context: Pointer, device: i32) -> Result<(Handle, Pointer)> {
        let missing = "listen is null";
        // SAFETY: the handle and the place outlive the call.
        let call = |to, comm| unsafe {
            anyhow::Ok(match self.table {
                NetTable::V8(t) => t.listen.context(missing)?(device, to, comm),
                NetTable::V9(t) => t.listen.context(missing)?(device, to, comm),
                NetTable::V10(t) => t.listen.context(missing)?(device, to, comm),
                NetTable::V11(t) => t.listen.context(missing)?(context.0, device, to, comm),
                NetTable::V12(t) => t.listen.context(missing)?(context.0, device, to, comm),
            })
        };
        listen_by(|to, comm| self.timed("listen", || call(to, comm)))
    }

    /// Begins or goes on with a connect; none while it is not ready. The plugin may keep its state
    /// in the handle.
    pub(crate) fn connect(
        &self,
        context: Pointer,
        device: i32,
        handle: &mut Handle,
    ) -> Result<Option<Comm>> {
        let (at, mut comm, mut offload) = (handle.as_mut_ptr().cast(), null_mut(), null_mut());
        let config = CommConfig { traffic_class: -1 };
        // SAFETY: as `listen`; the places for results outlive the call.
        let result = self.timed("connect", || unsafe {
            Ok::<_, anyhow::Error>(match self.table {
                NetTable::V8(t) => {
                    t.connect.context("connect is null")?(device, at, &mut comm, &mut offload)
                }
                NetTable::V9(t) => {
                    t.connect.context("connect is null")?(device, at, &mut comm, &mut offload)
                }
                NetTable::V10(t) => {
                    let connect = t.connect.context("connect is null")?;
                    connect(device, &config, at, &mut comm, &mut offload)
                }
                NetTable::V11(t) => {
                    let connect = t.connect.context("connect is null")?;
                    connect(context.0, device, at, &mut comm, &mut offload)
                }
                NetTable::V12(t) => {
                    let connect = t.connect.context("connect is null")?;
                    connect(context.0, device, at, &mut comm, &mut offload)
                }
            })
        })?;
        well("connect", result)?;
        Ok((!comm.is_null()).then_some(Comm { side: Side::Send, at: Pointer(comm) }))
    }

    /// Accepts the peer of a listen communicator; none while there is none.
    pub(crate) fn accept(&self, listen: Pointer) -> Result<Option<Comm>> {
        let (mut comm, mut offload) = (null_mut(), null_mut());
        let function = function!(self, accept);
        // SAFETY: a listen communicator of this plugin.
        let result =
            self.timed("accept", || unsafe { function(listen.0, &mut comm, &mut offload) });
        well("accept", result)?;
        Ok((!comm.is_null()).then_some(Comm { side: Side::Recv, at: Pointer(comm) }))
    }

    /// Registers memory of the host.
    pub(crate) fn register(&self, comm: Comm, at: *mut u8, bytes: usize) -> Result<Pointer> {
        let mut registration = null_mut();
        let function = function!(self, reg_mr);
        // SAFETY: the caller keeps the memory until it has deregistered it.
        let result =
            unsafe { function(comm.at.0, at.cast(), bytes, memory::HOST, &mut registration) };
        well("regMr", result)?;
        Ok(Pointer(registration))
    }

    pub(crate) fn deregister(&self, comm: Comm, registration: Pointer) -> Result<()> {
        let function = function!(self, dereg_mr);
        // SAFETY: a registration of this communicator.
        well("deregMr", unsafe { function(comm.at.0, registration.0) })
    }

    /// Posts a send; none if the plugin asks for it again later.
    pub(crate) fn isend(&self, comm: Comm, part: Part, tag: i32) -> Result<Option<Pointer>> {
        let (at, mr, mut request) = (part.at.cast::<c_void>(), part.registration.0, null_mut());
        let short = c_int::try_from(part.bytes).context("v8 sends at most 2 GiB");
        let place = &raw mut request;
        // SAFETY: the part is registered memory that its owner keeps while it is in use.
        let result = self.timed("isend", || unsafe {
            let from_v10 = |isend: Option<IsendV10>| {
                let isend = isend.context("isend is null")?;
                anyhow::Ok(isend(comm.at.0, at, part.bytes, tag, mr, null_mut(), place))
            };
            Ok::<_, anyhow::Error>(match self.table {
                NetTable::V8(t) => {
                    t.isend.context("isend is null")?(comm.at.0, at, short?, tag, mr, place)
                }
                NetTable::V9(t) => {
                    t.isend.context("isend is null")?(comm.at.0, at, part.bytes, tag, mr, place)
                }
                NetTable::V10(t) => from_v10(t.isend)?,
                NetTable::V11(t) => from_v10(t.isend)?,
                NetTable::V12(t) => from_v10(t.isend)?,
            })
        })?;
        well("isend", result)?;
        Ok((!request.is_null()).then_some(Pointer(request)))
    }

    /// Posts receives of one group; none if the plugin asks for them again later.
    pub(crate) fn irecv(
        &self,
        comm: Comm,
        parts: &[Part],
        tags: &[i32],
        completion: Completion,
    ) -> Result<Option<Pointer>> {
        let count = c_int::try_from(parts.len()).context("the length of a group")?;
        let mut at: Vec<*mut c_void> = parts.iter().map(|part| part.at.cast()).collect();
        let mut long: Vec<usize> = parts.iter().map(|part| part.bytes).collect();
        let mut short = Vec::new();
        for part in parts {
            short.push(c_int::try_from(part.bytes).unwrap_or(c_int::MAX));
        }
        let mut mrs: Vec<*mut c_void> = parts.iter().map(|part| part.registration.0).collect();
        let (at, mrs, mut tags) = (at.as_mut_ptr(), mrs.as_mut_ptr(), tags.to_vec());
        let (tags, long, short) = (tags.as_mut_ptr(), long.as_mut_ptr(), short.as_mut_ptr());
        // From v10 on there is a handle of the profiler for each receive, or no array at all.
        let none = null_mut();
        let mut request = match completion {
            Completion::Needed => null_mut(),
            Completion::Optional => OPTIONAL_RECV_COMPLETION as *mut c_void,
        };
        let place = &raw mut request;
        // SAFETY: the arrays have one place for each receive and outlive the call; the parts are
        // registered memory that their owner keeps while it is in use.
        let result = self.timed("irecv", || unsafe {
            let from_v10 = |irecv: Option<IrecvV10>| {
                let irecv = irecv.context("irecv is null")?;
                anyhow::Ok(irecv(comm.at.0, count, at, long, tags, mrs, none, place))
            };
            Ok::<_, anyhow::Error>(match self.table {
                NetTable::V8(t) => {
                    t.irecv.context("irecv is null")?(comm.at.0, count, at, short, tags, mrs, place)
                }
                NetTable::V9(t) => {
                    t.irecv.context("irecv is null")?(comm.at.0, count, at, long, tags, mrs, place)
                }
                NetTable::V10(t) => from_v10(t.irecv)?,
                NetTable::V11(t) => from_v10(t.irecv)?,
                NetTable::V12(t) => from_v10(t.irecv)?,
            })
        })?;
        well("irecv", result)?;
        ensure!(
            request as usize != OPTIONAL_RECV_COMPLETION,
            "irecv left the preset request as it was: NCCL would test it"
        );
        Ok((!request.is_null()).then_some(Pointer(request)))
    }

    /// Makes received bytes visible; none if there is nothing to wait for.
    pub(crate) fn iflush(&self, comm: Comm, part: Part) -> Result<Option<Pointer>> {
        let function = function!(self, iflush);
        let (mut at, mut mr, mut request) =
            (part.at.cast::<c_void>(), part.registration.0, null_mut());
        let mut size = c_int::try_from(part.bytes).context("a flush is of at most 2 GiB")?;
        // SAFETY: one place in each array.
        let result = self.timed("iflush", || unsafe {
            function(comm.at.0, 1, &mut at, &mut size, &mut mr, &mut request)
        });
        well("iflush", result)?;
        Ok((!request.is_null()).then_some(Pointer(request)))
    }

    /// The state of a request: none while it is not done, then the bytes of each receive.
    pub(crate) fn test<const N: usize>(&self, request: Pointer) -> Result<Option<[i32; N]>> {
        let function = function!(self, test);
        let (mut done, mut sizes) = (0, [-1; N]);
        let to = if N == 0 { null_mut() } else { sizes.as_mut_ptr() };
        // SAFETY: a request that was not done before, and a place for each receive, or none.
        let result = self.timed("test", || unsafe { function(request.0, &mut done, to) });
        well("test", result)?;
        Ok((done != 0).then_some(sizes))
    }

    /// Closes a communicator of data.
    pub(crate) fn close(&self, comm: Comm) -> Result<()> {
        let (name, function) = match comm.side {
            Side::Send => ("closeSend", function!(self, close_send)),
            Side::Recv => ("closeRecv", function!(self, close_recv)),
        };
        // SAFETY: it is closed once, and not used afterwards.
        well(name, unsafe { function(comm.at.0) })
    }

    pub(crate) fn close_listen(&self, listen: Pointer) -> Result<()> {
        let function = function!(self, close_listen);
        // SAFETY: it is closed once, and not used afterwards.
        well("closeListen", unsafe { function(listen.0) })
    }
}

/// A part of registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) at: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) registration: Pointer,
}

/// Whether NCCL needs to know when a receive is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    Needed,
    /// The request is preset to 1, as for the protocols LL and LL128.
    Optional,
}

/// The plugin's answer as a `Result`, with its last warning.
pub(crate) fn well(function: &str, result: NcclResult) -> Result<()> {
    if result == NcclResult::SUCCESS {
        return Ok(());
    }
    match log::last_warning() {
        Some(line) => bail!("{function} returned {result}; last warning: {line}"),
        None => bail!("{function} returned {result}, and nothing was logged at WARN"),
    }
}

pub(crate) type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> NcclResult;

/// Asks for properties. Fields that the plugin leaves alone are zero.
fn ask<P>(device: i32, function: Option<GetProperties<P>>) -> Result<P> {
    let function = function.context("getProperties is null")?;
    // SAFETY: all bytes zero are a value of each of these structs: numbers and pointers.
    let mut properties = unsafe { std::mem::zeroed::<P>() };
    // SAFETY: the struct is the version's.
    well("getProperties", unsafe { function(device, &mut properties) })?;
    Ok(properties)
}

fn properties_v8(device: i32, function: Option<GetProperties<PropertiesV8>>) -> Result<Properties> {
    let found = ask(device, function)?;
    let head = PropertiesHead {
        name: found.name,
        pci_path: found.pci_path,
        guid: found.guid,
        memory: found.memory,
        registration_is_global: found.registration_is_global,
        force_flush: 0,
        speed_mbps: found.speed_mbps,
        port: found.port,
        latency_us: found.latency_us,
        max_comms: found.max_comms,
        max_recvs: found.max_recvs,
        device_type: found.device_type,
        device_version: found.device_version,
    };
    of_head(&head)
}

fn properties_v9(device: i32, function: Option<GetProperties<PropertiesV9>>) -> Result<Properties> {
    let found = ask(device, function)?;
    let physical = physical(found.virtual_device.count, &found.virtual_device.devices)?;
    let longest_bytes = Some([found.max_p2p_bytes as u64, found.max_coll_bytes as u64]);
    Ok(Properties { physical, longest_bytes, ..of_head(&found.head)? })
}

pub(crate) fn properties_v11<const N: usize>(
    device: i32,
    function: Option<GetProperties<PropertiesV11<N>>>,
) -> Result<Properties> {
    let found = ask(device, function)?;
    let physical = physical(found.virtual_device.count, &found.virtual_device.devices)?;
    let longest_bytes = Some([found.max_p2p_bytes as u64, found.max_coll_bytes as u64]);
    Ok(Properties { physical, longest_bytes, ..of_head(&found.head)? })
}

fn physical(count: c_int, devices: &[c_int]) -> Result<Vec<i32>> {
    let listed = usize::try_from(count).ok().and_then(|count| devices.get(..count));
    Ok(listed.with_context(|| format!("{count} physical devices"))?.to_vec())
}

fn of_head(head: &PropertiesHead) -> Result<Properties> {
    Ok(Properties {
        name: text(head.name).context("the device's name is null")?,
        pci_path: text(head.pci_path),
        guid: head.guid,
        memory: head.memory,
        speed_mbps: head.speed_mbps,
        port: head.port,
        latency_us: head.latency_us,
        max_comms: head.max_comms,
        max_recvs: head.max_recvs,
        device_type: head.device_type,
        device_version: head.device_version,
        physical: Vec::new(),
        longest_bytes: None,
    })
}

fn text(at: *const c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: texts of properties have an end and live for ever, by the interface.
    Some(unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}
