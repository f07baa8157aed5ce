//! CUDA's driver where there is none: `driver.c`, compiled and loaded under the driver's name.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// The controls of the fake driver.
#[derive(Clone, Copy)]
pub(crate) struct Fake {
    pause: extern "C" fn(c_int),
    connections: extern "C" fn(c_int),
    shut: extern "C" fn(c_int),
    flushes: extern "C" fn() -> c_int,
    pass: extern "C" fn(c_int, u64),
    stall: extern "C" fn(c_int),
    stalled: extern "C" fn() -> c_int,
    refuse: extern "C" fn(c_int),
    launched: extern "C" fn() -> u64,
    tables: extern "C" fn() -> u64,
    kernels: extern "C" fn() -> u64,
    allocations: extern "C" fn() -> u64,
    blocked: extern "C" fn() -> c_int,
    emulate: extern "C" fn(EmulatedKernel),
    limit_together: extern "C" fn(u32),
    fabric: extern "C" fn(c_int),
}

/// A kernel that a function runs, on a thread of its own.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EmulatedKernel {
    /// Its name.
    pub(crate) name: *const c_char,
    /// Bytes of its parameter.
    pub(crate) len: usize,
    /// The kernel, as the function takes it.
    pub(crate) kernel: *const c_void,
    /// The function: kernel, blocks, threads, parameter.
    pub(crate) emulate: *const c_void,
}

#[allow(dead_code, reason = "no test needs all of it")]
impl Fake {
    /// Whether copies and kernels are paused.
    pub(crate) fn pause(self, yes: bool) {
        (self.pause)(c_int::from(yes));
    }

    /// How many hardware queues the streams of a GPU share; 0: each stream has one.
    pub(crate) fn connections(self, count: i32) {
        (self.connections)(count);
    }

    /// Whether memory that is exported meanwhile cannot be opened by other processes.
    pub(crate) fn shut(self, yes: bool) {
        (self.shut)(c_int::from(yes));
    }

    /// How often it was asked to flush other devices' writes.
    pub(crate) fn flushes(self) -> i32 {
        (self.flushes)()
    }

    /// Lets `count` kernels, and copies of at most `most` bytes, by while all are paused.
    pub(crate) fn pass(self, count: i32, most: u64) {
        (self.pass)(count, most);
    }

    /// Whether calls that enqueue a copy do not return.
    pub(crate) fn stall(self, yes: bool) {
        (self.stall)(c_int::from(yes));
    }

    /// How many such calls there are.
    pub(crate) fn stalled(self) -> i32 {
        (self.stalled)()
    }

    /// Takes `count` more copies, and refuses those after them; `None`: takes all.
    pub(crate) fn refuse_after(self, count: Option<i32>) {
        (self.refuse)(count.unwrap_or(-1));
    }

    /// How many copy kernels were launched with tables in the GPU's memory.
    pub(crate) fn tables(self) -> u64 {
        (self.tables)()
    }

    /// How many copy kernels were launched.
    pub(crate) fn kernels(self) -> u64 {
        (self.kernels)()
    }

    /// How often memory was asked for.
    pub(crate) fn allocations(self) -> u64 {
        (self.allocations)()
    }

    /// How many bytes streams were asked to copy.
    pub(crate) fn launched(self) -> u64 {
        (self.launched)()
    }

    /// How many calls wait for streams that wait for the host.
    pub(crate) fn blocked(self) -> i32 {
        (self.blocked)()
    }

    /// Adds a kernel, which must live as long as the process.
    pub(crate) fn emulate(self, kernel: EmulatedKernel) {
        (self.emulate)(kernel);
    }

    /// Lets no more than `blocks` blocks of a launch begin together, as on a stream with few
    /// multiprocessors.
    pub(crate) fn limit_together(self, blocks: u32) {
        (self.limit_together)(blocks);
    }

    /// Puts the process into this NVLink domain; 0: it may make no memory with fabric handles. The
    /// last GPU has no such handles.
    pub(crate) fn fabric(self, domain: i32) {
        (self.fabric)(domain);
    }
}

/// Loads it, before a caller asks for a driver: a search for one by name then finds this one.
pub(crate) fn load() -> Fake {
    static FAKE: LazyLock<Fake> = LazyLock::new(|| {
        let path = CString::new(build().as_os_str().as_bytes()).expect("a path");
        // SAFETY: our own library, without initialisers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        // SAFETY: the types are those in driver.c; the library stays loaded.
        unsafe {
            Fake {
                pause: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_pause",
                )),
                connections: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_connections",
                )),
                shut: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_shut",
                )),
                flushes: std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(find(
                    library,
                    c"fake_flushes",
                )),
                pass: std::mem::transmute::<*mut c_void, extern "C" fn(c_int, u64)>(find(
                    library,
                    c"fake_pass",
                )),
                stall: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_stall",
                )),
                stalled: std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(find(
                    library,
                    c"fake_stalled",
                )),
                refuse: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_refuse",
                )),
                tables: std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(find(
                    library,
                    c"fake_tables",
                )),
                kernels: std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(find(
                    library,
                    c"fake_kernels",
                )),
                allocations: std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(find(
                    library,
                    c"fake_allocations",
                )),
                launched: std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(find(
                    library,
                    c"fake_launched",
                )),
                blocked: std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(find(
                    library,
                    c"fake_blocked",
                )),
                emulate: std::mem::transmute::<*mut c_void, extern "C" fn(EmulatedKernel)>(find(
                    library,
                    c"fake_emulate",
                )),
                limit_together: std::mem::transmute::<*mut c_void, extern "C" fn(u32)>(find(
                    library,
                    c"fake_limit_together",
                )),
                fabric: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(find(
                    library,
                    c"fake_fabric",
                )),
            }
        }
    });
    *FAKE
}

/// # Safety
/// The library is loaded.
unsafe fn find(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the caller's promise.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "there is no {name:?}");
    found
}

/// Compiles it with the compiler that cargo links with. Tests may do so at the same time, each
/// under a name of its own.
fn build() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_driver");
    std::fs::create_dir_all(&folder).expect("a folder");
    let (own, library) =
        (folder.join(format!("{}.so", std::process::id())), folder.join("libcuda.so.1"));
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../uccl-device/tests/fake_driver/driver.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-pthread", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&own, &source])
        .status()
        .expect("cc runs");
    assert!(status.success(), "cc failed with {status}");
    std::fs::rename(&own, &library).expect("renamed");
    library
}
