//! NIXL's interface has statuses and no text: reasons go to standard error, as `UCCL_LOG` says.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Begins to log, once in a process.
pub(crate) fn init() {
    let filter = EnvFilter::try_from_env("UCCL_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // The second agent of a process finds it begun.
    let _begun_before = log.try_init();
}
