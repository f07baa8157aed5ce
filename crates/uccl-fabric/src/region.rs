//! Registered memory: which ranges peers may touch, with what key, until when.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};

use crate::mem::{Access, RemoteSpan, Span};
use crate::shm::published::{Listing, PublishedTable};

/// What peers may do in a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// Read it.
    pub read: bool,
    /// Write it.
    pub write: bool,
}

impl Rights {
    /// Reading and writing.
    pub const ALL: Self = Self { read: true, write: true };
    /// Reading only.
    pub const READ: Self = Self { read: true, write: false };
    /// Writing only.
    pub const WRITE: Self = Self { read: false, write: true };

    #[inline(always)]
    pub(crate) fn admit(self, access: Access) -> Result<(), AccessError> {
        let allowed = match access {
            Access::Read => self.read,
            Access::Write => self.write,
        };
        if allowed { Ok(()) } else { Err(AccessError::Denied) }
    }
}

/// Where memory lies in a segment that peers can map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedBacking {
    /// The segment's id in its owner's process.
    pub id: u32,
    /// Where in it, in bytes.
    pub offset: u64,
}

/// A registered region: what its owner hands to peers so that they can reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its place in the table.
    pub slot: u32,
    /// What a peer must know to touch it; random.
    pub key: u64,
    /// The memory.
    pub span: Span,
    /// What peers may do.
    pub rights: Rights,
    /// Where it lies in shared memory, if it does.
    pub backing: Option<SharedBacking>,
}

impl Region {
    /// All of the region, as a peer names it.
    #[must_use]
    pub fn remote(&self) -> RemoteSpan {
        let Span { addr, len } = self.span;
        RemoteSpan { addr: addr as u64, len: len as u64, key: self.key, slot: self.slot }
    }
}

/// Why an access is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AccessError {
    /// No living region has this key: forged, or revoked.
    #[error("no region has this key (forged, or deregistered)")]
    UnknownKey,
    /// The range is not within the region.
    #[error("the range is not within the region")]
    OutOfBounds,
    /// The region may not be accessed in this way.
    #[error("the region does not allow this access")]
    Denied,
}

impl AccessError {
    /// The number that stands for it between processes; never 0.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::UnknownKey => 1,
            Self::OutOfBounds => 2,
            Self::Denied => 3,
        }
    }

    /// The error that a number stands for.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::UnknownKey),
            2 => Some(Self::OutOfBounds),
            3 => Some(Self::Denied),
            _ => None,
        }
    }
}

/// Why a region cannot be registered or revoked.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The table is full.
    #[error("too many regions")]
    Full,
    /// The range wraps around the end of the address space, or does not fit its backing.
    #[error("the range wraps around")]
    BadRange,
    /// No random key could be drawn.
    #[error("no random key: {0}")]
    Random(getrandom::Error),
    /// There is no such region (any more).
    #[error("no such region")]
    Unknown,
}

/// How far `[addr, addr + len)` starts into the `size` bytes at `base`, if all of it lies there.
#[inline(always)]
pub(crate) fn offset_within(base: u64, size: u64, addr: u64, len: u64) -> Result<u64, AccessError> {
    let offset = addr.wrapping_sub(base);
    // Not `offset + len <= size`, which can overflow.
    if addr < base || offset > size || len > size - offset {
        return Err(AccessError::OutOfBounds);
    }
    Ok(offset)
}

/// The most regions a table takes; slots fit 32 bits with room to spare.
const MAX_REGIONS: usize = 1 << 30;

/// Random keys, drawn many at a time: a system call for each would be most of what a registration costs.
#[derive(Debug)]
struct Keys {
    drawn: [u64; 64],
    left: usize,
}

impl Keys {
    fn next(&mut self) -> Result<u64, RegionError> {
        if self.left == 0 {
            let mut bytes = [0; 64 * 8];
            getrandom::fill(&mut bytes).map_err(RegionError::Random)?;
            for (key, bytes) in self.drawn.iter_mut().zip(bytes.as_chunks().0) {
                *key = u64::from_le_bytes(*bytes);
            }
            self.left = self.drawn.len();
        }
        self.left -= 1;
        Ok(std::mem::take(&mut self.drawn[self.left]))
    }
}

#[derive(Clone, Copy, Debug)]
struct Live {
    key: u64,
    span: Span,
    rights: Rights,
}

#[derive(Debug)]
struct State {
    slots: Vec<Option<Live>>,
    /// Slots to be used again, the last freed first: its entry is the likeliest to be in cache.
    free: Vec<u32>,
    keys: Keys,
}

