//! Notifications of the ranks' connections, until the part that they are for asks for them.

use std::{mem, sync::Arc};

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint};
use uccl_wire::group::{GroupHello, GroupNotice};

use crate::error::Result;

/// The notifications of one endpoint. The groups that follow each other on an endpoint share it: a
/// rank that is late in one group may be sent the hello of the next.
#[derive(Clone, Default)]
pub struct Inbox {
    letters: Arc<Mutex<Letters>>,
}

#[derive(Default)]
struct Letters {
    hellos: Vec<(ConnId, GroupHello)>,
    notices: Vec<(ConnId, GroupNotice)>,
}

impl Inbox {
    /// Takes in the notifications that have arrived. Others than a group's are dropped.
    fn fill(&self, endpoint: &Endpoint) -> Result<()> {
        let arrived = endpoint.take_notifs()?;
        let mut letters = self.letters.lock();
        for notif in arrived {
            if let Ok(hello) = GroupHello::decode(&notif.payload) {
                letters.hellos.push((notif.conn, hello));
            } else if let Ok(notice) = GroupNotice::decode(&notif.payload) {
                letters.notices.push((notif.conn, notice));
            }
        }
        Ok(())
    }

    /// The hellos that nobody has taken.
    pub(crate) fn hellos(&self, endpoint: &Endpoint) -> Result<Vec<(ConnId, GroupHello)>> {
        self.fill(endpoint)?;
        Ok(mem::take(&mut self.letters.lock().hellos))
    }

    /// Keeps hellos for the next meeting.
    pub(crate) fn keep(&self, hellos: Vec<(ConnId, GroupHello)>) {
        self.letters.lock().hellos.extend(hellos);
    }

    /// The notices that nobody has taken.
    pub(crate) fn notices(&self, endpoint: &Endpoint) -> Result<Vec<(ConnId, GroupNotice)>> {
        self.fill(endpoint)?;
        Ok(mem::take(&mut self.letters.lock().notices))
    }
}
