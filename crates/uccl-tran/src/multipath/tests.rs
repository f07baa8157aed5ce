use super::*;
use crate::{
    choice::TwoChoices,
    control::{Credits, FixedWindow, Timely},
    recovery::OrderDetection,
};

const US: u64 = 1_000;

fn params(change: impl Fn(&mut MultipathParams)) -> MultipathParams {
    let mut params = MultipathParams { paths: 4, chunk_len: 1000, ..MultipathParams::default() };
    change(&mut params);
    params
}

fn sender(params: MultipathParams, techniques: Techniques) -> MultipathSender {
    MultipathSender::new(params, techniques, 0).expect("parameters")
}

fn all(sender: &mut MultipathSender, now_ns: u64) -> Vec<Attempt> {
    std::iter::from_fn(|| sender.next(now_ns)).collect()
}

fn events(sender: &mut MultipathSender) -> Vec<MultipathEvent> {
    std::iter::from_fn(|| sender.poll()).collect()
}

fn chunk(attempt: &Attempt) -> Chunk {
    match attempt.load {
        Load::Chunk(chunk) => chunk,
        Load::Probe => panic!("{attempt:?} is a probe"),
    }
}

/// An acknowledgement of these numbers, the largest first.
fn ack(path: u16, numbers: &[u32]) -> PathAck {
    let mut before = [0; 4];
    for bit in numbers[1..].iter().map(|number| numbers[0] - number - 1) {
        before[bit as usize / 64] |= 1 << (bit % 64);
    }
    PathAck { path, marked: 0, ack: Ack { largest: numbers[0], delay_ns: 0, before } }
}

#[test]
fn chunks_go_over_all_paths_and_a_message_ends_with_the_last() {
    let mut sender = sender(params(|_| ()), Techniques::default());
    assert_eq!(sender.push(0, 7500), 0);
    let sent = all(&mut sender, 0);
    let places: Vec<_> = sent.iter().map(|sent| (sent.path, sent.number)).collect();
    assert_eq!(places, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]);
    let last = chunk(&sent[7]);
    assert_eq!((last.offset, last.len, last.total), (7000, 500, 7500));
    assert_eq!(sender.in_flight_bytes(), 7500);
    for path in 0..4 {
        assert_eq!(events(&mut sender), []);
        sender.on_ack(10 * US, &ack(path, &[1, 0])).expect("sent");
    }
    assert_eq!(events(&mut sender), [MultipathEvent::Sent { message: 0 }]);
    assert_eq!((sender.in_flight_bytes(), sender.is_idle()), (0, true));
}

#[test]
fn a_lost_chunk_goes_once_more_over_another_path() {
    let order = || Techniques { loss: Box::new(OrderDetection::new(0)), ..Techniques::default() };
    for repeats in [Repeats::Harmless, Repeats::OnlyWhenProven] {
        let mut sender = sender(params(|p| p.repeats = repeats), order());
        sender.push(0, 12_000);
        let sent = all(&mut sender, 0);
        let lost = chunk(&sent[0]);
        sender.on_ack(10 * US, &ack(0, &[1])).expect("sent");
        let again = all(&mut sender, 10 * US);
        assert_eq!(again.len(), 1, "{repeats:?}");
        assert_eq!(chunk(&again[0]), lost);
        assert_ne!(again[0].path, 0);
        // The same hole, told of again and again, is no new loss.
        sender.on_ack(11 * US, &ack(0, &[2, 1])).expect("sent");
        sender.on_ack(12 * US, &ack(0, &[2, 1])).expect("sent");
        assert_eq!(all(&mut sender, 12 * US), []);
        assert_eq!(sender.repeats(), 1);
    }
}

#[test]
fn a_chunk_that_was_taken_for_lost_and_comes_is_undone() {
    let order = Techniques { loss: Box::new(OrderDetection::new(0)), ..Techniques::default() };
    let mut sender = sender(params(|p| p.paths = 1), order);
    sender.push(0, 2000);
    all(&mut sender, 0);
    sender.on_ack(10 * US, &ack(0, &[1])).expect("sent");
    assert_eq!(all(&mut sender, 10 * US).len(), 1, "the only path takes it again");
    sender.on_ack(11 * US, &ack(0, &[1, 0])).expect("sent");
    assert_eq!(events(&mut sender), [MultipathEvent::Sent { message: 0 }]);
    assert_eq!((sender.undone(), sender.in_flight_bytes()), (1, 1000));
    sender.on_ack(12 * US, &ack(0, &[2, 1, 0])).expect("sent");
    assert_eq!((events(&mut sender), sender.in_flight_bytes()), (vec![], 0));
}

