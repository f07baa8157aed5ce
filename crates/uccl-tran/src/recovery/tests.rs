use super::*;

const PATH: PathProgress = PathProgress {
    largest: 10,
    newest_sent_ns: 5_000,
    rtt_ns: 1_000,
    least_rtt_ns: 800,
    smoothed_rtt_ns: 1_000,
};

fn attempt(number: u64, sent_ns: u64) -> AttemptView {
    AttemptView { number, sent_ns }
}

#[test]
fn order_proves_and_takes_no_time() {
    let detection = OrderDetection::new(2);
    assert_eq!(detection.judge(&attempt(7, 4_000), &PATH, 0), Fate::Lost);
    assert_eq!(detection.judge(&attempt(8, 4_000), &PATH, u64::MAX), Fate::Waits);
}

#[test]
fn time_waits_for_reordering_and_longer_after_a_mistake() {
    let mut detection = TimeDetection::default();
    let judge =
        |detection: &TimeDetection, now_ns| detection.judge(&attempt(3, 4_500), &PATH, now_ns);
    assert_eq!(judge(&detection, 5_600), Fate::LostAt(5_700));
    assert_eq!(judge(&detection, 5_700), Fate::Lost);
    detection.on_undo(0);
    assert_eq!(judge(&detection, 5_700), Fate::LostAt(5_900));
    (0..20).for_each(|_| detection.on_undo(0));
    assert_eq!(judge(&detection, 5_700), Fate::LostAt(6_500), "at most a round trip");
    (0..16).for_each(|_| detection.on_round());
    assert_eq!(judge(&detection, 5_700), Fate::Lost);
    let newer = attempt(11, 5_001);
    assert_eq!(detection.judge(&newer, &PATH, u64::MAX), Fate::Waits, "nothing newer has come");
}

#[test]
fn probes_into_a_silence_come_ever_more_seldom() {
    let probe = TailProbe { least_ns: 100, most_ns: 10_000 };
    assert_eq!(probe.after_ns(10, 2, 7, 0), 100);
    assert_eq!(probe.after_ns(200, 50, 100, 0), 500);
    assert_eq!(probe.after_ns(200, 50, 100, 3), 4_000);
    assert_eq!(probe.after_ns(200, 50, 100, 200), 10_000);
}
