//! Words of the peer's that a lane between processes of one host changes by itself.

use uccl_fabric::region::Rights;
use uccl_wire::message::Change;

use crate::{
    memory::{pattern, piece},
    pair::Pair,
};

pub(crate) fn by_the_writer(pair: &Pair) {
    let Some(host) = &pair.a.host else {
        // Elsewhere the owner changes the word, which the engine asks it for by a message.
        return;
    };
    let (from, to) = (pair.private(64), pair.shared(72));
    let region = pair.region(&to, Rights::ALL);
    let (data, word) = (piece(&region.remote(), 0, 64), piece(&region.remote(), 64, 8));
    let value = || u64::from_le_bytes(to.bytes()[64..].try_into().expect("eight bytes"));
    let mut expected = 0_u64;
    for round in 0..100_u64 {
        let bytes = pattern(64, round);
        from.fill_with(&bytes);
        let change = if round.is_multiple_of(3) { Change::Set(round) } else { Change::Add(round) };
        expected = match change {
            Change::Set(value) => value,
            Change::Add(value) => expected.wrapping_add(value),
        };
        // SAFETY: the memory lives during the call. A lane may decline at any time.
        match unsafe { host.try_signalled(from.part(0, 64), &data, &word, change) } {
            Some(done) => {
                assert_eq!(done, Ok(()));
                assert!(to.bytes()[..64] == bytes, "the bytes are there");
            }
            None => while host.try_signal(&word, change).is_none() {},
        }
        assert_eq!(value(), expected, "round {round}");
    }
    pair.take_back(&region);
    for rights in [Rights::READ, Rights::WRITE] {
        let region = pair.region(&to, rights);
        let changed = host.try_signal(&piece(&region.remote(), 64, 8), Change::Add(1));
        assert!(!matches!(changed, Some(Ok(()))), "without the right: {rights:?}");
        pair.take_back(&region);
    }
    assert_eq!(value(), expected);
}
