//! Handles, which callers hold in the place of objects.

use std::{
    collections::BTreeMap,
    ptr::without_provenance_mut,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::RwLock;

/// One counter for all kinds, so that a handle of one kind is never one of another.
static NEXT: AtomicUsize = AtomicUsize::new(STEP);
/// Handles look aligned, for callers that check the alignment of pointers.
const STEP: usize = 16;

/// Objects by their handles: numbers that are never used twice, in the shape of pointers that
/// nobody follows.
pub(crate) struct Handles<T> {
    live: RwLock<BTreeMap<usize, Arc<T>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self { live: RwLock::new(BTreeMap::new()) }
    }

    pub(crate) fn add<H>(&self, object: T) -> *mut H {
        let handle = NEXT.fetch_add(STEP, Relaxed);
        self.live.write().insert(handle, Arc::new(object));
        without_provenance_mut(handle)
    }

    pub(crate) fn get<H>(&self, handle: *const H) -> Option<Arc<T>> {
        self.live.read().get(&handle.addr()).cloned()
    }

    pub(crate) fn remove<H>(&self, handle: *const H) -> Option<Arc<T>> {
        self.live.write().remove(&handle.addr())
    }

    /// Ends the handles of all objects that `keep` rejects.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        // The drop of the objects may take long, so it happens without the lock.
        let ended: Vec<_> = self.live.write().extract_if(.., |_, object| !keep(object)).collect();
        drop(ended);
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.live.read().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_ends_with_its_object() {
        let (numbers, texts) = (Handles::new(), Handles::new());
        let seven: *mut u8 = numbers.add(7);
        let text: *mut u8 = texts.add("text");
        assert_eq!(numbers.get(seven).as_deref(), Some(&7));
        assert!(numbers.get(text).is_none() && texts.get(seven).is_none());
        assert!(numbers.remove(seven).is_some() && numbers.remove(seven).is_none());
        assert!(numbers.get(seven).is_none() && numbers.get(std::ptr::null::<u8>()).is_none());
        assert_ne!(numbers.add::<u8>(8), seven);
        texts.retain(|text| text.is_empty());
        assert!(texts.all().is_empty());
    }
}
