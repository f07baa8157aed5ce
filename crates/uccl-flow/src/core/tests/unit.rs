//! Single rules of scheduler and inbox.

use uccl_wire::flow::{FlowHead, HeadKind};

use super::sim::params;
use crate::core::{Action, Inbox, Scheduler, Verdict};

fn chunk(message: u64, offset: u64, len: u64, total: u64) -> FlowHead {
    FlowHead { kind: HeadKind::Chunk, tag: 0, flow: 1, message, total, offset, len }
}

#[test]
fn a_repeat_is_dropped_before_and_after_the_end() {
    let mut inbox = Inbox::new(10, 20);
    inbox.post(20);
    let (first, second) = (chunk(0, 0, 10, 15), chunk(0, 10, 5, 15));
    assert_eq!(inbox.begin_landing(&first), Verdict::Land);
    assert!(!inbox.end_landing(&first, true));
    assert_eq!(inbox.begin_landing(&first), Verdict::Repeat);
    assert_eq!(inbox.begin_landing(&second), Verdict::Land);
    assert_eq!(inbox.begin_landing(&second), Verdict::Land, "two streams may carry it");
    assert!(!inbox.end_landing(&second, true), "the other still lands");
    assert!(inbox.is_landing());
    assert!(inbox.end_landing(&second, false));
    assert_eq!(inbox.begin_landing(&second), Verdict::Repeat, "the message has ended");
}

#[test]
fn a_peer_that_breaks_the_rules_is_seen() {
    let mut inbox = Inbox::new(10, 20);
    assert_eq!(inbox.begin_landing(&chunk(0, 0, 10, 100)), Verdict::Early);
    inbox.keep_early(chunk(0, 0, 10, 100), vec![0; 10].into());
    inbox.keep_early(chunk(0, 10, 10, 100), vec![0; 10].into());
    assert!(matches!(inbox.begin_landing(&chunk(0, 20, 10, 100)), Verdict::Wrong(_)));
    assert!(matches!(inbox.begin_landing(&chunk(0, 5, 10, 100)), Verdict::Wrong(_)));
    assert!(matches!(inbox.begin_landing(&chunk(0, 0, 9, 100)), Verdict::Wrong(_)));
    inbox.post(99);
    assert_eq!(inbox.begin_landing(&chunk(0, 0, 10, 100)), Verdict::TooLong { room: 99 });
    inbox.post(100);
    assert_eq!(inbox.begin_landing(&chunk(1, 0, 10, 100)), Verdict::Land);
    assert!(matches!(inbox.begin_landing(&chunk(1, 10, 10, 90)), Verdict::Wrong(_)));
}

#[test]
fn acknowledgements_that_cannot_be_are_refused() {
    let mut scheduler = Scheduler::new(params(1));
    scheduler.open(0, 0);
    scheduler.push(1, 0, 100, 0, 0);
    assert!(!scheduler.on_ack(0, 1, 0), "nothing is under way");
    assert!(scheduler.next(0, 0).is_some());
    assert!(scheduler.on_ack(0, 1, 50));
    assert!(!scheduler.on_ack(0, 0, 50), "it goes back");
    assert_eq!(scheduler.next_action(), Some(Action::Sent { flow: 1, message: 0 }));
}

#[test]
fn a_flow_that_is_forgotten_is_not_sent_again() {
    let mut scheduler = Scheduler::new(params(2));
    scheduler.open(0, 0);
    scheduler.open(1, 0);
    scheduler.push(1, 0, 100, 0, 0);
    assert!(scheduler.next(0, 0).is_some());
    scheduler.forget(1);
    scheduler.lose(0);
    assert_eq!(scheduler.next(1, 10), None);
    assert!(!scheduler.has_work());
}

#[test]
fn chunks_of_a_stream_that_stands_still_go_over_another_that_has_work() {
    let params = params(2);
    let mut scheduler = Scheduler::new(params);
    scheduler.open(0, 0);
    scheduler.open(1, 0);
    scheduler.push(1, 0, 1000 * params.chunk_len, 0, 0);
    scheduler.on_posted(1, 1);
    let first = scheduler.next(0, 0).expect("a chunk");
    let mut count = 0;
    for now_us in (0..params.late_us).step_by(100) {
        scheduler.on_time(now_us);
        let part = scheduler.next(1, now_us).expect("a chunk");
        assert!(!part.is_repeat, "at {now_us} us");
        count += 1;
        assert!(scheduler.on_ack(1, count, now_us));
    }
    let now_us = params.late_us;
    scheduler.on_time(now_us);
    assert_eq!(scheduler.next(0, now_us), None, "it gets no more");
    let part = scheduler.next(1, now_us).expect("a chunk");
    assert_eq!((part.offset, part.is_repeat), (first.offset, true));
    scheduler.on_time(params.dead_us);
    assert_eq!(scheduler.next_action(), Some(Action::Replace { stream: 0 }));
}

#[test]
fn a_stream_that_does_not_answer_is_passed_over_and_replaced() {
    let params = params(2);
    let mut scheduler = Scheduler::new(params);
    scheduler.open(0, 0);
    scheduler.open(1, 0);
    scheduler.on_asked(0, 1000);
    scheduler.on_asked(1, 1000);
    assert!(scheduler.has_work(), "it waits for the answer");
    assert!(scheduler.on_ack(1, 0, 1500), "a ping is answered by the same number");
    let now_us = 1000 + params.late_us;
    scheduler.on_time(now_us);
    scheduler.push(1, 0, 10 * params.chunk_len, 0, now_us);
    assert_eq!(scheduler.next(0, now_us), None);
    assert!(scheduler.next(1, now_us).is_some());
    scheduler.on_time(1000 + params.dead_us);
    assert_eq!(scheduler.next_action(), Some(Action::Replace { stream: 0 }));
}

#[test]
fn a_stream_that_is_passed_over_names_its_stand_in() {
    let params = params(2);
    let mut scheduler = Scheduler::new(params);
    scheduler.open(0, 0);
    scheduler.open(1, 0);
    scheduler.push(1, 0, 1000 * params.chunk_len, 0, 0);
    scheduler.on_posted(1, 1);
    assert!(scheduler.next(1, 0).is_some());
    let mut count = 0;
    for now_us in (0..20_000).step_by(500) {
        assert!(scheduler.next(0, now_us).is_some());
        count += 1;
        assert!(scheduler.on_ack(0, count, now_us + 400));
    }
    assert!(scheduler.on_ack(1, 1, 20_000));
    assert!(scheduler.next(1, 20_100).is_some(), "it is tried now and then");
    assert_eq!(scheduler.next(1, 20_200), None);
    assert_eq!((scheduler.stand_in(1, 20_200), scheduler.best()), (Some(0), Some(0)));
    assert!(scheduler.next(0, 20_200).is_some());
}
