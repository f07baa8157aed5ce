//! The table of regions that an owner publishes to the peers of its host.
//!
//! 65,536 entries of eight 64-bit words, in a segment that peers can only read:
//!
//! | word | meaning |
//! | --- | --- |
//! | 0 | version: odd while the region lives, even when there is none; grows with every change |
//! | 1, 2 | address and length in the owner's process |
//! | 3 | bit 0: may be read, bit 1: may be written, bit 2: lies in shared memory (words 6 and 7), bit 3: only a GPU reaches it, bit 4: locked host memory, which its owner's GPUs reach, bit 5: signals may change its words |
//! | 4, 5 | the first 128 bits of SHA-256(key, slot), both little-endian |
//! | 6, 7 | id of the shared memory, and where in it the region starts |
//!
//! Words 1 to 7 change only while the version is even. So a reader that sees the same odd version
//! before and after its reads has read one region whole. The table holds digests, not keys: a peer
//! can check a key that it was given, but cannot learn one.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sha2::{Digest, Sha256};
use uccl_device::MemoryKind;

use super::memo::Memo;
use super::segment::{MapMode, Mapping, Segment, Words};
use super::sync::Word;
use crate::mem::{Access, RemoteSpan, Span};
use crate::rights::{AccessError, Rights, SharedBacking, offset_within};

/// How many regions a table publishes. To access a region in a later slot, a peer asks the owner.
pub const PUBLISHED_REGIONS: usize = 1 << 16;

/// Words of an entry.
pub const ENTRY_WORDS: usize = 8;
const TABLE_BYTES: usize = PUBLISHED_REGIONS * ENTRY_WORDS * 8;

/// Flags in word 3, beside the bits of the rights.
const BACKED: u64 = 4;
const DEVICE: u64 = 8;
const LOCKED: u64 = 16;

/// Words 1 to 7 of an entry.
pub type Fields = [u64; 7];

/// Puts a region into a dead entry.
pub fn publish<W: Word>(entry: &[W; ENTRY_WORDS], fields: &Fields) {
    let version = entry[0].load(Ordering::Relaxed);
    // A reader that sees any of the new fields sees the even version too.
    W::fence(Ordering::Release);
    for (word, value) in entry[1..].iter().zip(fields) {
        word.store(*value, Ordering::Relaxed);
    }
    entry[0].store(version.wrapping_add(1) | 1, Ordering::Release);
}

/// Marks an entry dead. Hazard words read after this show which accesses are still under way.
pub fn retire<W: Word>(entry: &[W; ENTRY_WORDS]) {
    let version = entry[0].load(Ordering::Relaxed);
    if version & 1 == 1 {
        entry[0].store(version.wrapping_add(1), Ordering::SeqCst);
    }
}

/// The version of an entry. To rely on it, claim a hazard on the slot first.
#[inline(always)]
pub fn version<W: Word>(entry: &[W; ENTRY_WORDS]) -> u64 {
    entry[0].load(Ordering::SeqCst)
}

/// The version and fields of an entry. `None` if it holds no live region, or changed during the
/// read.
pub(crate) fn read<W: Word>(entry: &[W; ENTRY_WORDS]) -> Option<(u64, Fields)> {
    let before = version(entry);
    let fields = std::array::from_fn(|i| entry[i + 1].load(Ordering::Relaxed));
    W::fence(Ordering::Acquire);
    let after = entry[0].load(Ordering::Relaxed);
    (before & 1 == 1 && before == after).then_some((before, fields))
}

/// A digest that peers can check a key against, but not compute the key from.
fn digest(key: u64, slot: u32) -> [u64; 2] {
    let hash =
        Sha256::new().chain_update(key.to_le_bytes()).chain_update(slot.to_le_bytes()).finalize();
    let word = |at: usize| {
        hash.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    [word(0), word(8)]
}

fn entry(words: &Words, slot: u32) -> Option<&[core::sync::atomic::AtomicU64; ENTRY_WORDS]> {
    words.as_slice().get(slot as usize * ENTRY_WORDS..)?.first_chunk()
}

/// A region, as its owner publishes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listing {
    pub(crate) span: Span,
    pub(crate) rights: Rights,
    pub(crate) backing: Option<SharedBacking>,
    pub(crate) kind: MemoryKind,
}

/// The owner's side of the table.
#[derive(Debug)]
pub(crate) struct PublishedTable {
    segment: Segment,
    words: Words,
}