impl State {
    fn check(&self, span: &RemoteSpan, access: Access) -> Result<Span, AccessError> {
        let live = self.slots.get(span.slot as usize).copied().flatten();
        let live = live.filter(|live| live.key == span.key).ok_or(AccessError::UnknownKey)?;
        live.rights.admit(access)?;
        offset_within(live.span.addr as u64, live.span.len as u64, span.addr, span.len)?;
        // Both fit: they lie within a range of ours.
        Ok(Span { addr: span.addr as usize, len: span.len as usize })
    }
}

#[derive(Debug)]
struct Inner {
    state: RwLock<State>,
    published: PublishedTable,
}

/// An endpoint's regions.
///
/// Accesses that this process makes for a peer happen under [`lock`](Self::lock), and those that a peer of
/// this host makes by itself under its [`Hazards`](crate::shm::Hazards).
#[derive(Clone, Debug)]
pub struct RegionTable {
    inner: Arc<Inner>,
}

impl RegionTable {
    /// An empty table.
    ///
    /// # Errors
    /// When its shared segment cannot be made.
    pub fn new() -> io::Result<Self> {
        let keys = Keys { drawn: [0; 64], left: 0 };
        let state = RwLock::new(State { slots: Vec::new(), free: Vec::new(), keys });
        Ok(Self { inner: Arc::new(Inner { state, published: PublishedTable::new()? }) })
    }

    /// Lets peers touch `span` until it is revoked. Cheap enough to be done for one transfer. `span` may be
    /// empty, and regions may overlap.
    ///
    /// # Errors
    /// When the range wraps around, the table is full, or there is no randomness.
    pub fn insert(
        &self,
        span: Span,
        rights: Rights,
        backing: Option<SharedBacking>,
    ) -> Result<Region, RegionError> {
        span.addr.checked_add(span.len).ok_or(RegionError::BadRange)?;
        if backing.is_some_and(|b| b.offset.checked_add(span.len as u64).is_none()) {
            return Err(RegionError::BadRange);
        }
        let mut state = self.inner.state.write();
        let key = state.keys.next()?;
        let live = Some(Live { key, span, rights });
        let slot = match state.free.pop() {
            Some(slot) => {
                state.slots[slot as usize] = live;
                slot
            }
            None => {
                let slot = u32::try_from(state.slots.len()).map_err(|_| RegionError::Full)?;
                if state.slots.len() >= MAX_REGIONS {
                    return Err(RegionError::Full);
                }
                state.slots.push(live);
                slot
            }
        };
        drop(state);
        // Nobody else has the slot, nor yet the key.
        self.inner.published.publish(slot, key, &Listing { span, rights, backing });
        Ok(Region { slot, key, span, rights, backing })
    }

    /// Ends a region. When this returns no access under [`lock`](Self::lock) touches it; those that peers
    /// make by themselves have ended once none of their hazards
    /// [holds](crate::shm::Hazards::holds) the slot. Keep what this returns until then.
    ///
    /// Must not be called by a thread that holds a [`Locked`].
    ///
    /// # Errors
    /// [`RegionError::Unknown`] when there is no such region, or its key is another.
    pub fn revoke(&self, slot: u32, key: u64) -> Result<Revoked, RegionError> {
        let mut state = self.inner.state.write();
        let entry = state.slots.get_mut(slot as usize).ok_or(RegionError::Unknown)?;
        let live = entry.take_if(|live| live.key == key).ok_or(RegionError::Unknown)?;
        self.inner.published.retire(slot);
        drop(state);
        Ok(Revoked { inner: self.inner.clone(), slot, span: live.span })
    }

    /// Holds off revocation, so that what is checked stays allowed while the guard lives. Not to be taken
    /// twice by a thread, and not to be held for long: registration waits too.
    #[must_use]
    pub fn lock(&self) -> Locked<'_> {
        Locked(self.inner.state.read())
    }

    /// The memfd of the published table, to hand to peers of this host.
    #[must_use]
    pub fn published_fd(&self) -> BorrowedFd<'_> {
        self.inner.published.fd()
    }

    /// How many regions live.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.state.read().slots.iter().flatten().count()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The table, held still.
#[derive(Debug)]
pub struct Locked<'a>(RwLockReadGuard<'a, State>);

impl Locked<'_> {
    /// The memory that a peer names, if it may access it so.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn check(&self, span: &RemoteSpan, access: Access) -> Result<Span, AccessError> {
        self.0.check(span, access)
    }
}

/// A revoked region. Its slot is used again only when this is dropped, so that a hazard on the slot cannot be
/// taken for one on the region that comes next.
#[derive(Debug)]
#[must_use = "dropping it frees the slot: wait for the peers' hazards first"]
pub struct Revoked {
    inner: Arc<Inner>,
    slot: u32,
    span: Span,
}

impl Revoked {
    /// Where the region was in the table; what hazards hold.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The memory that was the region.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }
}

impl Drop for Revoked {
    fn drop(&mut self) {
        self.inner.state.write().free.push(self.slot);
    }
}
