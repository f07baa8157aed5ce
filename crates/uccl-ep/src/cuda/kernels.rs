//! The loaded kernels and their launches.

use std::{
    collections::HashMap,
    ffi::CStr,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Context, Function, GpuError, Grid, Module, Stream};

use super::params::{LAYOUT_THREADS, MAX_RANKS, PACKING_THREADS, THREADS, UNPACKING_THREADS};
use crate::shared::error::{Error, Result};

/// A kernel, and the number of threads in its blocks.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    function: Function,
    threads: u32,
}

impl Kernel {
    /// Enqueues so many blocks of it.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub(super) unsafe fn launch<P>(
        self,
        stream: &Stream,
        blocks: u32,
        parameter: &P,
    ) -> Result<()> {
        let grid = Grid { blocks, threads: self.threads };
        // SAFETY: the caller guarantees it.
        unsafe { stream.launch(self.function, grid, parameter) }.map_err(Error::from)
    }

    /// As [`launch`](Self::launch), with blocks that begin together.
    ///
    /// # Errors
    /// As there; and there are more blocks than can begin together.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub(super) unsafe fn launch_together<P>(
        self,
        stream: &Stream,
        blocks: u32,
        parameter: &P,
    ) -> Result<(), GpuError> {
        let grid = Grid { blocks, threads: self.threads };
        // SAFETY: the caller guarantees it.
        unsafe { stream.launch_together(self.function, grid, parameter) }
    }
}

/// The kernels in a context.
pub(super) struct Kernels {
    pub(super) layout: Kernel,
    pub(super) send: Kernel,
    pub(super) receive: Kernel,
    pub(super) combine_send: Kernel,
    pub(super) sum: Kernel,
    pub(super) combine_send_packed: Kernel,
    pub(super) sum_packed: Kernel,
    pub(super) dispatch: Kernel,
    pub(super) combine: Kernel,
    pub(super) mask: Kernel,
    pub(super) normal_send: Kernel,
    pub(super) count: Kernel,
    pub(super) normal_receive: Kernel,
    pub(super) normal_return: Kernel,
    pub(super) normal_sum: Kernel,
    pub(super) normal_dispatch: Kernel,
    pub(super) normal_combine: Kernel,
    pub(super) normal_totals: Kernel,
    pub(super) normal_recount: Kernel,
    pub(super) normal_dispatch_round: Kernel,
    pub(super) normal_receive_round: Kernel,
    pub(super) normal_return_round: Kernel,
    pub(super) normal_combine_round: Kernel,
    /// It must stay loaded.
    _module: Module,
}

impl Kernels {
    /// The kernels of a GPU, loaded at the first call.
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

    /// Looks up every kernel now: the driver may load a kernel only at its look-up, and waits for
    /// other kernels while it does.
    fn load(context: &'static Context) -> Result<Self, GpuError> {
        let module = Module::load(context, &uccl_kernels::EP, false)?;
        let kernel =
            |threads: u32, name: &CStr| Ok(Kernel { function: module.function(name)?, threads });
        Ok(Self {
            layout: kernel(LAYOUT_THREADS, c"uccl_ep_layout")?,
            send: kernel(THREADS, c"uccl_ep_low_latency_send")?,
            receive: kernel(THREADS, c"uccl_ep_low_latency_receive")?,
            combine_send: kernel(THREADS, c"uccl_ep_low_latency_return")?,
            sum: kernel(THREADS, c"uccl_ep_low_latency_sum")?,
            combine_send_packed: kernel(PACKING_THREADS, c"uccl_ep_low_latency_return_packed")?,
            sum_packed: kernel(UNPACKING_THREADS, c"uccl_ep_low_latency_sum_packed")?,
            dispatch: kernel(THREADS, c"uccl_ep_low_latency_dispatch")?,
            combine: kernel(THREADS, c"uccl_ep_low_latency_combine")?,
            mask: kernel(MAX_RANKS as u32, c"uccl_ep_mask")?,
            normal_send: kernel(THREADS, c"uccl_ep_normal_send")?,
            count: kernel(THREADS, c"uccl_ep_normal_count")?,
            normal_receive: kernel(THREADS, c"uccl_ep_normal_receive")?,
            normal_return: kernel(THREADS, c"uccl_ep_normal_return")?,
            normal_sum: kernel(THREADS, c"uccl_ep_normal_sum")?,
            normal_dispatch: kernel(THREADS, c"uccl_ep_normal_dispatch")?,
            normal_combine: kernel(THREADS, c"uccl_ep_normal_combine")?,
            normal_totals: kernel(THREADS, c"uccl_ep_normal_totals")?,
            normal_recount: kernel(THREADS, c"uccl_ep_normal_recount")?,
            normal_dispatch_round: kernel(THREADS, c"uccl_ep_normal_dispatch_round")?,
            normal_receive_round: kernel(THREADS, c"uccl_ep_normal_receive_round")?,
            normal_return_round: kernel(THREADS, c"uccl_ep_normal_return_round")?,
            normal_combine_round: kernel(THREADS, c"uccl_ep_normal_combine_round")?,
            _module: module,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::params::{
        CombineRound, Count, DispatchRound, Layout, Mask, NormalReceive, NormalReturn, NormalSend,
        NormalSum, Receive, ReceiveRound, Recount, Return, ReturnRound, Send, Sum, Totals,
        WholeCombine, WholeDispatch, WholeNormalCombine, WholeNormalDispatch,
    };

    const KERNELS: [(&str, usize); 23] = [
        ("layout", size_of::<Layout>()),
        ("low_latency_send", size_of::<Send>()),
        ("low_latency_receive", size_of::<Receive>()),
        ("low_latency_return", size_of::<Return>()),
        ("low_latency_sum", size_of::<Sum>()),
        ("low_latency_return_packed", size_of::<Return>()),
        ("low_latency_sum_packed", size_of::<Sum>()),
        ("low_latency_dispatch", size_of::<WholeDispatch>()),
        ("low_latency_combine", size_of::<WholeCombine>()),
        ("mask", size_of::<Mask>()),
        ("normal_send", size_of::<NormalSend>()),
        ("normal_count", size_of::<Count>()),
        ("normal_receive", size_of::<NormalReceive>()),
        ("normal_return", size_of::<NormalReturn>()),
        ("normal_sum", size_of::<NormalSum>()),
        ("normal_dispatch", size_of::<WholeNormalDispatch>()),
        ("normal_combine", size_of::<WholeNormalCombine>()),
        ("normal_totals", size_of::<Totals>()),
        ("normal_recount", size_of::<Recount>()),
        ("normal_dispatch_round", size_of::<DispatchRound>()),
        ("normal_receive_round", size_of::<ReceiveRound>()),
        ("normal_return_round", size_of::<ReturnRound>()),
        ("normal_combine_round", size_of::<CombineRound>()),
    ];

    #[test]
    fn the_kernels_take_the_parameters_of_this_build() {
        let ptx = uccl_kernels::EP.ptx;
        for (name, len) in KERNELS {
            assert!(ptx.contains(&format!(".entry uccl_ep_{name}(")), "{name}");
            let parameter = format!(".b8 uccl_ep_{name}_param_0[{len}]");
            assert!(ptx.contains(&parameter), "{parameter}: run cargo xtask kernels");
        }
    }
}
