//! Streams that die and stand still, over real sockets, and flows that are closed in the midst.

mod common;

use std::{sync::atomic::Ordering, time::Duration};

use common::{
    Relay, assert_peer_has_closed, exchange, pair, pair_by, pattern, post_recv, post_send, until,
};
use uccl_flow::{FlowError, Flows, RecvFlow, SendFlow, Settings};

fn settings() -> Settings {
    Settings { threads: 3, streams: 4, ..Settings::default() }
}

/// Short, and longer than a busy machine keeps a process from its turn.
const SOON: Duration = Duration::from_secs(4);

fn ends() -> (Flows, Flows) {
    let new = || Flows::new(settings()).expect("flows over loopback");
    (new(), new())
}

fn relayed(one: &Flows, two: &Flows) -> ((SendFlow, RecvFlow), Relay) {
    let relay = Relay::new(two.port());
    let flow = pair_by(one, two, |handle| relay.change(handle));
    until(|| (one.counters()[0].open_streams == settings().streams).then_some(()));
    (flow, relay)
}

#[test]
fn streams_that_die_are_replaced() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    exchange(&flow, (100, 1 << 20), |turn| {
        if turn % 10 == 5 {
            let lines = relay.lines();
            let line = &lines[1 + (turn / 10) % (lines.len() - 1)];
            line.is_dead.store(true, Ordering::Relaxed);
        }
    });
    until(|| (one.counters()[0].lost_streams > 0).then_some(()));
}

#[test]
fn a_stream_that_stands_still_is_passed_over_and_replaced() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    exchange(&flow, (20, 1 << 20), |_| {});
    relay.lines()[2].is_stalled.store(true, Ordering::Relaxed);
    exchange(&flow, (20, 1 << 20), |_| {});
    until(|| {
        exchange(&flow, (1, 1 << 20), |_| {});
        let counters = &one.counters()[0];
        (counters.lost_streams > 0 && counters.repeated_chunks > 0).then_some(())
    });
}

#[test]
fn a_peer_that_was_cut_off_goes_on() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    std::thread::scope(|scope| {
        exchange(&flow, (40, 1 << 20), |turn| {
            if turn == 10 {
                relay.cut(true);
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(1500));
                    relay.cut(false);
                });
            }
        });
    });
}

#[test]
fn small_messages_outlive_their_streams() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    let lines = relay.lines().len();
    exchange(&flow, (3000, 1000), |turn| {
        if turn % 300 == 7 {
            relay.lines().iter().for_each(|line| line.is_dead.store(true, Ordering::Relaxed));
        }
    });
    until(|| (relay.lines().len() > lines).then_some(()));
}

#[test]
fn a_small_message_outlives_a_stream_that_stands_still() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    for (count, len) in [(200, 1000), (20, 30_000)] {
        exchange(&flow, (count, len), |_| {});
        let before = relay.lines().len();
        relay.lines().iter().for_each(|line| line.is_stalled.store(true, Ordering::Relaxed));
        exchange(&flow, (count, len), |_| {});
        assert!(relay.lines().len() > before, "another stream has come");
    }
}

#[test]
fn small_messages_go_on_after_a_cut() {
    let (one, two) = ends();
    let (flow, relay) = relayed(&one, &two);
    std::thread::scope(|scope| {
        exchange(&flow, (2000, 3000), |turn| {
            if turn == 100 {
                relay.cut(true);
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(2500));
                    relay.cut(false);
                });
            }
        });
    });
}

#[test]
fn messages_that_have_ended_outlive_their_stream_and_their_flow() {
    let (one, two) = ends();
    let ((send, recv), relay) = relayed(&one, &two);
    let data = pattern(20_000, 1);
    relay.lines().iter().for_each(|line| line.is_stalled.store(true, Ordering::Relaxed));
    let messages: Vec<_> = (0..8).map(|_| post_send(&send, &data).expect("a slot")).collect();
    for message in messages {
        until(|| send.test(message).expect("no error"));
    }
    drop(send);
    relay.lines().iter().for_each(|line| line.is_dead.store(true, Ordering::Relaxed));
    for _ in 0..8 {
        let mut room = vec![0; 20_000];
        let receive = post_recv(&recv, &mut room).expect("a slot");
        until(|| recv.test(receive).expect("no error"));
        assert!(room == data);
    }
    assert_peer_has_closed(&recv);
}

