//! Transfers, and how they ended.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::null_mut,
};

use smallvec::SmallVec;
use uccl_p2p::{Iov, MrId, NoInterrupt, Op, Request, Status, TransferId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_C_LEN, IpcInfo},
};

use super::{Conn, FifoItem, UcclConn, Vector, code, flag};
use crate::{
    api::uccl_status_t,
    args::{self, Out},
    failure::{Answer, Failure, run},
};

/// The pieces of one transfer.
#[derive(Default)]
struct Pieces {
    iovs: SmallVec<[Iov; 4]>,
    adverts: SmallVec<[Advert; 4]>,
}

impl Pieces {
    fn one(mr: u64, data: *const c_void, len: usize) -> Self {
        let iov = Iov { mr: MrId(mr), ptr: args::address(data), len };
        Self { iovs: SmallVec::from_slice(&[iov]), ..Self::default() }
    }

    fn receive(&self, conn: &Conn) -> Answer {
        let request = Request::new(conn.id, Op::Recv, &self.iovs, &[]);
        conn.core.run(&request, &mut NoInterrupt)?;
        Ok(())
    }

    fn post(&self, conn: &Conn, op: Op) -> Answer<u64> {
        Ok(conn.core.post(&Request::new(conn.id, op, &self.iovs, &self.adverts))?.0)
    }
}

/// The vectors that a call was given, by their addresses.
struct Vectors {
    mrs: *const Vector<u64>,
    ptrs: *const Vector<*const c_void>,
    sizes: *const Vector<usize>,
    num_iovs: c_int,
}

impl Vectors {
    fn count(&self) -> Answer<usize> {
        let count = self.num_iovs;
        usize::try_from(count).map_err(|_| Failure::invalid(format!("num_iovs is {count}")))
    }

    /// # Safety
    /// They are vectors, which stay as they are.
    unsafe fn iovs(&self) -> Answer<SmallVec<[Iov; 4]>> {
        let count = self.count()?;
        // SAFETY: the caller's promise.
        let (mrs, ptrs, sizes) = unsafe {
            (
                Vector::first(self.mrs, count, "mr_ids")?,
                Vector::first(self.ptrs, count, "the vector of addresses")?,
                Vector::first(self.sizes, count, "size_v")?,
            )
        };
        let all = mrs.iter().zip(ptrs).zip(sizes);
        Ok(all
            .map(|((&mr, &ptr), &len)| Iov { mr: MrId(mr), ptr: args::address(ptr), len })
            .collect())
    }
}

/// The peer's advert for one piece.
///
/// # Safety
/// `ipc` is NULL, or has IPC_INFO_SIZE bytes.
unsafe fn advert(conn: &Conn, item: &FifoItem, ipc: *const c_char) -> Answer<Advert> {
    if ipc.is_null() || !conn.is_local {
        return Ok(item.advert()?);
    }
    // SAFETY: the caller's promise.
    let info = unsafe { args::one(ipc.cast::<[u8; IPC_INFO_C_LEN]>(), "ipc_bufs") }?;
    let advert = IpcInfo::decode(info).and_then(|info| info.advert());
    advert.map_err(|e| Failure::invalid(e.to_string()))
}

/// One piece to be read or written.
struct OneSidedOp {
    op: Op,
    mr: u64,
    data: *const c_void,
    size: usize,
    item: FifoItem,
}

impl OneSidedOp {
    /// # Safety
    /// `transfer_id` is NULL, or a place for an id.
    unsafe fn post(&self, conn: *mut UcclConn, transfer_id: *mut u64) -> c_int {
        code(|| {
            // SAFETY: the caller's promise.
            let out = unsafe { Out::new(transfer_id, "transfer_id") }?;
            let conn = super::conn(conn)?;
            let mut pieces = Pieces::one(self.mr, self.data, self.size);
            pieces.adverts.push(self.item.advert()?);
            out.put(pieces.post(&conn, self.op)?);
            Ok(())
        })
    }
}

