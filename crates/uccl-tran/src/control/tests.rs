use super::*;

const LINK: LinkFacts = LinkFacts { bytes_per_s: 12.5e9, base_rtt_ns: 10_000, chunk_len: 4096 };

fn ack(now_ns: u64, chunks: u64, rtt_ns: u64) -> AckSample {
    AckSample {
        now_ns,
        bytes: chunks * LINK.chunk_len,
        marked_bytes: 0,
        rtt_ns: Some(rtt_ns),
        least_rtt_ns: LINK.base_rtt_ns,
        in_flight_bytes: 1 << 30,
    }
}

/// Acknowledges a window, chunk by chunk, within one round trip.
fn round(control: &mut dyn CongestionControl, now_ns: &mut u64, rtt_ns: u64, is_marked: bool) {
    let chunks = (control.window_bytes() / LINK.chunk_len).clamp(1, 4096);
    for _ in 0..chunks {
        *now_ns += rtt_ns / chunks;
        let mut ack = ack(*now_ns, 1, rtt_ns);
        ack.marked_bytes = if is_marked { ack.bytes } else { 0 };
        control.on_ack(&ack);
    }
}

#[test]
fn every_algorithm_lets_one_chunk_go_and_bounds_the_bytes_under_way() {
    for name in CONTROL_NAMES {
        let mut control = control_named(name, &LINK).expect(name);
        assert!(control.allows(0, LINK.chunk_len), "{name}");
        let mut now_ns = 0;
        for step in 0..2000 {
            now_ns += 1_000;
            match step % 7 {
                0 => control.on_loss(now_ns, LINK.chunk_len),
                3 => control.on_silence(now_ns),
                5 => control.on_undo(now_ns),
                _ => control.on_ack(&ack(now_ns, 1, 10_000 + 700 * (step % 90))),
            }
            let rate = control.bytes_per_s();
            assert!(rate.is_none_or(|rate| rate > 0.0 && rate.is_finite()), "{name}: {rate:?}");
        }
        // Bytes beyond the window are no huge window (upstream subtracts without a check).
        assert!(name == "none" || name == "eqds" || !control.allows(1 << 40, 1), "{name}");
    }
    assert!(control_named("nothing", &LINK).is_none());
}

#[test]
fn swift_shrinks_once_a_round_trip() {
    let mut swift = Swift::new(&LINK);
    let start = swift.window_bytes();
    for nth in 0..20 {
        swift.on_ack(&ack(100_000 + nth, 1, 1_000_000));
    }
    assert_eq!(swift.window_bytes(), start / 2, "at most half, once");
    swift.on_ack(&ack(1_200_000, 1, 1_000_000));
    assert_eq!(swift.window_bytes(), start / 4);
}

#[test]
fn swift_grows_by_a_chunk_each_round_trip() {
    let (mut swift, mut now_ns) = (Swift::new(&LINK), 0);
    let start = swift.window_bytes();
    (0..10).for_each(|_| round(&mut swift, &mut now_ns, 10_000, false));
    let chunks = (swift.window_bytes() - start) as f64 / LINK.chunk_len as f64;
    assert!((8.0..11.0).contains(&chunks), "{chunks}");
}

#[test]
fn swift_paces_less_than_a_chunk_and_waits_longer_for_small_windows() {
    let mut swift = Swift::new(&LINK);
    assert_eq!(swift.bytes_per_s(), None);
    let mut now_ns = 0;
    // A delay that is too long for a large window is none for a small one (flow scaling).
    while swift.bytes_per_s().is_none() {
        now_ns += 400_000;
        swift.on_ack(&ack(now_ns, 1, 400_000));
    }
    let rate = swift.bytes_per_s().expect("less than a chunk");
    assert!(rate < LINK.bytes_per_s / 100.0 && swift.window_bytes() < LINK.chunk_len, "{rate}");
    swift.on_ack(&ack(now_ns + 400_000, 1, 30_000));
    assert!(swift.window_bytes() >= LINK.chunk_len, "30 us are below the target of a small window");
}

#[test]
fn cubic_keeps_seven_tenths_after_a_loss() {
    let (mut cubic, mut now_ns) = (Cubic::new(&LINK), 0);
    (0..5).for_each(|_| round(&mut cubic, &mut now_ns, 10_000, false));
    let before = cubic.window_bytes();
    assert!(before >= 300 * LINK.chunk_len, "slow start doubles: {before}");
    cubic.on_loss(now_ns, 1);
    cubic.on_loss(now_ns + 1, 1);
    let part = cubic.window_bytes() as f64 / before as f64;
    assert!((0.69..0.71).contains(&part), "{part}");
    cubic.on_undo(now_ns + 2);
    assert_eq!(cubic.window_bytes(), before, "the loss was none");
}

