//! The memory of messages: which chunks were placed, and whether that was allowed.

use std::collections::BTreeMap;

use uccl_tran::multipath::Chunk;

/// A message's memory.
#[derive(Default)]
struct Area {
    total: u64,
    placed: BTreeMap<u64, u32>,
    has_ended: bool,
}

/// The memory of all messages.
pub(super) struct Memory {
    chunk_len: u64,
    areas: BTreeMap<u64, Area>,
}

impl Memory {
    pub(super) fn new(chunk_len: u64) -> Self {
        Self { chunk_len, areas: BTreeMap::new() }
    }

    pub(super) fn post(&mut self, message: u64, total: u64) {
        self.areas.insert(message, Area { total, ..Area::default() });
    }

    pub(super) fn place(&mut self, chunk: &Chunk) {
        let area = self.areas.get_mut(&chunk.message).expect("a receive");
        assert!(!area.has_ended, "placed after the end: {chunk:?}");
        assert_eq!(area.total, chunk.total);
        let is_first = area.placed.insert(chunk.offset, chunk.len).is_none();
        assert!(is_first, "placed twice: {chunk:?}");
    }

    /// The receiver says that the message has come.
    pub(super) fn complete(&mut self, message: u64) {
        let area = self.areas.get_mut(&message).expect("a receive");
        let chunks = area.total.div_ceil(self.chunk_len).max(1);
        assert_eq!(area.placed.len() as u64, chunks, "{message} has ended too early");
        let bytes: u64 = area.placed.values().map(|len| u64::from(*len)).sum();
        assert_eq!(bytes, area.total);
        self.end(message);
    }

    /// Nothing may be placed any more.
    pub(super) fn end(&mut self, message: u64) {
        let area = self.areas.get_mut(&message).expect("a receive");
        assert!(!std::mem::replace(&mut area.has_ended, true), "{message} has ended twice");
    }

    pub(super) fn has_ended(&self, message: u64) -> bool {
        self.areas.get(&message).is_some_and(|area| area.has_ended)
    }

    /// Whether the message was given back before all of it had come.
    pub(super) fn is_free(&self, message: u64) -> bool {
        self.areas.get(&message).is_some_and(|area| {
            let chunks = area.total.div_ceil(self.chunk_len).max(1);
            area.has_ended && (area.placed.len() as u64) < chunks
        })
    }
}
