//! How the engine drives the protocol: messages are sent in the order in which the session encodes
//! them, and incoming messages are acted on.

use std::sync::Arc;

use uccl_fabric::lane::Handling;
use uccl_proto::Event;
use uccl_wire::message::Message;

use super::{
    connection::{Connection, Session, Talk},
    sends::MAX_QUEUED,
};

/// Most bytes of messages that may wait for a peer which goes on talking. A peer that reads its
/// messages never leaves so many unread: at most [`MAX_QUEUED`] and one message wait of those that
/// we send unasked, and the answers to all that a peer may ask before it has heard an answer are
/// far shorter than the rest.
const MAX_UNREAD: usize = 2 * MAX_QUEUED;

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

    /// Handles bytes that came in on the first lane. An error says how the peer broke the protocol.
    pub(super) fn hear(self: &Arc<Self>, bytes: &[u8]) -> Result<Handling, String> {
        let whole = {
            let mut talk = self.talk.lock();
            talk.session.assemble(bytes).map_err(|e| e.to_string())?
        };
        let Some(whole) = whole else { return Ok(Handling::Ended) };
        let message = Message::decode(&whole).map_err(|e| e.to_string())?;
        let event = self.tell(|session, out| session.hear(message, out));
        let mut handling = Handling::Ended;
        match event.map_err(|e| e.to_string())? {
            Event::Nothing => {}
            Event::Received { receive, seq, lens, data } => {
                self.take_eager(&receive, seq, lens.iter(), data);
            }
            Event::Fetch { receive, seq, sources } => {
                let sources: Vec<_> = sources.iter().collect();
                self.fetch(&receive, seq, &sources);
            }
            Event::EndReceive(transfer) | Event::EndCopy(transfer) => self.end_for_peer(&transfer),
            Event::SendEnded { send, verdict } => self.send_ended(send, verdict),
            Event::NotifEnded { notif, is_delivered } => self.notif_ended(notif, is_delivered),
            Event::Signal { id, word, change } => handling = self.take_signal(id, word, change),
            Event::SignalEnded { signal, status } => self.signal_ended(&signal, status),
            Event::Notified => self.resume_notifs(),
            Event::AskEnded { ask, answer } => self.ask_ended(ask, answer),
            Event::Copy { id, direction, pieces } => self.begin_copy(id, direction, pieces),
            Event::LaneDown { lane, orphans } => self.peer_lost_lane(lane, orphans),
            Event::Note { lane, note } => self.on_link(lane, note)?,
        }
        self.check_unread().map(|()| handling)
    }

    /// Fails for a peer that does not read: nearly every message gets an answer, and the answers
    /// take memory until they are read.
    pub(crate) fn check_unread(&self) -> Result<(), String> {
        match self.messages().queued_bytes() {
            waiting if waiting > MAX_UNREAD => {
                Err(format!("more is asked than is read of the answers: {waiting} bytes wait"))
            }
            _ => Ok(()),
        }
    }
}
