//! The proxy's thread: passes the messages of a collective on, over all channels in turn.

use std::thread;

use anyhow::{Result, ensure};

use super::pattern::Pattern;
use crate::{
    net::{Comm, Completion, Pointer},
    rank::{Network, Registration},
};

/// The communicators and the memory of one channel.
pub(super) struct Channel {
    pub(super) send: Comm,
    pub(super) recv: Comm,
    pub(super) out: Registration,
    pub(super) into: Registration,
}

/// The progress of one channel.
#[derive(Default)]
struct Progress {
    sends: Vec<Pointer>,
    receives: Vec<Pointer>,
    sent: usize,
    received: usize,
}

impl Progress {
    /// One pass of the proxy. True if it has done something.
    fn step(&mut self, network: &Network, at: (&Channel, &Pattern, usize)) -> Result<bool> {
        let (channel, pattern, number) = at;
        let messages = &pattern.messages[number];
        let mut has_moved = false;
        if self.receives.len() < messages.len()
            && self.receives.len() < self.received + pattern.depth
        {
            let slot = self.receives.len() % pattern.depth;
            let part = channel.into.part(slot * pattern.room, pattern.room);
            let posted = network.net.irecv(channel.recv, &[part], &[0], Completion::Needed)?;
            self.receives.extend(posted);
            has_moved = posted.is_some();
        } else if self.received < self.receives.len()
            && let Some([bytes]) = network.net.test::<1>(self.receives[self.received])?
        {
            let expected = messages[self.received].bytes;
            ensure!(usize::try_from(bytes) == Ok(expected), "{bytes} bytes, not {expected}");
            self.received += 1;
            has_moved = true;
        }
        if let Some(message) = messages.get(self.sends.len())
            && self.sends.len() < self.sent + pattern.depth
            && message.receives <= self.received
        {
            let slot = self.sends.len() % pattern.depth;
            let part = channel.out.part(slot * pattern.room, message.bytes);
            let posted = network.net.isend(channel.send, part, 0)?;
            self.sends.extend(posted);
            has_moved |= posted.is_some();
        } else if self.sent < self.sends.len()
            && network.net.test::<1>(self.sends[self.sent])?.is_some()
        {
            self.sent += 1;
            has_moved = true;
        }
        Ok(has_moved)
    }

    fn is_done(&self, count: usize) -> bool {
        self.sent == count && self.received == count
    }
}

/// Passes all messages of one collective on.
pub(super) fn pass(network: &Network, channels: &[Channel], pattern: &Pattern) -> Result<()> {
    let count = pattern.messages.len();
    ensure!(count <= channels.len(), "{count} channels, of {}", channels.len());
    let mut all: Vec<Progress> = (0..count).map(|_| Progress::default()).collect();
    loop {
        let (mut has_moved, mut is_done) = (false, true);
        for (number, one) in all.iter_mut().enumerate() {
            if !one.is_done(pattern.messages[number].len()) {
                has_moved |= one.step(network, (&channels[number], pattern, number))?;
                is_done = false;
            }
        }
        if is_done {
            return Ok(());
        }
        if !has_moved {
            // As NCCL's proxy.
            thread::yield_now();
        }
    }
}
