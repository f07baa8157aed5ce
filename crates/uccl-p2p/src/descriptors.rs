//! Room for descriptors, of which connections need many.

use std::os::fd::AsFd;

use rustix::{
    io::fcntl_dupfd_cloexec,
    process::{Resource, getrlimit},
};

/// How many descriptors there is to be room for: a table of 32 KiB. A connection over libfabric
/// takes about ten.
const ROOM: u64 = 4096;

/// Makes the process's table of descriptors as large as [`ROOM`], or as the process's limit. `any`
/// is some descriptor.
///
/// The kernel makes a full table twice as large, and until it has, every thread that opens
/// something waits. In a process that has threads it first waits until no processor reads the old
/// table. Where many threads wanted few processors, that was seen to take seconds, and connections
/// that were being made meanwhile ran out of time.
pub(crate) fn make_room(any: impl AsFd) {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(ROOM).min(ROOM);
    // If this fails, the table grows when it has to. The copy is closed here.
    drop(fcntl_dupfd_cloexec(any, most.saturating_sub(1) as i32));
}
