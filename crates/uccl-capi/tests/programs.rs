//! Programs in C and C++, compiled as their users compile theirs, and run: a real compiler checks
//! the headers, the names and the binary interface.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// Beyond the alarm that each program sets itself.
const LIMIT: Duration = Duration::from_secs(150);
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// A compiler, and the language and the standard that it compiles a file for.
#[derive(Clone, Copy)]
struct Language {
    compiler: &'static str,
    name: &'static str,
    standard: &'static str,
}

const C: Language = Language { compiler: "cc", name: "c", standard: "-std=c11" };
const CPP: Language = Language { compiler: "c++", name: "c++", standard: "-std=c++17" };

impl Language {
    /// Whether there is such a compiler; prints a notice if not.
    fn is_there(self) -> bool {
        let there = Command::new(self.compiler).arg("--version").output().is_ok();
        if !there {
            eprintln!("skipped: lacks {}: programs in {}", self.compiler, self.name);
        }
        there
    }

    fn command(self) -> Command {
        let mut command = Command::new(self.compiler);
        command
            .args(["-x", self.name, self.standard])
            .args(WARNINGS)
            .arg("-I")
            .arg(here("include"));
        command
    }
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The library that was built with this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    test.with_file_name("libuccl_capi.so")
}

/// A folder in which the library has its name.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    symlink(library(), folder.path().join("libuccl_p2p.so")).expect("a link");
    folder
}

fn succeed(command: &mut Command) -> String {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Output { status, stdout, stderr } = finish(child.expect("it starts"));
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{said}{complained}");
    said.into_owned()
}

