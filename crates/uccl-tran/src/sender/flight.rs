//! The messages and probes that were posted and have not ended, in a ring by number.

use std::time::Instant;

use uccl_wire::ack::Ack;

use crate::Event;

/// A message or probe that was posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostedMessage {
    pub(super) at: Instant,
    pub(super) item: u64,
    pub(super) bytes: u64,
    pub(super) state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// A message under way.
    Message,
    /// A message that has landed and is still to be reported.
    Landed,
    /// A message that never lands and is still to be reported.
    Lost,
    /// A probe under way that was sent once.
    Probe,
    /// A probe under way that was sent more than once.
    ProbeAgain,
    /// Ended, and reported if it was a message.
    Over,
}

impl State {
    /// Whether its acknowledgement measures the round trip. That of a probe sent twice does not.
    pub(super) fn times(self) -> bool {
        matches!(self, Self::Message | Self::Probe)
    }
}

/// The messages that an acknowledgement settled.
#[derive(Default)]
pub(super) struct SettledMessages {
    pub(super) any: bool,
    pub(super) messages: u32,
    pub(super) bytes: u64,
}

/// The numbers `first..next`, in a ring that never has to grow.
#[derive(Debug)]
pub(super) struct Flight {
    ring: Vec<Option<PostedMessage>>,
    first: u64,
    next: u64,
    /// One after the largest number that was acknowledged.
    acked: u64,
    /// Every number before this has come or was found lost.
    settled: u64,
    messages: u32,
    bytes: u64,
    unreported: u32,
    probes_at_end: u32,
}

impl Flight {
    pub(super) fn new(numbers: u32) -> Self {
        Self {
            ring: vec![None; numbers.next_power_of_two() as usize],
            first: 0,
            next: 0,
            acked: 0,
            settled: 0,
            messages: 0,
            bytes: 0,
            unreported: 0,
            probes_at_end: 0,
        }
    }

    /// The earliest number here.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The next number.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// How many numbers are here.
    pub(super) fn span(&self) -> u64 {
        self.next - self.first
    }

    /// How many messages are under way.
    pub(super) fn messages(&self) -> u32 {
        self.messages
    }

    /// Bytes of the messages under way.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many of the last numbers are probes.
    pub(super) fn probes_at_end(&self) -> u32 {
        self.probes_at_end
    }

    /// The first probe at the end, or the next number if there is none.
    pub(super) fn first_probe_at_end(&self) -> u64 {
        self.next - u64::from(self.probes_at_end)
    }

    pub(super) fn get(&self, number: u64) -> Option<&PostedMessage> {
        let here = (self.first..self.next).contains(&number);
        self.ring.get(self.place(number)).filter(|_| here)?.as_ref()
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut PostedMessage> {
        let (here, place) = ((self.first..self.next).contains(&number), self.place(number));
        self.ring.get_mut(place).filter(|_| here)?.as_mut()
    }

    fn place(&self, number: u64) -> usize {
        number as usize & (self.ring.len() - 1)
    }

    /// Adds a message or probe that is to be posted, and returns its number.
    pub(super) fn push(&mut self, sent: PostedMessage) -> u64 {
        if sent.state == State::Message {
            self.messages += 1;
            self.bytes = self.bytes.saturating_add(sent.bytes);
            self.probes_at_end = 0;
        } else {
            self.probes_at_end += 1;
        }
        let (number, place) = (self.next, self.place(self.next));
        self.next += 1;
        if let Some(slot) = self.ring.get_mut(place) {
            *slot = Some(sent);
        }
        number
    }

    /// The first probe under way from `at` on. Marks it as sent more than once.
    pub(super) fn repeat_probe(&mut self, at: u64) -> Option<u64> {
        (at..self.next).find(|number| {
            let probe = self
                .get_mut(*number)
                .filter(|sent| matches!(sent.state, State::Probe | State::ProbeAgain));
            probe.map(|sent| sent.state = State::ProbeAgain).is_some()
        })
    }

    /// Records all numbers that have come according to an acknowledgement.
    pub(super) fn land(&mut self, largest: u64, ack: &Ack) -> SettledMessages {
        let mut landed = SettledMessages::default();
        for number in self.settled.max(self.first)..=largest {
            let back = largest - number;
            let came = u32::try_from(back).is_ok_and(|back| ack.has(back));
            let Some(sent) = self.get_mut(number).filter(|_| came) else { continue };
            match sent.state {
                State::Message => {
                    sent.state = State::Landed;
                    landed.messages += 1;
                    landed.bytes += sent.bytes;
                }
                State::Probe | State::ProbeAgain => sent.state = State::Over,
                State::Landed | State::Lost | State::Over => continue,
            }
            landed.any = true;
        }
        if landed.any {
            self.acked = self.acked.max(largest + 1);
        }
        self.ended(landed.messages, landed.bytes);
        landed
    }

    /// Records as lost each number more than `reorder` before the largest acknowledged one that has
    /// not come. Returns the number of lost messages.
    pub(super) fn lose_before(&mut self, reorder: u32) -> u32 {
        let settled = self.acked.saturating_sub(u64::from(reorder) + 1);
        let (mut messages, mut bytes) = (0, 0);
        for number in self.settled.max(self.first)..settled {
            let Some(sent) = self.get_mut(number) else { continue };
            match sent.state {
                State::Message => {
                    sent.state = State::Lost;
                    messages += 1;
                    bytes += sent.bytes;
                }
                State::Probe | State::ProbeAgain => sent.state = State::Over,
                State::Landed | State::Lost | State::Over => {}
            }
        }
        self.settled = self.settled.max(settled);
        self.ended(messages, bytes);
        messages
    }

    fn ended(&mut self, messages: u32, bytes: u64) {
        self.messages -= messages;
        self.bytes = self.bytes.saturating_sub(bytes);
        self.unreported += messages;
        self.forget();
    }

    /// The event for the next message that has ended, oldest first.
    pub(super) fn report(&mut self) -> Option<Event> {
        if self.unreported == 0 {
            return None;
        }
        let event = (self.first..self.next).find_map(|number| {
            let sent = self.get_mut(number)?;
            let event = match sent.state {
                State::Landed => Event::Delivered(sent.item),
                State::Lost => Event::Lost(sent.item),
                _ => return None,
            };
            sent.state = State::Over;
            Some(event)
        });
        self.unreported -= 1;
        self.forget();
        event
    }

    /// Drops the numbers at the front that need no more reports. Probes ask about messages; without
    /// messages under way their answers are of no use, so they are dropped too.
    fn forget(&mut self) {
        let idle = self.messages == 0;
        while self.get(self.first).is_some_and(|sent| match sent.state {
            State::Over => true,
            State::Probe | State::ProbeAgain => idle,
            State::Message | State::Landed | State::Lost => false,
        }) {
            self.first += 1;
        }
        if idle {
            self.probes_at_end = 0;
        }
    }

    /// Items of the messages under way.
    pub(super) fn unsettled(&self) -> impl Iterator<Item = u64> {
        let sent = (self.first..self.next).filter_map(|number| self.get(number));
        sent.filter(|sent| sent.state == State::Message).map(|sent| sent.item)
    }
}
