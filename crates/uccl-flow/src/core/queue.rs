//! Messages that wait to be cut into chunks, flow by flow.

use std::collections::{HashMap, VecDeque};

/// A message with bytes that no stream has got yet.
#[derive(Clone, Copy, Debug)]
struct QueuedMessage {
    number: u64,
    total: u64,
    tag: u32,
    /// Bytes that streams have got.
    cut: u64,
}

/// A part of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub(super) flow: u64,
    pub(super) number: u64,
    pub(super) tag: u32,
    pub(super) total: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

#[derive(Default)]
struct FlowQueue {
    waiting: VecDeque<QueuedMessage>,
    /// Bytes that were cut of messages from `posted` on, by message.
    early: VecDeque<(u64, u64)>,
    /// Receives that are known to be posted.
    posted: u64,
}

/// Messages of all flows. Each flow gets its turn after a chunk of another.
#[derive(Default)]
pub(super) struct Queue {
    flows: HashMap<u64, FlowQueue>,
    /// Flows with a waiting message, the next one first; some may only lack permission.
    turns: VecDeque<u64>,
}

impl Queue {
    pub(super) fn push(&mut self, flow: u64, number: u64, total: u64, tag: u32) {
        let queue = self.flows.entry(flow).or_default();
        if queue.waiting.is_empty() {
            self.turns.push_back(flow);
        }
        queue.waiting.push_back(QueuedMessage { number, total, tag, cut: 0 });
    }

    pub(super) fn join(&mut self, flow: u64) {
        self.flows.entry(flow).or_default();
    }

    /// So many receives of the flow are posted.
    pub(super) fn on_posted(&mut self, flow: u64, posted: u64) {
        if let Some(queue) = self.flows.get_mut(&flow) {
            queue.posted = queue.posted.max(posted);
            queue.early.retain(|(number, _)| *number >= queue.posted);
        }
    }

    /// Removes the flow with all its messages.
    pub(super) fn forget(&mut self, flow: u64) {
        self.flows.remove(&flow);
        self.turns.retain(|other| *other != flow);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// The next chunk; `None` if no flow has one that it may send.
    pub(super) fn cut(&mut self, chunk_len: u64, early_len: u64) -> Option<Cut> {
        for _ in 0..self.turns.len() {
            let flow = self.turns.pop_front()?;
            let Some(queue) = self.flows.get_mut(&flow) else { continue };
            let cut = queue.cut(flow, chunk_len, early_len);
            if !queue.waiting.is_empty() {
                self.turns.push_back(flow);
            }
            if cut.is_some() {
                return cut;
            }
        }
        None
    }
}

impl FlowQueue {
    fn cut(&mut self, flow: u64, chunk_len: u64, early_len: u64) -> Option<Cut> {
        let first = self.waiting.front_mut()?;
        let len = chunk_len.min(first.total - first.cut);
        if first.number >= self.posted {
            let sent: u64 = self.early.iter().map(|(_, bytes)| *bytes).sum();
            if sent + len > early_len {
                return None;
            }
            match self.early.back_mut().filter(|(number, _)| *number == first.number) {
                Some((_, bytes)) => *bytes += len,
                None => self.early.push_back((first.number, len)),
            }
        }
        let QueuedMessage { number, total, tag, cut: offset } = *first;
        first.cut += len;
        if first.cut == first.total {
            self.waiting.pop_front();
        }
        Some(Cut { flow, number, tag, total, offset, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(queue: &mut Queue) -> Vec<(u64, u64, u64, u64)> {
        std::iter::from_fn(|| queue.cut(10, 30))
            .map(|cut| (cut.flow, cut.number, cut.offset, cut.len))
            .collect()
    }

    #[test]
    fn flows_take_turns() {
        let mut queue = Queue::default();
        queue.push(1, 0, 25, 0);
        queue.push(2, 0, 10, 0);
        assert_eq!(
            drained(&mut queue),
            [(1, 0, 0, 10), (2, 0, 0, 10), (1, 0, 10, 10), (1, 0, 20, 5)]
        );
        assert_eq!(queue.turns, []);
    }

    #[test]
    fn a_flow_sends_little_before_its_receives_are_posted() {
        let mut queue = Queue::default();
        queue.push(1, 4, 20, 0);
        queue.push(1, 5, 20, 0);
        queue.push(1, 6, 20, 0);
        assert_eq!(drained(&mut queue), [(1, 4, 0, 10), (1, 4, 10, 10), (1, 5, 0, 10)]);
        queue.on_posted(1, 5);
        assert_eq!(drained(&mut queue), [(1, 5, 10, 10), (1, 6, 0, 10)], "5 and 6 are early");
        queue.on_posted(1, 7);
        assert_eq!(drained(&mut queue), [(1, 6, 10, 10)]);
    }
}
