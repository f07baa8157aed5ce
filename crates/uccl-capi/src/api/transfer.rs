use std::ffi::c_void;

use smallvec::SmallVec;
use uccl_p2p::{
    Change, ConnId, Endpoint, Iov, MrId, NoInterrupt, Op, Request, Signal, Status, TransferId,
    Until,
};
use uccl_wire::{advert::Advert, message::MAX_IOVS};

use super::{
    UCCL_TIMEOUT_DEFAULT, call, call_for, deadline, endpoint, patience, uccl_advert_t,
    uccl_endpoint_t, uccl_status_t,
};
use crate::{
    args::{self, Out, put_if_wanted},
    failure::{Answer, Failure},
};

/// A piece of local memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct uccl_iov_t {
    /// The region that it lies in.
    pub mr: u64,
    /// Where it starts.
    pub ptr: *mut c_void,
    /// How long it is, in bytes.
    pub len: usize,
}

/// The kind of a transfer.
#[repr(i32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum uccl_op_t {
    /// From the peer's advertised memory into ours.
    UCCL_READ = 0,
    /// From ours into the peer's advertised memory.
    UCCL_WRITE = 1,
    /// From ours to the peer's matching receive.
    UCCL_SEND = 2,
    /// From the peer's matching send into ours.
    UCCL_RECV = 3,
}

/// The change that a signal makes to a word.
#[repr(i32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum uccl_change_t {
    /// The word becomes the value.
    UCCL_SET = 0,
    /// The value is added to the word, which wraps around.
    UCCL_ADD = 1,
}

/// A word of the peer's memory that a write changes, once, when all its bytes are visible there. It
/// does not change when the write fails or is cancelled. The word is an integer of eight bytes,
/// aligned to eight.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct uccl_signal_t {
    /// The advert of the word, which begins at the advert's first byte.
    pub word: uccl_advert_t,
    /// The value that the word becomes, or that is added to it.
    pub value: u64,
    /// One of uccl_change_t.
    pub change: i32,
    /// Not 0: the word changes only after all earlier writes of the request's context have
    /// succeeded, too. Once one of these has failed, the context's strong signals fail.
    pub strong: i32,
}

/// A transfer: any number of pieces moved as one. Set the whole struct to zero first, then the
/// needed fields, and `timeout_ms`.
#[repr(C)]
pub struct uccl_request_t {
    /// The connection.
    pub conn: u64,
    /// One of uccl_op_t.
    pub op: i32,
    /// Pieces of local memory.
    pub iovs: *const uccl_iov_t,
    /// The peer's memory, one advert a piece, each at least as long; NULL for UCCL_SEND and
    /// UCCL_RECV.
    pub adverts: *const uccl_advert_t,
    /// How many pieces there are, 1 to 65,536; with a signal there may be none.
    pub count: usize,
    /// A notification that the peer gets when the data has arrived, or NULL. Not with UCCL_RECV.
    pub notif: *const c_void,
    /// Its length in bytes, at most 64 MiB.
    pub notif_len: usize,
    /// Milliseconds until the transfer fails: UCCL_TIMEOUT_DEFAULT, UCCL_TIMEOUT_NEVER or a
    /// positive number.
    pub timeout_ms: i64,
    /// A word of the peer's that changes when a write's bytes have arrived, before the notification
    /// goes out, or NULL.
    pub signal: *const uccl_signal_t,
    /// The scope of strong signals: they follow the order in which transfers are posted in one
    /// context.
    pub context: u32,
}

/// A request in the engine's types.
struct Call<'a> {
    conn: ConnId,
    op: Op,
    iovs: SmallVec<[Iov; 4]>,
    adverts: SmallVec<[Advert; 4]>,
    notif: Option<&'a [u8]>,
    timeout_ms: i64,
    signal: Option<Signal>,
    context: u32,
}