#[test]
fn a_silence_is_answered_by_a_repeat_elsewhere_or_by_a_probe() {
    for repeats in [Repeats::Harmless, Repeats::OnlyWhenProven] {
        let mut sender = sender(params(|p| p.repeats = repeats), Techniques::default());
        sender.push(0, 900);
        let first = all(&mut sender, 0);
        let due_ns = sender.next_timeout_ns().expect("a timeout");
        // Well below the constant 500 us that upstream looks at every millisecond.
        assert!(due_ns <= 300 * US, "{due_ns}");
        let mut now_ns = due_ns;
        let mut later = Vec::new();
        while later.is_empty() {
            sender.on_timeout(now_ns);
            later = all(&mut sender, now_ns);
            now_ns = sender.next_timeout_ns().expect("a timeout");
        }
        assert_eq!((later[0].load, later[0].path), (Load::Probe, 0));
        match repeats {
            Repeats::Harmless => {
                assert_eq!(chunk(&later[1]), chunk(&first[0]));
                assert_ne!(later[1].path, 0);
            }
            Repeats::OnlyWhenProven => {
                assert_eq!(later.len(), 1, "nothing is proven");
                sender.on_ack(now_ns, &ack(0, &[1])).expect("sent");
                assert_eq!(chunk(&all(&mut sender, now_ns)[0]), chunk(&first[0]));
            }
        }
    }
}

#[test]
fn a_peer_that_is_gone_is_noticed() {
    for repeats in [Repeats::Harmless, Repeats::OnlyWhenProven] {
        let params = params(|p| {
            (p.paths, p.dead_after_ns, p.repeats) = (2, 50_000 * US, repeats);
        });
        let mut sender = sender(params, Techniques::default());
        sender.push(0, 5000);
        let (mut now_ns, mut dead, mut probes) = (0, Vec::new(), 0);
        while dead.len() < 2 {
            let sent = all(&mut sender, now_ns);
            probes += sent.iter().filter(|sent| sent.load == Load::Probe).count();
            for event in events(&mut sender) {
                assert!(matches!(event, MultipathEvent::PathDead { .. }));
                dead.push(event);
            }
            if dead.len() < 2 {
                now_ns = sender.next_timeout_ns().expect("a timeout");
                assert!(now_ns < 200_000 * US, "after {dead:?}");
                sender.on_timeout(now_ns);
            }
        }
        assert!(probes < 60, "probes come ever more seldom: {probes}");
        assert_eq!(all(&mut sender, now_ns), []);
        sender.close_path(now_ns, 1);
        sender.open_path(now_ns, 1);
        let again = all(&mut sender, now_ns);
        assert!(!again.is_empty() && again.iter().all(|sent| sent.path == 1), "{again:?}");
    }
}

#[test]
fn a_rate_is_enforced() {
    let link = LinkFacts { bytes_per_s: 1e9, base_rtt_ns: 10_000, chunk_len: 1000 };
    let control = Box::new(Timely::new(&link));
    let mut sender = sender(params(|_| ()), Techniques { control, ..Techniques::default() });
    sender.push(0, 10_000);
    let mut times = Vec::new();
    let mut now_ns = 0;
    while times.len() < 10 {
        times.extend(all(&mut sender, now_ns).iter().map(|_| now_ns));
        now_ns = sender.next_timeout_ns().expect("a timeout").max(now_ns + 1);
        sender.on_timeout(now_ns);
    }
    let gaps: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap == US), "a chunk each microsecond: {gaps:?}");
}

#[test]
fn a_window_is_enforced_over_all_paths() {
    let control = Box::new(FixedWindow::new(3500));
    let mut sender = sender(params(|_| ()), Techniques { control, ..Techniques::default() });
    sender.push(0, 10_000);
    assert_eq!(all(&mut sender, 0).len(), 3);
    sender.on_ack(US, &ack(1, &[0])).expect("sent");
    assert_eq!(all(&mut sender, US).len(), 1);
}

#[test]
fn a_sender_without_credits_asks_for_them() {
    let control = Box::new(Credits::new(1000));
    let mut sender = sender(params(|_| ()), Techniques { control, ..Techniques::default() });
    sender.push(0, 4000);
    let sent = all(&mut sender, 0);
    assert_eq!((sent.len(), sent[0].wanted_bytes), (1, 4000));
    assert_eq!(sender.poll_demand(0), None, "the chunk has told it");
    let late_ns = 10_000 * US;
    let demand = Demand { wanted_bytes: 4000, known_bytes: 1000 };
    assert_eq!(sender.poll_demand(late_ns), Some(demand));
    assert_eq!(sender.poll_demand(late_ns + 1), None);
    sender.on_credit(late_ns, 3000);
    assert_eq!(all(&mut sender, late_ns).len(), 2);
}

