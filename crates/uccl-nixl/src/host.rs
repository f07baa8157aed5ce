//! Whether the NIXL that loads this plugin is laid out as the plugin is.
//!
//! NIXL's interface is a C++ class. Its virtual functions are found by their order alone. NIXL's
//! version number for plugins stayed the same while that order changed, so the order itself is
//! looked at: NIXL's own plugins implement the same class, and their symbol tables name the
//! function in each place.

use std::{
    collections::HashMap,
    ffi::{CStr, OsStr, c_int, c_void},
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use object::{
    Object as _, ObjectSymbol as _, ObjectSymbolTable as _, RelocationTarget, read::elf::ElfFile64,
};

/// The prefix of the symbol of a class's table of virtual functions, before the class's name. In
/// the table, two other words precede the functions.
const TABLE: &str = "_ZTV";
const TABLE_HEAD: usize = 2;
/// The prefix of the symbol of its type information. The third word points to the type information
/// of the base class.
const TYPE_INFO: &str = "_ZTI";
const TYPE_INFO_HEAD: u64 = 2;
/// The class that every backend derives from.
const BASE: &str = "_ZTV17nixlBackendEngine";
const BASE_INFO: &str = "_ZTI17nixlBackendEngine";
const WORD: u64 = 8;
/// The number of functions that cpp/nixl_abi.h reserves behind the last one.
const RESERVED: usize = 4;
/// A place that is not compared. NIXL has two functions for views of memory on GPUs and one that
/// ends them: they are not implemented here, and had other names in some versions.
const UNUSED: &str = "";
/// The functions of cpp/nixl_abi.h, in its order; the destructor takes two places.
const FUNCTIONS: [&str; 27] = [
    UNUSED,
    UNUSED,
    "supportsRemote",
    "supportsLocal",
    "supportsNotif",
    "getSupportedMems",
    "registerMem",
    "deregisterMem",
    "connect",
    "disconnect",
    "unloadMD",
    "prepXfer",
    "postXfer",
    "checkXfer",
    "releaseReqH",
    UNUSED,
    UNUSED,
    UNUSED,
    "getPublicData",
    "getConnInfo",
    "loadRemoteConnInfo",
    "loadRemoteMD",
    "loadLocalMD",
    "getNotifs",
    "genNotif",
    "queryMem",
    "estimateXferCost",
];

/// The interface of this NIXL differs from the one that this plugin works with.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error(
        "this NIXL has {found} functions in a backend's interface and not {}, as {plugin} shows: this plugin works with NIXL 1.0 to 1.5 (pip install 'nixl>=1.0')",
        FUNCTIONS.len()
    )]
    Count { found: usize, plugin: String },
    #[error(
        "this NIXL has {found:?} in place {place} of a backend's interface and not {:?}, as {plugin} shows: this plugin works with NIXL 1.0 to 1.5 (pip install 'nixl>=1.0')",
        FUNCTIONS[*place]
    )]
    Order { place: usize, found: String, plugin: String },
}

/// Compares the interface with that of NIXL's own plugins. Without such a plugin nothing is
/// compared.
pub(crate) fn check() -> Result<(), Mismatch> {
    let plugins = folders().into_iter().flat_map(|folder| plugins_in(&folder));
    let tables = plugins.filter_map(|path| Some((fs::read(&path).ok()?, path)));
    for (image, path) in tables {
        if let Some(table) = table_in(&image) {
            tracing::debug!("compared with {}", path.display());
            return compare(&table, &path);
        }
    }
    tracing::debug!("no other plugin shows which NIXL this is");
    Ok(())
}

fn compare(table: &[Option<String>], path: &Path) -> Result<(), Mismatch> {
    let plugin = path.display().to_string();
    let found = table.len();
    if !(FUNCTIONS.len()..=FUNCTIONS.len() + RESERVED).contains(&found) {
        return Err(Mismatch::Count { found, plugin });
    }
    let places = FUNCTIONS.iter().zip(table).enumerate();
    for (place, (&ours, theirs)) in places {
        match theirs {
            Some(theirs) if ours != UNUSED && theirs != ours => {
                return Err(Mismatch::Order { place, found: theirs.clone(), plugin });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The folders that may have NIXL's own plugins: beside NIXL's libraries, beside this one, where
/// links to them may be, and `NIXL_PLUGIN_DIR`.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for library in loaded_libraries() {
        let name = library.file_name().unwrap_or_default().as_bytes();
        let Some(folder) = library.parent() else { continue };
        if name.starts_with(b"libnixl.so") || name.starts_with(b"libnixl-") {
            folders.extend([folder.join("plugins"), folder.join("nixl")]);
        }
        if is_plugin(&library) && is_own(&library) {
            folders.push(folder.to_owned());
        }
    }
    folders.extend(std::env::var_os("NIXL_PLUGIN_DIR").map(PathBuf::from));
    folders
}

/// The libraries of this process.
fn loaded_libraries() -> Vec<PathBuf> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        paths: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes its documented arguments, and `paths` is the vector below.
        let (name, paths) = unsafe { ((*info).dlpi_name, &mut *paths.cast::<Vec<PathBuf>>()) };
        if !name.is_null() {
            // SAFETY: the loader's own string.
            let name = unsafe { CStr::from_ptr(name) };
            paths.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        }
        0
    }
    let mut paths: Vec<PathBuf> = Vec::new();
    // SAFETY: `note` gets the vector, for the length of this call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut paths).cast()) };
    paths
}

