//! How the engine speaks the protocol: messages are sent in the order in which the session encodes
//! them.

use super::core::connection::{
    Connection,
    talk::{Session, Talk},
};
use crate::error::{Error, Result};

/// Bytes of messages that may wait for room on a lane before sends and notifications are refused.
pub(super) const MAX_QUEUED: usize = 32 << 20;

impl Connection {
    /// Fails if a message would only wait: the connection has ended, or the peer does not read.
    pub(super) fn check_open(&self, session: &Session) -> Result<()> {
        if session.is_closed() {
            return Err(self.lost_error());
        }
        if self.lanes.messages().queued_bytes() > MAX_QUEUED {
            return Err(Error::Full {
                what: "the connection's queue of messages in bytes",
                limit: MAX_QUEUED,
            });
        }
        Ok(())
    }

    /// Calls the session, and sends the message that it encodes, if any.
    pub(crate) fn tell<T>(&self, something: impl FnOnce(&mut Session, &mut Vec<u8>) -> T) -> T {
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        message.clear();
        let told = something(session, message);
        if !message.is_empty() {
            self.send_message(&[message]);
        }
        told
    }
}
