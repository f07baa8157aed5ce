//! Adverts in the form that callers carry.

use pyo3::prelude::*;
use uccl_wire::advert::{ADVERT_LEN, Advert};

use crate::{buffer, error::CallError};

/// Decodes the 64 bytes that `advertise` made.
pub(crate) fn advert(meta: &Bound<'_, PyAny>) -> Result<Advert, CallError> {
    let bytes = buffer::bytes(meta)?;
    if bytes.len() != ADVERT_LEN {
        return Err(CallError::runtime(format!(
            "meta must be exactly {ADVERT_LEN} bytes (what advertise returned), not {}",
            bytes.len()
        )));
    }
    Advert::decode(&bytes).map_err(CallError::refuse)
}
