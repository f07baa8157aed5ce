//! The tables of pieces that are posted again and again, in the memory of the GPU that copies them.
//!
//! A shared list ([`PieceList::share`](uccl_fabric::pieces::PieceList::share)) keeps the state of
//! its posts. The first post notes itself alone, so that a list that is posted once costs nothing
//! more. The second uploads a table behind its own copies. Each later post finds the peer's
//! regions, compares them with those of the table, and launches the kernel with it.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::MemoryKind;
use uccl_fabric::{
    gpu::{Engine, PieceTable},
    lane::{OpKind, RemoteSpans, Spans},
    shm::RegionSnapshot,
};

/// The address at which the GPU reaches the first piece in a region, and the region.
pub(super) type RegionPlace = (u64, RegionSnapshot);

/// The posts of a shared list so far.
enum PostState {
    /// There was one, or a table cannot be made.
    Posted {
        may_upload: bool,
    },
    Uploaded(Arc<KeptTable>),
}

/// The table of an operation's pieces.
pub(super) struct KeptTable {
    pub(super) table: PieceTable,
    /// In the order of [`PieceList::regions`](uccl_fabric::pieces::PieceList::regions).
    pub(super) regions: SmallVec<[RegionPlace; 1]>,
    kind: OpKind,
    memory: MemoryKind,
    local: Spans,
    engine: Weak<Mutex<Engine>>,
}

/// What a post does about the table of its pieces.
pub(super) enum TableUse {
    /// Copies with this one.
    Copy(Arc<KeptTable>),
    /// Uploads one.
    Upload,
    /// Notes that the list has been posted.
    Note,
    None,
}

/// A post whose pieces may be posted again.
#[derive(Clone, Copy)]
pub(super) struct TablePost<'a> {
    pub(super) kind: OpKind,
    /// The kind of our memory.
    pub(super) memory: MemoryKind,
    pub(super) local: &'a Spans,
    pub(super) remote: &'a RemoteSpans,
    pub(super) engine: &'a Arc<Mutex<Engine>>,
}

impl TablePost<'_> {
    pub(super) fn table_use(&self) -> TableUse {
        let Some(memo) = self.remote.memo() else { return TableUse::None };
        match memo.get::<PostState>().as_deref() {
            None => TableUse::Note,
            Some(PostState::Posted { may_upload: true }) => TableUse::Upload,
            Some(PostState::Posted { may_upload: false }) => TableUse::None,
            Some(PostState::Uploaded(kept)) if self.is_of(kept) => TableUse::Copy(Arc::clone(kept)),
            // Another lane has the table, unless that lane is gone.
            Some(PostState::Uploaded(kept)) if kept.engine.strong_count() > 0 => TableUse::None,
            Some(PostState::Uploaded(_)) => TableUse::Upload,
        }
    }

    fn is_of(&self, kept: &KeptTable) -> bool {
        let (ours, its) = (self.local.as_slice(), kept.local.as_slice());
        std::ptr::eq(kept.engine.as_ptr(), Arc::as_ptr(self.engine))
            && (kept.kind, kept.memory) == (self.kind, self.memory)
            && std::ptr::eq(ours, its)
    }

    /// Notes the first post, which has been enqueued.
    pub(super) fn note(&self) {
        if let Some(memo) = self.remote.memo() {
            memo.set(Arc::new(PostState::Posted { may_upload: true }));
        }
    }

    /// Keeps a table for later posts; `None`: no post uploads one again.
    pub(super) fn keep(&self, table: Option<PieceTable>, regions: SmallVec<[RegionPlace; 1]>) {
        let Some(memo) = self.remote.memo() else { return };
        let state = match table {
            None => PostState::Posted { may_upload: false },
            Some(table) => PostState::Uploaded(Arc::new(KeptTable {
                table,
                regions,
                kind: self.kind,
                memory: self.memory,
                local: self.local.clone(),
                engine: Arc::downgrade(self.engine),
            })),
        };
        memo.set(Arc::new(state));
    }
}
