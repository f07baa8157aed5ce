//! A sender and a receiver, and the model of their allowed behaviour.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    time::Instant,
};

use fastrand::Rng;
use uccl_tran::{Ack, Event, OutOfOrder, PacketNumber, Params, Receiver, Sender, Verdict};

use super::{Happening, Link};

/// The items that a sender sends.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) items: u64,
    pub(crate) bytes: RangeInclusive<u64>,
    /// Most items that the user has not seen delivered before it sends new ones.
    pub(crate) at_once: usize,
    /// Whether the receiver acknowledges whenever it has nothing else to do.
    pub(crate) flushes: bool,
}

/// Counts of events.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Tally {
    pub(crate) delivered: u64,
    pub(crate) delivered_bytes: u64,
    pub(crate) posted: u64,
    pub(crate) dropped: u64,
    pub(crate) probes: u64,
    pub(crate) acks: u64,
}

pub(crate) struct Flow {
    pub(crate) sender: Sender,
    receiver: Receiver,
    params: Params,
    load: Load,
    next_item: u64,
    again: BTreeSet<u64>,
    lengths: BTreeMap<u64, u64>,
    /// Items and the numbers under which they were posted.
    on_their_way: BTreeSet<(u64, u32)>,
    landed: BTreeSet<u64>,
    /// The number of each item's last posting, and the numbers with a reported end.
    numbers: BTreeMap<u64, u32>,
    told: BTreeSet<u32>,
    /// The path lets some messages be overtaken by more than it should.
    holds_up: bool,
    /// When everything up to the n-th posting is through, for order.
    through: Vec<Instant>,
    wakes_at: Option<Instant>,
    pub(crate) heard_at: Instant,
    pub(crate) dead_at: Option<Instant>,
    /// The path has shown that it does not keep order.
    pub(crate) broken: Option<OutOfOrder>,
    /// How many messages landed after their end was reported.
    pub(crate) late: u64,
    pub(crate) tally: Tally,
}

