//! Findings on this host: memory, processors, files.

use super::{Facts, Finding, Level, SHARED_RING};

pub(super) fn process_memory(facts: &Facts) -> Finding {
    const ABOUT: &str = "copies between processes";
    let Some(refused) = facts.probes.memory_refused() else {
        return Finding::fine(ABOUT, "process_vm_readv and process_vm_writev work");
    };
    let finding =
        Finding::new(ABOUT, Level::Slow, format!("process_vm_readv is refused: {refused}"))
            .cost(SHARED_RING);
    let scope = facts.topology.kernel.ptrace_scope;
    finding.remedy(match scope {
        Some(scope @ 1..) => format!(
            "kernel.yama.ptrace_scope is {scope}: sysctl -w kernel.yama.ptrace_scope=0, \
             or give the program CAP_SYS_PTRACE, or use memory from alloc, which needs neither"
        ),
        _ => "in a container, allow the process_vm_* calls in its seccomp profile (docker: \
              --cap-add SYS_PTRACE) and share the PID namespace; or use memory from alloc"
            .to_owned(),
    })
}

pub(super) fn shared_memory(facts: &Facts) -> Finding {
    const ABOUT: &str = "shared memory";
    match (&facts.probes.shared_memory, facts.topology.kernel.shm) {
        (Err(error), _) => Finding::new(ABOUT, Level::Slow, format!("no memfd: {error}"))
            .cost("same-host transfers go over TCP; alloc does not work")
            .remedy("allow memfd_create in the container's seccomp profile"),
        (Ok(()), Some(shm)) => {
            let mib = shm.size_bytes >> 20;
            // memfds are not counted against it; other libraries in the process may use it.
            Finding::fine(
                ABOUT,
                format!("memfd works; /dev/shm has {mib} MiB, which is not needed"),
            )
        }
        (Ok(()), None) => Finding::fine(ABOUT, "memfd works; no /dev/shm, which is not needed"),
    }
}

pub(super) fn cpus(facts: &Facts) -> Finding {
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let all = facts.topology.cpus.online.len();
    match cpus {
        1 => Finding::new("CPUs", Level::Slow, format!("this process may use 1 of {all}"))
            .cost("two sides that wait for each other take turns: tens of microseconds each")
            .remedy("allow it two or more (taskset, cgroup cpuset, container --cpus)"),
        _ => Finding::fine("CPUs", format!("this process may use {cpus} of {all}")),
    }
}

pub(super) fn numa(facts: &Facts) -> Finding {
    let nodes = facts.topology.numa_nodes.len();
    let sockets = facts.topology.cpus.sockets.unwrap_or(1);
    match nodes {
        0 if sockets > 1 => {
            Finding::new("NUMA", Level::Slow, "the kernel names no nodes, but there are sockets")
                .cost("buffers and threads may lie on the far socket")
                .remedy("mount /sys in the container, or boot without numa=off")
        }
        0 => Finding::fine("NUMA", "the kernel names no nodes; one socket"),
        _ => Finding::fine("NUMA", format!("{nodes} node(s)")),
    }
}

pub(super) fn huge_pages(facts: &Facts) -> Finding {
    match facts.topology.kernel.huge_pages.as_deref() {
        Some("never") => Finding::new("huge pages", Level::Note, "transparent huge pages are off")
            .cost("more page faults while large buffers are first touched")
            .remedy("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        Some(setting) => Finding::fine("huge pages", format!("transparent: {setting}")),
        None => Finding::fine("huge pages", "unknown"),
    }
}

/// Fewer open files are used up by a handful of connections.
const FEW_FILES: u64 = 1024;
/// With fewer, not even one endpoint gets its sockets.
const TOO_FEW_FILES: u64 = 32;

pub(super) fn open_files(facts: &Facts) -> Finding {
    const ABOUT: &str = "open files";
    match facts.open_files {
        Some(limit) if limit < FEW_FILES => {
            let level = if limit < TOO_FEW_FILES { Level::Broken } else { Level::Slow };
            Finding::new(ABOUT, level, format!("at most {limit}"))
                .cost("each connection takes several; connecting fails once they are used up")
                .remedy("ulimit -n 65536, or LimitNOFILE= in the service")
        }
        Some(limit) => Finding::fine(ABOUT, format!("at most {limit}")),
        None => Finding::fine(ABOUT, "no limit"),
    }
}
