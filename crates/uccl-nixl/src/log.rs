//! NIXL's interface has statuses and no text: reasons go to standard error, as `UCCL_LOG` says, or
//! `NIXL_LOG_LEVEL`.

use std::{env, io::IsTerminal as _};

use parking_lot::Mutex;
use tracing_subscriber::EnvFilter;

use crate::status::Status;

/// Begins to log, once in a process.
pub(crate) fn init() {
    let nixl = || EnvFilter::new(of_nixl(&env::var("NIXL_LOG_LEVEL").unwrap_or_default()));
    let filter = EnvFilter::try_from_env("UCCL_LOG").unwrap_or_else(|_| nixl());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // The second agent of a process finds it begun.
    let _begun_before = log.try_init();
}

/// Our level for one of NIXL's (`TRACE` to `FATAL`; its default is `WARN`).
fn of_nixl(level: &str) -> &'static str {
    match level.trim().to_ascii_uppercase().as_str() {
        "TRACE" => "trace",
        "DEBUG" => "debug",
        "INFO" => "info",
        "ERROR" => "error",
        // We abort nothing, so nothing of ours is fatal.
        "FATAL" => "off",
        _ => "warn",
    }
}

/// The kinds of failure that were logged of one connection: NIXL asks about a failed transfer as
/// often as it likes.
#[derive(Default)]
pub(crate) struct LoggedFailures(Mutex<Vec<Status>>);

impl LoggedFailures {
    /// Whether a failure is the first of its kind.
    pub(crate) fn is_new(&self, status: Status) -> bool {
        let mut logged = self.0.lock();
        let is_new = !logged.contains(&status);
        if is_new {
            logged.push(status);
        }
        is_new
    }

    /// A new connection: its failures are logged again.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nixls_levels_are_heeded() {
        for (nixl, ours) in [("FATAL", "off"), ("error", "error"), ("TRACE", "trace"), ("", "warn")]
        {
            assert_eq!(of_nixl(nixl), ours);
        }
    }

    #[test]
    fn a_failure_is_said_once_a_kind_and_connection() {
        let logged = LoggedFailures::default();
        assert!(logged.is_new(Status::Backend));
        assert!(!logged.is_new(Status::Backend));
        assert!(logged.is_new(Status::RemoteDisconnect));
        logged.clear();
        assert!(logged.is_new(Status::Backend));
    }
}