impl PublishedTable {
    pub(crate) fn new() -> io::Result<Self> {
        let segment = Segment::create_published("uccl-regions", TABLE_BYTES)?;
        let words = Words::new(&segment, 0, PUBLISHED_REGIONS * ENTRY_WORDS)?;
        Ok(Self { segment, words })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }

    /// Lists a region, if its slot is within the table. The slot must be retired.
    pub(crate) fn publish(&self, slot: u32, key: u64, listing: &Listing) {
        let Some(entry) = entry(&self.words, slot) else { return };
        let Listing { span, rights, backing, kind } = *listing;
        let [low, high] = digest(key, slot);
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        let bits = rights.to_bits()
            | flag(backing.is_some(), BACKED)
            | flag(kind.device_only().is_some(), DEVICE)
            | flag(kind == MemoryKind::Pinned, LOCKED);
        let (id, offset) = backing.map_or((0, 0), |b| (u64::from(b.id), b.offset));
        publish(entry, &[span.addr as u64, span.len as u64, bits, low, high, id, offset]);
    }

    pub(crate) fn retire(&self, slot: u32) {
        if let Some(entry) = entry(&self.words, slot) {
            retire(entry);
        }
    }
}

/// Why this process cannot access a region of the peer's by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PeerCheck {
    /// Its slot is beyond the published table: ask the owner.
    #[error("the region is not in the published table")]
    Unpublished,
    /// The access is not allowed.
    #[error(transparent)]
    Refused(#[from] AccessError),
}

/// A region of the peer's, read from its table by a process that has the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionSnapshot {
    /// The entry's version when it was read. The description is valid while the version stays the
    /// same.
    pub version: u64,
    /// Where the region starts in the owner's process.
    pub addr: u64,
    /// The region's length in bytes.
    pub len: u64,
    /// The accesses that peers may make there.
    pub rights: Rights,
    /// Where the region lies in shared memory, if it does.
    pub backing: Option<SharedBacking>,
    /// Only a GPU reaches it.
    pub device: bool,
    /// It is locked host memory, which the owner's GPUs reach.
    pub locked: bool,
}

impl RegionSnapshot {
    /// Checks that the access lies within the region and its rights. Returns its offset in the
    /// region, in bytes.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`] or [`AccessError::Denied`].
    #[inline]
    pub fn admit(&self, span: &RemoteSpan, needed: impl Into<Rights>) -> Result<u64, AccessError> {
        self.rights.admit(needed)?;
        offset_within(self.addr, self.len, span.addr, span.len)
    }

    fn from_fields(version: u64, fields: &Fields) -> Self {
        let [addr, len, bits, _, _, id, offset] = *fields;
        let rights = Rights::from_bits(bits);
        let backing = (bits & BACKED != 0)
            .then(|| u32::try_from(id).ok().map(|id| SharedBacking { id, offset }))
            .flatten();
        let (device, locked) = (bits & DEVICE != 0, bits & LOCKED != 0);
        Self { version, addr, len, rights, backing, device, locked }
    }
}

/// A peer's table, mapped read-only, with a cache of the keys already checked against it.
#[derive(Debug)]
pub struct PeerTable {
    words: Words,
    /// Key, slot + 1, version, and five words of the entry.
    memo: Memo<8>,
}

