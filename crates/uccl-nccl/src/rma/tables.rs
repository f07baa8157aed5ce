//! The one-sided tables that NCCL finds in the library, by their symbols.

// NCCL gives them their names.
#![allow(non_upper_case_globals)]

use std::ffi::c_char;

use uccl_nccl_abi::rma::{RmaFunctions, RmaTable, RmaV13, RmaV14, RmaV15, RmaV16};

use super::entry::{operations::*, setup::*};

/// The plugin's name, for NCCL's log.
const NAME: *const c_char = c"UCCL".as_ptr();

/// The functions that all tables have in common, and those given.
macro_rules! functions {
    ($($field:ident: $value:expr,)*) => {
        RmaFunctions {
            get_properties: Some(get_properties),
            listen: Some(listen),
            connect: Some(connect),
            dereg_mr_sym: Some(dereg_mr_sym),
            destroy_context: Some(destroy_context),
            close_coll: Some(close_coll),
            close_listen: Some(close_listen),
            flush: Some(flush),
            test: Some(test),
            progress: Some(progress),
            query_last_error: Some(query_last_error),
            finalize: Some(finalize),
            $($field: $value,)*
        }
    };
}

/// The functions from v15 on.
macro_rules! functions_from_15 {
    () => {
        functions!(
            create_context: Some(create_context_v14),
            reg_mr_sym: Some(reg_mr_sym_v14),
            reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf_v14),
            put: Some(put_v15),
            put_signal: Some(put_signal_v15),
            get: Some(get_v15),
        )
    };
}

/// A table before v16.
macro_rules! table {
    ($functions:expr) => {
        RmaTable { name: NAME, init: Some(init), devices: Some(devices), functions: $functions }
    };
}

/// The table of v13.
macro_rules! table_v13 {
    () => {
        table!(functions!(
            create_context: Some(create_context_v13),
            reg_mr_sym: Some(reg_mr_sym_v13),
            reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf_v13),
            put: Some(put_v13),
            put_signal: Some(put_signal_v13),
            get: Some(get_v13),
        ))
    };
}

/// For NCCL 2.30.3 and 2.30.4.
#[unsafe(no_mangle)]
pub static ncclGinPlugin_v13: RmaV13 = table_v13!();

/// For NCCL 2.30.3 and 2.30.4.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v13: RmaV13 = table_v13!();

/// For NCCL 2.30.7 and later.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: RmaV14 = table!(functions!(
    create_context: Some(create_context_v14),
    reg_mr_sym: Some(reg_mr_sym_v14),
    reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf_v14),
    put: Some(put_v13),
    put_signal: Some(put_signal_v14),
    get: Some(get_v13),
));

/// For NCCL 2.31.2 and later.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v15: RmaV15 = table!(functions_from_15!());

/// For NCCL 2.32.3 and later.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v16: RmaV16 = RmaV16 {
    name: NAME,
    init: Some(init),
    devices: Some(devices),
    get_rma_properties: Some(get_rma_properties),
    functions: functions_from_15!(),
};
