//! Findings on GPUs: reasons why they cannot be used, or are slow.

use uccl_device::{
    GpuVendor, NearNic, NicKind, NicState, Place, Topology,
    cuda::{DriverError, Failure, GpuLink},
};

use super::{Finding, Level};
use crate::{gpus::Gpus, matrix::label};

const CUDA: &str = "libcuda.so.1";
/// The oldest CUDA with drivers that take the kernels.
const OLDEST: (u32, u32) = (12, 1);
const UPDATE: &str = "update the NVIDIA driver to 530 or later (CUDA 12.1)";
const UNUSED: &str = "GPU memory cannot be used";
const IN_CONTAINER: &str =
    "in a container, run with --gpus all (docker, podman: nvidia-container-toolkit on the host)";

pub(super) fn examine(topology: &Topology, gpus: &Gpus) -> Vec<Finding> {
    let mut findings = vec![on_bus(topology, gpus), driver(topology, gpus)];
    findings.extend(visible(topology, gpus));
    findings.extend(peers(gpus));
    findings.extend(nodes(topology, gpus));
    findings.extend(nics(topology, gpus));
    findings
}

fn nvidia(topology: &Topology) -> usize {
    topology.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia).count()
}

fn on_bus(topology: &Topology, gpus: &Gpus) -> Finding {
    const ABOUT: &str = "GPUs";
    match (topology.gpus.len(), gpus.visible.len()) {
        (0, 0) => Finding::new(ABOUT, Level::Note, "none").cost("host memory alone can be moved"),
        (count, 0) if nvidia(topology) == 0 => {
            Finding::new(ABOUT, Level::Note, format!("{count} of AMD's"))
                .cost("AMD's GPUs are not used yet: host memory alone can be moved")
        }
        (0, seen) => Finding::fine(ABOUT, format!("{seen}, which the PCI bus does not show")),
        (count, _) => Finding::fine(ABOUT, format!("{count}")),
    }
}

fn driver(topology: &Topology, gpus: &Gpus) -> Finding {
    const ABOUT: &str = "CUDA";
    let level = if nvidia(topology) > 0 { Level::Slow } else { Level::Note };
    let broken =
        |seen: String, remedy: String| Finding::new(ABOUT, level, seen).cost(UNUSED).remedy(remedy);
    match (&gpus.unusable, gpus.version) {
        (Some(DriverError::NoLibrary(_) | DriverError::Unwanted(_)), _) if level == Level::Note => {
            Finding::new(ABOUT, Level::Note, format!("{CUDA} is not there; no GPU needs it"))
        }
        (Some(DriverError::NoLibrary(why)), _) => broken(
            format!("there are GPUs, but no driver ({why})"),
            format!("install the NVIDIA driver; {IN_CONTAINER}"),
        ),
        (Some(why @ DriverError::Incomplete { .. }), _) => broken(why.to_string(), UPDATE.into()),
        (Some(DriverError::Refused { failure, version, .. }), _) => {
            broken(format!("the driver does not start: {failure}"), cure(failure, *version))
        }
        (Some(why), _) => broken(why.to_string(), "see nvidia-smi and dmesg".into()),
        (None, Some((major, minor))) if (major, minor) < OLDEST => {
            let seen = format!("the driver is for CUDA {major}.{minor}");
            Finding::new(ABOUT, Level::Slow, seen)
                .cost("many small pieces of GPU memory are copied one by one, and newer ways to share it are missing")
                .remedy(UPDATE)
        }
        (None, Some((major, minor))) => {
            Finding::fine(ABOUT, format!("the driver works, for CUDA {major}.{minor}"))
        }
        (None, None) => Finding::fine(ABOUT, "the driver works"),
    }
}

