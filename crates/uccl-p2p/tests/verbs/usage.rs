//! The system resources of this process.

use std::{fmt, fs, process::Command};

/// Resources that must not grow with the number of lost rails.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Descriptors.
    pub(crate) files: usize,
    /// Queue pairs, regions and so on, as the kernel counts them for every device.
    pub(crate) objects: String,
    /// Memory.
    pub(crate) resident_kib: u64,
}

impl Usage {
    pub(crate) fn now() -> Self {
        let objects = Command::new("rdma").arg("resource").output().expect("iproute2").stdout;
        let status = fs::read_to_string("/proc/self/status").expect("proc");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|line| line.split_whitespace().next()?.parse().ok());
        Self {
            files: fs::read_dir("/proc/self/fd").expect("proc").count(),
            objects: String::from_utf8_lossy(&objects).trim().to_owned(),
            resident_kib: resident.expect("a number"),
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB, {} files\n{}", self.resident_kib, self.files, self.objects)
    }
}
