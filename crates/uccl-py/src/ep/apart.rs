//! What may take long to end.

use std::{mem::ManuallyDrop, ops::Deref};

use pyo3::Python;

/// Ends without the interpreter's lock: the end of a group waits until far peers have what was sent to them, and other
/// threads go on meanwhile.
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
        // SAFETY: nobody uses it after its drop.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        Python::attach(|py| py.detach(|| drop(value)));
    }
}
