//! The places of GPUs, beside the bus's report, and memory near to them.

use uccl_device::{
    DeviceOrder, Place, Topology,
    affinity::allowed_cpus,
    cuda::{DeviceBuffer, Direction, GpuLink, Gpus, PinnedBuffer, VisibleDevices},
    numa::node_at,
};

use crate::support::{Peer, gpus, pattern, stream};

fn machine() -> Topology {
    Topology::of_this_machine().expect("a machine")
}

#[test]
fn the_bus_knows_the_drivers_order() {
    if gpus(1).is_none() {
        return;
    }
    let topology = machine();
    let visible = VisibleDevices::of_this_process();
    let Some(guess) = topology.cuda_order(&visible, DeviceOrder::of_this_process()) else {
        eprintln!("skipped: the_bus_knows_the_drivers_order: lacks GPUs of one model");
        return;
    };
    let devices = Gpus::get().devices();
    let known: Vec<_> = devices.iter().map(|device| device.pci()).collect();
    assert_eq!(guess.iter().map(|gpu| gpu.pci).collect::<Vec<_>>(), known);
    for (gpu, device) in guess.iter().zip(devices) {
        assert!(gpu.uuid.is_none_or(|uuid| uuid == device.uuid()), "{gpu:?} is not {device:?}");
        assert_eq!(topology.gpu_address(device.ordinal()), Some(device.pci()));
    }
}

#[test]
fn the_bus_knows_the_order_of_those_that_are_visible() {
    if gpus(2).is_none() {
        return;
    }
    let devices = Gpus::get().devices();
    let uuids = format!("{},{}", devices[1].uuid(), devices[0].uuid());
    for visible in ["1,0", "1", "-1", &uuids] {
        let peer = Peer::start_with("order", &[("CUDA_VISIBLE_DEVICES", visible)]);
        let said = String::from_utf8(peer.hear()).expect("text");
        peer.finish();
        let (guess, driver) = said.split_once(';').expect("two lists");
        // Without the driver's list in /proc, UUIDs give no order.
        assert!(guess == driver || guess.is_empty() && visible == uuids, "{visible}: {said}");
    }
}

/// In the other process: the order before the driver is asked, and the driver's.
pub(crate) fn order(peer: &Peer) {
    let topology = machine();
    assert!(Gpus::in_use().is_none(), "nobody has used a GPU yet");
    let addresses = (0..).map_while(|ordinal| topology.gpu_address(ordinal));
    let guess: Vec<_> = addresses.map(|pci| pci.to_string()).collect();
    let devices = Gpus::get().devices().iter();
    let driver: Vec<_> = devices.map(|device| device.pci().to_string()).collect();
    peer.say(format!("{};{}", guess.join(","), driver.join(",")).as_bytes());
}

#[test]
fn links_are_mutual_and_agree_with_peer_access() {
    if gpus(2).is_none() {
        return;
    }
    let devices = Gpus::get().devices();
    let facts = Gpus::get().facts();
    for (a, gpu) in facts.iter().enumerate() {
        println!("GPU {a} ({}): {:?}", gpu.pci, gpu.links);
        for (b, other) in facts.iter().enumerate() {
            let link = gpu.links[b].expect("the driver says");
            assert_eq!(Some(link), other.links[a]);
            assert_eq!(link == GpuLink::Itself, a == b);
            let reached = a == b || devices[a].can_access(&devices[b]).expect("an answer");
            assert_eq!(link != GpuLink::None, reached);
        }
    }
    let joined = machine().machine_gpus(&facts);
    assert!(joined.len() >= facts.len());
    for gpu in &joined {
        println!("{gpu:?}");
    }
}

#[test]
fn pinned_memory_is_near_and_copied() {
    let Some(contexts) = gpus(1) else { return };
    let before = allowed_cpus();
    for context in contexts {
        let bytes = pattern(7, (4 << 20) + 17);
        let mut buffer = PinnedBuffer::near(context, bytes.len()).expect("pinned memory");
        assert!(buffer.address().is_multiple_of(4096));
        assert_eq!(buffer.len_bytes(), bytes.len());
        // SAFETY: nobody else has it.
        let slice = unsafe { buffer.as_mut_slice() };
        assert!(slice.iter().all(|byte| *byte == 0));
        slice.copy_from_slice(&bytes);
        match (
            machine().node_of(Place::Device(context.device().pci())),
            node_at(buffer.address() as usize),
        ) {
            (Some(wanted), Some(got)) => assert_eq!(got, wanted),
            (wanted, got) => {
                eprintln!(
                    "skipped: node of pinned memory: lacks a node ({wanted:?}) or move_pages ({got:?})"
                );
            }
        }
        let back = PinnedBuffer::near(context, bytes.len()).expect("pinned memory");
        let (from, to) = (buffer.address(), back.address());
        let device = DeviceBuffer::new(context, bytes.len()).expect("memory");
        let stream = stream(context);
        // SAFETY: all live until the stream has been waited for.
        unsafe {
            stream
                .copy(device.address(), from, bytes.len(), Direction::HostToDevice)
                .expect("a copy");
            stream
                .copy(to, device.address(), bytes.len(), Direction::DeviceToHost)
                .expect("a copy");
        }
        stream.synchronize().expect("it ends well");
        // SAFETY: the copies have ended.
        assert!(unsafe { back.as_slice() } == bytes);
    }
    assert_eq!(allowed_cpus(), before);
}
