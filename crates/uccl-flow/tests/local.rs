//! Messages by rings in shared memory, between two ends of one host.

mod common;

use std::{sync::atomic::Ordering, time::Duration};

use common::{
    Relay, assert_peer_has_closed, exchange, pair, pair_by, pattern, post_recv, post_send, until,
};
use uccl_flow::{FlowError, Flows, RecvFlow, SendFlow, Settings, Slot};

fn settings() -> Settings {
    Settings { local: true, threads: 2, streams: 4, ..Settings::default() }
}

fn flows() -> Flows {
    Flows::new(settings()).expect("flows over loopback")
}

/// The receiver opens the ring of a flow with its first messages.
fn open_ring(flow: &(SendFlow, RecvFlow)) {
    (0..3).for_each(|_| exchange(flow, (1, 1000), |_| {}));
}

fn relayed(one: &Flows, two: &Flows) -> ((SendFlow, RecvFlow), Relay) {
    let relay = Relay::new(two.port());
    let flow = pair_by(one, two, |handle| relay.change(handle));
    until(|| (one.counters()[0].open_streams == settings().streams).then_some(()));
    open_ring(&flow);
    (flow, relay)
}

/// Messages for which the ring has no room.
fn fill_ring(send: &SendFlow, data: &[Vec<u8>]) -> Vec<Slot> {
    let messages: Vec<_> = data.iter().map(|data| post_send(send, data).expect("a slot")).collect();
    let last = messages.last().copied().expect("some");
    assert_eq!(send.test(last).expect("the peer lives"), None, "the ring is full");
    messages
}

fn long_messages() -> Vec<Vec<u8>> {
    (0..16).map(|seed| pattern(Settings::LOCAL_MAX, seed)).collect()
}

#[test]
fn messages_of_all_lengths_come_whole() {
    let (one, two) = (flows(), flows());
    let pair = pair(&one, &two);
    for len in [0, 1, 48, 4096, 32 << 10, 100_000, Settings::LOCAL_MAX, 200_000, 1 << 20] {
        exchange(&pair, (40, len), |_| {});
    }
    let (send, recv) = pair;
    send.close();
    recv.close();
    let (sent, received) = (one.totals().sent, two.totals().received);
    assert_eq!(sent, received);
    assert_eq!((sent.small_messages, sent.large_messages), (280, 80), "{sent}");
}

#[test]
fn both_ends_must_ask_for_a_ring() {
    for (here, there) in [(true, false), (false, true)] {
        let [one, two] =
            [here, there].map(|local| Flows::new(Settings { local, ..settings() }).expect("flows"));
        let pair = pair(&one, &two);
        exchange(&pair, (40, 1000), |_| {});
        exchange(&pair, (40, Settings::LOCAL_MAX), |_| {});
        drop(pair);
        assert_eq!(one.totals().sent.large_messages, 40, "by the streams");
    }
}

#[test]
fn a_ring_is_opened_though_all_messages_come_in_chunks() {
    let (one, two) = (flows(), flows());
    let pair = pair(&one, &two);
    (0..3).for_each(|_| exchange(&pair, (1, Settings::LOCAL_MAX), |_| {}));
    exchange(&pair, (40, Settings::LOCAL_MAX), |_| {});
    drop(pair);
    assert!(one.totals().sent.small_messages >= 40, "{}", one.totals().sent);
}

#[test]
fn messages_by_a_ring_outlive_their_flow() {
    let flows = flows();
    let (send, recv) = pair(&flows, &flows);
    let flow = (send, recv);
    open_ring(&flow);
    let (send, recv) = flow;
    let data = pattern(1000, 5);
    let message = post_send(&send, &data).expect("a slot");
    until(|| send.test(message).expect("no error"));
    drop(send);
    let mut room = vec![0; 1000];
    let receive = post_recv(&recv, &mut room).expect("a slot");
    until(|| recv.test(receive).expect("it came before the end"));
    assert!(room == data);
    assert_peer_has_closed(&recv);
}

#[test]
fn messages_by_a_ring_outlive_the_own_stream() {
    let (one, two) = (flows(), flows());
    let ((send, recv), relay) = relayed(&one, &two);
    let data = long_messages();
    for _ in 0..2 {
        let before = relay.lines().len();
        let messages = fill_ring(&send, &data);
        relay.lines().iter().for_each(|line| line.is_dead.store(true, Ordering::Relaxed));
        // All streams come again, the flow's own too.
        until(|| (relay.lines().len() > before + settings().streams).then_some(()));
        let mut room = vec![0; Settings::LOCAL_MAX];
        let mut ended = vec![false; messages.len()];
        for data in &data {
            let receive = post_recv(&recv, &mut room).expect("a slot");
            until(|| {
                for (message, ended) in messages.iter().zip(&mut ended) {
                    *ended = *ended || send.test(*message).expect("no error").is_some();
                }
                recv.test(receive).expect("no error")
            });
            assert!(room == *data);
            room.fill(0);
        }
        assert!(ended.iter().all(|ended| *ended));
    }
    let flow = (send, recv);
    exchange(&flow, (20, 1 << 20), |_| {});
    exchange(&flow, (200, 100), |_| {});
    let (send, recv) = flow;
    drop(send);
    assert_peer_has_closed(&recv);
}

#[test]
fn a_sender_hears_of_a_peer_that_closes_with_a_full_ring() {
    let flows = flows();
    let flow = pair(&flows, &flows);
    open_ring(&flow);
    let (send, recv) = flow;
    let data = long_messages();
    let messages = fill_ring(&send, &data);
    drop(recv);
    let error = until(|| send.test(messages[messages.len() - 1]).err());
    assert!(matches!(error, FlowError::PeerClosed { .. }), "{error}");
}

#[test]
fn a_sender_by_a_ring_hears_of_a_peer_that_stays_away() {
    let short = Settings { limit: Duration::from_millis(1500), ..settings() };
    let one = Flows::new(short).expect("flows");
    let two = flows();
    let ((send, _recv), relay) = relayed(&one, &two);
    // The own stream's bytes are confirmed meanwhile, so that the ring alone has others.
    std::thread::sleep(Duration::from_secs(1));
    relay.cut(true);
    let data = pattern(100, 0);
    // It does not take the message out.
    let message = post_send(&send, &data).expect("a slot");
    until(|| send.test(message).expect("no error"));
    let error = until(|| {
        // SAFETY: the data lives as long as the flow.
        match unsafe { send.post(data.as_ptr(), data.len(), 0) } {
            Ok(Some(slot)) => {
                // The ring never is full: it would be seen by that.
                std::thread::sleep(Duration::from_millis(50));
                send.test(slot).err()
            }
            other => other.err(),
        }
    });
    assert!(matches!(error, FlowError::Lost { .. }), "{error}");
}
