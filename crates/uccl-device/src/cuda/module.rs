//! Compiled kernels: loading and launching.

use std::{
    ffi::{CStr, c_void},
    fmt, ptr,
};

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    raw::{Handle, JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES},
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
    /// Loads a cubin, a fatbin, or PTX, which the driver compiles and keeps in its cache on disk. The driver waits for
    /// every stream of the context that waits for the host, and holds up other threads meanwhile. So do not call this
    /// once streams may be held.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver cannot use it: it is for another GPU or a newer driver.
    pub fn load(context: &'static Context, image: &CStr) -> Result<Self, GpuError> {
        // SAFETY: text that ends in a zero byte.
        unsafe { Self::load_raw(context, image.as_ptr().cast()) }
    }

    /// Loads PTX that ends in a zero byte, as [`load`](Self::load) does.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and if the text does not end so.
    pub fn load_ptx(context: &'static Context, text: &str) -> Result<Self, GpuError> {
        let text = CStr::from_bytes_with_nul(text.as_bytes()).map_err(|error| {
            GpuError::System { doing: "loading kernels".to_owned(), reason: error.to_string() }
        })?;
        Self::load(context, text)
    }

    /// Loads an image that contains its own length.
    ///
    /// # Errors
    /// As for [`Self::load`].
    ///
    /// # Safety
    /// It must be a whole cubin or fatbin as NVIDIA's tools make them.
    pub unsafe fn load_binary(context: &'static Context, image: &[u8]) -> Result<Self, GpuError> {
        // SAFETY: the caller's promise.
        unsafe { Self::load_raw(context, image.as_ptr().cast()) }
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
        // SAFETY: the caller's promise; two options with two values; the log has the length that is given.
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
        Ok(Function { raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let module = self.raw as usize;
        let unload = move |driver: &Driver| {
            // SAFETY: loaded by this; whoever launches its kernels promises that the module outlives them.
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
    /// The function's module must be of the stream's context and live until the kernel has ended. `P` must be laid out
    /// like the kernel's parameter. With this parameter, the kernel must touch only memory that stays valid and
    /// unshared until it has ended.
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
}
