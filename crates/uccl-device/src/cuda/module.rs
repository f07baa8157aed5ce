//! Compiled kernels: loading and launching.

use std::{
    ffi::{CStr, c_void},
    fmt, ptr,
};

use uccl_kernels::Image;

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    raw::{
        DevResource, Handle, JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES, LaunchAttribute, LaunchConfig,
        NOT_SUPPORTED, RESOURCE_MULTIPROCESSORS, SUCCESS,
    },
    reaper,
    stream::Stream,
};

/// Kernels that are loaded in a context.
pub struct Module {
    context: &'static Context,
    raw: Handle,
}

// SAFETY: a module is a handle that any thread may use; the driver does its own locking.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("context", self.context).finish_non_exhaustive()
    }
}

/// How many blocks and threads run a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Blocks of threads (CTAs).
    pub blocks: u32,
    /// Threads in each block.
    pub threads: u32,
}

impl Module {
    /// Loads kernels: their machine code if the build has some, the driver takes it, and `portable`
    /// is not set; otherwise their PTX, which the driver compiles and keeps in its cache on disk.
    /// The driver waits for every stream of the context that waits for the host, and holds up other
    /// threads meanwhile. So do not call this once streams may be held.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver can use neither: CUDA before 12.1, or a GPU before
    /// Ampere.
    pub fn load(
        context: &'static Context,
        image: &Image,
        portable: bool,
    ) -> Result<Self, GpuError> {
        if let Some(code) = image.machine_code().filter(|_| !portable) {
            // SAFETY: a whole fatbin, as the image promises.
            match unsafe { Self::load_raw(context, code.as_ptr().cast()) } {
                Ok(module) => return Ok(module),
                Err(lost @ GpuError::Poisoned { .. }) => return Err(lost),
                // It was made for a newer driver or another GPU: try PTX.
                Err(_) => {}
            }
        }
        let ptx = CStr::from_bytes_with_nul(image.ptx.as_bytes()).map_err(|error| {
            GpuError::System { doing: "loading kernels".to_owned(), reason: error.to_string() }
        })?;
        // SAFETY: text that ends in a zero byte.
        unsafe { Self::load_raw(context, ptx.as_ptr().cast()) }
    }

