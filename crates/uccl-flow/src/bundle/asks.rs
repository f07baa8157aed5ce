//! Questions about flows' own streams, over the streams for chunks.

use std::collections::{HashMap, VecDeque};

use uccl_wire::flow::{FlowHead, HeadKind};

/// The receiver's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// It has so many bytes, and waits for more or does not.
    At { received: u64, is_waiting: bool },
    /// The flow has ended there.
    Ended,
}

#[derive(Default)]
struct Ask {
    sent: u64,
    is_queued: bool,
    answer: Option<Answer>,
}

/// Questions of all flows of a bundle.
#[derive(Default)]
pub(super) struct Asks {
    flows: HashMap<u64, Ask>,
    queue: VecDeque<u64>,
}

impl Asks {
    /// Has the receiver asked how far it is, when `sent` bytes have been sent.
    pub(super) fn push(&mut self, flow: u64, sent: u64) {
        let ask = self.flows.entry(flow).or_default();
        ask.sent = sent;
        if !std::mem::replace(&mut ask.is_queued, true) {
            self.queue.push_back(flow);
        }
    }

    /// The next question.
    pub(super) fn pop(&mut self) -> Option<FlowHead> {
        while let Some(flow) = self.queue.pop_front() {
            if let Some(ask) = self.flows.get_mut(&flow) {
                ask.is_queued = false;
                return Some(FlowHead::note(HeadKind::Sent, flow, ask.sent));
            }
        }
        None
    }

    /// The receiver has answered. Answers to questions that were not asked are dropped.
    pub(super) fn on_answer(&mut self, flow: u64, answer: Answer) {
        if let Some(ask) = self.flows.get_mut(&flow) {
            ask.answer = Some(answer);
        }
    }

    /// The last answer that has not been taken.
    pub(super) fn take(&mut self, flow: u64) -> Option<Answer> {
        self.flows.get_mut(&flow)?.answer.take()
    }

    pub(super) fn forget(&mut self, flow: u64) {
        self.flows.remove(&flow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_asked_once_and_only_its_answer_is_kept() {
        let mut asks = Asks::default();
        asks.push(1, 10);
        asks.push(1, 20);
        assert_eq!(asks.pop(), Some(FlowHead::note(HeadKind::Sent, 1, 20)));
        assert_eq!(asks.pop(), None);
        let answer = Answer::At { received: 5, is_waiting: true };
        asks.on_answer(1, answer);
        asks.on_answer(2, answer);
        assert_eq!((asks.take(1), asks.take(1), asks.take(2)), (Some(answer), None, None));
        asks.push(1, 30);
        asks.forget(1);
        assert_eq!(asks.pop(), None);
    }
}
