//! Ranks with GPUs on several hosts of an NVLink domain: on an emulated GPU, in two processes that
//! are kept apart as two nodes.

#[allow(dead_code, unused_imports, reason = "these tests launch no kernel")]
mod emulator;

use std::{
    env,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, Command},
    sync::Arc,
    time::Duration,
};

use uccl_ep::{
    Result,
    cuda::{Config, Group, Reach},
};

const DOMAIN: i32 = 3;
/// What the other process is told, by its environment: a socket's path, and its domain.
const SOCKET: &str = "UCCL_TEST_FABRIC_SOCKET";
const OTHER_DOMAIN: &str = "UCCL_TEST_FABRIC_DOMAIN";
const PATIENCE: Duration = Duration::from_secs(60);

fn config(rank: usize, ranks: usize, nodes: [u64; 2]) -> Config {
    let bind = Some([127, 0, 0, 1].into());
    Config {
        rank,
        ranks,
        pool: 1 << 16,
        timeout: Duration::from_secs(20),
        masks_late: false,
        device: 0,
        blocks: 2,
        is_alone: false,
        reach: Reach::Fabric,
        node: Some(nodes[rank]),
        network: Some(uccl_p2p::Config { bind, num_cpus: 1, ..Default::default() }),
    }
}

/// The facts of a group as one of its ranks has them.
#[derive(Debug)]
struct Facts {
    is_via_host: bool,
    nodes: usize,
    refusal: String,
    unreached: String,
}

impl Facts {
    fn of(group: &Arc<Group>) -> Self {
        Self {
            is_via_host: group.is_via_host(),
            nodes: group.nodes().count,
            refusal: group.fabric_refusal().unwrap_or_default(),
            unreached: group.unreached_reason().unwrap_or_default().to_owned(),
        }
    }
}

/// One of two ranks, which exchange bytes through this socket.
fn join(rank: usize, nodes: [u64; 2], socket: &mut UnixStream) -> Arc<Group> {
    let mut exchange = |own: Vec<u8>| -> Result<Vec<Option<Vec<u8>>>> {
        socket.write_all(&(own.len() as u32).to_le_bytes()).expect("told");
        socket.write_all(&own).expect("told");
        let mut len = [0; 4];
        socket.read_exact(&mut len).expect("the other rank tells");
        let mut other = vec![0; u32::from_le_bytes(len) as usize];
        socket.read_exact(&mut other).expect("the other rank tells");
        let both = if rank == 0 { [own, other] } else { [other, own] };
        Ok(both.map(Some).to_vec())
    };
    Group::join(config(rank, 2, nodes), &mut exchange).expect("it joins")
}

/// Not a test: the program of the other process.
#[test]
#[ignore = "the other process of a test"]
fn other_process() {
    let Ok(path) = env::var(SOCKET) else { return };
    let domain = env::var(OTHER_DOMAIN).expect("a domain").parse().expect("a number");
    emulator::load();
    emulator::join_domain(domain);
    let mut socket = UnixStream::connect(path).expect("connected");
    socket.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let group = join(1, [0, 1], &mut socket);
    let facts = Facts::of(&group);
    assert_eq!(facts.is_via_host, domain != DOMAIN, "{facts:?}");
    // The group stays until the other rank has looked.
    let _ = socket.read(&mut [0]);
}

fn start_other(path: &Path, domain: i32) -> Child {
    Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "other_process", "--ignored", "--nocapture"])
        .env(SOCKET, path)
        .env(OTHER_DOMAIN, domain.to_string())
        .spawn()
        .expect("it starts")
}

/// The facts of rank 0 in a group with rank 1, in another process of this domain.
fn beside(domain: i32) -> Facts {
    emulator::load();
    emulator::join_domain(DOMAIN);
    let path = env::temp_dir().join(format!("uccl-fabric-{}-{domain}", std::process::id()));
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut other = start_other(&path, domain);
    let (mut socket, _) = listener.accept().expect("the other process connects");
    std::fs::remove_file(&path).expect("removed");
    socket.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let group = join(0, [0, 1], &mut socket);
    let facts = Facts::of(&group);
    drop(socket);
    drop(group);
    let status = other.wait().expect("it ends");
    assert!(status.success(), "the other process failed: {status}");
    facts
}

#[test]
fn ranks_of_two_processes_reach_each_other_by_fabric_handles_or_by_the_host() {
    let facts = beside(DOMAIN);
    assert!(!facts.is_via_host && facts.nodes == 1, "{facts:?}");
    assert!(facts.refusal.is_empty() && facts.unreached.is_empty(), "{facts:?}");
    let facts = beside(DOMAIN + 1);
    assert!(facts.is_via_host && facts.nodes == 2, "{facts:?}");
    assert!(!facts.refusal.is_empty() && !facts.unreached.is_empty(), "{facts:?}");
    // A process without a channel of the IMEX service.
    let facts = beside(0);
    assert!(facts.is_via_host && facts.unreached.contains("fabric"), "{facts:?}");
    // This process, last: its domain is that of all its tests.
    a_rank_alone_has_its_window_without_a_fabric_handle();
}

fn a_rank_alone_has_its_window_without_a_fabric_handle() {
    emulator::join_domain(0);
    let mut exchange = |own: Vec<u8>| -> Result<Vec<Option<Vec<u8>>>> { Ok(vec![Some(own)]) };
    let group = Group::join(config(0, 1, [0, 0]), &mut exchange).expect("it joins");
    let facts = Facts::of(&group);
    assert!(!facts.is_via_host && facts.refusal.contains("FAKE_ERROR"), "{facts:?}");
}
