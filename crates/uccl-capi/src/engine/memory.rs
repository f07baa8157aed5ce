//! Registered memory, and the items and infos that name it to peers.

use std::ffi::{c_char, c_int, c_void};

use uccl_p2p::MrId;
use uccl_wire::{
    advert::ADVERT_LEN,
    ipc_info::{IPC_INFO_C_LEN, IpcInfo},
};

use super::{Engine, FifoItem, UcclEngine, code};
use crate::{
    api::uccl_status_t,
    args::{self, Out},
    failure::{Answer, Failure},
};

impl Engine {
    /// The region that an address lies in, and how much of it is from there on.
    fn region_at(&self, addr: usize) -> Option<(MrId, usize)> {
        let mr = self.core.region_holding(addr, 1)?;
        let (start, len) = self.core.region(mr).ok()?;
        Some((mr, start + len - addr))
    }
}

/// `uccl_engine_reg`
#[unsafe(export_name = "_Z15uccl_engine_regP11uccl_enginemmRm")]
pub unsafe extern "C" fn reg(
    engine: *mut UcclEngine,
    data: usize,
    size: usize,
    mr_id: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: a place for an id.
        let out = unsafe { Out::new(mr_id, "mr_id") }?;
        // SAFETY: the memory stays, as the header asks.
        out.put(unsafe { super::engine(engine)?.core.register(data, size) }?.0);
        Ok(())
    })
}

/// `uccl_engine_mr_destroy`
#[unsafe(export_name = "_Z22uccl_engine_mr_destroyP11uccl_enginem")]
pub extern "C" fn mr_destroy(engine: *mut UcclEngine, mr: u64) -> c_int {
    code(|| Ok(super::engine(engine)?.core.deregister(MrId(mr))?))
}

/// `uccl_engine_prepare_fifo`
#[unsafe(export_name = "_Z24uccl_engine_prepare_fifoP11uccl_enginemPKvmPc")]
pub unsafe extern "C" fn prepare_fifo(
    engine: *mut UcclEngine,
    mr: u64,
    data: *const c_void,
    size: usize,
    fifo_buf: *mut c_char,
) -> c_int {
    code(|| {
        // SAFETY: a place for FIFO_SIZE bytes.
        let out = unsafe { Out::new(fifo_buf.cast::<[u8; ADVERT_LEN]>(), "fifo_buf") }?;
        let made = super::engine(engine)?.core.advertise(MrId(mr), args::address(data), size)?;
        out.put(made.encode());
        Ok(())
    })
}

/// `uccl_engine_update_fifo`
#[unsafe(export_name = "_Z23uccl_engine_update_fifoR8FifoItemmj")]
pub unsafe extern "C" fn update_fifo(
    fifo_item: *mut FifoItem,
    remote_addr: u64,
    size: u32,
) -> c_int {
    code(|| {
        // SAFETY: an item.
        let mut item = unsafe { *args::one(fifo_item, "fifo_item")? };
        // An invalid item is refused here, and not only when it is used.
        item.advert()?;
        item.narrow(remote_addr, size);
        item.advert()?;
        // SAFETY: as above.
        unsafe { Out::new(fifo_item, "fifo_item") }?.put(item);
        Ok(())
    })
}

/// `serialize_fifo_item`
#[unsafe(export_name = "_Z19serialize_fifo_itemRK8FifoItemPc")]
pub unsafe extern "C" fn serialize_fifo_item(item: *const FifoItem, buf: *mut c_char) {
    code(|| {
        // SAFETY: an item, and a place for FIFO_SIZE bytes.
        let (item, out) =
            unsafe { (args::one(item, "item")?, Out::new(buf.cast::<[u8; ADVERT_LEN]>(), "buf")?) };
        out.put(item.bytes());
        Ok(())
    });
}

/// `deserialize_fifo_item`
#[unsafe(export_name = "_Z21deserialize_fifo_itemPKcP8FifoItem")]
pub unsafe extern "C" fn deserialize_fifo_item(buf: *const c_char, item: *mut FifoItem) {
    code(|| {
        // SAFETY: FIFO_SIZE bytes, and a place for an item.
        let (bytes, out) = unsafe {
            (*args::one(buf.cast::<[u8; ADVERT_LEN]>(), "buf")?, Out::new(item, "item")?)
        };
        out.put(FifoItem::of_bytes(bytes));
        Ok(())
    });
}

/// `uccl_engine_get_ipc_info`
#[unsafe(export_name = "_Z24uccl_engine_get_ipc_infoP11uccl_enginemPcPb")]
pub unsafe extern "C" fn get_ipc_info(
    engine: *mut UcclEngine,
    addr: usize,
    ipc_buf: *mut c_char,
    has_ipc: *mut bool,
) -> c_int {
    code(|| {
        // SAFETY: places for IPC_INFO_SIZE bytes and for a flag.
        let (out, has) = unsafe {
            let out = Out::new(ipc_buf.cast::<[u8; IPC_INFO_C_LEN]>(), "ipc_buf")?;
            (out, Out::new(has_ipc, "has_ipc")?)
        };
        has.put(false);
        let engine = super::engine(engine)?;
        let (mr, len) = engine.region_at(addr).ok_or_else(|| {
            let text = format!("no memory is registered at {addr:#x}");
            Failure::new(uccl_status_t::UCCL_OUT_OF_RANGE, text)
        })?;
        let advert = engine.core.advertise(mr, addr, len)?;
        let gpu = i32::try_from(engine.core.config().gpu_index).unwrap_or(-1);
        out.put(IpcInfo::of_host(&advert, gpu).encode_c());
        has.put(true);
        Ok(())
    })
}

/// `uccl_engine_update_ipc_info`
#[unsafe(export_name = "_Z27uccl_engine_update_ipc_infoPcmmm")]
pub unsafe extern "C" fn update_ipc_info(
    ipc_buf: *mut c_char,
    addr: usize,
    base_addr: usize,
    size: usize,
) -> c_int {
    code(|| {
        // SAFETY: IPC_INFO_SIZE bytes, also to be written.
        let (bytes, out) = unsafe {
            let buf = ipc_buf.cast::<[u8; IPC_INFO_C_LEN]>();
            (*args::one(buf, "ipc_buf")?, Out::new(buf, "ipc_buf")?)
        };
        out.put(narrowed(&bytes, addr, base_addr, size)?);
        Ok(())
    })
}

/// IPC info for `size` bytes at `addr`, made from the info for `base_addr`.
fn narrowed(
    info: &[u8; IPC_INFO_C_LEN],
    addr: usize,
    base_addr: usize,
    size: usize,
) -> Answer<[u8; IPC_INFO_C_LEN]> {
    let outside = |text: String| Failure::new(uccl_status_t::UCCL_OUT_OF_RANGE, text);
    let offset = addr.checked_sub(base_addr).ok_or_else(|| {
        outside(format!("{addr:#x} lies before {base_addr:#x}, which the IPC info was made for"))
    })?;
    let info = IpcInfo::decode(info).map_err(|e| Failure::invalid(e.to_string()))?;
    let part = IpcInfo { offset: offset as u64, size: size as u64, ..info };
    part.advert().map_err(|e| outside(e.to_string()))?;
    Ok(part.encode_c())
}
