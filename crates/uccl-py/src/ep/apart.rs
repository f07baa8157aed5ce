//! Values with a drop that may take long.

use std::{mem::ManuallyDrop, ops::Deref};

use pyo3::Python;

/// Drops its value without the GIL: the end of a group waits until far peers have received all
/// data, and other threads run meanwhile.
pub(super) struct Apart<T: Send>(ManuallyDrop<T>);

impl<T: Send> Apart<T> {
    pub(super) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Apart<T> {
    fn drop(&mut self) {
        // SAFETY: the value is not used after its drop.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        Python::attach(|py| py.detach(|| drop(value)));
    }
}
