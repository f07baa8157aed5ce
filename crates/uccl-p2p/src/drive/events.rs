//! The events of a connection: a lane's progress, the peer's messages, the ends of transfers. This
//! module only dispatches them: the parts of the engine below do what they ask for.

use std::sync::Arc;

use uccl_fabric::lane::{Handling, LaneError, MessageSink};
use uccl_proto::Event;
use uccl_wire::message::Message;

use super::{core::connection::Connection, session::MAX_QUEUED};
use crate::error::{Error, Result};

/// Most bytes of messages that may wait for a peer which goes on talking. A peer that reads its
/// messages never leaves so many unread: at most [`MAX_QUEUED`] and one message wait of those that
/// we send unasked, and the answers to all that a peer may ask before it has heard an answer are
/// far shorter than the rest.
const MAX_UNREAD: usize = 2 * MAX_QUEUED;

impl Connection {
    /// Makes all progress that is possible on every lane without blocking.
    pub(crate) fn progress(self: &Arc<Self>) -> bool {
        let mut moved = false;
        for lane in 0..self.lanes.all.len() {
            moved |= self.progress_lane(lane);
        }
        moved
    }

    pub(crate) fn progress_lane(self: &Arc<Self>, lane: usize) -> bool {
        if self.lanes.lost.has(lane) {
            return self.end_lane(lane);
        }
        let begun = lane == 0 && self.begin_due();
        match self.lanes.all[lane].progress(&Sink(self)) {
            Ok(moved) => {
                if moved && !self.lanes.is_stream(lane) {
                    self.care.borrow_lane(lane);
                }
                self.forward_notes();
                return moved | begun;
            }
            Err(_) if self.is_failed() => {}
            Err(e) if self.survives(lane, &e) => self.lose_lane(lane, e),
            Err(e) => self.fail_with(e),
        }
        true
    }

    fn fail_with(self: &Arc<Self>, e: LaneError) {
        let error = match e {
            LaneError::Protocol(reason) => {
                Error::Protocol { peer: Arc::clone(&self.peer.name), reason }
            }
            e => self.lost_to(e),
        };
        self.fail(error);
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
            Event::LookUp { id, ranges } => self.answer_look_up(id, ranges),
            Event::LookUpEnded { look_up, status, regions } => {
                self.look_up_ended(&look_up, status, regions);
            }
            Event::Notified => self.resume_notifs(),
            Event::AskEnded { ask, answer } => self.ask_ended(ask, answer),
            Event::Copy { id, direction, pieces } => self.begin_copy(id, direction, pieces),
            Event::LaneDown { lane, orphans } => self.peer_lost_lane(lane, orphans),
            Event::Note { lane, note } => {
                if self.on_link(lane, note)? {
                    self.offer_accept();
                }
            }
        }
        self.check_unread().map(|()| handling)
    }

    /// Fails for a peer that does not read: nearly every message gets an answer, and the answers
    /// take memory until they are read.
    pub(crate) fn check_unread(&self) -> Result<(), String> {
        match self.lanes.messages().queued_bytes() {
            waiting if waiting > MAX_UNREAD => {
                Err(format!("more is asked than is read of the answers: {waiting} bytes wait"))
            }
            _ => Ok(()),
        }
    }
}

/// Receives a lane's messages.
struct Sink<'a>(&'a Arc<Connection>);

impl MessageSink for Sink<'_> {
    fn message(&self, bytes: &[u8]) -> Result<Handling, String> {
        self.0.hear(bytes)
    }

    fn go_on(&self) -> Handling {
        self.0.go_on_with_signal()
    }

    fn signalled(&self) {
        self.0.core.signalled.notify();
    }
}
