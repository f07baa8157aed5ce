//! Credits of the receiver against incast (Olteanu et al., "An edge-queued datagram service for all
//! datacenter traffic", NSDI 2022).
//!
//! A sender says how many bytes it wants to have sent since the beginning. The receiver's
//! [`CreditPacer`], one for all senders of a host, grants them in turns, at the speed of its link.
//! Both numbers are totals of 64 bits, so any message with one may be lost, repeated or overtaken.

use std::collections::{HashMap, VecDeque};

use super::{AckSample, CongestionControl};

/// The sender's side: bytes that were granted and not yet spent.
#[derive(Clone, Copy, Debug)]
pub struct Credits {
    granted: u64,
    spent: u64,
}

impl Credits {
    /// The first `unsolicited_bytes` need no grant.
    #[must_use]
    pub fn new(unsolicited_bytes: u64) -> Self {
        Self { granted: unsolicited_bytes, spent: 0 }
    }
}

impl CongestionControl for Credits {
    fn on_ack(&mut self, _ack: &AckSample) {}

    fn on_loss(&mut self, _now_ns: u64, _bytes: u64) {}

    fn on_send(&mut self, _now_ns: u64, len: u64) {
        self.spent += len;
    }

    fn on_credit(&mut self, granted_bytes: u64) {
        self.granted = self.granted.max(granted_bytes);
    }

    fn granted_bytes(&self) -> Option<u64> {
        Some(self.granted)
    }

    fn window_bytes(&self) -> u64 {
        self.granted.saturating_sub(self.spent)
    }

    fn allows(&self, _in_flight_bytes: u64, len: u64) -> bool {
        // Grants come in whole quanta and chunks may be shorter: any rest is enough for one more.
        // An empty chunk is in no backlog, so nobody would grant anything for it.
        len == 0 || self.spent < self.granted
    }
}

/// A grant for a sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The sender, by the receiver's name for it.
    pub flow: u64,
    /// Bytes granted since the beginning.
    pub granted_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    wanted: u64,
    granted: u64,
    is_waiting: bool,
    /// A grant was lost: it is sent again, without another byte.
    is_repeated: bool,
}

/// The receiver's side: grants for all senders of a host, at the speed of its link.
#[derive(Debug)]
pub struct CreditPacer {
    quantum: u64,
    unsolicited: u64,
    interval_ns: u64,
    next_ns: u64,
    accounts: HashMap<u64, Account>,
    /// Senders with a wish, the next one first.
    turns: VecDeque<u64>,
}

impl CreditPacer {
    /// Grants `quantum` bytes every `interval_ns`. Each sender begins with `unsolicited_bytes`.
    #[must_use]
    pub fn new(quantum: u64, interval_ns: u64, unsolicited_bytes: u64) -> Self {
        Self {
            quantum: quantum.max(1),
            unsolicited: unsolicited_bytes,
            interval_ns,
            next_ns: 0,
            accounts: HashMap::new(),
            turns: VecDeque::new(),
        }
    }

    /// A sender wants to have sent so many bytes since the beginning. One that cannot send says how
    /// many it knows to be granted.
    pub fn on_demand(&mut self, flow: u64, wanted_bytes: u64, known_bytes: Option<u64>) {
        let granted = self.unsolicited;
        let fresh = Account { wanted: 0, granted, is_waiting: false, is_repeated: false };
        let account = self.accounts.entry(flow).or_insert(fresh);
        account.wanted = account.wanted.max(wanted_bytes);
        account.is_repeated |= known_bytes.is_some_and(|known| known < account.granted);
        let has_wish = account.wanted > account.granted || account.is_repeated;
        if has_wish && !account.is_waiting {
            account.is_waiting = true;
            self.turns.push_back(flow);
        }
    }

    /// The grant that is due, if one is.
    pub fn poll(&mut self, now_ns: u64) -> Option<Grant> {
        if now_ns < self.next_ns {
            return None;
        }
        let flow = self.turns.pop_front()?;
        let account = self.accounts.get_mut(&flow)?;
        if account.wanted > account.granted {
            account.granted += self.quantum;
            self.next_ns = now_ns.max(self.next_ns) + self.interval_ns;
        }
        (account.is_waiting, account.is_repeated) = (account.wanted > account.granted, false);
        if account.is_waiting {
            self.turns.push_back(flow);
        }
        Some(Grant { flow, granted_bytes: account.granted })
    }

    /// When to call [`CreditPacer::poll`].
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        (!self.turns.is_empty()).then_some(self.next_ns)
    }

    /// The sender has gone.
    pub fn forget(&mut self, flow: u64) {
        self.accounts.remove(&flow);
        self.turns.retain(|other| *other != flow);
    }
}
