//! Identifies this process's host for others: which boot of which kernel, and which namespaces.

use std::path::Path;

use serde::Serialize;

use crate::source::Source;

/// Identifies the boot of a kernel that a process runs on, and the process's namespaces.
///
/// Two processes with the same boot id run on the same kernel, even in different containers. The
/// namespaces decide whether they can reach each other's memory or sockets.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct HostIdentity {
    /// The host's name.
    pub hostname: Option<String>,
    /// A random number made at boot, as the kernel prints it.
    pub boot_id: Option<String>,
    /// Inode of the PID namespace.
    pub pid_namespace: Option<u64>,
    /// Inode of the network namespace.
    pub net_namespace: Option<u64>,
    /// Inode of the user namespace.
    pub user_namespace: Option<u64>,
}

impl HostIdentity {
    /// The identity of this process.
    pub fn of_this_process() -> Self {
        Self::read(&Source::new(Path::new("/")))
    }

    /// Whether both run on the same kernel. False if that is not known.
    pub fn same_host(&self, other: &Self) -> bool {
        known_equal(&self.boot_id, &other.boot_id)
    }

    /// Whether a process id means the same to both, and neither is hidden from the other by a user
    /// namespace. `process_vm_readv` needs this before permissions are even checked.
    pub fn same_processes(&self, other: &Self) -> bool {
        self.same_host(other)
            && known_equal(&self.pid_namespace, &other.pid_namespace)
            && known_equal(&self.user_namespace, &other.user_namespace)
    }

    /// Whether both see the same loopback interface.
    pub fn same_network(&self, other: &Self) -> bool {
        self.same_host(other) && known_equal(&self.net_namespace, &other.net_namespace)
    }

    pub(crate) fn read(source: &Source) -> Self {
        Self {
            hostname: source.text("proc/sys/kernel/hostname"),
            boot_id: source.text("proc/sys/kernel/random/boot_id"),
            pid_namespace: namespace(source, "pid"),
            net_namespace: namespace(source, "net"),
            user_namespace: namespace(source, "user"),
        }
    }
}

fn known_equal<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
    a.is_some() && a == b
}

/// Parses the target of a link such as `pid:[4026531836]`.
fn namespace(source: &Source, kind: &str) -> Option<u64> {
    let link = source.link(format!("proc/self/ns/{kind}"))?;
    let inode = link.to_str()?.strip_prefix(kind)?.strip_prefix(":[")?;
    inode.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> HostIdentity {
        HostIdentity {
            hostname: None,
            boot_id: Some("b".into()),
            pid_namespace: Some(1),
            net_namespace: Some(2),
            user_namespace: Some(3),
        }
    }

    #[test]
    fn another_container_is_the_same_host_and_other_processes() {
        let other = HostIdentity { pid_namespace: Some(9), ..identity() };
        assert!(identity().same_host(&other) && identity().same_network(&other));
        assert!(!identity().same_processes(&other));
        assert!(identity().same_processes(&identity()));
    }

    #[test]
    fn the_unknown_is_not_the_same() {
        assert!(!HostIdentity::default().same_host(&HostIdentity::default()));
        let other = HostIdentity { boot_id: Some("c".into()), ..identity() };
        assert!(!identity().same_host(&other) && !identity().same_network(&other));
    }
}
