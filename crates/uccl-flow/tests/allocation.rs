//! The path of a small message does not allocate.

mod allocations;
mod common;

use common::{pair, post_recv, post_send, until};
use uccl_flow::{Flows, Settings};

#[test]
fn small_messages_allocate_nothing() {
    for local in [false, true] {
        let flows = Flows::new(Settings { local, ..Settings::default() }).expect("flows");
        let (send, recv) = pair(&flows, &flows);
        let (data, mut room) = (vec![3u8; 4096], vec![0u8; 4096]);
        let mut exchange = || {
            let receive = post_recv(&recv, &mut room).expect("a slot");
            let message = post_send(&send, &data).expect("a slot");
            until(|| send.test(message).expect("no error"));
            until(|| recv.test(receive).expect("no error"));
        };
        // The first receives take room in lists that keep it, and open the ring.
        (0..40).for_each(|_| exchange());
        let before = allocations::count();
        (0..100).for_each(|_| exchange());
        assert_eq!(allocations::count() - before, 0, "by a ring: {local}");
    }
}