    /// # Safety
    /// It must be an image that contains its length, or text that ends in a zero byte.
    unsafe fn load_raw(context: &'static Context, image: *const c_void) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let mut log = [0_u8; 2048];
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        // The driver takes the length as the value of a pointer.
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
        let mut raw = ptr::null_mut();
        // SAFETY: the caller's promise; two options with two values; the log has the length that is
        // given.
        let code = unsafe {
            (context.driver().module_load)(
                &raw mut raw,
                image,
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        match log.trim() {
            "" => context.check(code, format_args!("loading kernels"))?,
            said => context.check(code, format_args!("loading kernels ({said})"))?,
        }
        Ok(Self { context, raw })
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if there is none.
    pub fn function(&self, name: &CStr) -> Result<Function, GpuError> {
        let _current = self.context.make_current()?;
        let mut raw = ptr::null_mut();
        let find = self.context.driver().module_function;
        // SAFETY: the module lives, and the name has an end.
        let code = unsafe { find(&raw mut raw, self.raw, name.as_ptr()) };
        self.context.check(code, format_args!("looking for the kernel {name:?}"))?;
        if let Some(load) = self.context.driver().function_load {
            // SAFETY: the driver has just returned this handle. Without the call the driver would
            // load the kernel at its first launch, and wait for other kernels then.
            let code = unsafe { load(raw) };
            self.context.check(code, format_args!("loading the kernel {name:?}"))?;
        }
        Ok(Function { raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let module = self.raw as usize;
        let unload = move |driver: &Driver| {
            // SAFETY: loaded by this; the launcher of its kernels promises that the module outlives
            // them.
            unsafe { (driver.module_unload)(module as Handle) }
        };
        reaper::later(self.context, unload, None);
    }
}

/// A kernel of a module.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    raw: Handle,
}

// SAFETY: a function is a handle that any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Stream {
    /// Launches a kernel that takes one struct by value.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses. Errors in the kernel itself show in later calls.
    ///
    /// # Safety
    /// The function's module must be of the stream's context and live until the kernel has ended.
    /// `P` must be laid out like the kernel's parameter. With this parameter, the kernel must touch
    /// only memory that stays valid and unshared until it has ended.
    pub unsafe fn launch<P>(
        &self,
        function: Function,
        grid: Grid,
        parameter: &P,
    ) -> Result<(), GpuError> {
        let context = self.context();
        let _current = context.make_current()?;
        // The driver copies the parameter before it returns, and does not write to it.
        let mut places = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; one place for the one parameter.
        let code = unsafe {
            (context.driver().launch)(
                function.raw,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                0,
                self.raw(),
                places.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        context.check(code, format_args!("launching {} blocks", grid.blocks))
    }

    /// As [`launch`](Self::launch), but all blocks begin together, or none does, if the driver can
    /// do so (CUDA 11.8).
    ///
    /// # Errors
    /// As of [`launch`](Self::launch); and there are more blocks than may run together:
    /// [`GpuError::is_too_large`].
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub unsafe fn launch_together<P>(
        &self,
        function: Function,
        grid: Grid,
        parameter: &P,
    ) -> Result<(), GpuError> {
        let context = self.context();
        let Some(launch) = context.driver().launch_with else {
            // SAFETY: as the caller has it.
            return unsafe { self.launch(function, grid, parameter) };
        };
        let _current = context.make_current()?;
        let mut places = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let config = LaunchConfig {
            blocks: [grid.blocks, 1, 1],
            threads: [grid.threads, 1, 1],
            shared: 0,
            stream: self.raw(),
            attributes: &LaunchAttribute::COOPERATIVE,
            count: 1,
        };
        // SAFETY: the caller's promise; one place for the one parameter, and the attribute is a
        // constant.
        let code = unsafe {
            launch(&raw const config, function.raw, places.as_mut_ptr(), ptr::null_mut())
        };
        if code == NOT_SUPPORTED {
            // SAFETY: as the caller has it.
            return unsafe { self.launch(function, grid, parameter) };
        }
        context.check(code, format_args!("launching {} blocks together", grid.blocks))
    }

    /// How many multiprocessors a stream's kernels may have: those of its green context, or of its
    /// context (an MPS server may give it a share of the GPU). None if the driver does not report
    /// it (before CUDA 12.4).
    pub fn multiprocessors(&self) -> Option<u32> {
        let (context, driver) = (self.context(), self.context().driver());
        let _current = context.make_current().ok()?;
        let (mut holder, mut resource) = (ptr::null_mut(), DevResource::NONE);
        let green = driver.stream_green_context.zip(driver.green_context_resource);
        if let Some((of_stream, resource_of)) = green {
            // SAFETY: the stream lives, and there is room for a handle.
            let code = unsafe { of_stream(self.raw(), &raw mut holder) };
            if code == SUCCESS && !holder.is_null() {
                // SAFETY: the stream keeps its context, and there is more room than any driver's
                // resource takes.
                let code =
                    unsafe { resource_of(holder, &raw mut resource, RESOURCE_MULTIPROCESSORS) };
                return (code == SUCCESS).then_some(resource.multiprocessors);
            }
        }
        // SAFETY: there is room for a handle.
        let code = unsafe { (driver.context_get_current)(&raw mut holder) };
        let resource_of = driver.context_resource.filter(|_| code == SUCCESS)?;
        // SAFETY: it is the current context; there is room as above.
        let code = unsafe { resource_of(holder, &raw mut resource, RESOURCE_MULTIPROCESSORS) };
        (code == SUCCESS).then_some(resource.multiprocessors)
    }
}