/// The smallest plugin comes first, as it is read the soonest.
fn plugins_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path()).filter(|path| is_nixls(path));
    let mut plugins: Vec<_> =
        paths.map(|path| (fs::metadata(&path).map_or(0, |file| file.len()), path)).collect();
    plugins.sort();
    plugins.into_iter().map(|(_, path)| path).collect()
}

fn is_nixls(path: &Path) -> bool {
    is_plugin(path) && !is_own(path)
}

fn is_plugin(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b"libplugin_") && name.ends_with(b".so")
}

/// Whether it is this plugin, or a link to it: NIXL may find it under UCX's name.
fn is_own(path: &Path) -> bool {
    let own = OsStr::new("libplugin_UCCL.so");
    let target = fs::canonicalize(path).unwrap_or_default();
    path.file_name() == Some(own) || target.file_name() == Some(own)
}

/// The library with the kernels of `nixl_ep`, if this process has loaded it.
pub(crate) fn nixl_ep() -> Option<PathBuf> {
    let is_it = |library: &PathBuf| {
        let name = library.file_name().unwrap_or_default().as_bytes();
        name.starts_with(b"nixl_ep_cpp")
    };
    loaded_libraries().into_iter().find(is_it)
}

/// The functions of a backend in a plugin: the name in each place, where it is known.
fn table_in(image: &[u8]) -> Option<Vec<Option<String>>> {
    let elf: ElfFile64<'_> = ElfFile64::parse(image).ok()?;
    let symbols: HashMap<_, _> =
        elf.dynamic_symbols().filter_map(|symbol| Some((symbol.name().ok()?, symbol))).collect();
    let size = symbols.get(BASE)?.size();
    let count = usize::try_from(size / WORD).ok()?.checked_sub(TABLE_HEAD)?;
    let pointers = pointers_in(&elf);
    // The base class has no names for functions that it does not implement; classes derived from it
    // do.
    let derived = symbols.iter().find(|(name, table)| {
        let class = name.strip_prefix(TABLE);
        let info = class.and_then(|class| symbols.get(format!("{TYPE_INFO}{class}").as_str()));
        let base = info.and_then(|info| pointers.get(&(info.address() + TYPE_INFO_HEAD * WORD)));
        table.size() >= size && base == Some(&BASE_INFO)
    });
    let start = derived?.1.address() + TABLE_HEAD as u64 * WORD;
    let place = |place: usize| pointers.get(&(start + place as u64 * WORD)).copied();
    Some((0..count).map(|at| place(at).and_then(method)).collect())
}

/// The loader's relocations: the symbol that each address will point to.
fn pointers_in<'data>(elf: &ElfFile64<'data>) -> HashMap<u64, &'data str> {
    let Some(symbols) = elf.dynamic_symbol_table() else { return HashMap::new() };
    let relocations = elf.dynamic_relocations().into_iter().flatten();
    let named = relocations.filter_map(|(address, relocation)| match relocation.target() {
        RelocationTarget::Symbol(index) => {
            Some((address, symbols.symbol_by_index(index).ok()?.name().ok()?))
        }
        _ => None,
    });
    named.collect()
}

/// The method's name in a mangled name such as `_ZNK13nixlUcxEngine14supportsRemoteEv`.
fn method(mangled: &str) -> Option<String> {
    let nested = mangled.strip_prefix("_ZN")?;
    let nested = nested.strip_prefix('K').unwrap_or(nested);
    let (_class, rest) = identifier(nested)?;
    identifier(rest).map(|(method, _)| method.to_owned())
}

/// Splits a length and as many characters from the rest.
fn identifier(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let len: usize = text.get(..digits)?.parse().ok()?;
    text.get(digits..)?.split_at_checked(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_here() -> Vec<Option<String>> {
        FUNCTIONS.iter().map(|name| (!name.is_empty()).then(|| (*name).to_owned())).collect()
    }

    #[test]
    fn the_same_order_is_taken_with_functions_behind_it() {
        let (mut table, path) = (as_here(), Path::new("libplugin_X.so"));
        for _ in 0..=RESERVED {
            assert_eq!(compare(&table, path), Ok(()));
            table.push(Some("later".into()));
        }
        assert!(matches!(compare(&table, path), Err(Mismatch::Count { found: 32, .. })));
        assert!(matches!(compare(&table[..26], path), Err(Mismatch::Count { found: 26, .. })));
    }

    #[test]
    fn another_order_is_refused_with_the_first_difference() {
        let mut table = as_here();
        table.swap(11, 12);
        let refused = compare(&table, Path::new("libplugin_X.so")).expect_err("refused");
        assert!(refused.to_string().contains("\"postXfer\" in place 11"), "{refused}");
    }

    #[test]
    fn names_are_read_from_mangled_ones() {
        let cases = [
            ("_ZNK13nixlUcxEngine14supportsRemoteEv", Some("supportsRemote")),
            ("_ZN15nixlPosixEngine7connectERKNSt7__cxx1112basic_stringE", Some("connect")),
            ("_ZN15nixlPosixEngineD1Ev", None),
            ("__cxa_pure_virtual", None),
            ("_ZN99short", None),
        ];
        for (mangled, name) in cases {
            assert_eq!(method(mangled).as_deref(), name, "{mangled}");
        }
    }

    #[test]
    fn a_file_that_is_no_plugin_is_passed_over() {
        assert_eq!(table_in(b"not an ELF file"), None);
        let own = fs::read("/proc/self/exe").expect("this program");
        assert_eq!(table_in(&own), None);
    }
}
