//! Shared libraries that are loaded at run time: looked for without loading them.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Where the loader looks when neither its cache nor the environment helps.
const FOLDERS: [&str; 6] =
    ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu"];

/// Where the loader would find a library of this name, if it would.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let from_environment = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let first = env::split_paths(&from_environment)
        .filter(|folder| !folder.as_os_str().is_empty())
        .map(|folder| folder.join(name));
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let last = FOLDERS.iter().map(|folder| Path::new(folder).join(name));
    first.chain(in_cache(&cache, name)).chain(last).find(|path| path.is_file())
}

/// Paths to `name` among the strings of the loader's cache, each of which ends in a zero byte.
fn in_cache(cache: &[u8], name: &str) -> Vec<PathBuf> {
    cache
        .split(|byte| *byte == 0)
        .filter_map(|bytes| std::str::from_utf8(bytes).ok())
        .filter(|text| text.starts_with('/'))
        .filter(|text| text.rsplit('/').next() == Some(name))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caches_strings_are_searched_for_whole_names() {
        let cache =
            b"ld.so-1.7.0\0\x01\xff\0libcuda.so.1\0/usr/lib/libcuda.so.1\0/opt/libcuda.so.12\0";
        assert_eq!(in_cache(cache, "libcuda.so.1"), [PathBuf::from("/usr/lib/libcuda.so.1")]);
        assert!(in_cache(cache, "libcuda.so").is_empty());
        assert!(in_cache(b"", "libcuda.so.1").is_empty());
    }

    #[test]
    fn the_c_library_is_found_and_an_unknown_library_is_not() {
        // This test program is linked with it.
        if cfg!(target_env = "gnu") {
            assert!(find("libc.so.6").is_some());
        }
        assert_eq!(find("libno-such-library.so.1"), None);
    }
}