/// `uccl_engine_read`
#[unsafe(export_name = "_Z16uccl_engine_readP9uccl_connmPKvm8FifoItemPm")]
pub unsafe extern "C" fn read(
    conn: *mut UcclConn,
    mr: u64,
    data: *const c_void,
    size: usize,
    fifo_item: FifoItem,
    transfer_id: *mut u64,
) -> c_int {
    // SAFETY: a place for an id.
    unsafe { OneSidedOp { op: Op::Read, mr, data, size, item: fifo_item }.post(conn, transfer_id) }
}

/// `uccl_engine_write`
#[unsafe(export_name = "_Z17uccl_engine_writeP9uccl_connmPKvm8FifoItemPm")]
pub unsafe extern "C" fn write(
    conn: *mut UcclConn,
    mr: u64,
    data: *const c_void,
    size: usize,
    fifo_item: FifoItem,
    transfer_id: *mut u64,
) -> c_int {
    // SAFETY: a place for an id.
    unsafe { OneSidedOp { op: Op::Write, mr, data, size, item: fifo_item }.post(conn, transfer_id) }
}

/// The peer's side of many pieces to be read or written.
struct Remote {
    items: *const Vector<FifoItem>,
    ipc_bufs: *const Vector<*mut c_char>,
}

/// # Safety
/// They are vectors, and `transfer_id` is NULL or a place for an id.
unsafe fn post_vector(
    op: Op,
    conn: *mut UcclConn,
    local: &Vectors,
    remote: &Remote,
    transfer_id: *mut u64,
) -> c_int {
    code(|| {
        let count = local.count()?;
        // SAFETY: the caller's promise.
        let (out, iovs, items, ipc_bufs) = unsafe {
            (
                Out::new(transfer_id, "transfer_id")?,
                local.iovs()?,
                Vector::first(remote.items, count, "fifo_items")?,
                Vector::all(remote.ipc_bufs, "ipc_bufs")?,
            )
        };
        let conn = super::conn(conn)?;
        let mut pieces = Pieces { iovs, adverts: SmallVec::with_capacity(count) };
        for (i, item) in items.iter().enumerate() {
            let ipc = ipc_bufs.get(i).copied().unwrap_or(null_mut());
            // SAFETY: the caller's promise.
            pieces.adverts.push(unsafe { advert(&conn, item, ipc) }?);
        }
        out.put(pieces.post(&conn, op)?);
        Ok(())
    })
}

/// `uccl_engine_read_vector`
#[unsafe(export_name = "_Z23uccl_engine_read_vectorP9uccl_connSt6vectorImSaImEES1_IPvSaIS4_EES3_S1_I8FifoItemSaIS7_EEiPmS1_IPcSaISB_EE")]
// As C++ has it.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn read_vector(
    conn: *mut UcclConn,
    mr_ids: *const Vector<u64>,
    dst_v: *const Vector<*const c_void>,
    size_v: *const Vector<usize>,
    fifo_items: *const Vector<FifoItem>,
    num_iovs: c_int,
    transfer_id: *mut u64,
    ipc_bufs: *const Vector<*mut c_char>,
) -> c_int {
    let local = Vectors { mrs: mr_ids, ptrs: dst_v, sizes: size_v, num_iovs };
    let remote = Remote { items: fifo_items, ipc_bufs };
    // SAFETY: vectors, and a place for an id.
    unsafe { post_vector(Op::Read, conn, &local, &remote, transfer_id) }
}

/// `uccl_engine_write_vector`
#[unsafe(export_name = "_Z24uccl_engine_write_vectorP9uccl_connSt6vectorImSaImEES1_IPvSaIS4_EES3_S1_I8FifoItemSaIS7_EEiPmS1_IPcSaISB_EE")]
// As C++ has it.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn write_vector(
    conn: *mut UcclConn,
    mr_ids: *const Vector<u64>,
    src_v: *const Vector<*const c_void>,
    size_v: *const Vector<usize>,
    fifo_items: *const Vector<FifoItem>,
    num_iovs: c_int,
    transfer_id: *mut u64,
    ipc_bufs: *const Vector<*mut c_char>,
) -> c_int {
    let local = Vectors { mrs: mr_ids, ptrs: src_v, sizes: size_v, num_iovs };
    let remote = Remote { items: fifo_items, ipc_bufs };
    // SAFETY: vectors, and a place for an id.
    unsafe { post_vector(Op::Write, conn, &local, &remote, transfer_id) }
}

