//! `CUDA_VISIBLE_DEVICES`: the GPUs of a machine that a process sees, and their order.

use super::uuid::GpuUuid;

/// One entry of the list.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum VisibleEntry {
    /// A GPU by its number on the machine.
    Index(u32),
    /// A GPU by its UUID or the beginning of it, `GPU-…` as written.
    Uuid(String),
    /// A part of a GPU, `MIG-…` as written.
    Mig(String),
}

/// The value of `CUDA_VISIBLE_DEVICES`.
///
/// The driver reads the variable itself. This type is for code that must tell which GPU of the
/// machine an ordinal means without asking a driver, or in another process's environment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum VisibleDevices {
    /// The variable is not set: all GPUs, in the machine's order.
    All,
    /// These, in this order.
    List(Vec<VisibleEntry>),
}

impl VisibleDevices {
    /// The value in this process's environment.
    pub fn of_this_process() -> Self {
        Self::parse(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
    }

    /// Parses the variable's value. As in the driver, the first entry that is not valid ends the
    /// list: `0,-1,1` is GPU 0, and `-1` or an empty value mean no GPU.
    pub fn parse(value: Option<&str>) -> Self {
        let Some(value) = value else { return Self::All };
        Self::List(value.split(',').map_while(|entry| VisibleEntry::parse(entry.trim())).collect())
    }

    /// For each ordinal, the index in `machine` of the GPU that it means. `machine` holds the
    /// machine's GPUs in the driver's order, by their UUIDs where known.
    ///
    /// The list ends at an entry that names no GPU, several GPUs, or a part of a GPU (MIG). If a
    /// GPU is named twice, the result is empty.
    pub fn resolve(&self, machine: &[Option<GpuUuid>]) -> Vec<usize> {
        let Self::List(entries) = self else { return (0..machine.len()).collect() };
        let mut found = Vec::new();
        for index in entries.iter().map_while(|entry| entry.find(machine)) {
            if found.contains(&index) {
                return Vec::new();
            }
            found.push(index);
        }
        found
    }
}

impl VisibleEntry {
    fn parse(entry: &str) -> Option<Self> {
        let starts = |prefix: &str| entry.get(..4).is_some_and(|e| e.eq_ignore_ascii_case(prefix));
        if starts("GPU-") {
            Some(Self::Uuid(entry.to_owned()))
        } else if starts("MIG-") {
            Some(Self::Mig(entry.to_owned()))
        } else {
            let digits = !entry.is_empty() && entry.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| entry.parse().ok().map(Self::Index))?
        }
    }

    fn find(&self, machine: &[Option<GpuUuid>]) -> Option<usize> {
        match self {
            Self::Index(index) => {
                usize::try_from(*index).ok().filter(|index| *index < machine.len())
            }
            Self::Uuid(text) => {
                let text = text.to_ascii_lowercase();
                let named =
                    |uuid: &GpuUuid| uuid.to_string().to_ascii_lowercase().starts_with(&text);
                let mut matching = (machine.iter().enumerate())
                    .filter(|(_, uuid)| uuid.as_ref().is_some_and(named))
                    .map(|(index, _)| index);
                let first = matching.next()?;
                matching.next().is_none().then_some(first)
            }
            Self::Mig(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn machine() -> Vec<Option<GpuUuid>> {
        [0x10, 0x11, 0x20, 0x30].map(|first| Some(GpuUuid([first; 16]))).to_vec()
    }

    fn resolved(value: &str) -> Vec<usize> {
        VisibleDevices::parse(Some(value)).resolve(&machine())
    }

    #[test]
    fn lists_are_read_as_the_driver_reads_them() {
        assert_eq!(VisibleDevices::parse(None).resolve(&machine()), [0, 1, 2, 3]);
        assert_eq!(resolved("2, 0"), [2, 0]);
        assert_eq!(resolved(""), []);
        assert_eq!(resolved("-1"), []);
        assert_eq!(resolved("1,-1,2"), [1]);
        assert_eq!(resolved("1,4,2"), [1]);
        assert_eq!(resolved("0x1"), []);
        assert_eq!(resolved("1,1"), []);
        assert_eq!(resolved("99999999999"), []);
    }

    #[test]
    fn uuids_may_be_shortened_as_far_as_they_name_one_gpu() {
        assert_eq!(resolved("GPU-20,GPU-3030"), [2, 3]);
        assert_eq!(resolved(&format!("{},0", GpuUuid([0x11; 16]))), [1, 0]);
        assert_eq!(resolved("GPU-1"), []);
        assert_eq!(resolved("3,GPU-ff,0"), [3]);
        assert_eq!(resolved("0,MIG-20202020"), [0]);
        assert_eq!(VisibleDevices::parse(Some("GPU-20")).resolve(&[None, None]), []);
    }

    proptest! {
        #[test]
        fn ordinals_are_of_distinct_gpus(value in "[-0-9A-Za-z, ]{0,30}") {
            let found = resolved(&value);
            prop_assert!(found.iter().all(|index| *index < 4));
            let mut distinct = found.clone();
            distinct.sort();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), found.len());
        }
    }
}