impl PeerTable {
    /// Maps the table in the memfd that the peer handed over.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when it is not such a table; otherwise the system's error.
    pub fn map(fd: OwnedFd) -> io::Result<Self> {
        let segment = Arc::new(Mapping::of(fd, MapMode::ReadOnly, TABLE_BYTES)?);
        if segment.len() != TABLE_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's region table is too short",
            ));
        }
        let words = Words::new(&segment, 0, PUBLISHED_REGIONS * ENTRY_WORDS)?;
        Ok(Self { words, memo: Memo::default() })
    }

    /// The version of a slot's entry, or `None` beyond the table. Read it after claiming a hazard:
    /// if it is still that of [`RegionSnapshot`], the region lives until the hazard is cleared.
    #[inline(always)]
    pub fn version(&self, slot: u32) -> Option<u64> {
        entry(&self.words, slot).map(version)
    }

    /// Checks an access against the table. If a hazard on the slot was claimed before this call,
    /// the answer holds until the hazard is cleared; otherwise it may be outdated at once.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn check(&self, span: &RemoteSpan, access: Access) -> Result<RegionSnapshot, PeerCheck> {
        let checked = self.find(span)?;
        checked.admit(span, access)?;
        Ok(checked)
    }

    /// Finds the region with the slot and key of `span`. Does not check the range.
    ///
    /// # Errors
    /// [`PeerCheck::Unpublished`], or [`AccessError::UnknownKey`].
    pub fn find(&self, span: &RemoteSpan) -> Result<RegionSnapshot, PeerCheck> {
        let entry = entry(&self.words, span.slot).ok_or(PeerCheck::Unpublished)?;
        match self.recall(span, version(entry)) {
            Some(checked) => Ok(checked),
            None => Ok(self.verify(span, entry)?),
        }
    }

    fn recall(&self, span: &RemoteSpan, version: u64) -> Option<RegionSnapshot> {
        let [key, slot, seen, addr, len, bits, id, offset] = self.memo.get(span.slot)?;
        let same = version & 1 == 1
            && seen == version
            && key == span.key
            && slot == u64::from(span.slot) + 1;
        same.then(|| RegionSnapshot::from_fields(version, &[addr, len, bits, 0, 0, id, offset]))
    }

    fn verify(
        &self,
        span: &RemoteSpan,
        entry: &[core::sync::atomic::AtomicU64; ENTRY_WORDS],
    ) -> Result<RegionSnapshot, AccessError> {
        let (version, fields) = read(entry).ok_or(AccessError::UnknownKey)?;
        let [addr, len, bits, low, high, id, offset] = fields;
        let expected = digest(span.key, span.slot);
        // No branch between the halves: the time taken must not tell which half was right.
        if (expected[0] ^ low) | (expected[1] ^ high) != 0 {
            return Err(AccessError::UnknownKey);
        }
        let slot = u64::from(span.slot) + 1;
        self.memo.put(span.slot, &[span.key, slot, version, addr, len, bits, id, offset]);
        Ok(RegionSnapshot::from_fields(version, &fields))
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::frame::Status;

    use super::*;
    use crate::region::{AdmittedMemory, Region, RegionTable};

    const BACKING: SharedBacking = SharedBacking { id: 9, offset: 4096 };

    fn map(table: &RegionTable) -> PeerTable {
        PeerTable::map(table.published_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    fn insert(table: &RegionTable, backing: Option<SharedBacking>) -> Region {
        table.insert(Span { addr: 0x1000, len: 64 }, Rights::ALL, backing).unwrap()
    }

    #[test]
    fn a_peer_finds_the_memory_that_the_owner_registered() {
        let table = RegionTable::new().unwrap();
        let before = insert(&table, None);
        let peer = map(&table);
        let after = insert(&table, Some(BACKING));
        // Twice: first from the table, then from the cache.
        for _ in 0..2 {
            for (region, backing) in [(before, None), (after, Some(BACKING))] {
                let found = peer.check(&region.remote(), Access::Write).unwrap();
                assert_eq!((found.addr, found.len, found.backing), (0x1000, 64, backing));
                assert_eq!(Some(found.version), peer.version(region.slot));
            }
        }
    }

    #[test]
    fn a_peer_refuses_the_same_requests_as_the_owner() {
        let table = RegionTable::new().unwrap();
        let region = table.insert(Span { addr: 0x1000, len: 64 }, Rights::READ, None).unwrap();
        let peer = map(&table);
        let all = region.remote();
        let forged = RemoteSpan { key: all.key ^ (1 << 40), ..all };
        let longer = RemoteSpan { len: 65, ..all };
        // Valid requests come in between, so that the second round also asks the cache.
        for _ in 0..2 {
            for remote in [forged, longer, RemoteSpan { slot: 1, ..all }, all] {
                for access in [Access::Read, Access::Write] {
                    let owner = table.lock().check(&remote, access).map(drop);
                    assert_eq!(
                        peer.check(&remote, access).map(drop),
                        owner.map_err(PeerCheck::Refused)
                    );
                }
            }
        }
        let beyond = RemoteSpan { slot: PUBLISHED_REGIONS as u32, ..all };
        assert_eq!(peer.check(&beyond, Access::Read), Err(PeerCheck::Unpublished));
    }

    #[test]
    fn a_revoked_region_is_not_remembered() {
        let table = RegionTable::new().unwrap();
        let peer = map(&table);
        let old = insert(&table, None);
        peer.check(&old.remote(), Access::Read).unwrap();
        drop(table.revoke(old.slot, old.key).unwrap());
        let unknown = Err(PeerCheck::Refused(AccessError::UnknownKey));
        assert_eq!(peer.check(&old.remote(), Access::Read), unknown);
        let new = insert(&table, None);
        assert_eq!(new.slot, old.slot);
        assert_eq!(peer.check(&old.remote(), Access::Read), unknown);
        peer.check(&new.remote(), Access::Read).unwrap();
    }

    #[test]
    fn peers_see_whether_cpus_and_gpus_reach_a_region() {
        use MemoryKind::{Cuda, Host, Managed, Pinned};
        let table = RegionTable::new().unwrap();
        let peer = map(&table);
        for (kind, device, locked) in [
            (Host, false, false),
            (Pinned, false, true),
            (Managed { device: 0 }, false, false),
            (Cuda { device: 3 }, true, false),
        ] {
            let span = Span { addr: 0x1000, len: 64 };
            let region = table.insert_kind(kind, span, Rights::ALL, None).unwrap();
            // Twice: first from the table, then from the cache.
            for _ in 0..2 {
                let found = peer.find(&region.remote()).unwrap();
                assert_eq!((found.device, found.locked), (device, locked), "{kind}");
            }
            let admitted = table.admit(&region.remote(), Access::Read);
            let whole = AdmittedMemory { span, kind, region: region.slot };
            assert_eq!(admitted, if device { Err(Status::Device) } else { Ok(whole) });
            let part = Span { addr: 0x1010, len: 8 };
            let part = table.insert_part(region.slot, kind, part, Rights::READ, None).unwrap();
            assert!(table.admit(&part.remote(), Access::Write).is_err());
            let admitted = table.admit(&part.remote(), Access::Read);
            assert_eq!(admitted.ok().map(|part| part.region), (!device).then_some(region.slot));
            let beyond = RemoteSpan { len: 65, ..region.remote() };
            assert!(table.admit(&beyond, Access::Write).is_err());
        }
        assert_eq!(table.refused(), 4 + 1 + 4 + 1);
    }

    #[test]
    fn slots_beyond_the_table_are_left_to_the_owner() {
        let table = RegionTable::new().unwrap();
        let peer = map(&table);
        let last = (0..PUBLISHED_REGIONS).fold(insert(&table, None), |_, _| insert(&table, None));
        assert_eq!(last.slot as usize, PUBLISHED_REGIONS);
        assert_eq!(peer.check(&last.remote(), Access::Read), Err(PeerCheck::Unpublished));
        assert_eq!(table.lock().check(&last.remote(), Access::Read), Ok(last.span));
        drop(table.revoke(last.slot, last.key).unwrap());
    }

    #[test]
    fn the_key_is_not_in_the_table() {
        let table = RegionTable::new().unwrap();
        let _peer = map(&table);
        let region = insert(&table, None);
        let segment = Mapping::of(
            table.published_fd().try_clone_to_owned().unwrap(),
            MapMode::ReadOnly,
            TABLE_BYTES,
        );
        let words = Words::new(&Arc::new(segment.unwrap()), 0, ENTRY_WORDS).unwrap();
        let words: Vec<u64> =
            words.as_slice().iter().map(|word| word.load(Ordering::Relaxed)).collect();
        assert!(words.contains(&0x1000), "not the table: {words:x?}");
        assert!(!words.contains(&region.key));
    }

    #[test]
    fn the_digest_is_sha_256() {
        // From another implementation: sha256(bytes 1..=8, then 5, 0, 0, 0).
        let key = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(digest(key, 5).map(u64::to_le_bytes).concat(), DIGEST_5);
    }

    const DIGEST_5: [u8; 16] = [
        0xb4, 0x17, 0xb9, 0x29, 0x95, 0xc7, 0xca, 0xdd, 0x3b, 0x7e, 0x6a, 0xc2, 0xac, 0x66, 0x87,
        0x17,
    ];

    #[test]
    fn a_key_is_right_only_if_all_of_its_digest_is() {
        let table = RegionTable::new().unwrap();
        let region = insert(&table, None);
        let owner = PublishedTable::new().unwrap();
        let peer = PeerTable::map(owner.fd().try_clone_to_owned().unwrap()).unwrap();
        let [low, high] = digest(region.key, region.slot);
        for (wrong_low, wrong_high) in [(0, 1), (1, 0), (1 << 63, 1 << 63), (0, 0)] {
            owner.retire(region.slot);
            let entry = entry(&owner.words, region.slot).unwrap();
            let bits = Rights::ALL.to_bits();
            publish(entry, &[0x1000, 64, bits, low ^ wrong_low, high ^ wrong_high, 0, 0]);
            let found = peer.check(&region.remote(), Access::Read).is_ok();
            assert_eq!(found, (wrong_low, wrong_high) == (0, 0), "{wrong_low:x} {wrong_high:x}");
        }
    }

    #[test]
    fn a_table_of_another_size_is_refused() {
        let segment = Segment::create_published("test", 4096).unwrap();
        let error = PeerTable::map(segment.fd().try_clone_to_owned().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