/// `uccl_engine_send`
#[unsafe(export_name = "_Z16uccl_engine_sendP9uccl_connmPKvmPm")]
pub unsafe extern "C" fn send(
    conn: *mut UcclConn,
    mr: u64,
    data: *const c_void,
    size: usize,
    transfer_id: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: a place for an id.
        let out = unsafe { Out::new(transfer_id, "transfer_id") }?;
        let conn = super::conn(conn)?;
        out.put(Pieces::one(mr, data, size).post(&conn, Op::Send)?);
        Ok(())
    })
}

/// `uccl_engine_send_vector`
#[unsafe(export_name = "_Z23uccl_engine_send_vectorP9uccl_connSt6vectorImSaImEES1_IPKvSaIS5_EES3_iPm")]
pub unsafe extern "C" fn send_vector(
    conn: *mut UcclConn,
    mr_ids: *const Vector<u64>,
    src_v: *const Vector<*const c_void>,
    size_v: *const Vector<usize>,
    num_iovs: c_int,
    transfer_id: *mut u64,
) -> c_int {
    code(|| {
        let local = Vectors { mrs: mr_ids, ptrs: src_v, sizes: size_v, num_iovs };
        // SAFETY: a place for an id, and vectors.
        let (out, iovs) = unsafe { (Out::new(transfer_id, "transfer_id")?, local.iovs()?) };
        let pieces = Pieces { iovs, ..Pieces::default() };
        out.put(pieces.post(&*super::conn(conn)?, Op::Send)?);
        Ok(())
    })
}

/// `uccl_engine_recv`
#[unsafe(export_name = "_Z16uccl_engine_recvP9uccl_connmPvm")]
pub extern "C" fn recv(conn: *mut UcclConn, mr: u64, data: *mut c_void, data_size: usize) -> c_int {
    code(|| Pieces::one(mr, data, data_size).receive(&*super::conn(conn)?))
}

/// `uccl_engine_recv_vector`
#[unsafe(export_name = "_Z23uccl_engine_recv_vectorP9uccl_connSt6vectorImSaImEES1_IPvSaIS4_EES3_i")]
pub unsafe extern "C" fn recv_vector(
    conn: *mut UcclConn,
    mr_ids: *const Vector<u64>,
    dst_v: *const Vector<*const c_void>,
    size_v: *const Vector<usize>,
    num_iovs: c_int,
) -> c_int {
    code(|| {
        let local = Vectors { mrs: mr_ids, ptrs: dst_v, sizes: size_v, num_iovs };
        // SAFETY: vectors.
        let pieces = Pieces { iovs: unsafe { local.iovs() }?, ..Pieces::default() };
        pieces.receive(&*super::conn(conn)?)
    })
}

/// `uccl_engine_xfer_status`
#[unsafe(export_name = "_Z23uccl_engine_xfer_statusP9uccl_connm")]
pub extern "C" fn xfer_status(conn: *mut UcclConn, transfer_id: u64) -> c_int {
    // A transfer that has failed has ended.
    flag(|| has_ended(conn, transfer_id), true)
}

/// `uccl_engine_xfer_error`
#[unsafe(export_name = "_Z22uccl_engine_xfer_errorP9uccl_connm")]
pub extern "C" fn xfer_error(conn: *mut UcclConn, transfer_id: u64) -> c_int {
    match run(|| has_ended(conn, transfer_id)) {
        Ok(true) => uccl_status_t::UCCL_OK as c_int,
        Ok(false) => uccl_status_t::UCCL_IN_PROGRESS as c_int,
        Err(status) => status as c_int,
    }
}

/// Whether it has ended well; a failure is an error.
fn has_ended(conn: *mut UcclConn, transfer_id: u64) -> Answer<bool> {
    match super::conn(conn)?.core.poll(TransferId(transfer_id))? {
        Status::Pending => Ok(false),
        Status::Done(_) => Ok(true),
        Status::Failed(error) => Err(error.into()),
    }
}
