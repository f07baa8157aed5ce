//! Bytes from a peer that mean harm: addresses and keys.

use std::cell::RefCell;

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use uccl_fabric::rail::{MAX_ADDRESS, Rail};
use uccl_wire::libfabric::FabricAddress;

use crate::pair::{Memory, Pair, for_each_provider, open, pattern};

for_each_provider!(
    any_bytes_as_an_address_are_refused_or_lead_nowhere,
    addresses_of_others_are_refused,
    any_bytes_as_a_key_are_refused_or_useless,
);

/// How many addresses are tried; each makes a channel.
const CASES: u32 = 60;

fn runner() -> TestRunner {
    TestRunner::new(Config { cases: CASES, failure_persistence: None, ..Config::default() })
}

/// Connects to this address and probes the channel. It need not work, but nothing may crash or
/// hang.
fn go_there(rail: &dyn Rail, address: &[u8]) {
    let mut channel = rail.open().expect("an end");
    if channel.connect(address).is_err() || channel.probe(1).is_err() {
        return;
    }
    for _ in 0..20 {
        if channel.poll(&mut Vec::new()).is_err() {
            return;
        }
        std::thread::yield_now();
    }
}

fn any_bytes_as_an_address_are_refused_or_lead_nowhere(provider: &str) {
    if provider == "shm" {
        return eprintln!(
            "skipped: shm lacks doubt: it crashes over the name of an end that is gone"
        );
    }
    let Some(rail) = open(provider) else { return };
    let sound = rail.open().expect("an end").address().to_vec();
    assert!(sound.len() <= MAX_ADDRESS);
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let result = runner().run(&(changes, any::<prop::sample::Index>()), |(changes, cut)| {
        let mut bytes = sound.clone();
        for (at, byte) in &changes {
            *at.get_mut(&mut bytes) = *byte;
        }
        go_there(&rail, &bytes);
        go_there(&rail, &bytes[..cut.index(bytes.len())]);
        Ok(())
    });
    result.expect("no address is too much");
    for bytes in [&[][..], &[0; 16], &[0xff; MAX_ADDRESS]] {
        assert!(rail.open().expect("an end").connect(bytes).is_err());
    }
    // An endpoint's name of any bytes, in an address that is otherwise sound.
    let whole = FabricAddress::decode(&sound).expect("our own");
    let names = prop::collection::vec(any::<u8>(), whole.name.len()..=whole.name.len());
    let result = runner().run(&names, |name| {
        go_there(&rail, &FabricAddress { name: &name, ..whole }.encode().expect("sound"));
        Ok(())
    });
    result.expect("no name is too much");
}

fn addresses_of_others_are_refused(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let sound = rail.open().expect("an end").address().to_vec();
    let whole = FabricAddress::decode(&sound).expect("our own");
    let long = [whole.name, &[1]].concat();
    for strange in [
        FabricAddress { provider: "cxi", ..whole },
        FabricAddress { format: whole.format ^ 1, ..whole },
        FabricAddress { name: &whole.name[..whole.name.len() - 1], ..whole },
        FabricAddress { name: &long, ..whole },
        FabricAddress { name: &vec![0; whole.name.len()], ..whole },
        FabricAddress { probe_key: b"what", ..whole },
    ] {
        let bytes = strange.encode().expect("sound");
        let refused = rail.open().expect("an end").connect(&bytes);
        assert!(refused.is_err(), "{strange:?}");
    }
}

fn any_bytes_as_a_key_are_refused_or_useless(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let channel = RefCell::new(&mut pair.a.channel);
    let result = runner().run(&prop::collection::vec(any::<u8>(), 0..300), |bytes| {
        let imported = channel.borrow_mut().import(&bytes);
        prop_assert_eq!(imported.is_ok(), bytes.len() == 9 && bytes[0] == 1);
        Ok(())
    });
    result.expect("keys are told from others");
    // The channel has not suffered.
    let (ours, theirs) = (Memory::new(&rail, 100, pattern), Memory::new(&rail, 100, |_| 0));
    let one = pair.request(uccl_fabric::lane::OpKind::Read, &ours, &theirs);
    pair.run(&[one]).expect("it goes");
    assert!(ours.bytes.iter().all(|byte| *byte == 0));
}
