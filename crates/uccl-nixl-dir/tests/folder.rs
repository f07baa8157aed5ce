//! Folders as `NIXL_PLUGIN_DIR` would name them.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    thread,
};

use tempfile::TempDir;
use uccl_nixl_dir::{Error, PLUGIN, Roots, provide_in, provide_instead_of_ucx_in};

/// An installed wheel of NIXL, and this project's plugin.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { folder: TempDir::new().expect("a temporary folder") };
        for file in [
            "site/.nixl_cu99.mesonpy.libs/plugins/libplugin_UCX.so",
            "site/.nixl_cu99.mesonpy.libs/plugins/libplugin_POSIX.so",
            "site/.nixl_cu99.mesonpy.libs/plugins/libtelemetry_exporter_x.so",
            "site/.nixl_cu99.mesonpy.libs/libnixl.so",
            "site/nixl_cu99.libs/ucx/libuct_cma.so",
            "site/elsewhere/file",
            "ours/libplugin_UCCL.so",
        ] {
            let path = world.at(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
            fs::write(path, file).expect("it can be written");
        }
        fs::create_dir(world.at("tmp")).expect("it can be made");
        world
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn roots(&self) -> Roots {
        Roots { cache: Some(self.at("cache")), temporary: self.at("tmp") }
    }

    fn theirs(&self) -> PathBuf {
        self.at("site/.nixl_cu99.mesonpy.libs/plugins")
    }

    fn provide(&self) -> Result<PathBuf, Error> {
        provide_in(&self.roots(), &self.at("ours/libplugin_UCCL.so"), &self.theirs())
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> =
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

#[test]
fn it_holds_all_plugins_and_the_libraries_that_they_look_for() {
    let world = World::new();
    let folder = world.provide().expect("a folder");
    assert!(folder.starts_with(world.at("cache/uccl/nixl")), "{folder:?}");
    let others = ["libplugin_POSIX.so", "libplugin_UCX.so", "libtelemetry_exporter_x.so"];
    assert_eq!(names(&folder), [others[0], PLUGIN, others[1], others[2]]);
    assert_eq!(text(&folder.join(PLUGIN)), "ours/libplugin_UCCL.so");
    // Plugins reach these paths through $ORIGIN/.. and $ORIGIN/../../nixl_cu99.libs.
    let library = "site/.nixl_cu99.mesonpy.libs/libnixl.so";
    assert_eq!(text(&folder.join("../libnixl.so")), library);
    let module = "site/nixl_cu99.libs/ucx/libuct_cma.so";
    assert_eq!(text(&folder.join("../../nixl_cu99.libs/ucx/libuct_cma.so")), module);
    assert!(!folder.join("../../elsewhere").exists());
}

#[test]
fn one_with_ucxs_name_has_the_plugin_twice_and_a_place_of_its_own() {
    let world = World::new();
    let ours = world.at("ours/libplugin_UCCL.so");
    let folder = provide_instead_of_ucx_in(&world.roots(), &ours, &world.theirs());
    let folder = folder.expect("a folder");
    assert_ne!(folder, world.provide().expect("a folder"));
    assert_eq!(text(&folder.join("libplugin_UCX.so")), "ours/libplugin_UCCL.so");
    assert_eq!(text(&folder.join(PLUGIN)), "ours/libplugin_UCCL.so");
    assert_eq!(names(&folder).len(), 4);
    assert!(text(&folder.join("libplugin_POSIX.so")).contains("site/"));
}

#[test]
fn it_is_made_once_and_anew_when_anything_changes() {
    let world = World::new();
    let first = world.provide().expect("a folder");
    fs::write(first.join("mark"), "").expect("it can be written");
    assert_eq!(world.provide().expect("a folder"), first);
    assert!(first.join("mark").exists(), "it was made again");
    fs::write(world.theirs().join("libplugin_NEW.so"), "").expect("it can be written");
    let second = world.provide().expect("a folder");
    assert_ne!(second, first);
    assert!(second.join("libplugin_NEW.so").exists());
    assert_eq!(names(&world.at("cache/uccl/nixl")).len(), 2);
}

#[test]
fn a_damaged_one_is_made_again() {
    let world = World::new();
    let folder = world.provide().expect("a folder");
    fs::remove_file(folder.join("libplugin_UCX.so")).expect("it can be removed");
    fs::remove_file(folder.join(PLUGIN)).expect("it can be removed");
    symlink("/elsewhere", folder.join(PLUGIN)).expect("it can be linked");
    assert_eq!(world.provide().expect("a folder"), folder);
    assert_eq!(text(&folder.join(PLUGIN)), "ours/libplugin_UCCL.so");
    assert!(folder.join("libplugin_UCX.so").exists());
    assert_eq!(names(&world.at("cache/uccl/nixl")).len(), 1);
}

#[test]
fn many_at_once_get_the_same_whole_folder() {
    let world = World::new();
    for _ in 0..20 {
        let folders: Vec<_> = thread::scope(|scope| {
            let look = || {
                let folder = world.provide().expect("a folder");
                assert_eq!(names(&folder).len(), 4);
                folder
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(look)).collect();
            threads.into_iter().map(|thread| thread.join().expect("it went well")).collect()
        });
        assert!(folders.iter().all(|folder| *folder == folders[0]), "{folders:?}");
        assert_eq!(names(&world.at("cache/uccl/nixl")).len(), 1);
        fs::remove_dir_all(world.at("cache")).expect("it can be removed");
    }
}

#[test]
fn temporary_files_serve_where_the_cache_cannot() {
    let world = World::new();
    // A file in the folder's place stops root as well; permissions would not.
    fs::write(world.at("cache"), "").expect("it can be written");
    let folder = world.provide().expect("a folder");
    assert!(folder.starts_with(world.at("tmp")), "{folder:?}");
    let [own] = &names(&world.at("tmp"))[..] else { panic!("more than one folder") };
    let mode = fs::metadata(world.at("tmp").join(own)).expect("a folder").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert_eq!(world.provide().expect("a folder"), folder);

    // Nothing is put where others may write.
    let shared = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.at("tmp").join(own), shared).expect("they can be changed");
    let error = world.provide().expect_err("it is refused").to_string();
    assert!(error.contains("cache"), "{error}");
}

#[test]
fn a_missing_plugin_or_package_is_named() {
    let world = World::new();
    let provide = |ours: &str, theirs: &str| {
        provide_in(&world.roots(), &world.at(ours), &world.at(theirs)).expect_err("it is refused")
    };
    let plugins = "site/.nixl_cu99.mesonpy.libs/plugins";
    let error = provide("ours/none.so", plugins);
    assert!(matches!(&error, Error::NoPlugin(_)) && error.to_string().contains("g++"), "{error}");
    for folder in ["site/elsewhere", "site/none"] {
        let error = provide("ours/libplugin_UCCL.so", folder);
        assert!(matches!(&error, Error::NoNixl(path) if path.ends_with(folder)), "{error}");
    }
    assert!(!world.at("cache").exists());
}
