use super::*;

fn paths(rtts_ns: &[u64]) -> Vec<PathState> {
    let state = |rtt_ns: &u64| PathState { can_take: true, rtt_ns: *rtt_ns, in_flight_bytes: 0 };
    rtts_ns.iter().map(state).collect()
}

fn counts(choice: &mut dyn PathChoice, paths: &[PathState], draws: usize) -> Vec<usize> {
    let mut counts = vec![0; paths.len()];
    for _ in 0..draws {
        let chosen = choice.choose(&Candidates { paths, avoid: None }).expect("a path");
        counts[chosen] += 1;
    }
    counts
}

#[test]
fn every_technique_takes_only_paths_that_may_be_taken() {
    for name in CHOICE_NAMES {
        let mut choice = choice_named(name, 4, 1).expect(name);
        let mut paths = paths(&[5, 5, 5, 5]);
        paths[2].can_take = false;
        for step in 0..200 {
            choice.on_ack(step % 4, step % 3 == 0);
            let chosen = choice.choose(&Candidates { paths: &paths, avoid: Some(1) });
            assert!(matches!(chosen, Some(0 | 3)), "{name}: {chosen:?}");
        }
        paths.iter_mut().for_each(|path| path.can_take = false);
        assert_eq!(choice.choose(&Candidates { paths: &paths, avoid: None }), None, "{name}");
        assert_eq!(choice.choose(&Candidates { paths: &[], avoid: None }), None, "{name}");
    }
    assert!(choice_named("nothing", 4, 1).is_none());
}

#[test]
fn round_robin_is_even() {
    assert_eq!(counts(&mut RoundRobin::default(), &paths(&[9, 1, 5]), 30), [10, 10, 10]);
}

#[test]
fn two_choices_prefer_the_shorter_round_trip_and_try_the_unknown() {
    let counts = counts(&mut TwoChoices::new(7), &paths(&[100, 10, 50, 0]), 4000);
    // The worst of four wins only where it is drawn twice: one draw in 16.
    assert!((150..350).contains(&counts[0]), "{counts:?}");
    assert!(counts[3] > counts[1] && counts[1] > counts[2] && counts[2] > counts[0], "{counts:?}");
}

#[test]
fn a_marked_path_loses_its_turn_once() {
    let mut choice = MarkAvoidance::new(3);
    let paths = paths(&[1, 1, 1]);
    choice.on_ack(1, true);
    let mut next = || choice.choose(&Candidates { paths: &paths, avoid: None });
    assert_eq!([next(), next(), next(), next()], [Some(0), Some(2), Some(0), Some(1)]);
    (0..3).for_each(|path| choice.on_loss(path));
    assert!(choice.choose(&Candidates { paths: &paths, avoid: None }).is_some(), "all are marked");
}

#[test]
fn a_good_entropy_is_used_again_and_a_bad_one_is_not() {
    let mut choice = RecycledEntropies::new(4);
    let paths = paths(&[1, 1, 1, 1]);
    choice.on_ack(3, false);
    choice.on_ack(2, true);
    choice.on_ack(1, false);
    choice.on_loss(1);
    let mut next = || choice.choose(&Candidates { paths: &paths, avoid: None });
    assert_eq!([next(), next(), next()], [Some(3), Some(0), Some(1)]);
}
