//! A library's offers, and the errors for a provider or a domain that it does not offer.

use uccl_fabric::{
    lane::OpKind,
    rail::{Rail, RailError},
};
use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings, Threading, offers};

use crate::pair::{Memory, Pair, open_with, pattern, settings};

fn refused(settings: &LibfabricSettings) -> Option<String> {
    match LibfabricRail::open_all(settings) {
        Err(RailError::Unavailable(why)) if why.contains("libfabric cannot be loaded") => {
            eprintln!("skipped: {why}");
            None
        }
        Err(RailError::Unavailable(why)) => Some(why),
        Err(other) => panic!("{other}"),
        Ok(rails) => panic!("{} rails where there should be none", rails.len()),
    }
}

#[test]
fn a_provider_that_is_absent_is_named_beside_those_that_are_there() {
    for (ask, remedy) in [
        (LibfabricSettings::cxi(), "Slingshot"),
        (LibfabricSettings::efa(), "Elastic Fabric Adapter"),
        (LibfabricSettings { provider: Some("nonsense".into()), ..settings("") }, "fi_info -l"),
    ] {
        let ask = LibfabricSettings { library: settings("").library, ..ask };
        let Some(why) = refused(&ask) else { return };
        assert!(why.contains(remedy) && why.contains("It has "), "{why}");
    }
}

#[test]
fn a_domain_that_is_absent_is_named_beside_those_that_are_there() {
    let Some(rail) = open_with(&settings("tcp;ofi_rxm")) else { return };
    assert_eq!(rail.info().name, "lo");
    let named = Devices::Named(vec!["lo".into(), "nowhere0".into()]);
    let ask = LibfabricSettings { devices: named, ..settings("tcp;ofi_rxm") };
    let why = refused(&ask).expect("the library is there");
    assert!(why.contains("no domain nowhere0") && why.contains("lo"), "{why}");
    let ask = LibfabricSettings { devices: Devices::Index(99), ..settings("tcp;ofi_rxm") };
    let why = refused(&ask).expect("the library is there");
    assert!(why.contains("no device 99"), "{why}");
}

#[test]
fn each_domain_is_one_rail_and_loopback_only_where_there_is_no_other() {
    let all = LibfabricSettings { devices: Devices::All, ..settings("tcp;ofi_rxm") };
    let rails = match LibfabricRail::open_all(&all) {
        Ok(rails) => rails,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let mut names: Vec<_> = rails.iter().map(|rail| rail.info().name.clone()).collect();
    assert!(names == ["lo"] || !names.contains(&"lo".to_owned()), "{names:?}");
    for rail in &rails {
        let info = rail.info();
        assert_eq!(info.link, "libfabric:tcp;ofi_rxm");
        assert!(info.network.is_empty() || info.network.contains('/'), "{info:?}");
    }
    names.dedup();
    assert_eq!(names.len(), rails.len());
    for gpu in 0..3 {
        let one = LibfabricSettings { devices: Devices::ForGpu(gpu), ..all.clone() };
        let one = LibfabricRail::open_all(&one).expect("one of them");
        assert_eq!(one[0].info(), rails[gpu % rails.len()].info());
        assert_eq!(one.len(), 1);
    }
}

#[test]
fn offers_are_listed_in_words() {
    let listing = match offers(&settings("")) {
        Ok(listing) => listing,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    assert!(listing.version >= (1, 15));
    let tcp = |offer: &&uccl_libfabric::Offer| {
        offer.provider.starts_with("tcp") && offer.endpoint_type == "rdm"
    };
    let Some(tcp) = listing.offers.iter().find(tcp) else {
        return eprintln!("skipped: the library lacks tcp");
    };
    assert!(tcp.caps.contains(&"rma") && tcp.address.is_some(), "{tcp:?}");
}

#[test]
fn one_lock_a_rail_will_do_as_well() {
    let ask = LibfabricSettings { threading: Threading::Domain, ..settings("tcp;ofi_rxm") };
    let Some(rail) = open_with(&ask) else { return };
    let mut pair = Pair::new(&rail);
    let (ours, theirs) = (Memory::new(&rail, 5000, pattern), Memory::new(&rail, 5000, |_| 0));
    let one = pair.request(OpKind::Write, &ours, &theirs);
    pair.run(&[one]).expect("it goes");
    assert!(ours.bytes == theirs.bytes);
}

#[test]
fn the_best_provider_moves_bytes() {
    let ask = LibfabricSettings { provider: None, devices: Devices::All, ..settings("") };
    let Some(rail) = open_with(&ask) else { return };
    assert!(!rail.info().link.contains("shm"), "{:?}", rail.info());
    let mut pair = Pair::new(&rail);
    let (ours, theirs) = (Memory::new(&rail, 5000, pattern), Memory::new(&rail, 5000, |_| 0));
    let one = pair.request(OpKind::Write, &ours, &theirs);
    pair.run(&[one]).expect("it goes");
    assert!(ours.bytes == theirs.bytes);
}