#[test]
fn acknowledgements_that_cannot_be_are_refused() {
    let mut sender = sender(params(|_| ()), Techniques::default());
    sender.push(0, 2000);
    all(&mut sender, 0);
    for wrong in [ack(0, &[1]), ack(0, &[u32::MAX]), ack(3, &[0]), ack(9, &[0])] {
        assert!(sender.on_ack(US, &wrong).is_err(), "{wrong:?}");
    }
    let mut before_first = ack(0, &[0]);
    before_first.ack.before[0] = 1;
    assert!(sender.on_ack(US, &before_first).is_err());
    assert_eq!(sender.in_flight_bytes(), 2000);
}

#[test]
fn a_cancelled_message_sends_nothing_and_ends_when_nothing_is_under_way() {
    let control = Box::new(FixedWindow::new(2000));
    let mut sender = sender(
        params(|p| p.repeats = Repeats::OnlyWhenProven),
        Techniques { control, ..Techniques::default() },
    );
    sender.push(0, 9000);
    assert_eq!(all(&mut sender, 0).len(), 2);
    sender.cancel(0);
    sender.on_ack(US, &ack(0, &[0])).expect("sent");
    assert_eq!((all(&mut sender, US), events(&mut sender)), (vec![], vec![]));
    sender.on_ack(US, &ack(1, &[0])).expect("sent");
    assert_eq!(events(&mut sender), [MultipathEvent::Cancelled { message: 0 }]);
    assert!(sender.is_idle());
}

#[test]
fn a_path_never_has_more_numbers_than_an_acknowledgement_tells_of() {
    let mut sender = sender(params(|p| p.paths = 1), Techniques::default());
    sender.push(0, 1 << 20);
    assert_eq!(all(&mut sender, 0).len() as u64, MOST_CHUNKS);
}

fn receiver(change: impl Fn(&mut MultipathParams)) -> MultipathReceiver {
    MultipathReceiver::new(params(change)).expect("parameters")
}

fn attempt(path: u16, number: u32, offset: u64, len: u32, total: u64) -> Attempt {
    let load = Load::Chunk(Chunk { message: 0, total, offset, len });
    Attempt { path, number, load, wanted_bytes: 0 }
}

#[test]
fn a_chunk_is_placed_once_and_never_after_the_end_or_a_fence() {
    let mut receiver = receiver(|_| ());
    let first = attempt(0, 0, 0, 1000, 1500);
    assert_eq!(receiver.on_attempt(0, &first, false), ChunkVerdict::Early);
    receiver.post(1500);
    receiver.post(1000);
    assert_eq!(receiver.on_attempt(0, &first, false), ChunkVerdict::Place);
    assert_eq!(receiver.on_attempt(0, &first, false), ChunkVerdict::Repeat, "the same attempt");
    let again = attempt(1, 0, 0, 1000, 1500);
    assert_eq!(receiver.on_attempt(0, &again, false), ChunkVerdict::Repeat, "another path");
    assert_eq!(receiver.poll_ended(), None);
    let second = attempt(1, 1, 1000, 500, 1500);
    assert_eq!(receiver.on_attempt(0, &second, false), ChunkVerdict::Place);
    assert_eq!(receiver.poll_ended(), Some(0));
    let late = attempt(2, 0, 1000, 500, 1500);
    assert_eq!(receiver.on_attempt(0, &late, false), ChunkVerdict::Repeat, "it has ended");
    assert!(receiver.fence(1) && !receiver.fence(1) && !receiver.fence(0));
    let mut fenced = attempt(3, 0, 0, 1000, 1000);
    fenced.load = Load::Chunk(Chunk { message: 1, total: 1000, offset: 0, len: 1000 });
    assert_eq!(receiver.on_attempt(0, &fenced, false), ChunkVerdict::Repeat);
    assert_eq!(receiver.poll_ended(), None);
}

/// The memory of receives that have ended is used again, without their bits.
#[test]
fn receives_are_counted_from_the_first_that_has_not_ended() {
    let mut receiver = receiver(|_| ());
    (0..3).for_each(|_| _ = receiver.post(2000));
    let of = |number, message, offset| {
        let load = Load::Chunk(Chunk { message, total: 2000, offset, len: 1000 });
        Attempt { path: 0, number, load, wanted_bytes: 0 }
    };
    let mut number = 0;
    for (message, posted) in [(1, 3), (0, 3), (2, 2), (3, 1), (4, 0)] {
        for offset in [0, 1000] {
            let verdict = receiver.on_attempt(0, &of(number, message, offset), false);
            assert_eq!(verdict, ChunkVerdict::Place, "{message}");
            number += 1;
        }
        if message == 0 {
            (0..2).for_each(|_| _ = receiver.post(2000));
        }
        assert_eq!((receiver.poll_ended(), receiver.posted()), (Some(message), posted));
    }
}