/// The common cause of a driver's failure to start, by its error (`CUresult`).
fn cure(failure: &Failure, version: i32) -> String {
    let common = match failure.code {
        34 => {
            "the library is the toolkit's stub: take the folder stubs out of LD_LIBRARY_PATH".into()
        }
        46 => "another process has the GPU for itself: nvidia-smi -c DEFAULT".into(),
        100 => format!(
            "the driver is given no GPU: see nvidia-smi, CUDA_VISIBLE_DEVICES and /dev/nvidia*; {IN_CONTAINER}"
        ),
        101 => "a GPU was lost or is in MIG mode without instances: see nvidia-smi -L".into(),
        304 => "the kernel refuses a call: see the rights of /dev/nvidia*, the container's device \
                rules, and ulimit -v and -l"
            .into(),
        802 => "GPUs joined by NVSwitch need the fabric manager: systemctl start \
                nvidia-fabricmanager, of the driver's own version; in a VM the host runs it. Right \
                after boot, wait"
            .into(),
        803 => format!(
            "{CUDA} and the kernel's driver are of different versions: reboot after an update, or \
             rebuild the container for this host's driver"
        ),
        804 => {
            "a compatibility library (cuda-compat) is in the way, which these GPUs do not take: \
                take it out of LD_LIBRARY_PATH, or update the driver"
                .into()
        }
        999 => "nvidia-uvm is mostly what is missing: modprobe nvidia-uvm (or nvidia-modprobe -u \
                -c=0), and /dev/nvidia-uvm in the container; after suspend, load it anew; else see \
                dmesg for Xid"
            .into(),
        _ => "see nvidia-smi and dmesg".into(),
    };
    match u32::try_from(version) {
        Ok(version @ 1..) if (version / 1000, version % 1000 / 10) < OLDEST => {
            format!("{common}; and {UPDATE}")
        }
        _ => common,
    }
}

/// Finds an entry of `CUDA_VISIBLE_DEVICES` that names no GPU.
fn visible(topology: &Topology, gpus: &Gpus) -> Option<Finding> {
    const ABOUT: &str = "CUDA_VISIBLE_DEVICES";
    const REMEDY: &str =
        "unset it, or name GPUs as nvidia-smi -L does: by number from 0, or by UUID";
    let mask = gpus.mask.as_deref()?;
    let all = nvidia(topology);
    // A driver that cannot run at all does not check the list.
    let ran = match &gpus.unusable {
        None => true,
        Some(DriverError::Refused { failure, .. }) => failure.code == 100,
        Some(_) => false,
    };
    if !ran || all == 0 && gpus.visible.is_empty() {
        return None;
    }
    let entries: Vec<_> = mask.split(',').map(str::trim).collect();
    let seen = gpus.visible.len();
    let finding = |what: String| Finding::new(ABOUT, Level::Slow, what).remedy(REMEDY);
    Some(match entries.get(seen) {
        _ if seen == 0 && (mask.trim().is_empty() || entries[0].starts_with('-')) => {
            finding(format!("{mask:?} hides all {all} GPUs")).cost(UNUSED)
        }
        Some(_) if seen == 0 && entries.len() > 1 => {
            finding(format!("{mask:?} names no GPU at first, or one twice: all {all} are hidden"))
                .cost(UNUSED)
        }
        Some(first) if seen == 0 => {
            finding(format!("{first:?} is no GPU of the {all} here: all are hidden")).cost(UNUSED)
        }
        Some(unknown) => {
            finding(format!("{unknown:?} is no GPU here, and ends the list after {seen}"))
                .cost("the GPUs from there on are hidden")
        }
        None => Finding::fine(ABOUT, format!("{seen} of {all} GPUs")),
    })
}

/// Which GPUs do not reach each other's memory.
fn peers(gpus: &Gpus) -> Option<Finding> {
    const ABOUT: &str = "GPU peer access";
    let pairs = gpus.visible.iter().flat_map(|gpu| {
        let later = (0_u32..).zip(&gpu.links).filter(move |(other, _)| *other > gpu.ordinal);
        let apart = later.filter(|(_, link)| **link == Some(GpuLink::None));
        apart.map(move |(other, _)| format!("{}-{other}", gpu.ordinal))
    });
    let pairs: Vec<_> = pairs.collect();
    match (gpus.visible.len(), pairs.is_empty()) {
        (0 | 1, _) => None,
        (_, true) => Some(Finding::fine(ABOUT, "every GPU reaches every other")),
        (_, false) => Some(
            Finding::new(ABOUT, Level::Slow, format!("none between GPUs {}", pairs.join(", ")))
                .cost("copies between them go through the host's memory, at half the rate or less")
                .remedy(
                    "nvidia-smi topo -p2p r says why; between sockets or on GeForce cards there \
                     may be none, else turn off ACS and the IOMMU for their switches, and give a \
                     VM all GPUs of an NVSwitch",
                ),
        ),
    }
}

