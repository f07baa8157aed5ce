//! libfabric's providers on this host, as rails: real libraries, real providers, both ends.
//!
//! `UCCL_LIBFABRIC_SO` names another library than the system's, `UCCL_TEST_LIBFABRIC` a provider that is tried
//! besides those that every host has (`cxi`, `efa`, `verbs;ofi_rxm`). What a library or a provider lacks is skipped by
//! name.

mod conformance;
mod ends;
mod faults;
mod hostile;
mod pair;
mod processes;
mod sleep;
mod transfers;