#[test]
fn a_sender_of_small_messages_hears_of_a_peer_that_stays_away_and_of_one_that_closes() {
    let short = Settings { limit: SOON, ..settings() };
    let one = Flows::new(short).expect("flows");
    let two = Flows::new(self::settings()).expect("flows");
    let ((send, _recv), relay) = relayed(&one, &two);
    let data = pattern(100, 0);
    let fails = |send: &SendFlow| {
        until(|| {
            // SAFETY: the data lives as long as the flow.
            match unsafe { send.post(data.as_ptr(), data.len(), 0) } {
                Ok(None) => None,
                Ok(Some(slot)) => send.test(slot).err(),
                Err(error) => Some(error),
            }
        })
    };
    relay.cut(true);
    let error = fails(&send);
    assert!(matches!(error, FlowError::Lost { .. }), "{error}");
    let (one, two) = ends();
    let (send, recv) = pair(&one, &two);
    drop(recv);
    let error = fails(&send);
    assert!(matches!(error, FlowError::PeerClosed { .. }), "{error}");
}

#[test]
fn a_peer_without_any_stream_is_an_error_at_the_limit() {
    let settings = Settings { limit: SOON, ..settings() };
    let one = Flows::new(settings).expect("flows");
    let two = Flows::new(self::settings()).expect("flows");
    let ((send, _recv), relay) = relayed(&one, &two);
    let data = pattern(8 << 20, 0);
    relay.cut(true);
    let message = post_send(&send, &data).expect("a slot");
    let error = until(|| send.test(message).err());
    assert!(matches!(error, FlowError::Lost { .. }), "{error}");
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
}

#[test]
fn a_peer_that_is_silent_is_an_error_for_receives_too() {
    let new = || Flows::new(Settings { limit: SOON, ..settings() });
    let (one, two) = (new().expect("flows"), new().expect("flows"));
    let (flow, relay) = relayed(&one, &two);
    let mut room = vec![0; 100];
    let receive = post_recv(&flow.1, &mut room).expect("a slot");
    // Both ends live, and the receive waits for longer than the limit.
    std::thread::sleep(2 * SOON);
    assert!(matches!(flow.1.test(receive), Ok(None)));
    relay.cut(true);
    let error = until(|| flow.1.test(receive).err());
    assert!(matches!(error, FlowError::Lost { .. }), "{error}");
    assert!(error.to_string().contains("1 requests, 100 bytes"), "{error}");
}

#[test]
fn nothing_lands_after_close() {
    let (one, two) = ends();
    for round in 0..10 {
        let (send, recv) = pair(&one, &two);
        let data = pattern(4 << 20, round);
        let mut rooms = vec![vec![0; 4 << 20]; 4];
        let receives: Vec<_> =
            rooms.iter_mut().map(|room| post_recv(&recv, room).expect("a slot")).collect();
        let sends: Vec<_> = (0..4).map(|_| post_send(&send, &data).expect("a slot")).collect();
        until(|| recv.test(receives[round % 3]).expect("no error"));
        recv.close();
        rooms.iter_mut().for_each(|room| room.fill(7));
        // The sender's chunks go on arriving.
        for message in sends {
            until(|| send.test(message).ok().flatten());
        }
        assert!(rooms.iter().all(|room| room.iter().all(|byte| *byte == 7)), "round {round}");
    }
}

#[test]
fn messages_are_not_read_after_close() {
    let (one, two) = ends();
    let (other_send, other_recv) = pair(&one, &two);
    for round in 0..10 {
        let (send, recv) = pair(&one, &two);
        let mut data = pattern(4 << 20, round);
        let mut rooms = vec![vec![0; 4 << 20]; 4];
        let receives: Vec<_> =
            rooms.iter_mut().map(|room| post_recv(&recv, room).expect("a slot")).collect();
        for _ in 0..4 {
            post_send(&send, &data).expect("a slot");
        }
        until(|| recv.test(receives[0]).expect("no error"));
        send.close();
        data.fill(255);
        let content = pattern(4 << 20, round);
        let mut ended = [false; 4];
        ended[0] = true;
        // Receives end with the right bytes or with an error, and never with others.
        until(|| {
            for at in 1..4 {
                if ended[at] {
                    continue;
                }
                match recv.test(receives[at]) {
                    Ok(None) => {}
                    Ok(Some(_)) => {
                        assert!(rooms[at] == content, "round {round}");
                        ended[at] = true;
                    }
                    Err(error) => {
                        assert!(matches!(error, FlowError::PeerClosed { .. }), "{error}");
                        ended[at] = true;
                    }
                }
            }
            ended.iter().all(|is_ended| *is_ended).then_some(())
        });
    }
    // Other flows of the same streams are as they were.
    exchange(&(other_send, other_recv), (10, 1 << 20), |_| {});
}
