//! Values with a drop that may take long.

use std::{mem::ManuallyDrop, ops::Deref};

use pyo3::Python;

/// Drops its value without the GIL: the end of a group waits until far peers have received all
/// data, and other threads run meanwhile.
pub(super) struct DetachedDrop<T: Send>(ManuallyDrop<T>);

impl<T: Send> DetachedDrop<T> {
    pub(super) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for DetachedDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for DetachedDrop<T> {
    fn drop(&mut self) {
        // SAFETY: the value is not used after its drop.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        Python::attach(|py| py.detach(|| drop(value)));
    }
}
