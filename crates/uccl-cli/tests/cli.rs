//! The command as its users run it.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

fn uccl(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_uccl")).args(arguments).output().expect("uccl runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn limits_measure_every_ceiling_of_this_machine() {
    let output =
        uccl(&["bench", "--limits", "--size", "4K,64K", "--duration", "5ms", "--json", "-"]);
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    let rows = report["rows"].as_array().expect("rows");
    for op in ["memcpy", "tcp-stream", "tcp-rtt", "vm-read", "vm-write", "shm-rtt", "thread-hop"] {
        let row = rows.iter().find(|row| row["op"] == op).expect(op);
        assert_eq!(row["path"], "raw");
        let number = if op.ends_with("rtt") || op == "thread-hop" {
            &row["latency_us"]["p50"]
        } else {
            &row["gb_per_s"]
        };
        // A container may refuse; then the row's note says so.
        assert!(number.as_f64().is_some_and(|n| n > 0.0) || row["note"].is_string(), "{row}");
    }
    // Standard output was taken, so that the table went elsewhere.
    assert!(String::from_utf8_lossy(&output.stderr).contains("thread-hop"));
}

/// Runs a short benchmark and returns its rows. All bytes must have been checked.
fn bench(arguments: &str) -> Vec<Value> {
    let words = "bench --duration 4ms --json -".split(' ').chain(arguments.split(' '));
    let output = uccl(&words.collect::<Vec<_>>());
    assert!(output.status.success(), "{output:?}");
    let mut report = json(&output);
    let rows: Vec<Value> = serde_json::from_value(report["rows"].take()).expect("rows");
    for row in &rows {
        assert_eq!(row["verified"], "yes", "{row}");
        assert!(row["gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert!(row["latency_us"]["min"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }
    rows
}

#[test]
fn every_op_moves_the_right_bytes_over_every_path() {
    let rows = bench("--op write,read,send,notif --size 1,64K --transport auto,tcp");
    assert_eq!(rows.len(), 16);
    assert!(rows.iter().filter(|row| row["transport"] == "tcp").all(|row| row["path"] == "tcp"));
}

#[test]
fn one_process_can_have_both_sides() {
    let rows = bench("--op write,read,send --size 100 --processes 1 --direction bi");
    assert_eq!(rows.len(), 3);
}

#[test]
fn both_directions_and_many_iovs() {
    let rows = bench("--op write,read,send,notif --size 1000 --iovs 9 --direction bi --inflight 3");
    let iovs: Vec<_> = rows.iter().map(|row| row["iovs"].as_u64()).collect();
    assert_eq!(iovs, [Some(9), Some(9), Some(9), Some(1)]);
}

#[test]
fn one_outstanding_checksummed_in_memory_of_both_kinds() {
    let rows = bench("--op write,send --size 5K --inflight 1 --checksum --memory heap,alloc");
    let memory: Vec<_> = rows.iter().map(|row| row["memory"].as_str()).collect();
    assert_eq!(memory, ["heap", "heap", "alloc", "alloc"].map(Some));
}

#[test]
fn two_hosts_meet_over_tcp() {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let addr = free.expect("a free port").to_string();
    let mut server = Command::new(env!("CARGO_BIN_EXE_uccl"))
        .args(["bench", "--once", "--listen", &addr])
        .stderr(Stdio::piped())
        .spawn()
        .expect("a server");
    let mut said = BufReader::new(server.stderr.take().expect("its words")).lines();
    let first = said.next().expect("a line").expect("UTF-8");
    assert!(first.contains(&addr), "{first}");
    let rows = bench(&format!("--op write,send --size 64K --transport tcp --connect {addr}"));
    assert!(rows.iter().all(|row| row["path"] == "tcp"));
    assert!(server.wait().expect("it ends").success());
    assert!(said.any(|line| line.is_ok_and(|line| line.ends_with("done"))));
}

#[test]
fn files_are_written_beside_the_table() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (csv, svg) = (path("a.csv"), path("a.svg"));
    let output = uccl(&[
        "bench",
        "--limits",
        "--size",
        "4K",
        "--duration",
        "2ms",
        "--csv",
        &csv,
        "--plot",
        &svg,
    ]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("memcpy"));
    assert!(fs::read_to_string(csv).expect("a CSV file").contains("memcpy,raw,"));
    assert!(fs::read_to_string(svg).expect("an SVG file").contains("raw memcpy"));
}

#[test]
fn the_message_for_a_mistake_names_the_remedy() {
    for (arguments, word) in [
        (&["bench", "--size", "4X"][..], "4K"),
        (&["bench", "--json", "-", "--csv", "-"], "file"),
        (&["bench", "--connect", "127.0.0.1:1"], "--listen"),
        (&["bench", "--size", "900000T", "--op", "write"], "--size"),
        (
            &["bench", "--limits", "--size", "4K", "--json", "/no/such/folder/a"],
            "/no/such/folder/a",
        ),
    ] {
        let output = uccl(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn topo_shows_this_machine() {
    let output = uccl(&["topo"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("CPUs") && text.contains("same host"), "{text}");
    let report = json(&uccl(&["topo", "--json"]));
    let path = report["paths"]["same_host"]["name"].as_str();
    assert!(path.is_some_and(|name| ["cma", "shm", "tcp"].contains(&name)), "{report}");
    assert!(report["topology"]["kernel"]["release"].is_string());
}

#[test]
fn topo_names_the_paths_that_transfers_take() {
    let settings: [&[(&str, &str)]; 6] = [
        &[],
        &[("UCCL_P2P_DISABLE_CMA", "1")],
        &[("UCCL_P2P_TRANSPORT", "tcp")],
        &[("UCCL_P2P_TRANSPORT", "local")],
        &[("UCCL_P2P_TRANSPORT", "fifo")],
        &[("UCCL_P2P_ASK_OWNERS", "1")],
    ];
    for variables in settings {
        let run = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_uccl"));
            json(&command.args(arguments).envs(variables.iter().copied()).output().expect("runs"))
        };
        let mut said = run(&["topo", "--json"]);
        for (row, options) in [
            ("same_process", ["--memory=heap", "--processes=1"]),
            ("same_host", ["--memory=heap", "--processes=2"]),
            ("same_host_alloc", ["--memory=alloc", "--processes=2"]),
        ] {
            // The other end's offer of shared memory comes beside the transfers: the shortest bench
            // may be over before.
            let mut took = Value::Null;
            for duration in ["--duration=1ms", "--duration=200ms", "--duration=5s"] {
                let bench = ["bench", "--op=write", "--size=64K", "--json=-", duration];
                took = run(&[&bench[..], &options].concat())["rows"][0]["path"].take();
                if took == said["paths"][row]["name"] {
                    break;
                }
                said = run(&["topo", "--json"]);
            }
            let path = &said["paths"][row]["name"];
            assert!(took.is_string() && *path == took, "{variables:?}, {row}: {path}, but {took}");
        }
    }
}

#[test]
fn topo_shows_gpus_and_the_nics_near_to_them() {
    let root = TempDir::new().expect("a temporary folder");
    for (name, class, vendor) in [("00.0", "0x030200", "0x10de"), ("02.0", "0x020000", "0x15b3")] {
        let device = root.path().join(format!("sys/devices/pci0000:10/0000:10:{name}"));
        fs::create_dir_all(&device).expect("a folder");
        fs::write(device.join("class"), class).expect("a file");
        fs::write(device.join("vendor"), vendor).expect("a file");
        let bus = root.path().join("sys/bus/pci/devices");
        fs::create_dir_all(&bus).expect("a folder");
        symlink(&device, bus.join(format!("0000:10:{name}"))).expect("a link");
    }
    let nic = root.path().join("sys/devices/pci0000:10/0000:10:02.0/net/eth0");
    fs::create_dir_all(&nic).expect("a folder");
    fs::write(nic.join("operstate"), "up").expect("a file");
    symlink("../..", nic.join("device")).expect("a link");
    fs::create_dir_all(root.path().join("sys/class/net")).expect("a folder");
    symlink(&nic, root.path().join("sys/class/net/eth0")).expect("a link");

    let root = root.path().to_str().expect("UTF-8");
    let output = uccl(&["topo", "--root", root]);
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().find(|line| line.trim().starts_with("0000:10:00.0  X"));
    assert!(row.is_some_and(|row| row.contains("PHB*")), "{text}");
    assert!(text.contains("GPU to other host"), "{text}");
    let report = json(&uccl(&["topo", "--json", "--root", root]));
    let gpu = &report["gpus"][0];
    assert_eq!(gpu["nearest_nic"]["name"], "eth0", "{report}");
    assert_eq!((&gpu["interfaces"][0]["distance"], &gpu["ordinal"]), (&"PHB".into(), &Value::Null));
    assert!(report["no_gpu"].is_string() && report["paths"]["gpu"]["same_host"]["why"].is_string());
}

#[test]
fn doctor_finds_this_machine_working() {
    let output = uccl(&["doctor", "--json"]);
    let findings = json(&output);
    let broken = findings.as_array().expect("findings").iter().any(|f| f["level"] == "broken");
    assert_eq!(output.status.success(), !broken, "{findings}");
    let text = uccl(&["doctor"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("copies between processes"));
}

#[test]
fn nixl_dir_names_a_folder_with_all_plugins() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::create_dir_all(path("nixl/plugins")).expect("a folder");
    for file in ["nixl/plugins/libplugin_UCX.so", "ours.so"] {
        fs::write(path(file), "").expect("a file");
    }
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uccl"));
        // A Python without NIXL, even where this machine's has it.
        command.env("XDG_CACHE_HOME", path("cache")).env("PATH", path("bin"));
        command.arg("nixl-dir").args(arguments).output().expect("uccl runs")
    };
    let (ours, plugins) = (path("ours.so"), path("nixl/plugins"));
    let output = run(&["--plugin", &ours, "--nixl-plugins", &plugins]);
    assert!(output.status.success(), "{output:?}");
    let made = String::from_utf8(output.stdout).expect("UTF-8");
    for plugin in ["libplugin_UCX.so", "libplugin_UCCL.so"] {
        assert!(Path::new(made.trim()).join(plugin).exists(), "{made}");
    }

    let python = path("bin/python3");
    fs::create_dir(path("bin")).expect("a folder");
    let said = |arguments: &[&str]| {
        let output = run(arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    assert!(said(&["--plugin", &ours]).contains("cannot ask python3"));
    fs::write(&python, "#!/bin/sh\necho 'NIXL is not installed: pip install nixl' >&2; exit 1\n")
        .expect("a file");
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("permissions");
    let error = said(&["--plugin", &ours]);
    assert!(error.contains("pip install nixl") && error.contains("--nixl-plugins"), "{error}");
    assert!(said(&["--plugin", &path("none.so")]).contains("pip install nixl"));
    assert!(said(&["--plugin", &path("none.so"), "--nixl-plugins", &plugins]).contains("g++"));
}

#[test]
fn experts_are_measured_on_one_node_and_on_several() {
    for (nodes, across) in [("1", false), ("2", true)] {
        let words = "bench ep --ranks 4 --num-tokens 6 --hidden 256 --num-topk 4 --num-experts 8";
        let words = words.split(' ').chain(["--nodes", nodes, "--rounds", "2", "--json", "-"]);
        let output = uccl(&words.collect::<Vec<_>>());
        assert!(output.status.success(), "{output:?}");
        let report = json(&output);
        let rows = report["rows"].as_array().expect("rows");
        let calls =
            ["low latency combine, in place", "elastic combine, expanded", "normal combine"];
        for call in calls {
            let row = rows.iter().find(|row| row["call"] == call).expect(call);
            let [all, foreign, crosses] = ["bytes", "foreign_bytes", "across_bytes"]
                .map(|name| row[name].as_f64().expect("a number"));
            assert!(all > foreign && foreign > crosses && (crosses > 0.0) == across, "{row}");
        }
        assert!(
            String::from_utf8_lossy(&output.stderr).contains(&format!("4 ranks on {nodes} nodes"))
        );
    }
}

#[test]
fn a_simulation_has_a_table_json_and_a_picture_and_its_seed_repeats_it() {
    let folder = TempDir::new().expect("a folder");
    let picture = folder.path().join("picture.svg");
    let picture = picture.to_str().expect("a path");
    let words = "sim --senders 4 --size 64K --cc fixed,eqds --loss 0.01 --seed 7 --json - --plot";
    let arguments: Vec<_> = words.split(' ').chain([picture]).collect();
    let (first, again) = (uccl(&arguments), uccl(&arguments));
    assert!(first.status.success(), "{first:?}");
    assert_eq!(first.stdout, again.stdout, "the seed repeats it");
    let report = json(&first);
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!((&run["seed"], &run["completions"]), (&7.into(), &4.into()), "{run}");
        assert!(run["groups"][0]["times"]["p99_us"].as_f64().is_some_and(|us| us > 0.0), "{run}");
    }
    // Standard output was taken, so that the table went elsewhere.
    assert!(String::from_utf8_lossy(&first.stderr).contains("eqds, recycled, time"));
    assert!(fs::read_to_string(picture).expect("a picture").starts_with("<svg "));
}

#[test]
fn a_simulation_of_the_impossible_is_refused_in_words() {
    for (words, reason) in [
        ("sim --cc nothing", "there are none, fixed"),
        ("sim --hosts 4", "needs 16 hosts"),
        ("sim --loss 2", "not between 0 and 1"),
        ("sim --paths 0", "must be above 0"),
    ] {
        let output = uccl(&words.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(reason), "{words}: {text}");
    }
}