#[test]
fn a_peer_that_breaks_the_rules_is_seen() {
    let mut receiver = receiver(|_| ());
    receiver.post(5000);
    let wrong = [
        attempt(9, 0, 0, 1000, 5000),
        attempt(0, 0, 500, 1000, 5000),
        attempt(0, 0, 0, 1001, 5000),
        attempt(0, 0, 0, 999, 5000),
        attempt(0, 0, 5000, 1000, 5000),
        attempt(0, 0, 5000, 0, 5000),
        attempt(0, 0, u64::MAX - 615, 1000, 5000),
    ];
    for attempt in wrong {
        let verdict = receiver.on_attempt(0, &attempt, false);
        assert!(matches!(verdict, ChunkVerdict::Wrong(_)), "{attempt:?}: {verdict:?}");
    }
    let long = attempt(0, 0, 0, 1000, 6000);
    assert_eq!(receiver.on_attempt(0, &long, false), ChunkVerdict::TooLong { room: 5000 });
    assert_eq!(receiver.on_attempt(0, &attempt(0, 0, 0, 1000, 5000), false), ChunkVerdict::Place);
    let other = receiver.on_attempt(0, &attempt(0, 1, 1000, 1000, 4000), false);
    assert!(matches!(other, ChunkVerdict::Wrong(_)));
    let far = attempt(0, 1 << 20, 1000, 1000, 5000);
    assert_eq!(receiver.on_attempt(0, &far, false), ChunkVerdict::Stale);
    assert_eq!(
        receiver.on_attempt(0, &attempt(0, 300, 1000, 1000, 5000), false),
        ChunkVerdict::Place
    );
    let old = attempt(0, 1, 2000, 1000, 5000);
    assert_eq!(receiver.on_attempt(0, &old, false), ChunkVerdict::Stale, "an acknowledgement ends");
    assert_eq!(receiver.repeats(), 0);
}

#[test]
fn acknowledgements_come_after_so_many_or_so_long_or_at_once() {
    let mut receiver = receiver(|p| (p.ack_every, p.ack_delay_ns) = (3, 50 * US));
    receiver.post(100_000);
    let send = |receiver: &mut MultipathReceiver, number: u32, is_marked: bool| {
        let attempt = attempt(1, number, u64::from(number) * 1000, 1000, 100_000);
        assert_eq!(receiver.on_attempt(0, &attempt, is_marked), ChunkVerdict::Place);
        receiver.poll_ack(0)
    };
    assert_eq!((send(&mut receiver, 0, false), send(&mut receiver, 1, false)), (None, None));
    assert_eq!(send(&mut receiver, 2, false), Some(ack(1, &[2, 1, 0])));
    assert_eq!(send(&mut receiver, 3, false), None);
    assert!(send(&mut receiver, 5, false).is_some(), "4 is missing");
    assert_eq!(send(&mut receiver, 6, true).map(|ack| ack.marked), Some(1), "it is marked");
    assert_eq!(send(&mut receiver, 7, false), None);
    let due_ns = receiver.next_timeout_ns().expect("a timeout");
    assert!(receiver.poll_ack(due_ns + 50 * US).is_some());
    assert_eq!(receiver.poll_ack(u64::MAX), None);
}

#[test]
fn two_choices_avoid_a_slow_path() {
    let choice = Box::new(TwoChoices::new(3));
    let mut sender = sender(params(|_| ()), Techniques { choice, ..Techniques::default() });
    sender.push(0, 400_000);
    let mut next = [0u32; 4];
    let mut counts = [0; 4];
    for now_ns in (0..400 * 40 * US).step_by(40_000) {
        let Some(sent) = sender.next(now_ns) else { break };
        counts[usize::from(sent.path)] += 1;
        let number = next[usize::from(sent.path)];
        next[usize::from(sent.path)] += 1;
        let rtt_ns = if sent.path == 2 { 30 * US } else { 10 * US };
        let mut numbers: Vec<_> = (0..=number).rev().collect();
        numbers.truncate(200);
        sender.on_ack(now_ns + rtt_ns, &ack(sent.path, &numbers)).expect("sent");
    }
    assert!(counts[2] < 50 && counts.iter().sum::<i32>() == 400, "{counts:?}");
}

#[test]
fn parameters_that_cannot_work_are_refused() {
    let changes: [fn(&mut MultipathParams); 7] = [
        |p| p.paths = 0,
        |p| p.chunk_len = 0,
        |p| p.most_open = 0,
        |p| p.ack_every = 0,
        |p| p.dead_after_ns = 0,
        |p| p.tail_probe.least_ns = 0,
        |p| p.tail_probe.most_ns = 1,
    ];
    for change in changes {
        assert!(MultipathReceiver::new(params(change)).is_err());
        let params = params(change);
        assert!(MultipathSender::new(params, Techniques::default(), 0).is_err());
    }
}
