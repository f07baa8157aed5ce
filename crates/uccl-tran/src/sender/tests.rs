use proptest::prelude::*;

use super::*;
use crate::Congestion;

const MS: Duration = Duration::from_millis(1);
const FIRST: u32 = u32::MAX - 1;

fn sender(now: Instant, change: impl Fn(&mut Params)) -> Sender {
    let mut params = Params { first: FIRST, ..Params::default() };
    change(&mut params);
    Sender::new(params, now).unwrap()
}

/// An acknowledgement of these numbers, the largest first.
fn ack(numbers: &[u32]) -> Ack {
    let largest = numbers[0];
    let mut before = [0; 4];
    for bit in numbers[1..].iter().map(|number| largest - number - 1) {
        before[bit as usize / 64] |= 1 << (bit % 64);
    }
    Ack { largest: largest.wrapping_add(FIRST), delay_ns: 0, before }
}

fn events(sender: &mut Sender, now: Instant) -> Vec<Event> {
    std::iter::from_fn(|| sender.poll(now)).collect()
}

fn send_all(sender: &mut Sender, now: Instant, items: std::ops::Range<u64>) {
    for item in items {
        sender.send(now, item, 1000).unwrap();
    }
}

#[test]
fn a_packet_that_an_acknowledgement_passes_over_is_lost() {
    let now = Instant::now();
    let mut sender = sender(now, |_| ());
    send_all(&mut sender, now, 100..105);
    sender.on_ack(now + MS, &ack(&[3, 2, 0])).unwrap();
    let ended =
        [Event::Delivered(100), Event::Lost(101), Event::Delivered(102), Event::Delivered(103)];
    assert_eq!(events(&mut sender, now), ended);
    assert_eq!(sender.unsettled().collect::<Vec<_>>(), [104]);
    sender.on_ack(now + MS, &ack(&[2, 0])).unwrap();
    sender.on_ack(now + MS, &ack(&[3, 2, 1, 0])).unwrap();
    assert_eq!(events(&mut sender, now), [], "nothing new");
}

#[test]
fn a_path_that_reorders_loses_later() {
    let now = Instant::now();
    let mut sender = sender(now, |p| p.reorder = 2);
    send_all(&mut sender, now, 0..5);
    sender.on_ack(now, &ack(&[2])).unwrap();
    assert_eq!(events(&mut sender, now), [Event::Delivered(2)]);
    sender.on_ack(now, &ack(&[3, 2, 1])).unwrap();
    assert_eq!(
        events(&mut sender, now),
        [Event::Lost(0), Event::Delivered(1), Event::Delivered(3)]
    );
}

#[test]
fn silence_is_answered_with_one_probe_number_and_death() {
    let start = Instant::now();
    let mut sender = sender(start, |p| p.dead_after = 1000 * MS);
    send_all(&mut sender, start, 0..1);
    let probe = Event::Probe(PacketNumber(1u32.wrapping_add(FIRST)));
    let (mut now, mut waits) = (start, Vec::new());
    loop {
        let at = sender.next_timeout().unwrap();
        waits.push(at - now);
        now = at;
        sender.on_timeout(now);
        match events(&mut sender, now)[..] {
            [event] if event == probe => {}
            [Event::PathDead] => break,
            ref other => panic!("{other:?}"),
        }
    }
    assert!(waits.windows(2).take(3).all(|w| w[1] == 2 * w[0]), "{waits:?}");
    assert!(waits.iter().all(|wait| *wait <= Params::default().max_probe), "{waits:?}");
    assert_eq!(now - start, 1000 * MS);
    assert_eq!(sender.unsettled().collect::<Vec<_>>(), [0]);
    assert_eq!((sender.next_timeout(), sender.poll(now)), (None, None));
    assert_eq!(sender.send(now, 1, 1), Err(SendError::PathDead(1000 * MS)));
    assert_eq!(sender.on_ack(now, &ack(&[0])), Err(AckError::PathDead));
}

