//! The driver's report on each GPU, and the ways from one name to another.

use uccl_device::{Topology, cuda::Gpus};

use crate::support::{Peer, gpus};

#[test]
fn ordinal_uuid_and_pci_address_lead_to_each_other() {
    if gpus(1).is_none() {
        return;
    }
    let all = Gpus::get();
    let machine = Topology::of_this_machine().expect("a machine");
    for device in all.devices() {
        let same = |found: Option<&uccl_device::cuda::Device>| {
            assert_eq!(found.map(|found| found.ordinal()), Some(device.ordinal()));
        };
        same(all.by_uuid(device.uuid()));
        same(all.by_pci(device.pci()));
        same(all.device(device.ordinal()).ok());
        assert_eq!(device.uuid().to_string().parse(), Ok(device.uuid()));
        assert!(device.multiprocessors() > 0 && device.memory_bytes() > 1 << 30);
        assert!(device.capability().major >= 5);
        let on_bus = machine.gpus.iter().find(|gpu| gpu.pci == device.pci());
        println!(
            "GPU {}: {}, {}, PCI {} ({}), NUMA node {:?}, capability {}, {} SMs, {} copy engines",
            device.ordinal(),
            device.name(),
            device.uuid(),
            device.pci(),
            if on_bus.is_some() { "in sysfs" } else { "not in sysfs" },
            device.numa_node(),
            device.capability(),
            device.multiprocessors(),
            device.copy_engines(),
        );
    }
    println!("driver: CUDA {:?}", all.driver_version());
    let count = all.devices().len() as u32;
    let error = all.device(count).expect_err("out of range").to_string();
    assert!(error.contains(&count.to_string()), "{error}");
}

#[test]
fn hidden_and_reordered_gpus_keep_their_uuids() {
    if gpus(2).is_none() {
        return;
    }
    let ours: Vec<_> = Gpus::get().devices().iter().map(|d| d.uuid().to_string()).collect();
    let shown = |visible: &str| {
        let peer = Peer::start_with("list", &[("CUDA_VISIBLE_DEVICES", visible)]);
        let list = String::from_utf8(peer.hear()).expect("text");
        peer.finish();
        list.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(shown(&format!("{},{}", ours[1], ours[0])), [ours[1].clone(), ours[0].clone()]);
    assert_eq!(shown(&ours[1]), [ours[1].clone()]);
    assert_eq!(shown("-1"), ["none"]);
}

/// In the other process.
pub(crate) fn list(peer: &Peer) {
    let uuids: Vec<_> = Gpus::get().devices().iter().map(|d| d.uuid().to_string()).collect();
    assert_eq!(uuids.is_empty(), Gpus::get().why_none().is_some());
    peer.say(if uuids.is_empty() { "none".to_owned() } else { uuids.join("\n") }.as_bytes());
}