impl<'a> Call<'a> {
    /// # Safety
    /// The request's lists are as long as it says, and its notification stays for `'a`.
    unsafe fn of(request: &'a uccl_request_t) -> Answer<Self> {
        let op = op_of(request.op)?;
        if request.count > MAX_IOVS {
            let count = request.count;
            return Err(Failure::invalid(format!(
                "{count} pieces: a transfer has 1 to {MAX_IOVS}"
            )));
        }
        let one_sided = matches!(op, Op::Read | Op::Write);
        if !one_sided && !request.adverts.is_null() {
            return Err(Failure::invalid("a send or receive has no adverts: leave them NULL"));
        }
        let adverts = if one_sided { request.count } else { 0 };
        // SAFETY: the caller's promise.
        let (iovs, adverts, notif) = unsafe {
            (
                args::many(request.iovs, request.count, "iovs")?,
                args::many(request.adverts, adverts, "adverts")?,
                args::many(request.notif.cast::<u8>(), request.notif_len, "notif")?,
            )
        };
        let decode = |advert: &uccl_advert_t| Advert::decode(&advert.bytes);
        Ok(Call {
            conn: ConnId(request.conn),
            op,
            iovs: iovs.iter().map(iov_of).collect(),
            adverts: adverts.iter().map(decode).collect::<Result<_, _>>()?,
            // An empty notification is one too, if its pointer is not NULL.
            notif: (!request.notif.is_null()).then_some(notif),
            timeout_ms: request.timeout_ms,
            // SAFETY: the caller's promise.
            signal: unsafe { request.signal.as_ref() }.map(signal_of).transpose()?,
            context: request.context,
        })
    }

    fn request(&self) -> Answer<Request<'_>> {
        Ok(Request {
            notif: self.notif,
            timeout: deadline(self.timeout_ms)?,
            signal: self.signal,
            context: self.context,
            ..Request::new(self.conn, self.op, &self.iovs, &self.adverts)
        })
    }

    /// Returns the bytes that were moved.
    fn run(&self, endpoint: &Endpoint) -> Answer<u64> {
        Ok(endpoint.run(&self.request()?, &mut NoInterrupt)?.bytes)
    }
}

/// One of `uccl_op_t`.
pub(super) fn op_of(op: i32) -> Answer<Op> {
    match op {
        op if op == uccl_op_t::UCCL_READ as i32 => Ok(Op::Read),
        op if op == uccl_op_t::UCCL_WRITE as i32 => Ok(Op::Write),
        op if op == uccl_op_t::UCCL_SEND as i32 => Ok(Op::Send),
        op if op == uccl_op_t::UCCL_RECV as i32 => Ok(Op::Recv),
        op => Err(Failure::invalid(format!("op {op} is none of uccl_op_t"))),
    }
}

/// A piece of local memory.
pub(super) fn iov_of(iov: &uccl_iov_t) -> Iov {
    Iov { mr: MrId(iov.mr), ptr: args::address(iov.ptr), len: iov.len }
}

fn signal_of(signal: &uccl_signal_t) -> Answer<Signal> {
    let change = match signal.change {
        change if change == uccl_change_t::UCCL_SET as i32 => Change::Set(signal.value),
        change if change == uccl_change_t::UCCL_ADD as i32 => Change::Add(signal.value),
        change => return Err(Failure::invalid(format!("{change} is none of uccl_change_t"))),
    };
    let advert = Advert::decode(&signal.word.bytes)?;
    Ok(Signal { advert, change, strong: signal.strong != 0 })
}

/// The request of a call that waits: pieces, and nothing else.
fn plain(
    op: uccl_op_t,
    conn: u64,
    iovs: *const uccl_iov_t,
    adverts: *const uccl_advert_t,
    count: usize,
) -> uccl_request_t {
    let (op, timeout_ms) = (op as i32, UCCL_TIMEOUT_DEFAULT);
    uccl_request_t {
        conn,
        op,
        iovs,
        adverts,
        count,
        notif: std::ptr::null(),
        notif_len: 0,
        timeout_ms,
        signal: std::ptr::null(),
        context: 0,
    }
}

