//! A connection that is not complete yet.

use std::sync::Arc;

use super::NAP;
use crate::{
    drive::{attempt::SleepLimit, core::connection::Connection},
    error::Error,
};

/// A connection in the list of connections until it is complete. If this is dropped before, the
/// connection ends, and leaves the list.
pub(super) struct Draft(Option<Arc<Connection>>);

impl Draft {
    pub(super) fn of(conn: &Arc<Connection>) -> Self {
        Self(Some(Arc::clone(conn)))
    }

    /// Ends the connection, without blocking where another thread is ending it already.
    pub(super) async fn fail(self, limit: &SleepLimit, e: Error) {
        let Some(conn) = &self.0 else { return };
        conn.close(e);
        while !conn.has_left() {
            limit.next_look(NAP).await;
        }
    }

    /// The connection stays.
    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let Some(conn) = self.0.take() else { return };
        if !conn.is_failed() {
            conn.close(conn.lost_to("closed here, before it was complete"));
        }
        // Another thread may be ending it, and it stays listed until then.
        conn.wait_for_end();
        conn.core.forget_conn(conn.id);
    }
}
