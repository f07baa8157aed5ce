//! Puts, gets and their requests.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
    sync::Arc,
};

use uccl_nccl_abi::{NcclResult, rma::signal};
use uccl_p2p::{Change, Iov, Op};

use super::quiet;
use crate::{
    entry::{give, known},
    fault::Fault,
    rma::{
        context::{Coll, Contexts, Operation, SignalPlace},
        group::Region,
        slots::Ticket,
    },
};

/// A place in a registered region.
#[derive(Clone, Copy)]
struct At {
    offset: u64,
    mr: *mut c_void,
}

/// A put or a get, as NCCL has it.
#[derive(Clone, Copy)]
struct Call {
    name: &'static str,
    op: Op,
    context: c_int,
    local: At,
    bytes: usize,
    remote: At,
    rank: u32,
    signal: Option<CallSignal>,
}

#[derive(Clone, Copy)]
struct CallSignal {
    at: At,
    value: u64,
    change: u32,
}

impl Call {
    /// The operation of this call.
    ///
    /// # Safety
    ///
    /// Its registrations are null or of this plugin.
    unsafe fn operation(&self, contexts: &Contexts) -> Result<Operation, Fault> {
        let misuse = |why| Fault::Misuse(self.name, why);
        let context = contexts.number(self.context);
        let context = context.ok_or(misuse("there is no such context"))?;
        let rank = self.rank as usize;
        if rank >= contexts.coll.group.len() {
            return Err(misuse("there is no such rank"));
        }
        let (mut local, mut remote) = (None, (0, 0));
        if self.bytes > 0 {
            // SAFETY: the caller's.
            let (ours, theirs) = unsafe {
                (known::<Region>(self.name, self.local.mr)?, known(self.name, self.remote.mr)?)
            };
            let ptr = usize::try_from(self.local.offset).ok();
            let ptr = ptr.and_then(|offset| ours.base.checked_add(offset));
            let ptr = ptr.ok_or(misuse("an offset beyond all memory"))?;
            local = Some(Iov { mr: ours.mr, ptr, len: self.bytes });
            let theirs: &Region = theirs;
            remote = (theirs.number, self.remote.offset);
        }
        let signal = match self.signal {
            None => None,
            Some(CallSignal { at, value, change }) => {
                let change = match change {
                    signal::INCREMENT => Change::Add(1),
                    signal::ADD => Change::Add(value),
                    _ => return Err(misuse("a signal that neither increments nor adds")),
                };
                if !at.offset.is_multiple_of(8) {
                    return Err(misuse("a signal's word is aligned to 8 bytes"));
                }
                // SAFETY: the caller's.
                let region = unsafe { known::<Region>(self.name, at.mr) }?.number;
                Some(SignalPlace { region, offset: at.offset, change })
            }
        };
        Ok(Operation { context, rank, op: self.op, local, remote, signal })
    }

    /// Begins it.
    ///
    /// # Safety
    ///
    /// Contexts of `createContext`, registrations of their group, and a place for the request. NCCL
    /// keeps the memory until the request has ended, or the contexts.
    unsafe fn begin(&self, contexts: *mut c_void, request: *mut *mut c_void) -> NcclResult {
        quiet(|| {
            // SAFETY: the caller's.
            let (contexts, operation) = unsafe {
                give(self.name, request, null_mut())?;
                let contexts = known::<Contexts>(self.name, contexts)?;
                (contexts, self.operation(contexts)?)
            };
            let ticket = contexts.coll.begin(operation)?;
            // SAFETY: the caller's.
            unsafe { give(self.name, request, ticket.cast_mut().cast()) }
        })
    }
}

pub(crate) unsafe extern "C" fn put_v13(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let (local, remote) =
        (At { offset: source, mr: source_mr }, At { offset: target, mr: target_mr });
    let (name, op, signal) = ("iput", Op::Write, None);
    let begun = Call { name, op, context, local, bytes, remote, rank, signal };
    // SAFETY: NCCL's contexts, registrations and place.
    unsafe { begun.begin(contexts, request) }
}

