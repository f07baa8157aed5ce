//! Room for the streams that peers open, shared by their sources.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use parking_lot::Mutex;

/// The place that a stream comes from, as far as a stranger cannot choose it freely.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// A process of this host, over a Unix socket.
    Host,
    /// An IPv4 address, or a network of 64 bits of IPv6: one host may have all addresses of such a
    /// network.
    Network(IpAddr),
}

impl Source {
    /// The source of streams from an address.
    pub(crate) fn of(ip: IpAddr) -> Self {
        Self::Network(match ip.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
            ip => ip,
        })
    }
}

#[derive(Default)]
struct TakenSeats {
    all: usize,
    by_source: HashMap<Source, usize>,
}

/// The room for streams that peers open.
pub(crate) struct Seats {
    most: usize,
    taken: Arc<Mutex<TakenSeats>>,
}

/// Room for one stream, until it is dropped.
pub(crate) struct Seat {
    source: Source,
    taken: Arc<Mutex<TakenSeats>>,
}

impl Seats {
    /// Room for `most` streams.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// Room for a stream from `source`, if there is any. No source gets more than is left for the
    /// others, so that none of them takes all.
    pub(crate) fn take(&self, source: Source) -> Option<Seat> {
        let mut taken = self.taken.lock();
        let left = self.most.saturating_sub(taken.all);
        let own = taken.by_source.get(&source).copied().unwrap_or(0);
        if own >= left {
            return None;
        }
        taken.all += 1;
        *taken.by_source.entry(source).or_default() += 1;
        Some(Seat { source, taken: Arc::clone(&self.taken) })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        taken.all -= 1;
        if let Some(own) = taken.by_source.get_mut(&self.source) {
            *own -= 1;
            if *own == 0 {
                taken.by_source.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    #[test]
    fn a_source_leaves_room_for_others() {
        let seats = Seats::new(8);
        let take = |last: u8| std::iter::from_fn(|| seats.take(source(last))).collect::<Vec<_>>();
        let first = take(1);
        assert_eq!(first.len(), 4);
        let second = take(2);
        assert_eq!(second.len(), 2);
        assert_eq!((take(3).len(), take(4).len()), (1, 1), "none is left over");
        drop(first);
        assert_eq!(take(1).len(), 3);
        drop(second);
        assert!(seats.taken.lock().by_source.is_empty(), "sources that have left are kept");
    }

    #[test]
    fn the_last_place_is_one_too() {
        let seats = Seats::new(1);
        let one = seats.take(source(1));
        assert!(one.is_some() && seats.take(source(2)).is_none());
    }

    #[test]
    fn one_network_of_ipv6_is_one_source() {
        let of = |text: &str| Source::of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
