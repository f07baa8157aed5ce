//! How the engine speaks the protocol: messages are sent in the order in which the session encodes
//! them.

use super::core::connection::{
    Connection,
    talk::{Session, Talk},
};

impl Connection {
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
