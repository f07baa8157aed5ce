//! Cables that may be cut: those of a guest, and spare ones that a test makes and removes with
//! their devices.

use std::{env, fs, path::Path, process::Command};

use uccl_p2p::TransferId;

use crate::ends::{Way, devices, until};

/// A transfer is in its middle when this many bytes have crossed a cable.
const SOME_BYTES: u64 = 256 << 10;

/// Runs iproute2; returns whether it succeeded.
fn tell(words: &str) -> bool {
    let mut words = words.split(' ');
    let run = Command::new(words.next().expect("a program")).args(words).status();
    run.expect("iproute2").success()
}

fn must(words: &str) {
    assert!(tell(words), "{words}");
}

/// Whether an interface is in our network namespace.
fn is_here(interface: &str) -> bool {
    Path::new("/sys/class/net").join(interface).exists()
}

/// The namespace of the other ends, if they have their own.
fn other_netns() -> Option<String> {
    let file = env::var("RDMA_VM_PEER_NETNS").ok()?;
    Some(Path::new(&file).file_name()?.to_str()?.to_owned())
}

/// A network cable between two RDMA devices, by its interfaces.
#[derive(Clone)]
pub(crate) struct Cable {
    pub(crate) ends: [String; 2],
}

impl Cable {
    /// A cable of the guest; `None` elsewhere.
    pub(crate) fn of_guest(rail: usize) -> Option<Self> {
        let end = |variable| {
            let name = devices(variable, rail + 1).get(rail)?.replace("rxe", "rail");
            (is_here(&name) || name.starts_with("rail") && other_netns().is_some()).then_some(name)
        };
        Some(Self { ends: [end("RDMA_VM_DEVS")?, end("RDMA_VM_PEER_DEVS")?] })
    }

    pub(crate) fn set(&self, end: usize, state: &str) {
        let name = &self.ends[end];
        match other_netns().filter(|_| !is_here(name)) {
            Some(netns) => must(&format!("ip -n {netns} link set {name} {state}")),
            None => must(&format!("ip link set {name} {state}")),
        }
    }

    /// The bytes that have crossed the cable in both directions; in one, if the other end is in
    /// another namespace.
    pub(crate) fn bytes(&self) -> u64 {
        let of = |end: &String| {
            let path = format!("/sys/class/net/{end}/statistics/tx_bytes");
            fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok())
        };
        self.ends.iter().filter_map(of).sum()
    }

    /// Waits until a part of a transfer has crossed the cable; returns whether the transfer is
    /// still pending.
    pub(crate) fn until_used(&self, before: u64, way: Way<'_>, id: TransferId) -> bool {
        until("use of the cable", || self.bytes() >= before + SOME_BYTES || !way.is_pending(id));
        way.is_pending(id)
    }

    /// Whether bytes have crossed the cable since `before` was read.
    pub(crate) fn is_used(&self, before: u64) -> bool {
        self.bytes() >= before + SOME_BYTES
    }
}

/// A cable with soft-RoCE devices for one test, in a guest.
pub(crate) struct Spare {
    pub(crate) cable: Cable,
    pub(crate) devices: [String; 2],
}

impl Spare {
    /// Makes a cable. Prints a line and returns `None` if that would change the machine.
    pub(crate) fn plug() -> Option<Self> {
        let alone = env::var("RDMA_VM_GUESTS").is_ok_and(|count| count == "1");
        if !alone || !devices("RDMA_VM_DEVS", 1).iter().any(|name| name.starts_with("rxe")) {
            eprintln!("skipped: no device that may be removed (cargo xtask guest has some)");
            return None;
        }
        let cable = Cable { ends: ["spare_a", "spare_b"].map(str::to_owned) };
        must("ip link add spare_a type veth peer name spare_b");
        for (number, end) in (1..).zip(&cable.ends) {
            must(&format!("ip link set {end} address 02:77:00:00:fe:0{number} mtu 4200"));
            must(&format!("ip link set {end} up"));
            must(&format!("ip addr add 10.77.254.{number}/24 dev {end}"));
            must(&format!("rdma link add rxe_{end} type rxe netdev {end}"));
        }
        let devices = cable.ends.clone().map(|end| format!("rxe_{end}"));
        until("the ports of a new cable", || devices.iter().all(|device| is_active(device)));
        Some(Self { cable, devices })
    }

    /// Removes the device of one end, even if it is in use.
    pub(crate) fn remove_device(&self, end: usize) {
        must(&format!("rdma link del {}", self.devices[end]));
    }

    /// Removes the cable, and with it the devices of both ends.
    pub(crate) fn remove(&self) {
        must(&format!("ip link del {}", self.cable.ends[0]));
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if is_here(&self.cable.ends[0]) {
            tell(&format!("ip link del {}", self.cable.ends[0]));
        }
        until("the end of the devices", || {
            let there = |name: &String| Path::new("/sys/class/infiniband").join(name).exists();
            !self.devices.iter().any(there)
        });
    }
}

fn is_active(device: &str) -> bool {
    let state = format!("/sys/class/infiniband/{device}/ports/1/state");
    fs::read_to_string(state).is_ok_and(|state| state.contains("ACTIVE"))
}