/// Options only say that more follows: nothing is held back here.
pub(crate) unsafe extern "C" fn put_v15(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    _options: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without options.
    unsafe {
        put_v13(contexts, context, source, source_mr, bytes, target, target_mr, rank, request)
    }
}

pub(crate) unsafe extern "C" fn get_v13(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let (local, remote) =
        (At { offset: target, mr: target_mr }, At { offset: source, mr: source_mr });
    let (name, op, signal) = ("iget", Op::Read, None);
    let begun = Call { name, op, context, local, bytes, remote, rank, signal };
    // SAFETY: NCCL's contexts, registrations and place.
    unsafe { begun.begin(contexts, request) }
}

pub(crate) unsafe extern "C" fn get_v15(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    _options: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without options.
    unsafe {
        get_v13(contexts, context, source, source_mr, bytes, target, target_mr, rank, request)
    }
}

pub(crate) unsafe extern "C" fn put_signal_v13(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    word: u64,
    word_mr: *mut c_void,
    value: u64,
    change: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let (local, remote) =
        (At { offset: source, mr: source_mr }, At { offset: target, mr: target_mr });
    let signal = Some(CallSignal { at: At { offset: word, mr: word_mr }, value, change });
    let (name, op) = ("iputSignal", Op::Write);
    let begun = Call { name, op, context, local, bytes, remote, rank, signal };
    // SAFETY: NCCL's contexts, registrations and place.
    unsafe { begun.begin(contexts, request) }
}

/// Each signal is strong: NCCL sends that of a put apart from it.
pub(crate) unsafe extern "C" fn put_signal_v14(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    word: u64,
    word_mr: *mut c_void,
    value: u64,
    change: u32,
    _is_strong: bool,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without a strength.
    unsafe {
        put_signal_v13(
            contexts, context, source, source_mr, bytes, target, target_mr, rank, word, word_mr,
            value, change, request,
        )
    }
}

pub(crate) unsafe extern "C" fn put_signal_v15(
    contexts: *mut c_void,
    context: c_int,
    source: u64,
    source_mr: *mut c_void,
    bytes: usize,
    target: u64,
    target_mr: *mut c_void,
    rank: u32,
    word: u64,
    word_mr: *mut c_void,
    value: u64,
    change: u32,
    _is_strong: bool,
    _options: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the same function without a strength and without options.
    unsafe {
        put_signal_v13(
            contexts, context, source, source_mr, bytes, target, target_mr, rank, word, word_mr,
            value, change, request,
        )
    }
}

/// An operation that has ended is visible: there is nothing to wait for.
pub(crate) unsafe extern "C" fn flush(
    _contexts: *mut c_void,
    _context: c_int,
    _mr: *mut c_void,
    _rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's place for the request.
    quiet(|| unsafe { give("iflush", request, null_mut()) })
}

pub(crate) unsafe extern "C" fn test(
    coll: *mut c_void,
    request: *mut c_void,
    done: *mut c_int,
) -> NcclResult {
    quiet(|| {
        // SAFETY: NCCL's place for the answer, a group of `connect`, and a request of it, or none.
        let is_done = unsafe {
            give("test", done, 0)?;
            let coll = known::<Arc<Coll>>("test", coll)?;
            request.is_null() || coll.test(known::<Ticket>("test", request)?)?
        };
        // SAFETY: as above.
        unsafe { give("test", done, c_int::from(is_done)) }
    })
}

pub(crate) unsafe extern "C" fn progress(contexts: *mut c_void) -> NcclResult {
    // SAFETY: of `createContext`.
    quiet(|| Ok(unsafe { known::<Contexts>("progress", contexts) }?.coll.progress()?))
}

pub(crate) unsafe extern "C" fn query_last_error(
    contexts: *mut c_void,
    has_error: *mut bool,
) -> NcclResult {
    quiet(|| {
        // SAFETY: of `createContext`, and NCCL's place for the answer.
        unsafe {
            let contexts = known::<Contexts>("queryLastError", contexts)?;
            let has_failed = contexts.coll.group.look_at_members().is_err();
            give("queryLastError", has_error, has_failed)
        }
    })
}
