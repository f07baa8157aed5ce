//! The tables that NCCL finds in the library, by their symbols.

// NCCL gives them their names.
#![allow(non_upper_case_globals)]

use std::ffi::c_char;

use uccl_nccl_abi::{
    net::{NetFrom11, NetV8, NetV9, NetV10, NetV11, NetV12},
    tuner::{TunerV4, TunerV5},
};

use crate::{
    entry::{connecting::*, lifecycle::*, messages::*},
    tuner,
};

/// The network's name, for `NCCL_NET`.
const NAME: *const c_char = c"UCCL".as_ptr();

/// The fields that all tables have in common, and those given.
macro_rules! table {
    ($name:ident { $($field:ident: $value:expr,)* }) => {
        $name {
            name: NAME,
            devices: Some(devices),
            get_properties: Some(get_properties),
            accept: Some(accept),
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: None,
            dereg_mr: Some(dereg_mr),
            iflush: Some(iflush),
            test: Some(test),
            close_send: Some(close),
            close_recv: Some(close),
            close_listen: Some(close_listen),
            get_device_mr: None,
            irecv_consumed: None,
            $($field: $value,)*
        }
    };
}

/// A table from v11 on.
macro_rules! table_from_11 {
    () => {
        table!(NetFrom11 {
            init: Some(init),
            listen: Some(listen),
            connect: Some(connect),
            isend: Some(isend),
            irecv: Some(irecv),
            make_virtual_device: None,
            finalize: Some(finalize),
            set_net_attributes: None,
        })
    };
}

/// For NCCL 2.19 and later.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: NetV8 = table!(NetV8 {
    init: Some(init_v8),
    listen: Some(listen_v8),
    connect: Some(connect_v8),
    isend: Some(isend_v8),
    irecv: Some(irecv_v8),
});

/// For NCCL 2.24 and later.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v9: NetV9 = table!(NetV9 {
    init: Some(init_v8),
    listen: Some(listen_v8),
    connect: Some(connect_v8),
    isend: Some(isend_v9),
    irecv: Some(irecv_v9),
    make_virtual_device: None,
});

/// For NCCL 2.26 and later.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v10: NetV10 = table!(NetV10 {
    init: Some(init_v10),
    listen: Some(listen_v8),
    connect: Some(connect_v10),
    isend: Some(isend),
    irecv: Some(irecv),
    make_virtual_device: None,
});

/// For NCCL 2.28 and later.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v11: NetV11 = table_from_11!();

/// For NCCL 2.30 and later.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: NetV12 = table_from_11!();

/// The tuner of NCCL 2.26 and later.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v4: TunerV4 = TunerV4 {
    name: NAME,
    init: Some(tuner::init_v4),
    get_coll_info: Some(tuner::get_coll_info),
    end: Some(tuner::end),
};

/// The tuner of NCCL 2.28 and later.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v5: TunerV5 = TunerV5 {
    name: NAME,
    init: Some(tuner::init_v5),
    get_coll_info: Some(tuner::get_coll_info),
    end: Some(tuner::end),
};
