//! One way to call one-sided tables of all versions, with the time that each call takes.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::{
    memory,
    rma::{GinConfig, PutV13, RmaConfig, RmaV15, RmaV16},
};

use crate::{
    log,
    net::{Handle, Pointer, Properties, Slowest, listen_by, properties_v11, well},
    rma_table::{RmaTable, with_rma},
};

/// A function of a table.
macro_rules! function {
    ($self:ident, $name:ident) => {
        with_rma!($self.table, table => table.functions.$name)
            .with_context(|| format!("{} is null", stringify!($name)))?
    };
}

/// A place in registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    pub(crate) mr: Pointer,
    pub(crate) offset: u64,
}

impl At {
    pub(crate) const NONE: Self = Self { mr: Pointer(null_mut()), offset: 0 };
}

/// A put or a get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) context: i32,
    /// Our memory for a put, the peer's for a get.
    pub(crate) from: At,
    pub(crate) to: At,
    pub(crate) bytes: usize,
    pub(crate) rank: usize,
}

/// A signal behind a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signal {
    pub(crate) at: At,
    pub(crate) value: u64,
    pub(crate) change: u32,
}

/// A one-sided table, and the calls that were made through it.
#[derive(Clone)]
pub(crate) struct Rma {
    table: RmaTable,
    slowest: Arc<Slowest>,
}

impl Rma {
    pub(crate) fn new(table: RmaTable) -> Self {
        Self { table, slowest: Arc::default() }
    }

    /// The call that took longest of those that must return at once.
    pub(crate) fn slowest(&self) -> Option<(&'static str, Duration)> {
        self.slowest.get()
    }

    /// Begins a communicator; the plugin's answer and the context.
    pub(crate) fn init(&self, id: u64) -> Result<Pointer> {
        let mut context = null_mut();
        let init = with_rma!(self.table, table => table.init).context("init is null")?;
        // SAFETY: called as NCCL does.
        well("init", unsafe { init(&mut context, id, log::logger()) })?;
        Ok(Pointer(context))
    }

    pub(crate) fn finalize(&self, context: Pointer) -> Result<()> {
        let function = function!(self, finalize);
        // SAFETY: the context is that of `init`.
        well("finalize", unsafe { function(context.0) })
    }

    pub(crate) fn devices(&self) -> Result<i32> {
        let mut count = 0;
        let function = with_rma!(self.table, table => table.devices).context("devices is null")?;
        // SAFETY: the count outlives the call.
        well("devices", unsafe { function(&mut count) })?;
        Ok(count)
    }

    pub(crate) fn properties(&self, device: i32) -> Result<Properties> {
        properties_v11(device, with_rma!(self.table, table => table.functions.get_properties))
    }

    pub(crate) fn listen(&self, context: Pointer) -> Result<(Handle, Pointer)> {
        let function = function!(self, listen);
        listen_by(|to, comm| {
            // SAFETY: the handle and the place outlive the call.
            let call = || unsafe { function(context.0, 0, to, comm) };
            Ok(self.slowest.timed("listen", call))
        })
    }

    /// Joins the ranks of these handles. It may block.
    pub(crate) fn connect(
        &self,
        context: Pointer,
        handles: &mut [Handle],
        rank: usize,
        listen: Pointer,
    ) -> Result<Pointer> {
        let mut at: Vec<*mut c_void> =
            handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (ranks, mut coll) = (c_int::try_from(at.len())?, null_mut());
        let (rank, function) = (c_int::try_from(rank)?, function!(self, connect));
        // SAFETY: a handle of each rank, and a listen communicator of this plugin.
        let result =
            unsafe { function(context.0, at.as_mut_ptr(), ranks, rank, listen.0, &mut coll) };
        well("connect", result)?;
        ensure!(!coll.is_null(), "connect gives no group");
        Ok(Pointer(coll))
    }