/// Finds GPUs with an unknown NUMA node.
fn nodes(topology: &Topology, gpus: &Gpus) -> Option<Finding> {
    const ABOUT: &str = "GPU NUMA nodes";
    let all = topology.machine_gpus(&gpus.visible);
    if all.is_empty() || topology.numa_nodes.len() < 2 {
        return None;
    }
    let unknown: Vec<_> = all.iter().filter(|gpu| gpu.numa_node.is_none()).map(label).collect();
    Some(match unknown.is_empty() {
        true => Finding::fine(ABOUT, "known"),
        false => Finding::new(ABOUT, Level::Slow, format!("unknown of {}", unknown.join(", ")))
            .cost("threads and pinned memory cannot be put on their side of the machine")
            .remedy(
                "/sys/bus/pci/devices/<address>/numa_node says -1: set NUMA (ACPI SRAT) in the \
                 BIOS; in a VM, attach GPUs to the virtual node of their socket; or start the \
                 program under numactl",
            ),
    })
}

/// Which GPUs have a NIC near to them that is down, while a farther one serves.
fn nics(topology: &Topology, gpus: &Gpus) -> Option<Finding> {
    const ABOUT: &str = "NICs near GPUs";
    let kind = match topology.rdma.iter().any(|device| device.pci.is_some()) {
        true => NicKind::Rdma,
        false => NicKind::Interface,
    };
    let all = topology.machine_gpus(&gpus.visible);
    let missed = all.iter().filter_map(|gpu| {
        let nics = topology.nics_near(Place::Device(gpu.pci), kind);
        let (nearest, used) = nearer_and_down(&nics)?;
        let used = used.map_or_else(|| "nothing".to_owned(), |nic| nic.name.clone());
        Some((
            format!("{} near {}, which uses {used}", nearest.name, label(gpu)),
            nearest.name.clone(),
        ))
    });
    let (seen, mut names): (Vec<_>, Vec<_>) = missed.unzip();
    names.sort();
    names.dedup();
    let any = all.iter().any(|gpu| topology.nearest_nic(Place::Device(gpu.pci)).is_some());
    match (seen.is_empty(), any) {
        (true, false) => None,
        (true, true) => Some(Finding::fine(ABOUT, "the nearest are up")),
        (false, _) => Some(
            Finding::new(ABOUT, Level::Slow, format!("down: {}", seen.join("; ")))
                .cost("that GPU's data crosses the machine to a farther NIC")
                .remedy(match kind {
                    NicKind::Rdma => format!(
                        "see rdma link and ibstat for {}: cable, switch port, subnet manager",
                        names.join(", ")
                    ),
                    _ => format!("ip link set {} up, and see its cable", names.join(" and ")),
                }),
        ),
    }
}

