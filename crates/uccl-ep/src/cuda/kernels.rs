//! The loaded kernels and their launches.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use uccl_device::cuda::{Context, Function, GpuError, Grid, Module, Stream};

use super::params::{
    LAYOUT_THREADS, PACKING_THREADS, THREADS, UNPACKING_THREADS, is_wide, room_for,
};
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

/// The kernels of groups of some size, in a context.
pub(super) struct Kernels {
    pub(super) layout: Kernel,
    pub(super) send: Kernel,
    pub(super) receive: Kernel,
    pub(super) combine_send: Kernel,
    pub(super) sum: Kernel,
    pub(super) combine_send_packed: Kernel,
    pub(super) sum_packed: Kernel,
    pub(super) mask: Kernel,
    pub(super) normal_send: Kernel,
    pub(super) count: Kernel,
    pub(super) normal_receive: Kernel,
    pub(super) normal_return: Kernel,
    pub(super) normal_sum: Kernel,
    pub(super) normal_totals: Kernel,
    pub(super) normal_recount: Kernel,
    pub(super) normal_receive_round: Kernel,
    pub(super) normal_return_round: Kernel,
    fused: Option<WholeCallKernels>,
    /// It must stay loaded.
    _module: Module,
}

/// The kernels that do a whole call, whose rows have ready flags.
pub(super) struct WholeCallKernels {
    pub(super) dispatch: Kernel,
    pub(super) combine: Kernel,
    pub(super) normal_dispatch: Kernel,
    pub(super) normal_combine: Kernel,
    pub(super) normal_dispatch_round: Kernel,
    pub(super) normal_combine_round: Kernel,
}

impl Kernels {
    /// The kernels of a GPU for groups of so many ranks, loaded at the first call.
    pub(super) fn of(context: &'static Context, ranks: usize) -> Result<Arc<Self>> {
        type BySize = HashMap<(u32, bool), Arc<Kernels>>;
        static LOADED: LazyLock<Mutex<BySize>> = LazyLock::new(Mutex::default);
        let mut loaded = LOADED.lock();
        let size = (context.device().ordinal(), is_wide(ranks));
        if let Some(kernels) = loaded.get(&size) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Self::load(context, ranks)?);
        loaded.insert(size, Arc::clone(&kernels));
        Ok(kernels)
    }

    /// The kernels that do a whole call.
    ///
    /// # Errors
    /// A wide group has none.
    pub(super) fn fused(&self) -> Result<&WholeCallKernels> {
        let why = "a call of so many ranks has a launch for each half";
        self.fused.as_ref().ok_or_else(|| Error::invalid(why))
    }

    /// Looks up every kernel now: the driver may load a kernel only at its look-up, and waits for
    /// other kernels while it does.
    fn load(context: &'static Context, ranks: usize) -> Result<Self> {
        let (image, prefix) = match is_wide(ranks) {
            true => (&uccl_kernels::EP_WIDE, "uccl_ep_wide_"),
            false => (&uccl_kernels::EP, "uccl_ep_"),
        };
        let module = Module::load(context, image, false)?;
        let kernel = |threads: u32, name: &str| {
            let name = CString::new(format!("{prefix}{name}")).unwrap_or_default();
            Ok::<_, Error>(Kernel { function: module.function(&name)?, threads })
        };
        let fused = || {
            Ok::<_, Error>(WholeCallKernels {
                dispatch: kernel(THREADS, "low_latency_dispatch")?,
                combine: kernel(THREADS, "low_latency_combine")?,
                normal_dispatch: kernel(THREADS, "normal_dispatch")?,
                normal_combine: kernel(THREADS, "normal_combine")?,
                normal_dispatch_round: kernel(THREADS, "normal_dispatch_round")?,
                normal_combine_round: kernel(THREADS, "normal_combine_round")?,
            })
        };
        Ok(Self {
            layout: kernel(LAYOUT_THREADS, "layout")?,
            send: kernel(THREADS, "low_latency_send")?,
            receive: kernel(THREADS, "low_latency_receive")?,
            combine_send: kernel(THREADS, "low_latency_return")?,
            sum: kernel(THREADS, "low_latency_sum")?,
            combine_send_packed: kernel(PACKING_THREADS, "low_latency_return_packed")?,
            sum_packed: kernel(UNPACKING_THREADS, "low_latency_sum_packed")?,
            mask: kernel(room_for(ranks) as u32, "mask")?,
            normal_send: kernel(THREADS, "normal_send")?,
            count: kernel(THREADS, "normal_count")?,
            normal_receive: kernel(THREADS, "normal_receive")?,
            normal_return: kernel(THREADS, "normal_return")?,
            normal_sum: kernel(THREADS, "normal_sum")?,
            normal_totals: kernel(THREADS, "normal_totals")?,
            normal_recount: kernel(THREADS, "normal_recount")?,
            normal_receive_round: kernel(THREADS, "normal_receive_round")?,
            normal_return_round: kernel(THREADS, "normal_return_round")?,
            fused: if is_wide(ranks) { None } else { Some(fused()?) },
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

    /// The kernels of `ep.cu` alone.
    const FUSED: [&str; 6] = [
        "low_latency_dispatch",
        "low_latency_combine",
        "normal_dispatch",
        "normal_combine",
        "normal_dispatch_round",
        "normal_combine_round",
    ];

    #[test]
    fn the_kernels_take_the_parameters_of_this_build() {
        let wide = KERNELS.into_iter().filter(|(name, _)| !FUSED.contains(name));
        let wide = wide.map(|(name, len)| (uccl_kernels::EP_WIDE.ptx, format!("wide_{name}"), len));
        let narrow = KERNELS.map(|(name, len)| (uccl_kernels::EP.ptx, name.to_owned(), len));
        for (ptx, name, len) in narrow.into_iter().chain(wide) {
            assert!(ptx.contains(&format!(".entry uccl_ep_{name}(")), "{name}");
            let parameter = format!(".b8 uccl_ep_{name}_param_0[{len}]");
            assert!(ptx.contains(&parameter), "{parameter}: run cargo xtask kernels");
        }
    }
}
