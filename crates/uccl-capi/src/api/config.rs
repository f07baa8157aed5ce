use std::ffi::c_char;

use parking_lot::Mutex;
use uccl_p2p::Config;

use super::{call, uccl_status_t};
use crate::{
    args::{self, Out},
    failure::{Answer, Failure},
    handles::Handles,
};

/// The settings of an endpoint that is to be made.
pub struct uccl_config_t;

static CONFIGS: Handles<Mutex<Config>> = Handles::new();

/// The environment's settings. Prints a notice of each variable without effect: programs in C have
/// no other log.
pub(crate) fn environment() -> Answer<Config> {
    for notice in uccl_p2p::take_notices() {
        eprintln!("uccl: {notice}");
    }
    Ok(Config::from_env()?)
}

/// The settings of a handle; NULL stands for the environment's settings.
pub(crate) fn config_or_environment(config: *const uccl_config_t) -> Answer<Config> {
    if config.is_null() {
        return environment();
    }
    let config = CONFIGS.get(config).ok_or_else(|| Failure::no_handle("config"))?;
    let settings = config.lock().clone();
    Ok(settings)
}

/// Makes settings: the defaults, changed by the environment variables UCCL_P2P_*.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_config_new(config: *mut *mut uccl_config_t) -> uccl_status_t {
    call(|| {
        // SAFETY: a place for a pointer.
        let out = unsafe { Out::new(config, "config") }?;
        out.put(CONFIGS.add(Mutex::new(environment()?)));
        Ok(())
    })
}

/// Changes a setting: `name` is the environment variable (UCCL_P2P_TIMEOUT_MS) or the part behind
/// its prefix, in lower case (timeout_ms); docs/settings.md lists them. Beside those there are
/// `gpu_index`, the GPU that the endpoint serves (0), and `port`, the port that it listens on (0
/// for any; the base port plus the GPU's index if that is free).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uccl_config_set(
    config: *mut uccl_config_t,
    name: *const c_char,
    value: *const c_char,
) -> uccl_status_t {
    call(|| {
        // SAFETY: strings.
        let (name, value) = unsafe { (args::text(name, "name")?, args::text(value, "value")?) };
        let config = CONFIGS.get(config).ok_or_else(|| Failure::no_handle("config"))?;
        let changed = config.lock().set(name, value);
        Ok(changed?)
    })
}

/// Ends settings. Endpoints that were made with them keep theirs.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_config_free(config: *mut uccl_config_t) -> uccl_status_t {
    call(|| CONFIGS.remove(config).map(drop).ok_or_else(|| Failure::no_handle("config")))
}
