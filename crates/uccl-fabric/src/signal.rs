//! Signals: changes that are made to words of registered memory for a peer.
//!
//! A signal word is [`SIGNAL_LEN`] bytes long, aligned to its length, and changes as a whole: an
//! atomic load, by the CPU or a GPU, sees the old value or the new one. A reader that sees the new
//! value with acquire order also sees the data that the signal announces.

use std::sync::atomic::{AtomicU64, Ordering};

use uccl_wire::{
    frame::Status,
    signal::{Change, SIGNAL_LEN},
};

use crate::{
    gpu::{self, WordChange},
    guarded,
    mem::RemoteSpan,
    region::{RegionTable, Rights},
    status_of,
};

/// A word of the peer's memory, and the change to make to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word {
    /// Where it is, [`SIGNAL_LEN`] bytes.
    pub span: RemoteSpan,
    /// The change to make to the word.
    pub change: Change,
}

/// The word is not aligned to its length.
#[derive(Debug)]
pub struct AlignmentError;

/// Changes a word that the CPU reaches.
///
/// # Safety
/// [`SIGNAL_LEN`] bytes must be there, readable and writable, and only accessed as an atomic
/// meanwhile.
pub unsafe fn change_word(at: *mut u8, change: Change) -> Result<(), AlignmentError> {
    let at = at.cast::<u64>();
    if !at.is_aligned() {
        return Err(AlignmentError);
    }
    // SAFETY: the caller's promise, and it is aligned.
    let word = unsafe { AtomicU64::from_ptr(at) };
    match change {
        Change::Set(value) => word.store(value, Ordering::Release),
        Change::Add(value) => {
            word.fetch_add(value, Ordering::AcqRel);
        }
    }
    Ok(())
}

/// Changes a word of ours for a peer, if the peer has the right. The region cannot be revoked
/// meanwhile, or is [in use](RegionTable::is_in_use).
///
/// Returns the change if it is under way: the copy engine changes a word in GPU memory, and no
/// kernel is launched.
///
/// # Errors
/// The reason for the refusal, as a wire status: then nothing has changed.
pub fn apply(table: &RegionTable, word: &Word) -> Result<Option<WordChange>, Status> {
    let Word { span, change } = word;
    let refuse = |status| {
        table.note_refusal();
        status
    };
    if span.len != SIGNAL_LEN || !span.addr.is_multiple_of(SIGNAL_LEN) {
        return Err(refuse(Status::Protocol));
    }
    let regions = table.lock();
    let located = regions.locate(span, Rights::SIGNAL).map_err(|e| refuse(status_of(e)))?;
    let at = located.span.addr;
    if located.device.is_some() {
        // Calls of the driver may take long, and a locked table stops registrations.
        drop(regions);
        let used = table.locate_for_use(span, Rights::SIGNAL);
        let (located, in_use) = used.map_err(|e| refuse(status_of(e)))?;
        let device = located.device.ok_or_else(|| refuse(Status::UnknownKey))?;
        // SAFETY: the word is registered, and its region in use. Users read words that signals
        // change as atomics.
        let begun = unsafe { gpu::begin_change(device, located.span.addr, *change, in_use) };
        return begun.map(Some).map_err(|_| Status::Fault);
    }
    // SAFETY: the word is registered, and stays so under the lock.
    if !unsafe { guarded::is_readable(located.span) } {
        return Err(Status::Fault);
    }
    // SAFETY: as above. Users read words that signals change as atomics.
    unsafe { change_word(at as *mut u8, *change) }.map_err(|_| Status::Protocol)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Span;

    #[test]
    fn only_a_peer_with_the_right_changes_a_word_and_only_where_it_is_aligned() {
        let table = RegionTable::new().expect("a table");
        let memory: Vec<AtomicU64> = (0..4).map(AtomicU64::new).collect();
        let span = Span { addr: memory.as_ptr() as usize, len: 32 };
        let all = table.insert(span, Rights::ALL, None).expect("there is room").remote();
        let written = table.insert(span, Rights::WRITE, None).expect("there is room").remote();
        let word = |of: RemoteSpan, at| RemoteSpan { addr: of.addr + at, len: SIGNAL_LEN, ..of };
        let apply = |span, change| {
            let under_way = apply(&table, &Word { span, change })?;
            assert!(under_way.is_none(), "the CPU reaches the word");
            Ok(())
        };
        assert_eq!(apply(word(all, 8), Change::Set(7)), Ok(()));
        assert_eq!(apply(word(all, 24), Change::Add(u64::MAX)), Ok(()));
        let seen = || memory.iter().map(|word| word.load(Ordering::Acquire)).collect::<Vec<_>>();
        assert_eq!(seen(), [0, 7, 2, 2]);
        for (word, why) in [
            (word(written, 0), Status::Denied),
            (word(all, 4), Status::Protocol),
            (RemoteSpan { len: 4, ..all }, Status::Protocol),
            (word(all, 32), Status::OutOfBounds),
            (RemoteSpan { key: all.key ^ 1, ..word(all, 0) }, Status::UnknownKey),
        ] {
            assert_eq!(apply(word, Change::Set(9)), Err(why), "{word:?}");
        }
        assert_eq!(seen(), [0, 7, 2, 2]);
        assert_eq!(table.refused(), 5);
        drop(table.revoke(all.slot, all.key).expect("it is there"));
        assert_eq!(apply(word(all, 0), Change::Set(9)), Err(Status::UnknownKey));
        assert_eq!(seen(), [0, 7, 2, 2]);
    }
}