    pub(crate) fn create_context(&self, coll: Pointer, count: i32) -> Result<Pointer> {
        let (mut made, mut device) = (null_mut(), null_mut());
        let mut gin = GinConfig {
            signals: 0,
            counters: 0,
            contexts: count,
            queue_depth: 0,
            traffic_class: -1,
        };
        // Some releases have a third field behind these two: one.
        let mut rma = [count, -1, 1];
        let at = rma.as_mut_ptr().cast::<RmaConfig>();
        let missing = "createContext is null";
        // SAFETY: a group of this plugin; settings and places outlive the call.
        let result = unsafe {
            match self.table {
                RmaTable::V13(t) => {
                    let create = t.functions.create_context.context(missing)?;
                    create(coll.0, &mut gin, &mut made, &mut device)
                }
                RmaTable::V14(t) => {
                    t.functions.create_context.context(missing)?(coll.0, at, &mut made)
                }
                RmaTable::V15(t) => {
                    t.functions.create_context.context(missing)?(coll.0, at, &mut made)
                }
                RmaTable::V16(t) => {
                    t.functions.create_context.context(missing)?(coll.0, at, &mut made)
                }
            }
        };
        well("createContext", result)?;
        ensure!(!made.is_null(), "createContext gives no contexts");
        Ok(Pointer(made))
    }

    /// Registers memory of the host.
    pub(crate) fn register(&self, coll: Pointer, at: *mut u8, bytes: usize) -> Result<Pointer> {
        let (mut mr, mut device, kind) = (null_mut(), null_mut(), memory::HOST);
        let (at, missing) = (at.cast::<c_void>(), "regMrSym is null");
        // SAFETY: the caller keeps the memory until it has deregistered it.
        let result = self.slowest.timed("regMrSym", || unsafe {
            anyhow::Ok(match self.table {
                RmaTable::V13(t) => {
                    let register = t.functions.reg_mr_sym.context(missing)?;
                    register(coll.0, at, bytes, kind, 0, &mut mr, &mut device)
                }
                RmaTable::V14(t) => {
                    let register = t.functions.reg_mr_sym.context(missing)?;
                    register(coll.0, at, bytes, kind, 0, &mut mr)
                }
                RmaTable::V15(t) => {
                    let register = t.functions.reg_mr_sym.context(missing)?;
                    register(coll.0, at, bytes, kind, 0, &mut mr)
                }
                RmaTable::V16(t) => {
                    let register = t.functions.reg_mr_sym.context(missing)?;
                    register(coll.0, at, bytes, kind, 0, &mut mr)
                }
            })
        })?;
        well("regMrSym", result)?;
        ensure!(!mr.is_null(), "regMrSym gives no registration");
        Ok(Pointer(mr))
    }

    pub(crate) fn deregister(&self, coll: Pointer, mr: Pointer) -> Result<()> {
        let function = function!(self, dereg_mr_sym);
        // SAFETY: a registration of this group.
        well("deregMrSym", unsafe { function(coll.0, mr.0) })
    }

    pub(crate) fn destroy_context(&self, contexts: Pointer) -> Result<()> {
        let function = function!(self, destroy_context);
        // SAFETY: destroyed once, and not used afterwards.
        well("destroyContext", unsafe { function(contexts.0) })
    }

    pub(crate) fn close_coll(&self, coll: Pointer) -> Result<()> {
        let function = function!(self, close_coll);
        // SAFETY: closed once, and not used afterwards.
        well("closeColl", unsafe { function(coll.0) })
    }

    pub(crate) fn close_listen(&self, listen: Pointer) -> Result<()> {
        let function = function!(self, close_listen);
        // SAFETY: closed once, and not used afterwards.
        well("closeListen", unsafe { function(listen.0) })
    }

    pub(crate) fn put(&self, contexts: Pointer, put: Move) -> Result<Pointer> {
        self.moved("iput", contexts, put)
    }

    pub(crate) fn get(&self, contexts: Pointer, get: Move) -> Result<Pointer> {
        self.moved("iget", contexts, get)
    }

    fn moved(&self, name: &'static str, contexts: Pointer, one: Move) -> Result<Pointer> {
        let Move { context, from, to, bytes, rank } = one;
        let (rank, mut request) = (u32::try_from(rank)?, null_mut());
        let is_put = name == "iput";
        let place = &raw mut request;
        // SAFETY: contexts and registrations of this plugin; the memory is kept while in use.
        let result = self.slowest.timed(name, || unsafe {
            let to_14 = |function: Option<PutV13>| {
                let function = function.context("a function is null")?;
                let (source, target) = (from.mr.0, to.mr.0);
                anyhow::Ok(function(
                    contexts.0,
                    context,
                    from.offset,
                    source,
                    bytes,
                    to.offset,
                    target,
                    rank,
                    place,
                ))
            };
            match self.table {
                RmaTable::V13(t) => to_14(if is_put { t.functions.put } else { t.functions.get }),
                RmaTable::V14(t) => to_14(if is_put { t.functions.put } else { t.functions.get }),
                RmaTable::V15(RmaV15 { functions, .. })
                | RmaTable::V16(RmaV16 { functions, .. }) => {
                    let function = if is_put { functions.put } else { functions.get };
                    let function = function.context("a function is null")?;
                    anyhow::Ok(function(
                        contexts.0,
                        context,
                        from.offset,
                        from.mr.0,
                        bytes,
                        to.offset,
                        to.mr.0,
                        rank,
                        0,
                        place,
                    ))
                }
            }
        })?;
        well(name, result)?;
        ensure!(!request.is_null(), "{name} gives no request: NCCL tests it all the same");
        Ok(Pointer(request))
    }

