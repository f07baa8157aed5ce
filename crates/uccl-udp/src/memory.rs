//! Registered memory, as datagrams name it.

use std::collections::HashMap;

use uccl_fabric::{
    mem::{Access, Span},
    region::{Rights, offset_within},
};

/// All regions of a rail, by key.
#[derive(Default)]
pub(crate) struct MemoryTable(HashMap<u64, RegisteredMemory>);

struct RegisteredMemory {
    span: Span,
    rights: Rights,
}

impl MemoryTable {
    pub(crate) fn insert(&mut self, key: u64, span: Span, rights: Rights) {
        self.0.insert(key, RegisteredMemory { span, rights });
    }

    pub(crate) fn remove(&mut self, key: u64) {
        self.0.remove(&key);
    }

    /// The memory that a key, an offset and a length name, if peers may access it so.
    pub(crate) fn locate(&self, key: u64, addr: u64, len: u32, access: Access) -> Option<Span> {
        let region = self.0.get(&key)?;
        region.rights.admit(access).ok()?;
        let offset = offset_within(0, region.span.len as u64, addr, len.into()).ok()?;
        Some(Span { addr: region.span.addr + offset as usize, len: len as usize })
    }
}

/// The bytes of a span from `offset` on; `None` if they do not lie in it.
pub(crate) fn part(span: Span, offset: u32, len: usize) -> Option<Span> {
    let offset = offset as usize;
    let end = offset.checked_add(len)?;
    (end <= span.len).then_some(Span { addr: span.addr + offset, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reaches_its_region_and_no_further() {
        let mut table = MemoryTable::default();
        table.insert(7, Span { addr: 1000, len: 100 }, Rights::WRITE);
        let locate = |table: &MemoryTable, key, addr, len, access| {
            table.locate(key, addr, len, access).map(|span| (span.addr, span.len))
        };
        assert_eq!(locate(&table, 7, 90, 10, Access::Write), Some((1090, 10)));
        assert_eq!(locate(&table, 7, 90, 11, Access::Write), None);
        assert_eq!(locate(&table, 7, u64::MAX, 2, Access::Write), None);
        assert_eq!(locate(&table, 7, 0, 1, Access::Read), None, "no right");
        assert_eq!(locate(&table, 8, 0, 1, Access::Write), None);
        table.remove(7);
        assert_eq!(locate(&table, 7, 0, 1, Access::Write), None);
        let span = Span { addr: 1000, len: 100 };
        assert_eq!(part(span, 60, 40), Some(Span { addr: 1060, len: 40 }));
        assert_eq!(part(span, 61, 40), None);
    }
}
