//! The calls of a group.

use std::sync::Arc;

use super::{
    Group,
    post::{Call, Messages},
};
use crate::{
    error::Result,
    memory::Buffer,
    part::CallOptions,
    plan::{self, Direction, Message, Piece},
    work::Work,
};

impl Group {
    /// Sends or receives one message. Messages of a pair of ranks meet in the order of their calls.
    ///
    /// # Errors
    /// There is no such rank, it is lost, or the memory is not registered and has to be.
    pub fn message(
        &self,
        direction: Direction,
        peer: usize,
        buffer: Buffer,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        // Before the memory is looked at: the caller learns of the rank first.
        self.shared.conn(peer)?;
        let piece = Piece::whole(0, buffer.len());
        let message = Message { direction, peer, piece };
        // A message without bytes is none: its other side knows that, too.
        let messages = if buffer.is_empty() { &[][..] } else { &[message][..] };
        let call = Call { is_collective: false, options };
        self.post(vec![buffer], Messages::direct(messages), call)
    }

    /// Every rank gets the input of every rank: `outputs[r]` is that of rank `r`. As in all
    /// collectives, the rank's own part is left to the caller, who copies it.
    ///
    /// # Errors
    /// A rank is lost, the group's collectives have ended, or there is not one buffer for each
    /// rank.
    pub fn all_gather(
        &self,
        input: Buffer,
        outputs: Vec<Buffer>,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        let mut table = Table::default();
        let (input, outputs) = (table.add(input), table.add_all(outputs));
        let messages = plan::all_gather(self.shared.place, input, &outputs)?;
        self.collective(table, Messages::direct(&messages), options)
    }

    /// Every rank gets a part of every rank's: `inputs[r]` goes to rank `r`, `outputs[r]` comes
    /// from it. The parts of each pair have one length on both sides, and may have none.
    ///
    /// # Errors
    /// As those of [`all_gather`](Self::all_gather).
    pub fn all_to_all(
        &self,
        inputs: Vec<Buffer>,
        outputs: Vec<Buffer>,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        let mut table = Table::default();
        let (inputs, outputs) = (table.add_all(inputs), table.add_all(outputs));
        let messages = plan::all_to_all(self.shared.place, &inputs, &outputs)?;
        self.collective(table, Messages::direct(&messages), options)
    }

    /// Every rank gets the root's bytes. Ranks of other hosts pass on long ones to each other, as
    /// [`plan::relayed_broadcast`] has it.
    ///
    /// # Errors
    /// As those of [`all_gather`](Self::all_gather), or there is no such root.
    pub fn broadcast(
        &self,
        root: usize,
        buffer: Buffer,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        let mut table = Table::default();
        let (piece, place) = (table.add(buffer), self.shared.place);
        let hosts = self.hosts.as_ref();
        let relayed = hosts.map(|hosts| plan::relayed_broadcast(place, root, piece, hosts));
        match relayed.transpose()?.flatten() {
            Some(plan) => self.collective(table, Messages::of(&plan), options),
            None => {
                let messages = plan::broadcast(place, root, piece)?;
                self.collective(table, Messages::direct(&messages), options)
            }
        }
    }

    /// Every rank gets its part of the root's. `inputs` are the root's, one for each rank.
    ///
    /// # Errors
    /// As those of [`broadcast`](Self::broadcast).
    pub fn scatter(
        &self,
        root: usize,
        inputs: Vec<Buffer>,
        output: Buffer,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        let mut table = Table::default();
        let (inputs, output) = (table.add_all(inputs), table.add(output));
        let messages = plan::scatter(self.shared.place, root, &inputs, output)?;
        self.collective(table, Messages::direct(&messages), options)
    }

    /// The root gets every rank's input. `outputs` are the root's, one for each rank.
    ///
    /// # Errors
    /// As those of [`broadcast`](Self::broadcast).
    pub fn gather(
        &self,
        root: usize,
        input: Buffer,
        outputs: Vec<Buffer>,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        let mut table = Table::default();
        let (input, outputs) = (table.add(input), table.add_all(outputs));
        let messages = plan::gather(self.shared.place, root, input, &outputs)?;
        self.collective(table, Messages::direct(&messages), options)
    }

    /// Ends on each rank when every rank has begun it.
    ///
    /// # Errors
    /// As those of [`all_gather`](Self::all_gather).
    pub fn barrier(&self, options: CallOptions) -> Result<Arc<Work>> {
        let mut table = Table::default();
        table.add(self.tokens.clone());
        let token = |offset: usize| Piece { buffer: 0, offset, len: 1 };
        let outputs: Vec<_> = (1..=self.ranks()).map(token).collect();
        let messages = plan::all_gather(self.shared.place, token(0), &outputs)?;
        self.collective(table, Messages::direct(&messages), options)
    }

    fn collective(
        &self,
        table: Table,
        messages: Messages<'_>,
        options: CallOptions,
    ) -> Result<Arc<Work>> {
        if let Some(why) = self.shared.broken() {
            return Err(why);
        }
        self.post(table.buffers, messages, Call { is_collective: true, options })
    }
}

/// The buffers of a call.
#[derive(Default)]
struct Table {
    buffers: Vec<Buffer>,
}

impl Table {
    /// Adds a buffer, all of which is one piece.
    fn add(&mut self, buffer: Buffer) -> Piece {
        let piece = Piece::whole(self.buffers.len(), buffer.len());
        self.buffers.push(buffer);
        piece
    }

    fn add_all(&mut self, buffers: Vec<Buffer>) -> Vec<Piece> {
        buffers.into_iter().map(|buffer| self.add(buffer)).collect()
    }
}