impl Flow {
    pub(crate) fn new(params: Params, load: Load, start: Instant) -> Self {
        Self {
            sender: Sender::new(params, start).unwrap(),
            receiver: Receiver::new(params).unwrap(),
            params,
            load,
            next_item: 0,
            again: BTreeSet::new(),
            lengths: BTreeMap::new(),
            on_their_way: BTreeSet::new(),
            landed: BTreeSet::new(),
            numbers: BTreeMap::new(),
            told: BTreeSet::new(),
            holds_up: false,
            through: Vec::new(),
            wakes_at: None,
            heard_at: start,
            dead_at: None,
            broken: None,
            late: 0,
            tally: Tally::default(),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.dead_at.is_some() || self.broken.is_some() || self.tally.delivered == self.load.items
    }

    /// A message has gone through.
    pub(crate) fn through(&mut self, now: Instant, number: u32, item: Option<u64>, lands: bool) {
        let late = item.is_some() && self.told.contains(&number);
        if let Some(item) = item {
            assert!(self.on_their_way.remove(&(item, number)), "{item} is on its way");
            assert!(!late || self.holds_up, "{item} has ended");
            assert!(late || !lands || self.landed.insert(item), "{item} landed twice");
        }
        self.late += u64::from(late && lands);
        if lands {
            let verdict = match item {
                Some(_) => self.receiver.on_packet(now, number),
                None => self.receiver.on_probe(now, number),
            };
            let again = item.is_none() && verdict == Ok(Verdict::Duplicate);
            match verdict {
                Err(broken) => {
                    assert!(self.holds_up, "{number:#x}: {broken}");
                    self.broken.get_or_insert(broken);
                }
                Ok(verdict) => {
                    assert!(!late, "{number:#x} landed late, and nobody noticed");
                    assert!(again || verdict == Verdict::New, "{number:#x}: {verdict:?}");
                }
            }
        } else {
            self.tally.dropped += u64::from(item.is_some());
        }
    }

    /// An acknowledgement has arrived.
    pub(crate) fn acknowledged(&mut self, now: Instant, bytes: &[u8]) {
        let ack = Ack::decode(bytes).unwrap();
        let before = self.sender.in_flight();
        let result = self.sender.on_ack(now, &ack);
        assert!(result.is_ok() || self.dead_at.is_some(), "{result:?}");
        if self.sender.in_flight() < before {
            self.heard_at = now;
        }
    }

    /// Handles events, sends, acknowledges, and sets the timer.
    pub(crate) fn act(
        &mut self,
        now: Instant,
        rng: &mut Rng,
        link: &mut Link,
        out: &mut Vec<(Instant, Happening)>,
    ) {
        self.sender.on_timeout(now);
        while let Some(event) = self.sender.poll(now) {
            match event {
                Event::Delivered(item) => self.delivered(item),
                Event::Lost(item) => {
                    assert!(!self.landed.contains(&item), "{item} is not lost");
                    self.told(item);
                    assert!(self.again.insert(item));
                }
                Event::Probe(number) => {
                    self.tally.probes += 1;
                    self.post(now, rng, link, number, None, out);
                }
                Event::PathDead => self.dead_at = Some(now),
            }
        }
        self.send(now, rng, link, out);
        let ack =
            if self.load.flushes { self.receiver.flush(now) } else { self.receiver.poll_ack(now) };
        if let Some(ack) = ack {
            self.tally.acks += 1;
            for at in link.carry_ack(now, rng) {
                out.push((at, Happening::Ack(ack.encode().to_vec())));
            }
        }
        self.wake(now, out);
    }

    /// Sets a timer, unless one fires early enough.
    fn wake(&mut self, now: Instant, out: &mut Vec<(Instant, Happening)>) {
        let timeouts = [self.sender.next_timeout(), self.receiver.next_timeout()];
        let Some(at) = timeouts.into_iter().flatten().min() else { return };
        if self.wakes_at.is_none_or(|set| set <= now || at < set) {
            self.wakes_at = Some(at);
            out.push((at, Happening::Timer));
        }
    }

    fn delivered(&mut self, item: u64) {
        assert!(self.landed.contains(&item), "{item} has not landed");
        self.told(item);
        let bytes = self.lengths.remove(&item).expect("delivered once");
        self.tally.delivered += 1;
        self.tally.delivered_bytes += bytes;
    }

    /// The end of an item's last posting is reported: it must not be on its way any more.
    fn told(&mut self, item: u64) {
        let mut left = self.on_their_way.range((item, 0)..=(item, u32::MAX));
        assert!(left.next().is_none() || self.holds_up, "{item} may still land");
        self.told.extend(self.numbers.get(&item));
    }

    fn send(
        &mut self,
        now: Instant,
        rng: &mut Rng,
        link: &mut Link,
        out: &mut Vec<(Instant, Happening)>,
    ) {
        loop {
            let item = match self.again.first() {
                Some(item) => *item,
                None if self.next_item < self.load.items
                    && self.lengths.len() < self.load.at_once =>
                {
                    self.next_item
                }
                None => return,
            };
            let bytes =
                *self.lengths.entry(item).or_insert_with(|| rng.u64(self.load.bytes.clone()));
            if self.sender.in_flight() == 0 {
                self.heard_at = now;
            }
            let can = self.sender.can_send(bytes);
            let sent = self.sender.send(now, item, bytes);
            assert_eq!(can, sent.is_ok());
            let Ok(number) = sent else {
                if item == self.next_item {
                    self.lengths.remove(&item);
                }
                return;
            };
            if item == self.next_item {
                self.next_item += 1;
            }
            self.again.remove(&item);
            self.tally.posted += 1;
            self.post(now, rng, link, number, Some((item, bytes)), out);
        }
    }

    /// Puts a message on the link. One that is dropped may have written a part until then, so it
    /// counts as on its way.
    fn post(
        &mut self,
        now: Instant,
        rng: &mut Rng,
        link: &mut Link,
        number: PacketNumber,
        item: Option<(u64, u64)>,
        out: &mut Vec<(Instant, Happening)>,
    ) {
        let (at, lands) = link.carry(now, item.map_or(0, |(_, bytes)| bytes), rng);
        let posted = self.through.len();
        // It goes through no earlier than the messages that it must not overtake.
        let behind = posted.checked_sub(self.params.reorder as usize + 1);
        let at = behind.map_or(at, |behind| at.max(self.through[behind]));
        self.through.push(self.through.last().map_or(at, |last| at.max(*last)));
        self.holds_up |= link.path.held > 0.0;
        let at = at + link.hold_up(rng).unwrap_or_default();
        if let Some((item, _)) = item {
            let others = self.on_their_way.range((item, 0)..=(item, u32::MAX)).count();
            assert!(others == 0 || self.holds_up, "{item} is on its way already");
            self.on_their_way.insert((item, number.0));
            self.numbers.insert(item, number.0);
        }
        let item = item.map(|(item, _)| item);
        out.push((at, Happening::Message { number: number.0, item, lands }));
    }
}
