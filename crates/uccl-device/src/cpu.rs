//! CPUs and NUMA nodes.

use std::{collections::BTreeSet, fmt, path::Path, str::FromStr};

use serde::{Serialize, Serializer};

use crate::{error::ParseCpuListError, source::Source};

/// A set of CPUs, in the kernel's notation: `0-3,8`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct CpuList(BTreeSet<u32>);

/// No kernel numbers a CPU above this. A larger number means a broken file.
const MAX_CPU: u32 = 1 << 16;

impl CpuList {
    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// How many CPUs it holds.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it holds this one.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuList {
    type Err = ParseCpuListError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseCpuListError(text.to_owned());
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.trim().parse().map_err(|_| error())?;
            let last: u32 = last.trim().parse().map_err(|_| error())?;
            if first > last || last > MAX_CPU {
                return Err(error());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut cpus = self.iter().peekable();
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            match last == first {
                true => write!(f, "{separator}{first}")?,
                false => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl Serialize for CpuList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The machine's processors.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Cpus {
    /// The vendor's name for the model.
    pub model: Option<String>,
    /// The CPUs that are online.
    pub online: CpuList,
    /// How many packages (sockets) there are.
    pub sockets: Option<usize>,
    /// How many cores there are: fewer than CPUs if a core runs several threads.
    pub cores: Option<usize>,
}

impl Cpus {
    pub(crate) fn read(source: &Source) -> Self {
        let folder = Path::new("sys/devices/system/cpu");
        let online: CpuList = source.value(folder.join("online")).unwrap_or_default();
        let mut sockets = BTreeSet::new();
        let mut cores = BTreeSet::new();
        for cpu in online.iter() {
            let topology = folder.join(format!("cpu{cpu}/topology"));
            // The kernel reports -1 for an unknown value.
            let package: Option<u32> = source.value(topology.join("physical_package_id"));
            let core: Option<u32> = source.value(topology.join("core_id"));
            sockets.extend(package);
            cores.extend(core.map(|core| (package, core)));
        }
        let known = |count: usize| (count > 0).then_some(count);
        Self {
            model: model(source),
            sockets: known(sockets.len()),
            cores: known(cores.len()),
            online,
        }
    }
}

fn model(source: &Source) -> Option<String> {
    let text = source.text("proc/cpuinfo")?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Memory and the CPUs near it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct NumaNode {
    /// The kernel's number for it.
    pub id: u32,
    /// The CPUs near it; empty for a node that has only memory.
    pub cpus: CpuList,
    /// All its memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Relative cost of reaching each node, this one's being 10 (ACPI SLIT); in the order of nodes.
    pub distances: Vec<u32>,
}

impl NumaNode {
    pub(crate) fn read_all(source: &Source) -> Vec<Self> {
        let folder = Path::new("sys/devices/system/node");
        let mut nodes: Vec<_> = source
            .names(folder)
            .iter()
            .filter_map(|name| name.strip_prefix("node")?.parse().ok())
            .map(|id| Self::read(source, id, &folder.join(format!("node{id}"))))
            .collect();
        nodes.sort_by_key(|node| node.id);
        nodes
    }

    fn read(source: &Source, id: u32, folder: &Path) -> Self {
        let distances = source.text(folder.join("distance")).unwrap_or_default();
        Self {
            id,
            cpus: source.value(folder.join("cpulist")).unwrap_or_default(),
            memory_bytes: memory_bytes(source, folder),
            distances: distances.split_whitespace().filter_map(|n| n.parse().ok()).collect(),
        }
    }
}

/// Parses a line such as `Node 0 MemTotal: 16384 kB`.
fn memory_bytes(source: &Source, folder: &Path) -> Option<u64> {
    let text = source.text(folder.join("meminfo"))?;
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_the_kernel_does() {
        for text in ["", "0", "0-3", "0-3,8", "1,3,5-7"] {
            assert_eq!(text.parse::<CpuList>().expect(text).to_string(), text);
        }
        assert_eq!("3,2,1,0".parse::<CpuList>().expect("any order").to_string(), "0-3");
        for wrong in ["a", "3-1", "1-", "-1", "0-4000000000"] {
            assert!(wrong.parse::<CpuList>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_list_knows_its_length_and_its_cpus() {
        let list: CpuList = [4, 2, 3].into_iter().collect();
        assert_eq!((list.len(), list.is_empty()), (3, false));
        assert!(list.contains(3) && !list.contains(5));
    }
}