#[test]
fn a_probe_settles_the_packets_before_it() {
    let start = Instant::now();
    let mut sender = sender(start, |_| ());
    send_all(&mut sender, start, 0..2);
    let now = sender.next_timeout().unwrap();
    sender.on_timeout(now);
    assert_eq!(events(&mut sender, now).len(), 1);
    sender.on_ack(now + MS, &ack(&[2, 0])).unwrap();
    assert_eq!(events(&mut sender, now), [Event::Delivered(0), Event::Lost(1)]);
    assert_eq!((sender.next_timeout(), sender.in_flight()), (None, 0));
    assert!((sender.loss_rate() - 0.5).abs() < 1e-9);
    // A second attempt has a number of its own.
    assert_eq!(sender.send(now, 1, 1000), Ok(PacketNumber(3u32.wrapping_add(FIRST))));
}

/// Otherwise a peer that only repeats itself would keep a dead path alive.
#[test]
fn an_acknowledgement_with_nothing_new_does_not_end_the_silence() {
    let start = Instant::now();
    let mut sender = sender(start, |p| p.dead_after = 100 * MS);
    send_all(&mut sender, start, 0..2);
    sender.on_ack(start, &ack(&[0])).unwrap();
    let mut now = start;
    while sender.next_timeout().unwrap() < start + 100 * MS {
        let due = sender.next_timeout().unwrap();
        sender.on_ack(now + (due - now) / 2, &ack(&[0])).unwrap();
        assert_eq!(sender.next_timeout(), Some(due), "as if nothing had come");
        now = due;
        sender.on_timeout(now);
    }
    now = start + 100 * MS;
    sender.on_timeout(now);
    assert_eq!(events(&mut sender, now).last(), Some(&Event::PathDead));
}

#[test]
fn the_window_is_as_long_as_an_acknowledgement_can_tell_of() {
    let start = Instant::now();
    let mut sender = sender(start, |p| (p.window, p.reorder, p.congestion) = (250, 6, None));
    send_all(&mut sender, start, 0..250);
    let full = SendError::Full { messages: 250, bytes: 250_000 };
    assert_eq!(sender.send(start, 250, 1), Err(full));
    // However long the silence lasts, probes use no more than the numbers that are left.
    for _ in 0..20 {
        let now = sender.next_timeout().unwrap();
        sender.on_timeout(now);
        let probes: Vec<_> =
            (250..257u32).map(|n| Event::Probe(PacketNumber(n.wrapping_add(FIRST)))).collect();
        assert_eq!(events(&mut sender, now), probes);
    }
    sender.on_ack(start, &ack(&[256, 0])).unwrap();
    let ended = events(&mut sender, start);
    assert_eq!((ended[0], ended[1], ended.len()), (Event::Delivered(0), Event::Lost(1), 250));
    send_all(&mut sender, start, 0..240);
}

#[test]
fn a_closed_window_lets_some_messages_through() {
    let now = Instant::now();
    let congestion = Congestion { start_bytes: 1, floor_bytes: 1, ..Congestion::default() };
    let mut sender = sender(now, |p| p.congestion = Some(congestion));
    send_all(&mut sender, now, 0..u64::from(congestion.floor_messages));
    assert!(!sender.can_send(1));
}

proptest! {
    /// An acknowledgement of numbers that were not sent is refused and changes nothing; none
    /// panics.
    #[test]
    fn hostile_acknowledgements_change_nothing(
        sent in 0u64..100,
        largest: u32,
        near in -300i32..300,
        use_near: bool,
        before: [u64; 4],
        delay_ns: u32,
    ) {
        let now = Instant::now();
        let mut sender = sender(now, |p| p.congestion = None);
        send_all(&mut sender, now, 0..sent);
        let number = if use_near { sent as i64 + i64::from(near) } else { i64::from(largest) };
        let ack = Ack { largest: (number as u32).wrapping_add(FIRST), delay_ns, before };
        let was = format!("{sender:?}");
        let sane = (0..sent as i64).contains(&number) && i64::from(ack.reach()) <= number;
        let result = sender.on_ack(now + MS, &ack);
        prop_assert_eq!(result.is_ok(), sane, "{:?}", result);
        if !sane {
            prop_assert_eq!(format!("{sender:?}"), was);
        }
    }
}