/// Writes `count` pieces into the peer's memory, `iovs[i]` to the memory of `adverts[i]`, and waits
/// until they have arrived.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_write(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    iovs: *const uccl_iov_t,
    adverts: *const uccl_advert_t,
    count: usize,
) -> uccl_status_t {
    let request = plain(uccl_op_t::UCCL_WRITE, conn, iovs, adverts, count);
    // SAFETY: the lists are as long as the caller says.
    call(|| unsafe { Call::of(&request) }?.run(&*self::endpoint(endpoint)?).map(drop))
}

/// Reads `count` pieces of the peer's memory, `adverts[i]` into `iovs[i]`, and waits until they
/// have arrived.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_read(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    iovs: *const uccl_iov_t,
    adverts: *const uccl_advert_t,
    count: usize,
) -> uccl_status_t {
    let request = plain(uccl_op_t::UCCL_READ, conn, iovs, adverts, count);
    // SAFETY: the lists are as long as the caller says.
    call(|| unsafe { Call::of(&request) }?.run(&*self::endpoint(endpoint)?).map(drop))
}

/// Sends `count` pieces as one message to the peer's matching receive, and waits until it has taken
/// them. Sends and receives of a connection meet in order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_send(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    iovs: *const uccl_iov_t,
    count: usize,
) -> uccl_status_t {
    let request = plain(uccl_op_t::UCCL_SEND, conn, iovs, std::ptr::null(), count);
    // SAFETY: the list is as long as the caller says.
    call(|| unsafe { Call::of(&request) }?.run(&*self::endpoint(endpoint)?).map(drop))
}

/// Receives one message into `count` pieces, as many as it was sent in, and waits for it.
/// `received`, if not NULL, gets its length in bytes, which may be less than there is room for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_recv(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    iovs: *const uccl_iov_t,
    count: usize,
    received: *mut u64,
) -> uccl_status_t {
    let request = plain(uccl_op_t::UCCL_RECV, conn, iovs, std::ptr::null(), count);
    call(|| {
        // SAFETY: the list is as long as the caller says.
        let bytes = unsafe { Call::of(&request) }?.run(&*self::endpoint(endpoint)?)?;
        // SAFETY: NULL, or a place for a number.
        unsafe { put_if_wanted(received, bytes) };
        Ok(())
    })
}

/// Makes a transfer and waits for its end. `bytes`, if not NULL, gets how much was moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_run(
    endpoint: *const uccl_endpoint_t,
    request: *const uccl_request_t,
    bytes: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a request with lists as long as it says.
        let moved = unsafe { Call::of(args::one(request, "request")?) }?
            .run(&*self::endpoint(endpoint)?)?;
        // SAFETY: NULL, or a place for a number.
        unsafe { put_if_wanted(bytes, moved) };
        Ok(())
    })
}

/// Starts a transfer. The caller may free the request and its lists when this has returned; the
/// memory that is moved must stay until the transfer has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_post(
    endpoint: *const uccl_endpoint_t,
    request: *const uccl_request_t,
    transfer: *mut u64,
) -> uccl_status_t {
    call(|| {
        // SAFETY: a request with lists as long as it says, and a place for an id.
        let (call, out) =
            unsafe { (Call::of(args::one(request, "request")?)?, Out::new(transfer, "transfer")?) };
        out.put(self::endpoint(endpoint)?.post(&call.request()?)?.0);
        Ok(())
    })
}

/// The state of a transfer: UCCL_IN_PROGRESS, UCCL_OK, or the status of its failure. The answer for
/// a transfer that has ended stays the same; the last 16,384 are remembered. `bytes`, if not NULL,
/// gets how much was moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_poll(
    endpoint: *const uccl_endpoint_t,
    transfer: u64,
    bytes: *mut u64,
) -> uccl_status_t {
    call_for(|| {
        let status = self::endpoint(endpoint)?.poll(TransferId(transfer))?;
        // SAFETY: NULL, or a place for a number.
        unsafe { stands(status, bytes) }
    })
}