#[test]
fn cubic_comes_back_to_the_old_window_in_the_time_of_its_formula() {
    let rtt_ns = 100_000_000;
    let (mut cubic, mut now_ns) = (Cubic::new(&LINK), 0);
    (0..6).for_each(|_| round(&mut cubic, &mut now_ns, rtt_ns, false));
    let most = cubic.window_bytes() as f64 / LINK.chunk_len as f64;
    cubic.on_loss(now_ns, 1);
    let start_ns = now_ns;
    // K, the time since the loss, not since the last acknowledgement.
    let k_s = (most * 0.3 / 0.4).cbrt();
    while (cubic.window_bytes() as f64) < 0.99 * most * LINK.chunk_len as f64 {
        round(&mut cubic, &mut now_ns, rtt_ns, false);
        assert!(now_ns < start_ns + 60_000_000_000, "it never comes back");
    }
    let took_s = (now_ns - start_ns) as f64 / 1e9;
    assert!((0.6 * k_s..1.15 * k_s).contains(&took_s), "{took_s} of {k_s}");
}

#[test]
fn timely_slows_down_above_its_high_delay_and_grows_below_the_low_one() {
    let (mut timely, mut now_ns) = (Timely::new(&LINK), 0);
    let full = timely.bytes_per_s().expect("a rate");
    for _ in 0..10 {
        now_ns += 300_000;
        timely.on_ack(&ack(now_ns, 1, 300_000));
    }
    let slow = timely.bytes_per_s().expect("a rate");
    assert!(slow < full / 4.0, "{slow}");
    for _ in 0..10 {
        now_ns += 20_000;
        timely.on_ack(&ack(now_ns, 1, 12_000));
    }
    assert!(timely.bytes_per_s().expect("a rate") > slow);
}

#[test]
fn delay_and_marks_together_decide() {
    let window = |is_marked: bool, rtt_ns: u64| {
        let (mut control, mut now_ns) = (DelayAndMarks::new(&LINK), 0);
        // From half of the largest window, so that there is room in both directions.
        control.on_loss(0, 1 << 30);
        let start = control.window_bytes() as f64;
        (0..2).for_each(|_| round(&mut control, &mut now_ns, rtt_ns, is_marked));
        control.window_bytes() as f64 / start
    };
    let (short, long) = (12_000, 60_000);
    assert!(window(false, short) > window(false, long) && window(false, long) > 1.0);
    assert_eq!(window(true, short), 1.0, "the queue is draining");
    assert!(window(true, long) < 0.8);
}

#[test]
fn one_lost_chunk_is_no_congestion() {
    let mut control = DelayAndMarks::new(&LINK);
    let start = control.window_bytes();
    control.on_loss(1_000, LINK.chunk_len);
    assert_eq!(control.window_bytes(), start);
    control.on_loss(2_000, start / 2);
    assert!(control.window_bytes() < start);
}

#[test]
fn grants_go_round_at_the_speed_of_the_link() {
    let mut pacer = CreditPacer::new(100, 10, 50);
    pacer.on_demand(1, 1_000, None);
    pacer.on_demand(2, 260, None);
    let mut grants = Vec::new();
    let mut now_ns = 5;
    while let Some(next_ns) = pacer.next_ns() {
        assert!(next_ns == 0 || pacer.poll(next_ns - 1).is_none());
        now_ns = now_ns.max(next_ns);
        grants.extend(pacer.poll(now_ns).map(|grant| (now_ns, grant.flow, grant.granted_bytes)));
    }
    assert_eq!(grants[..4], [(5, 1, 150), (15, 2, 150), (25, 1, 250), (35, 2, 250)]);
    assert_eq!(grants.iter().filter(|grant| grant.1 == 2).count(), 3);
    assert_eq!(grants.last(), Some(&(now_ns, 1, 1_050)));
}

#[test]
fn a_grant_that_was_lost_comes_again_and_grants_nothing_twice() {
    let mut pacer = CreditPacer::new(100, 10, 0);
    pacer.on_demand(1, 100, None);
    assert_eq!(pacer.poll(0), Some(Grant { flow: 1, granted_bytes: 100 }));
    assert_eq!(pacer.poll(100), None);
    pacer.on_demand(1, 100, Some(0));
    assert_eq!(pacer.poll(100), Some(Grant { flow: 1, granted_bytes: 100 }));
    assert_eq!(pacer.poll(200), None);
    let mut credits = Credits::new(0);
    // Old grants and more than 256 of them (upstream's numbers have 8 bits) do no harm.
    for granted in [100, 100, 50, 100 << 10, 300] {
        credits.on_credit(granted);
    }
    credits.on_send(0, (100 << 10) - 1);
    assert!(credits.allows(0, 4096));
    credits.on_send(0, 1);
    assert!(!credits.allows(0, 1) && credits.allows(0, 0), "an empty chunk needs no credit");
    pacer.forget(1);
    assert_eq!(pacer.next_ns(), None);
}