    /// Puts, and changes a word then. Without bytes it changes the word alone.
    pub(crate) fn put_signal(&self, contexts: Pointer, put: Move, then: Signal) -> Result<Pointer> {
        let Move { context, from, to, bytes, rank } = put;
        let Signal { at, value, change } = then;
        let (rank, mut request) = (u32::try_from(rank)?, null_mut());
        let missing = "iputSignal is null";
        let (place, strong) = (&raw mut request, true);
        let (source, target, word) = (from.mr.0, to.mr.0, at.mr.0);
        // SAFETY: as for a put.
        let result = self.slowest.timed("iputSignal", || unsafe {
            anyhow::Ok(match self.table {
                RmaTable::V13(t) => t.functions.put_signal.context(missing)?(
                    contexts.0,
                    context,
                    from.offset,
                    source,
                    bytes,
                    to.offset,
                    target,
                    rank,
                    at.offset,
                    word,
                    value,
                    change,
                    place,
                ),
                RmaTable::V14(t) => t.functions.put_signal.context(missing)?(
                    contexts.0,
                    context,
                    from.offset,
                    source,
                    bytes,
                    to.offset,
                    target,
                    rank,
                    at.offset,
                    word,
                    value,
                    change,
                    strong,
                    place,
                ),
                RmaTable::V15(RmaV15 { functions, .. })
                | RmaTable::V16(RmaV16 { functions, .. }) => {
                    functions.put_signal.context(missing)?(
                        contexts.0,
                        context,
                        from.offset,
                        source,
                        bytes,
                        to.offset,
                        target,
                        rank,
                        at.offset,
                        word,
                        value,
                        change,
                        strong,
                        0,
                        place,
                    )
                }
            })
        })?;
        well("iputSignal", result)?;
        ensure!(!request.is_null(), "iputSignal gives no request: NCCL tests it all the same");
        Ok(Pointer(request))
    }

    /// Makes gotten bytes visible; none if there is nothing to wait for.
    pub(crate) fn flush(
        &self,
        contexts: Pointer,
        context: i32,
        mr: Pointer,
        rank: usize,
    ) -> Result<Option<Pointer>> {
        let (rank, mut request) = (u32::try_from(rank)?, null_mut());
        let function = function!(self, flush);
        // SAFETY: contexts and a registration of this plugin.
        let result = self
            .slowest
            .timed("iflush", || unsafe { function(contexts.0, context, mr.0, rank, &mut request) });
        well("iflush", result)?;
        Ok((!request.is_null()).then_some(Pointer(request)))
    }

    pub(crate) fn test(&self, coll: Pointer, request: Pointer) -> Result<bool> {
        let (mut done, function) = (0, function!(self, test));
        // SAFETY: a request of this group that was not done before.
        let result =
            self.slowest.timed("test", || unsafe { function(coll.0, request.0, &mut done) });
        well("test", result)?;
        Ok(done != 0)
    }

    /// Makes progress, if the plugin has a function for that.
    pub(crate) fn progress(&self, contexts: Pointer) -> Result<()> {
        let Some(function) = with_rma!(self.table, table => table.functions.progress) else {
            return Ok(());
        };
        // SAFETY: contexts of this plugin.
        well("progress", self.slowest.timed("progress", || unsafe { function(contexts.0) }))
    }

    /// Whether the plugin knows of an error.
    pub(crate) fn has_error(&self, contexts: Pointer) -> Result<bool> {
        let query = with_rma!(self.table, table => table.functions.query_last_error);
        let Some(function) = query else { return Ok(false) };
        let mut has_error = false;
        // SAFETY: contexts of this plugin, and a place for the answer.
        let result = self
            .slowest
            .timed("queryLastError", || unsafe { function(contexts.0, &mut has_error) });
        well("queryLastError", result)?;
        Ok(has_error)
    }
}
