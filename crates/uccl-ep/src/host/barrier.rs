//! Ranks wait for each other.

use std::sync::Arc;

use crate::{
    host::group::{CallGuard, Group, InterruptCheck, Milestone, WaitContext},
    shared::{
        error::{Phase, Result},
        header::Header,
        nodes::Nodes,
        protocol::{Call, ReceiveMode, Step},
    },
};

impl Group {
    /// Waits until every rank that takes part has called this too. It is a call of one round
    /// without data: numbered, with the group's deadline and its masks.
    ///
    /// # Errors
    /// A peer is late, or makes another call.
    pub fn barrier(self: &Arc<Self>, is_interrupted: &mut InterruptCheck<'_>) -> Result<()> {
        let phase = Phase::Barrier;
        self.check_is_last(phase)?;
        let (place, participants) = (self.place(0)?, self.participants(Nodes::one(self.ranks())));
        let mut call = Call::new(place, ReceiveMode::PerStream, participants, |_| 1);
        let mut guard = CallGuard::new(self, &call);
        let header = Header::<0, 0> { phase, agreed: [], values: [] };
        let mut wait = WaitContext { phase, is_interrupted, wait_times: None };
        self.drive(&mut call, Milestone::Over, &mut wait, |call, step| match step {
            Step::Send { stream, .. } => {
                if let Some(mut writer) = self.window().writer(&stream) {
                    writer.write_header(call.number(), header.to_words());
                }
                Ok(())
            }
            Step::Take { stream: Some(stream), .. } => {
                let theirs = self.window().header(&stream, call.number());
                header.values_of(self.rank(), stream.peer, theirs).map(|[]| ())
            }
            _ => Ok(()),
        })?;
        guard.has_ended = true;
        Ok(())
    }
}
