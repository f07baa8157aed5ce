//! Facts of the running kernel that decide how fast bytes can move.

use serde::Serialize;

use crate::source::Source;

/// Kernel settings that matter to transfers.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct KernelFacts {
    /// The kernel's version.
    pub release: Option<String>,
    /// TCP congestion control.
    pub congestion: Congestion,
    /// `net.core.rmem_max`: the largest receive buffer that a socket may ask for, in bytes.
    pub rmem_max_bytes: Option<u64>,
    /// `net.core.wmem_max`: the largest send buffer that a socket may ask for, in bytes.
    pub wmem_max_bytes: Option<u64>,
    /// Third value of `net.ipv4.tcp_rmem`: up to how many bytes the kernel grows a TCP receive
    /// buffer by itself.
    pub tcp_rmem_max_bytes: Option<u64>,
    /// Third value of `net.ipv4.tcp_wmem`: up to how many bytes the kernel grows a TCP send buffer
    /// by itself.
    pub tcp_wmem_max_bytes: Option<u64>,
    /// `kernel.yama.ptrace_scope`. `None` if the kernel is built without Yama, and then nothing is
    /// restricted.
    pub ptrace_scope: Option<u8>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// The size of `/dev/shm`, if it exists.
    pub shm: Option<SharedMemory>,
}

/// Which TCP congestion controls there are.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Congestion {
    /// The one that a new socket uses.
    pub default: Option<String>,
    /// Those that any process may choose.
    pub allowed: Vec<String>,
    /// Those that are loaded. A process with CAP_NET_ADMIN may choose any of them.
    pub available: Vec<String>,
}

/// The file system behind `/dev/shm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct SharedMemory {
    /// How large it may grow, in bytes.
    pub size_bytes: u64,
    /// How much of it is free, in bytes.
    pub free_bytes: u64,
}

impl KernelFacts {
    pub(crate) fn read(source: &Source) -> Self {
        let net = "proc/sys/net";
        Self {
            release: source.text("proc/sys/kernel/osrelease"),
            congestion: Congestion::read(source),
            rmem_max_bytes: source.value(format!("{net}/core/rmem_max")),
            wmem_max_bytes: source.value(format!("{net}/core/wmem_max")),
            tcp_rmem_max_bytes: third(source, &format!("{net}/ipv4/tcp_rmem")),
            tcp_wmem_max_bytes: third(source, &format!("{net}/ipv4/tcp_wmem")),
            ptrace_scope: source.value("proc/sys/kernel/yama/ptrace_scope"),
            huge_pages: source
                .text("sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|text| chosen(&text)),
            shm: SharedMemory::read(source),
        }
    }
}

impl Congestion {
    fn read(source: &Source) -> Self {
        let words = |name: &str| -> Vec<String> {
            let text = source.text(format!("proc/sys/net/ipv4/{name}")).unwrap_or_default();
            text.split_whitespace().map(str::to_owned).collect()
        };
        Self {
            default: source.text("proc/sys/net/ipv4/tcp_congestion_control"),
            allowed: words("tcp_allowed_congestion_control"),
            available: words("tcp_available_congestion_control"),
        }
    }
}

impl SharedMemory {
    fn read(source: &Source) -> Option<Self> {
        let stat = rustix::fs::statvfs(source.path("dev/shm")).ok()?;
        Some(Self {
            size_bytes: stat.f_blocks.checked_mul(stat.f_frsize)?,
            free_bytes: stat.f_bavail.checked_mul(stat.f_frsize)?,
        })
    }
}

fn third(source: &Source, path: &str) -> Option<u64> {
    source.text(path)?.split_whitespace().nth(2)?.parse().ok()
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_is_the_choice() {
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
        assert_eq!(chosen("[always"), None);
    }
}
