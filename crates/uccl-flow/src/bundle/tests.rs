//! Threads that a message wakes.

use uccl_wire::flow::HeadKind;

use super::*;

fn bundle(bells: &[Arc<Bell>]) -> Bundle {
    let peer = Peer { instance: 1, addr: None, device: "lo".into() };
    let target = Target {
        peer,
        key: [0; 16],
        pairs: Pairs { routes: Vec::new(), spare: 0, is_local: true },
    };
    Bundle::new(target, &Settings::default(), bells.to_vec(), Arc::default())
}

#[test]
fn each_chunk_wakes_another_thread() {
    let bells: Vec<_> = (0..4).map(|_| Arc::new(Bell::new().expect("an eventfd"))).collect();
    let bundle = bundle(&bells);
    let data = vec![0; 128 << 10];
    (0..8).for_each(|stream| bundle.on_open(stream));
    bundle.add(1);
    for message in 0..4 {
        let (kind, total) = (HeadKind::Message, data.len() as u64);
        let head = FlowHead { kind, tag: 0, flow: 1, message, total, offset: 0, len: total };
        bundle.push(&head, Span::of(&data), message as usize, &Arc::default()).expect("room");
        let rung = bells.iter().filter(|bell| bell.is_rung()).count();
        assert_eq!(rung as u64, message + 1);
    }
}