/// The nearest NIC that is down, if no NIC that is up is as near; and the NIC in use instead.
fn nearer_and_down(nics: &[NearNic]) -> Option<(&NearNic, Option<&NearNic>)> {
    let used = nics.iter().find(|nic| nic.state == NicState::Up);
    let on_bus = |nic: &&NearNic| nic.state == NicState::Down && nic.pci.is_some();
    let down = nics.iter().filter(on_bus).filter(|nic| nic.distance.is_some());
    let down = down.min_by_key(|nic| nic.distance)?;
    let nearer = used.and_then(|used| used.distance).is_none_or(|used| down.distance < Some(used));
    nearer.then_some((down, used))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::examples::{Machine, no_library, refusing, two};

    fn find(findings: &[Finding], about: &str) -> Option<Finding> {
        findings.iter().find(|finding| finding.about == about).cloned()
    }

    fn finding(machine: &Machine, gpus: &Gpus, about: &str) -> Finding {
        let findings = examine(&machine.read(), gpus);
        find(&findings, about).unwrap_or_else(|| panic!("nothing about {about}: {findings:?}"))
    }

    #[test]
    fn a_good_machine_has_nothing_to_say() {
        let findings = examine(&Machine::two_sockets().read(), &two(GpuLink::Nvlink));
        assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:?}");
        assert_eq!(findings.len(), 5);
    }

    #[test]
    fn a_machine_without_gpus_misses_no_driver() {
        let findings = examine(&Machine::new().read(), &no_library());
        assert!(findings.iter().all(|finding| finding.level == Level::Note), "{findings:?}");
        assert_eq!(findings.len(), 2);
    }

    #[test]
    fn gpus_without_a_driver_are_told_with_the_remedy_for_containers() {
        let cuda = finding(&Machine::two_sockets(), &no_library(), "CUDA");
        assert_eq!(cuda.level, Level::Slow);
        assert!(
            cuda.seen.contains("libcuda.so.1") && cuda.remedy.contains("--gpus all"),
            "{cuda:?}"
        );
    }

    #[test]
    fn the_remedy_for_a_driver_that_does_not_start_names_the_usual_lack() {
        for (code, word) in [
            (34, "stub"),
            (100, "--gpus all"),
            (802, "nvidia-fabricmanager"),
            (803, "versions"),
            (804, "cuda-compat"),
            (999, "nvidia-uvm"),
            (12345, "dmesg"),
        ] {
            let cuda = finding(&Machine::two_sockets(), &refusing(code), "CUDA");
            assert_eq!(cuda.level, Level::Slow);
            assert!(cuda.remedy.contains(word), "{cuda:?}");
            assert!(cuda.seen.contains(&format!("CUDA_ERROR_SOMETHING ({code})")), "{cuda:?}");
            assert!(!cuda.remedy.contains(UPDATE));
        }
    }

    #[test]
    fn an_old_driver_is_to_be_updated() {
        let machine = Machine::two_sockets();
        let old = Gpus { version: Some((11, 8)), ..two(GpuLink::Nvlink) };
        assert_eq!(finding(&machine, &old, "CUDA").remedy, UPDATE);
        let incomplete =
            DriverError::Incomplete { library: CUDA.into(), reason: "it has no cuX".into() };
        let older = Gpus { unusable: Some(incomplete), ..Gpus::default() };
        assert_eq!(finding(&machine, &older, "CUDA").remedy, UPDATE);
        let mut refusing = refusing(999);
        if let Some(DriverError::Refused { version, .. }) = &mut refusing.unusable {
            *version = 11080;
        }
        assert!(finding(&machine, &refusing, "CUDA").remedy.contains(UPDATE));
    }

    #[test]
    fn a_list_that_hides_gpus_is_told() {
        let machine = Machine::two_sockets();
        let masked = |mut gpus: Gpus, mask: &str, seen: usize| {
            gpus.visible.truncate(seen);
            gpus.mask = Some(mask.to_owned());
            finding(&machine, &gpus, "CUDA_VISIBLE_DEVICES")
        };
        for (mask, word) in [("", "hides all 2"), ("-1", "hides all 2"), ("7", "\"7\" is no GPU")] {
            let hidden = masked(refusing(100), mask, 0);
            assert!(hidden.level == Level::Slow && hidden.seen.contains(word), "{hidden:?}");
            assert!(!hidden.remedy.is_empty());
        }
        assert!(masked(refusing(100), "1,1", 0).seen.contains("one twice"));
        let cut = masked(two(GpuLink::Nvlink), "1,9,0", 1);
        assert!(cut.level == Level::Slow && cut.seen.contains("\"9\""), "{cut:?}");
        assert_eq!(masked(two(GpuLink::Nvlink), "1,0", 2).level, Level::Fine);
        // Without a driver that ran there is no finding, and without a list none is needed.
        let other = Gpus { mask: Some("7".into()), ..refusing(802) };
        assert_eq!(find(&examine(&machine.read(), &other), "CUDA_VISIBLE_DEVICES"), None);
    }

    #[test]
    fn gpus_that_do_not_reach_each_other_are_named() {
        let peers = finding(&Machine::two_sockets(), &two(GpuLink::None), "GPU peer access");
        assert_eq!((peers.level, peers.seen.as_str()), (Level::Slow, "none between GPUs 0-1"));
        assert!(peers.remedy.contains("ACS"));
        let by_bus = finding(&Machine::two_sockets(), &two(GpuLink::Pcie), "GPU peer access");
        assert_eq!(by_bus.level, Level::Fine);
    }

    #[test]
    fn a_gpu_without_a_node_is_named_where_there_are_several() {
        let machine = Machine::two_sockets();
        machine.homeless("0000:80:00.0");
        let nodes = finding(&machine, &two(GpuLink::Pcie), "GPU NUMA nodes");
        assert_eq!((nodes.level, nodes.seen.as_str()), (Level::Slow, "unknown of GPU1"));
    }

    #[test]
    fn the_nearest_nic_that_is_down_is_named_with_its_substitute() {
        let machine = Machine::two_sockets();
        machine.port(1, "1: DOWN");
        let nics = finding(&machine, &two(GpuLink::Pcie), "NICs near GPUs");
        assert_eq!(nics.level, Level::Slow);
        assert_eq!(nics.seen, "down: mlx5_1 near GPU1, which uses mlx5_0");
        assert!(nics.remedy.contains("mlx5_1"));
        machine.port(0, "1: DOWN");
        let nics = finding(&machine, &two(GpuLink::Pcie), "NICs near GPUs");
        assert!(nics.seen.contains("mlx5_0 near GPU0, which uses nothing"), "{nics:?}");
    }
}
