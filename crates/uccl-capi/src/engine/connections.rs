//! Meeting peers.

use std::{
    ffi::{c_char, c_int},
    sync::atomic::Ordering::SeqCst,
    time::Duration,
};

use uccl_p2p::{ConnId, Interrupt, NoInterrupt, gpu_index, resolve};

use super::{CONNS, Conn, Engine, UcclConn, UcclEngine, code, engine, flag, handle};
use crate::{
    api::uccl_status_t,
    args::{self, Out, TextOut},
    failure::{Answer, Failure},
};

impl Engine {
    fn hold(&self, handle: *const UcclEngine, id: ConnId) -> Answer<*mut UcclConn> {
        let is_local = self.core.connection(id)?.same_host;
        let held = Conn { core: self.core.clone(), engine: handle.addr(), id, is_local };
        let conn = CONNS.add(held);
        // An engine that was destroyed meanwhile no longer looks for its connections.
        if self.stopped.load(SeqCst) && engine(handle).is_err() {
            CONNS.remove(conn);
            return Err(Failure::new(uccl_status_t::UCCL_CLOSED, "the engine has been destroyed"));
        }
        Ok(conn)
    }
}

/// Stops a waiting accept.
struct StopCheck<'a>(&'a Engine);

impl Interrupt for StopCheck<'_> {
    fn interrupted(&mut self) -> bool {
        self.0.stopped.load(SeqCst)
    }
}

/// `uccl_engine_connect`
#[unsafe(export_name = "_Z19uccl_engine_connectP11uccl_enginePKcS2_ib")]
pub unsafe extern "C" fn connect(
    engine: *mut UcclEngine,
    ip_addr: *const c_char,
    remote_gpu_bdf: *const c_char,
    remote_port: c_int,
    _same_process: bool,
) -> *mut UcclConn {
    handle(|| {
        // SAFETY: a string.
        let host = unsafe { args::text(ip_addr, "ip_addr") }?;
        let known = super::engine(engine)?;
        let core = &known.core;
        let connected = match remote_port {
            ..=0 => {
                // SAFETY: a string.
                let port = core.config().well_known_port(unsafe { index_of(remote_gpu_bdf) }?)?;
                core.connect_any_when_up(&resolve(host, port)?, None, &mut NoInterrupt)?
            }
            port => {
                let no_port = |_| Failure::invalid(format!("{port} is no port"));
                let port = u16::try_from(port).map_err(no_port)?;
                core.connect_any(&resolve(host, port)?, None, &mut NoInterrupt)?
            }
        };
        known.hold(engine, connected)
    })
}

/// # Safety
/// As for [`args::text`].
unsafe fn index_of(gpu: *const c_char) -> Answer<i64> {
    if gpu.is_null() {
        return Err(Failure::invalid(
            "neither remote_port nor remote_gpu_bdf says where to connect",
        ));
    }
    // SAFETY: the caller's promise.
    Ok(gpu_index(unsafe { args::text(gpu, "remote_gpu_bdf") }?))
}

/// `uccl_engine_accept`
#[unsafe(export_name = "_Z18uccl_engine_acceptP11uccl_enginePcmPi")]
pub unsafe extern "C" fn accept(
    engine: *mut UcclEngine,
    ip_addr_buf: *mut c_char,
    ip_addr_buf_len: usize,
    remote_gpu_idx: *mut c_int,
) -> *mut UcclConn {
    handle(|| {
        // SAFETY: room for as many bytes, and a place for a number.
        let (ip, index) = unsafe {
            let ip = TextOut::new(ip_addr_buf, ip_addr_buf_len, "ip_addr_buf")?;
            (ip, Out::new(remote_gpu_idx, "remote_gpu_idx")?)
        };
        let known = super::engine(engine)?;
        if known.stopped.load(SeqCst) {
            let text = "accept: uccl_engine_stop_accept was called before";
            return Err(Failure::new(uccl_status_t::UCCL_CANCELLED, text));
        }
        let accepted = known.core.accept(Some(Duration::ZERO), &mut StopCheck(&known))?;
        if let Err(failure) = ip.put(&accepted.ip.to_string()) {
            known.core.disconnect(accepted.conn)?;
            return Err(failure);
        }
        index.put(c_int::try_from(accepted.gpu_index).unwrap_or(-1));
        known.hold(engine, accepted.conn)
    })
}

/// `uccl_engine_stop_accept`
#[unsafe(export_name = "_Z23uccl_engine_stop_acceptP11uccl_engine")]
pub extern "C" fn stop_accept(engine: *mut UcclEngine) -> c_int {
    code(|| {
        super::engine(engine)?.stopped.store(true, SeqCst);
        Ok(())
    })
}

/// `uccl_engine_start_listener`
#[unsafe(export_name = "_Z26uccl_engine_start_listenerP9uccl_conn")]
pub extern "C" fn start_listener(conn: *mut UcclConn) -> c_int {
    code(|| super::conn(conn).map(drop))
}

/// `uccl_engine_stop_listener`
#[unsafe(export_name = "_Z25uccl_engine_stop_listenerP9uccl_conn")]
pub extern "C" fn stop_listener(conn: *mut UcclConn) -> c_int {
    code(|| super::conn(conn).map(drop))
}

/// `uccl_engine_conn_is_local`
#[unsafe(export_name = "_Z25uccl_engine_conn_is_localP9uccl_conn")]
pub extern "C" fn conn_is_local(conn: *mut UcclConn) -> c_int {
    flag(|| Ok(super::conn(conn)?.is_local), false)
}

/// `uccl_engine_conn_destroy`
#[unsafe(export_name = "_Z24uccl_engine_conn_destroyP9uccl_conn")]
pub extern "C" fn conn_destroy(conn: *mut UcclConn) -> c_int {
    code(|| {
        let ended = CONNS.remove(conn).ok_or_else(|| Failure::no_handle("connection"))?;
        Ok(ended.core.disconnect(ended.id)?)
    })
}
