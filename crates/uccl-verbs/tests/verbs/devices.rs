//! The properties of devices, and the messages where there are none.

use std::env;

use uccl_device::GidKind;
use uccl_fabric::rail::{Rail, RailError};
use uccl_verbs as verbs;
use uccl_verbs::VerbsSettings;

use crate::support::Rails;

fn refusal(settings: VerbsSettings) -> String {
    match verbs::open(&settings) {
        Err(RailError::Unavailable(why)) => why,
        Err(error) => panic!("{error:?}"),
        Ok(rails) => panic!("{} rails", rails.len()),
    }
}

#[test]
fn devices_are_listed_with_their_ports() {
    let Some(rails) = Rails::shared() else { return };
    let devices = verbs::list(None).expect("a list");
    let name = rails.a.info().name.clone();
    let (device, port) = name.split_once(':').expect("device:port");
    let device = devices.iter().find(|listed| listed.name == device).expect("listed");
    let port = &device.ports[port.parse::<usize>().expect("a number") - 1];
    assert!(port.is_active && port.state == "ACTIVE", "{port:?}");
    assert!((256..=4096).contains(&port.mtu_bytes), "{port:?}");
    assert!(!port.gids.is_empty(), "{port:?}");
    assert!(rails.a.is_up());
}

#[test]
fn the_list_describes_the_guests_devices() {
    if !env::var("RDMA_VM_DEVS").is_ok_and(|devices| devices.starts_with("rxe0a")) {
        return eprintln!("skipped: lacks a guest with soft-RoCE");
    }
    let devices = verbs::list(None).expect("a list");
    let device = devices.iter().find(|device| device.name == "rxe0a").expect("rxe0a");
    assert!(device.is_software && device.pci.is_none() && device.unusable.is_none());
    let port = &device.ports[0];
    assert_eq!((port.mtu_bytes, port.speed_mbps, port.interfaces()), (4096, None, vec!["rail0a"]));
    let gid = &port.gids[1];
    let ip = gid.address.to_canonical().to_string();
    assert_eq!((gid.kind, ip.as_str()), (Some(GidKind::RoceV2), "10.77.0.1"));
    let rails = Rails::shared().expect("rails");
    let info = rails.b.info();
    assert_eq!((info.network.as_str(), info.name.as_str()), ("10.77.0.0/24", "rxe0b:1"));
}

#[test]
fn devices_that_are_not_there_are_named() {
    let Some(rails) = Rails::shared() else { return };
    let named = |name: &str| VerbsSettings {
        devices: vec![name.parse().expect("a name")],
        ..VerbsSettings::default()
    };
    let said = refusal(named("mlx5_77"));
    assert!(said.contains("no RDMA device mlx5_77; devices here: "), "{said}");
    let good = rails.a.info().name.parse().expect("a name");
    let bad = "mlx5_77".parse().expect("a name");
    let both = VerbsSettings { devices: vec![bad, good], ..VerbsSettings::default() };
    let opened = verbs::open(&both).expect("one of the two is there");
    let names: Vec<_> = opened.iter().map(|rail| rail.info().name.as_str()).collect();
    assert_eq!(names, [rails.a.info().name.as_str()]);
    let settings = VerbsSettings { gid_index: Some(250), ..VerbsSettings::default() };
    assert!(refusal(settings).contains("no GID at index 250; it has 0: "));
    let settings = VerbsSettings { service_level: 16, ..VerbsSettings::default() };
    assert!(refusal(settings).contains("service level"));
}

/// Runs everywhere: a machine without RDMA gets a message with the remedy.
#[test]
fn a_machine_without_rdma_names_the_library_that_it_lacks() {
    let settings =
        VerbsSettings { library: Some("libno-such.so.1".to_owned()), ..Default::default() };
    let said = refusal(settings);
    assert!(said.contains("libno-such.so.1") && said.contains("install"), "{said}");
    match verbs::open(&VerbsSettings::default()) {
        Ok(rails) => assert!(!rails.is_empty()),
        Err(RailError::Unavailable(why)) => eprintln!("no RDMA here: {why}"),
        Err(error) => panic!("{error:?}"),
    }
}
