//! A GPU on a CPU: the kernels compiled for it, and the driver that runs them.

#[path = "../../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;
mod ring;

pub(crate) use self::ring::Ring;

use std::{
    ffi::{CStr, CString, c_char, c_void},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    mem,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{LazyLock, Once},
};

use self::fake_driver::EmulatedKernel;

/// A kernel, as emulator.cpp and wide.cpp list it.
#[repr(C)]
struct KernelEntry {
    name: *const c_char,
    len: usize,
    kernel: *const c_void,
}

/// The kernels, compiled for the CPU.
struct Library(*mut c_void);

// SAFETY: a handle that any thread may use, and that is never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let path = CString::new(build().as_os_str().as_bytes()).expect("a path");
    // SAFETY: our own library, without initialisers.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "{path:?} cannot be loaded");
    Library(library)
});

/// Blocks of a launch that begin together, as if all streams had this many multiprocessors.
pub(crate) const MOST_TOGETHER: u32 = 4;

/// The call number in a weight that is read as a call's count.
pub(crate) fn call_of_weight(call: u64, weight: f32) -> u64 {
    let Library(library) = *LIBRARY;
    let found = find(library, c"emulated_call_of_weight");
    // SAFETY: the type is that in emulator.cpp; the library stays loaded.
    let of = unsafe { mem::transmute::<*const c_void, extern "C" fn(u64, f32) -> u64>(found) };
    of(call, weight)
}

/// Loads the kernels and the driver, before anything asks for a driver.
pub(crate) fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        let driver = fake_driver::load();
        driver.limit_together(MOST_TOGETHER);
        let Library(library) = *LIBRARY;
        let emulate = find(library, c"emulate");
        for list in [c"emulated_kernels", c"emulated_wide_kernels"] {
            let mut listed = find(library, list).cast::<KernelEntry>();
            // SAFETY: a list in the library, which stays loaded; the last entry has no name.
            unsafe {
                while !(*listed).name.is_null() {
                    let KernelEntry { name, len, kernel } = listed.read();
                    driver.emulate(EmulatedKernel { name, len, kernel, emulate });
                    listed = listed.add(1);
                }
            }
        }
    });
}

/// Puts this process into an NVLink domain, where memory may have fabric handles.
#[allow(dead_code, reason = "tests of other things stay outside")]
pub(crate) fn join_domain(domain: i32) {
    fake_driver::load().fabric(domain);
}

fn find(library: *mut c_void, name: &CStr) -> *const c_void {
    // SAFETY: the library is loaded.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "there is no {name:?}");
    found
}

const FLAGS: &str = "-x c++ -std=c++17 -O1 -fPIC -shared -ffp-contract=off -U_FORTIFY_SOURCE";

/// The kernels for this CPU, compiled unless a test has compiled the same sources. Tests may do so
/// at the same time, each under a name of its own.
fn build() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
    fs::create_dir_all(&folder).expect("a folder");
    let sources = [here.clone(), here.join("../../../../kernels/ep")];
    let library = folder.join(format!("{:016x}.so", hash_of(&sources)));
    if !library.exists() {
        let made = folder.join(format!("{}.made", process::id()));
        compile(&here, &made);
        // Removes the libraries of other sources; another test may have removed them.
        let is_old = |file: &PathBuf| file.extension() == Some("so".as_ref()) && *file != library;
        for file in files_in(&folder).into_iter().filter(is_old) {
            let _ = fs::remove_file(file);
        }
        fs::rename(&made, &library).expect("renamed");
    }
    library
}

/// The hash of the compiler's options, and of all files below some folders.
fn hash_of(folders: &[PathBuf]) -> u64 {
    let mut state = DefaultHasher::new();
    FLAGS.hash(&mut state);
    for path in folders.iter().flat_map(files_below) {
        fs::read(path).expect("a source").hash(&mut state);
    }
    state.finish()
}

fn compile(here: &Path, library: &Path) {
    let status = Command::new("c++")
        .args(FLAGS.split(' '))
        .arg("-I")
        .args([here, &here.join("emulator.cpp"), &here.join("wide.cpp")])
        .arg("-o")
        .arg(library)
        .status()
        .expect("c++ runs");
    assert!(status.success(), "c++ failed with {status}");
}

/// The files of a folder, in the order of their names.
fn files_in(folder: &PathBuf) -> Vec<PathBuf> {
    entries_of(folder).into_iter().filter(|path| path.is_file()).collect()
}

/// The files of a folder and of the folders in it.
fn files_below(folder: &PathBuf) -> Vec<PathBuf> {
    let below = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    entries_of(folder).into_iter().flat_map(below).collect()
}

fn entries_of(folder: &PathBuf) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut entries: Vec<_> = entries.collect();
    entries.sort();
    entries
}
