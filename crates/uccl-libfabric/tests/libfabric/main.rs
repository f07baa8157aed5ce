//! libfabric's providers on this host, as rails: real libraries, real providers, both ends.
//!
//! `UCCL_LIBFABRIC_SO` names another library than the system's, `UCCL_TEST_LIBFABRIC` a provider
//! (`cxi`, `efa`, `verbs;ofi_rxm`) that is tried besides those that every host has. A test that
//! needs more than the library or the provider has is skipped, and names the missing part.

mod conformance;
mod ends;
mod faults;
mod hostile;
mod pair;
mod processes;
mod sleep;
mod transfers;