/// The output of a program, or a failure if it takes too long. The output must fit a pipe.
fn finish(mut child: Child) -> Output {
    let started = Instant::now();
    while child.try_wait().expect("its status").is_none() {
        if started.elapsed() > LIMIT {
            child.kill().expect("it is ended");
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

/// Compiles a program and runs it without the engine's variables in its environment.
fn run(language: Language, source: &str, expected: &str) {
    run_with(language, source, &[], expected);
}

fn run_with(language: Language, source: &str, options: &[&str], expected: &str) {
    if !language.is_there() {
        return;
    }
    let folder = folder();
    let program = folder.path().join("program");
    let mut compile = language.command();
    compile.arg(here("tests/programs").join(source)).arg("-o").arg(&program).arg("-L");
    // POSIX functions beside the standard's.
    compile
        .arg(folder.path())
        .args(["-D_GNU_SOURCE", "-O1", "-pthread", "-luccl_p2p"])
        .args(options);
    succeed(&mut compile);
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("UCCL_") {
            command.env_remove(name);
        }
    }
    let said = succeed(command.env("LD_LIBRARY_PATH", folder.path()));
    assert!(said.contains(expected), "{said}");
}

#[test]
fn every_failure_says_why() {
    run(C, "status.c", "each failure said why");
}

#[test]
fn data_moves_and_nothing_stays_behind() {
    run(C, "transfers.c", "100 rounds left nothing behind");
}

#[test]
fn a_transfer_is_prepared_once_and_posted_often() {
    run(C, "prepared.c", "prepared once, posted often");
}

#[test]
fn published_memory_is_named_by_its_address() {
    run(C, "addresses.c", "moved by address");
}

#[test]
fn connects_are_polled_and_cancelled() {
    run(C, "connecting.c", "every connect was polled to its end");
}

#[test]
fn a_killed_peer_is_lost() {
    run(C, "killed.c", "the peer was lost");
}

#[test]
fn every_call_of_the_engine_interface() {
    run(CPP, "engine_calls.cpp", "every call did what it says");
}

#[test]
fn faults_through_the_engine_interface() {
    run(CPP, "engine_faults.cpp", "every call returned, and said why");
}

#[test]
fn plugins_find_the_functions_that_they_rely_on() {
    run(CPP, "engine_plugin.cpp", "what plugins rely on is there");
    // With strings of another layout.
    run_with(
        CPP,
        "engine_plugin.cpp",
        &["-D_GLIBCXX_USE_CXX11_ABI=0"],
        "what plugins rely on is there",
    );
}

/// A header compiles alone, in each of the languages that it is for.
#[test]
fn headers_compile_alone() {
    const CPP11: Language = Language { standard: "-std=c++11", ..CPP };
    const CPP20: Language = Language { standard: "-std=c++20", ..CPP };
    let both = [("uccl.h", C), ("uccl.h", CPP), ("uccl_engine.h", CPP11), ("uccl_engine.h", CPP)];
    let others = [("uccl_engine.h", CPP20), ("common.h", CPP11)];
    for (header, language) in both.into_iter().chain(others) {
        if language.is_there() {
            let header = here("include").join(header);
            // A header of its own would have a pragma in the middle of nothing.
            succeed(
                language.command().args(["-fsyntax-only", "-include"]).arg(header).arg("/dev/null"),
            );
        }
    }
}

/// The symbols of the library that UCCL's plugin for NIXL needs.
const PLUGIN: [&str; 23] = [
    "_Z15uccl_engine_regP11uccl_enginemmRm",
    "_Z18uccl_engine_acceptP11uccl_enginePcmPi",
    "_Z18uccl_engine_createib",
    "_Z19uccl_engine_connectP11uccl_enginePKcS2_ib",
    "_Z19uccl_engine_destroyP11uccl_engine",
    "_Z21deserialize_fifo_itemPKcP8FifoItem",
    "_Z22uccl_engine_get_notifsv",
    "_Z22uccl_engine_mr_destroyP11uccl_enginem",
    "_Z22uccl_engine_send_notifP9uccl_connP10notify_msg",
    "_Z23uccl_engine_read_vectorP9uccl_connSt6vectorImSaImEES1_IPvSaIS4_EES3_S1_I8FifoItemSaIS7_EEiPmS1_IPcSaISB_EE",
    "_Z23uccl_engine_stop_acceptP11uccl_engine",
    "_Z23uccl_engine_update_fifoR8FifoItemmj",
    "_Z23uccl_engine_xfer_statusP9uccl_connm",
    "_Z24uccl_engine_conn_destroyP9uccl_conn",
    "_Z24uccl_engine_get_ipc_infoP11uccl_enginemPcPb",
    "_Z24uccl_engine_get_metadataP11uccl_enginePPc",
    "_Z24uccl_engine_get_notifs_vv",
    "_Z24uccl_engine_prepare_fifoP11uccl_enginemPKvmPc",
    "_Z24uccl_engine_write_vectorP9uccl_connSt6vectorImSaImEES1_IPvSaIS4_EES3_S1_I8FifoItemSaIS7_EEiPmS1_IPcSaISB_EE",
    "_Z24uccl_engine_send_notif_vP9uccl_connPK12notify_msg_v",
    "_Z25uccl_engine_conn_is_localP9uccl_conn",
    "_Z26uccl_engine_start_listenerP9uccl_conn",
    "_Z27uccl_engine_update_ipc_infoPcmmm",
];

/// The library exports the functions that the two headers declare, and nothing besides.
#[test]
fn the_library_exports_only_functions_that_the_headers_declare() {
    if Command::new("nm").arg("--version").output().is_err() {
        eprintln!("skipped: lacks nm: the library's symbols");
        return;
    }
    let listed = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: Vec<_> =
        listed.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    for symbol in PLUGIN {
        assert!(exported.contains(&symbol), "{symbol} is not exported");
    }
    let c = fs::read_to_string(here("include/uccl.h")).expect("the C header");
    let cpp = fs::read_to_string(here("include/uccl_engine.h")).expect("the C++ header");
    for symbol in exported {
        // _Z, a length, the name.
        let mangled =
            symbol.strip_prefix("_Z").map(|s| s.trim_start_matches(|c: char| c.is_ascii_digit()));
        let declared = match mangled {
            Some(rest) => declared_names(&cpp).any(|name| rest.starts_with(name)),
            None => declared_names(&c).any(|name| name == symbol),
        };
        assert!(declared, "{symbol} is exported, and no header declares it");
    }
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(library()));
    assert!(dynamic.contains("Library soname: [libuccl_p2p.so]"), "{dynamic}");
    assert!(!dynamic.contains("libstdc++"), "C programs need no C++: {dynamic}");
}

/// The words of a header that an opening parenthesis follows.
fn declared_names(header: &str) -> impl Iterator<Item = &str> {
    let before = header.split('(').map(|text| text.trim_end());
    before
        .filter_map(|text| text.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next())
        .filter(|name| !name.is_empty())
}
