//! The compiled kernels, which are part of this library.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Context, Function, GpuError, Module};

/// The kernels as PTX, which every GPU from Ampere on runs. The driver compiles it once for each driver and GPU.
const PTX: &str = concat!(include_str!("../../ptx/ep.ptx"), "\0");

/// The kernels in a context.
pub(super) struct Kernels {
    pub(super) route: Function,
    pub(super) send: Function,
    pub(super) receive: Function,
    pub(super) give_back: Function,
    pub(super) sum: Function,
    pub(super) give_back_packed: Function,
    pub(super) sum_packed: Function,
    pub(super) dispatch: Function,
    pub(super) combine: Function,
    pub(super) mask: Function,
    pub(super) layout: Function,
    pub(super) normal_send: Function,
    pub(super) count: Function,
    pub(super) normal_receive: Function,
    pub(super) normal_return: Function,
    pub(super) normal_sum: Function,
    pub(super) normal_dispatch: Function,
    pub(super) normal_combine: Function,
    /// It must stay loaded.
    _module: Module,
}

impl Kernels {
    /// The kernels of a GPU, which are loaded at the first call.
    pub(super) fn of(context: &'static Context) -> Result<Arc<Self>, GpuError> {
        static LOADED: LazyLock<Mutex<HashMap<u32, Arc<Kernels>>>> = LazyLock::new(Mutex::default);
        let mut loaded = LOADED.lock();
        let ordinal = context.device().ordinal();
        if let Some(kernels) = loaded.get(&ordinal) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Self::load(context)?);
        loaded.insert(ordinal, Arc::clone(&kernels));
        Ok(kernels)
    }

    /// Looks up each kernel: the driver might load a kernel only then, and waits for other kernels while it does.
    fn load(context: &'static Context) -> Result<Self, GpuError> {
        let module = Module::load_ptx(context, PTX)?;
        Ok(Self {
            route: module.function(c"uccl_ep_route")?,
            send: module.function(c"uccl_ep_send")?,
            receive: module.function(c"uccl_ep_receive")?,
            give_back: module.function(c"uccl_ep_return")?,
            sum: module.function(c"uccl_ep_sum")?,
            give_back_packed: module.function(c"uccl_ep_return_packed")?,
            sum_packed: module.function(c"uccl_ep_sum_packed")?,
            dispatch: module.function(c"uccl_ep_dispatch")?,
            combine: module.function(c"uccl_ep_combine")?,
            mask: module.function(c"uccl_ep_mask")?,
            layout: module.function(c"uccl_ep_layout")?,
            normal_send: module.function(c"uccl_ep_normal_send")?,
            count: module.function(c"uccl_ep_count")?,
            normal_receive: module.function(c"uccl_ep_normal_receive")?,
            normal_return: module.function(c"uccl_ep_normal_return")?,
            normal_sum: module.function(c"uccl_ep_normal_sum")?,
            normal_dispatch: module.function(c"uccl_ep_normal_dispatch")?,
            normal_combine: module.function(c"uccl_ep_normal_combine")?,
            _module: module,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::{
        super::params::{
            Count, Mask, NormalReceive, NormalReturn, NormalSend, NormalSum, Receive, Return, Send,
            Sum, WholeCombine, WholeDispatch, WholeNormalCombine, WholeNormalDispatch,
        },
        *,
    };

    const KERNELS: [(&str, usize); 18] = [
        ("route", size_of::<Send>()),
        ("send", size_of::<Send>()),
        ("receive", size_of::<Receive>()),
        ("return", size_of::<Return>()),
        ("sum", size_of::<Sum>()),
        ("return_packed", size_of::<Return>()),
        ("sum_packed", size_of::<Sum>()),
        ("dispatch", size_of::<WholeDispatch>()),
        ("combine", size_of::<WholeCombine>()),
        ("mask", size_of::<Mask>()),
        ("layout", size_of::<NormalSend>()),
        ("normal_send", size_of::<NormalSend>()),
        ("count", size_of::<Count>()),
        ("normal_receive", size_of::<NormalReceive>()),
        ("normal_return", size_of::<NormalReturn>()),
        ("normal_sum", size_of::<NormalSum>()),
        ("normal_dispatch", size_of::<WholeNormalDispatch>()),
        ("normal_combine", size_of::<WholeNormalCombine>()),
    ];

    #[test]
    fn the_kernels_take_the_parameters_of_this_build() {
        for (name, len) in KERNELS {
            let parameter = format!(".b8 uccl_ep_{name}_param_0[{len}]");
            assert!(PTX.contains(&parameter), "{parameter}: run cargo xtask kernels");
        }
    }

    #[test]
    fn the_kernels_are_there_for_drivers_of_cuda_12_1_and_later() {
        assert!(CStr::from_bytes_with_nul(PTX.as_bytes()).is_ok());
        for line in [".version 8.1\n", ".target sm_80\n"] {
            assert!(PTX.contains(line), "{line}");
        }
        for (name, _) in KERNELS {
            assert!(PTX.contains(&format!(".entry uccl_ep_{name}(")), "{name}");
        }
    }
}