/// Waits for a transfer's end, at most `timeout_ms`; after that the answer is UCCL_IN_PROGRESS, and
/// the transfer continues. Otherwise as `uccl_poll`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_wait(
    endpoint: *const uccl_endpoint_t,
    transfer: u64,
    timeout_ms: i64,
    bytes: *mut u64,
) -> uccl_status_t {
    call_for(|| {
        let (endpoint, patience) = (self::endpoint(endpoint)?, patience(timeout_ms)?);
        let status = endpoint.wait(TransferId(transfer), patience, &mut NoInterrupt)?;
        // SAFETY: NULL, or a place for a number.
        unsafe { stands(status, bytes) }
    })
}

/// Waits until the word of eight bytes at `ptr` in region `mr`, which peers' signals change, is
/// `at_least` or more. The data that its signals announce has then arrived. `value`, if not NULL,
/// gets the word's value. UCCL_DEADLINE if that takes longer than `timeout_ms`. The word is in host
/// memory: let a stream or a kernel wait for a word in a GPU's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_wait_signal(
    endpoint: *const uccl_endpoint_t,
    mr: u64,
    ptr: *const c_void,
    at_least: u64,
    timeout_ms: i64,
    value: *mut u64,
) -> uccl_status_t {
    // SAFETY: the caller's promise.
    unsafe { wait_word(endpoint, None, (mr, ptr), at_least, timeout_ms, value) }
}

/// As `uccl_wait_signal`, for a word that the peer of a connection changes. If the connection ends
/// first, returns the reason of the end, such as UCCL_CONNECTION_LOST.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_wait_signal_from(
    endpoint: *const uccl_endpoint_t,
    conn: u64,
    mr: u64,
    ptr: *const c_void,
    at_least: u64,
    timeout_ms: i64,
    value: *mut u64,
) -> uccl_status_t {
    // SAFETY: the caller's promise.
    unsafe { wait_word(endpoint, Some(ConnId(conn)), (mr, ptr), at_least, timeout_ms, value) }
}

/// # Safety
/// `value` is NULL, or may be written.
unsafe fn wait_word(
    endpoint: *const uccl_endpoint_t,
    conn: Option<ConnId>,
    (mr, ptr): (u64, *const c_void),
    at_least: u64,
    timeout_ms: i64,
    value: *mut u64,
) -> uccl_status_t {
    call(|| {
        let (endpoint, timeout) = (self::endpoint(endpoint)?, deadline(timeout_ms)?);
        let (mr, ptr, until) = (MrId(mr), args::address(ptr.cast_mut()), Until::AtLeast(at_least));
        let seen = match conn {
            None => endpoint.wait_word(mr, ptr, until, timeout, &mut NoInterrupt),
            Some(conn) => {
                endpoint.wait_word_from(conn, (mr, ptr), until, timeout, &mut NoInterrupt)
            }
        }?;
        // SAFETY: NULL, or a place for a number.
        unsafe { put_if_wanted(value, seen) };
        Ok(())
    })
}

/// Ends a transfer. When this returns, no byte of it lands on either side any more. The answer is
/// UCCL_OK if it had succeeded before, else UCCL_CANCELLED or the status of its failure. A peer
/// that does not confirm the end in time loses its connection; then this holds on this side at
/// once, and on the peer's side once the peer notices.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_cancel(endpoint: *const uccl_endpoint_t, transfer: u64) -> uccl_status_t {
    call_for(|| {
        let status = self::endpoint(endpoint)?.cancel(TransferId(transfer))?;
        // SAFETY: nothing is written to NULL.
        unsafe { stands(status, std::ptr::null_mut()) }
    })
}

/// # Safety
/// `bytes` is NULL, or may be written.
unsafe fn stands(status: Status, bytes: *mut u64) -> Answer<uccl_status_t> {
    match status {
        Status::Pending => Ok(uccl_status_t::UCCL_IN_PROGRESS),
        Status::Failed(error) => Err(error.into()),
        Status::Done(outcome) => {
            // SAFETY: the caller's promise.
            unsafe { put_if_wanted(bytes, outcome.bytes) };
            Ok(uccl_status_t::UCCL_OK)
        }
    }
}
