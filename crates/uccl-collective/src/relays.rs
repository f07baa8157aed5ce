//! The messages that a call posts once it has received their bytes.

use crate::{
    error::Result,
    memory::CallRegions,
    part::{CallOptions, Part},
    plan::Relay,
    shared::GroupCore,
};

/// The messages that a call has not passed on yet.
pub(crate) struct Relays {
    /// In their order, which is that of each rank's receives.
    waiting: Vec<Relay>,
    turn: u64,
    options: CallOptions,
    /// By rank, during a pass: an earlier message to it waits.
    is_held: Vec<bool>,
}

impl Relays {
    /// Takes the call's turn, if it has relays. The caller holds the lock that keeps calls in
    /// order.
    pub(crate) fn new(relays: &[Relay], shared: &GroupCore, options: CallOptions) -> Self {
        let (turn, is_held) = match relays.is_empty() {
            true => (0, Vec::new()),
            false => (shared.take_turn(), vec![false; shared.place.ranks]),
        };
        // Bytes that have come are behind the work of the call's stream already.
        let options = CallOptions { after: None, ..options };
        Self { waiting: relays.to_vec(), turn, options, is_held }
    }

    /// The number of messages that are not posted yet.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Posts the messages with bytes that have come, if those of earlier calls have been posted.
    /// They become parts of the call.
    pub(crate) fn post_ready(
        &mut self,
        shared: &GroupCore,
        regions: &CallRegions,
        parts: &mut Vec<Part>,
    ) -> Result<()> {
        if self.waiting.is_empty() || !shared.is_turn(self.turn) {
            return Ok(());
        }
        let Self { waiting, is_held, options, .. } = self;
        is_held.fill(false);
        let mut posted = Ok(());
        waiting.retain(|relay| {
            let peer = relay.message.peer;
            let has_come = || parts.get(relay.after).is_some_and(Part::has_come);
            if posted.is_ok() && !is_held[peer] && has_come() {
                let conn = shared.conn_of_relays(peer);
                let part = conn
                    .and_then(|conn| Part::post((shared, regions), conn, &relay.message, *options));
                match part {
                    Ok(part) => {
                        parts.push(part);
                        return false;
                    }
                    Err(e) => posted = Err(e),
                }
            }
            is_held[peer] = true;
            true
        });
        posted?;
        if self.waiting.is_empty() {
            shared.pass_turn(self.turn);
        }
        Ok(())
    }
}
