//! Memory that is named by its address, over links that misbehave, while its owner ends and
//! registers it anew.

use fastrand::Rng;
use uccl_chaos::{RailFaults, each_seed};

use super::{
    PATIENT, some_lanes,
    world::{ByRails, Memory, Side, join},
};
use crate::{AddressPiece, AddressRequest, Error, MrId, NoInterrupt, Op, Outcome, Result, Status};

const LEN: usize = 30_000;

/// Two ends, joined by lanes or by rails.
fn sides(seed: u64, rng: &mut Rng) -> [Side; 2] {
    if seed.is_multiple_of(2) {
        let count = rng.usize(1..4);
        return join(seed, &some_lanes(rng, count), PATIENT);
    }
    let faults = RailFaults {
        delay_polls: [0, 3][rng.usize(0..2)],
        chunk_bytes: [4096, 64 << 10][rng.usize(0..2)],
        reorder: rng.bool(),
        keys_of_channels: rng.bool(),
        ..RailFaults::default()
    };
    ByRails::new(&[faults]).join(seed)
}

fn pieces(local: &Memory, remote: &Memory) -> Vec<AddressPiece> {
    let step = LEN.div_ceil(7);
    let piece = |at: usize| AddressPiece {
        local: local.addr() + at,
        remote: (remote.addr() + at) as u64,
        len: step.min(LEN - at),
    };
    (0..LEN).step_by(step).map(piece).collect()
}

fn publish(side: &Side, memory: &Memory) -> MrId {
    let mr = side.register(memory);
    side.ep.publish(mr).expect("it may");
    mr
}

fn run(side: &Side, op: Op, pieces: &[AddressPiece]) -> Result<Outcome> {
    let request = AddressRequest { conn: side.conn, op, pieces, timeout: None };
    side.ep.run_by_address(&request, &mut NoInterrupt)
}

#[test]
fn memory_is_found_as_often_as_it_is_registered() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut sides = sides(seed, &mut rng);
        let mut memory = || Memory::new(&mut rng, &[LEN]);
        let [local, remote, other] = [memory(), memory(), memory()];
        let _ours = sides[0].register(&local);
        let pieces = pieces(&local, &remote);
        for round in 0..3 {
            let mr = publish(&sides[1], &remote);
            run(&sides[0], Op::Write, &pieces).expect("published");
            assert!(remote.now()[..LEN] == local.now()[..LEN], "round {round}");
            sides[1].ep.deregister(mr).expect("unused");
            // Another region takes its slot, and an unpublished one its addresses.
            let others = [&other, &remote].map(|memory| sides[1].register(memory));
            let before = (other.now(), remote.now());
            let refused = run(&sides[0], Op::Write, &pieces);
            assert!(matches!(refused, Err(Error::NotPublished { .. })), "{refused:?}");
            assert!((other.now(), remote.now()) == before, "a byte of a refused write landed");
            others.iter().for_each(|mr| sides[1].ep.deregister(*mr).expect("unused"));
        }
        sides.iter_mut().for_each(Side::leave);
    });
}

#[test]
fn a_look_up_ends_with_its_connection() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut sides = sides(seed, &mut rng);
        let [local, remote] = [(); 2].map(|()| Memory::new(&mut rng, &[LEN]));
        let _both = (sides[0].register(&local), publish(&sides[1], &remote));
        let pieces = pieces(&local, &remote);
        let request =
            AddressRequest { conn: sides[0].conn, op: Op::Read, pieces: &pieces, timeout: None };
        let posted = sides[0].ep.post_by_address(&request).expect("posted");
        sides[1].connection().fail(sides[1].connection().lost_to("cut"));
        let ended = posted.wait(Some(PATIENT), &mut NoInterrupt).expect("ours");
        let is_lost = matches!(ended, Status::Failed(Error::ConnectionLost { .. }));
        assert!(is_lost || matches!(ended, Status::Done(_)), "{ended:?}");
        let later = run(&sides[0], Op::Read, &pieces);
        assert!(matches!(later, Err(Error::ConnectionLost { .. })), "{later:?}");
        sides.iter_mut().for_each(Side::leave);
    });
}
