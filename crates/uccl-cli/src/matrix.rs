//! GPUs and NICs, each with each: how one reaches the other.

use std::fmt::Write;

use uccl_device::{
    InterfaceKind, MachineGpu, NearNic, NicKind, PciAddress, PciDistance, Place, Topology,
    cuda::GpuLink,
};

use crate::units::gib;

const LEGEND: &str = "  X itself, NVL NVLink, PIX at most one PCIe switch between, PXB several switches, PHB one host bridge,
  NODE host bridges of one NUMA node, SYS across NUMA nodes, ? unknown
  * the NIC that the GPU uses first, ! no peer access: copies go through the host's memory
";

/// A NIC's column.
struct Column<'a> {
    kind: NicKind,
    name: &'a str,
    head: String,
}

/// The table and its legend; empty on a machine without GPUs.
pub(crate) fn matrix(topology: &Topology, gpus: &[MachineGpu]) -> String {
    if gpus.is_empty() {
        return String::new();
    }
    let mut rows = rows(topology, gpus);
    rows.insert(0, head(topology, gpus));
    let mut out = String::from("\nGPUs and NICs\n");
    out.push_str(&aligned(&rows));
    out.push_str(LEGEND);
    for gpu in gpus {
        let _ = writeln!(out, "  {}", line(gpu));
    }
    out
}

/// A GPU's label: its CUDA ordinal, or its PCI address if this process does not see it.
pub(crate) fn label(gpu: &MachineGpu) -> String {
    match gpu.ordinal {
        Some(ordinal) => format!("GPU{ordinal}"),
        None => gpu.pci.to_string(),
    }
}

fn columns(topology: &Topology) -> Vec<Column<'_>> {
    let is_rdma = |pci: Option<PciAddress>| {
        let mut active = topology.rdma.iter().filter(|device| device.is_active());
        pci.is_some() && active.any(|device| device.pci == pci)
    };
    let head = |name: &str, up: bool| if up { name.to_owned() } else { format!("{name}(down)") };
    let rdma = topology.rdma.iter().map(|device| Column {
        kind: NicKind::Rdma,
        name: &device.name,
        head: head(&device.name, device.is_active()),
    });
    // A NIC that is both is one device: once is enough.
    let interfaces = topology
        .interfaces
        .iter()
        .filter(|interface| interface.kind == InterfaceKind::Physical && !is_rdma(interface.pci));
    let interfaces = interfaces.map(|interface| Column {
        kind: NicKind::Interface,
        name: &interface.name,
        head: head(&interface.name, interface.is_up()),
    });
    rdma.chain(interfaces).collect()
}

fn head(topology: &Topology, gpus: &[MachineGpu]) -> Vec<String> {
    let nics = columns(topology).into_iter().map(|column| column.head);
    let last = ["NUMA", "CPUs"].map(str::to_owned);
    let first = [String::new()].into_iter().chain(gpus.iter().map(label));
    first.chain(nics).chain(last).collect()
}

fn rows(topology: &Topology, gpus: &[MachineGpu]) -> Vec<Vec<String>> {
    let columns = columns(topology);
    let row = |gpu: &MachineGpu| {
        let links = gpus.iter().map(|other| link(topology, gpu, other));
        let nearest = topology.nearest_nic(Place::Device(gpu.pci));
        let nics = columns.iter().map(|column| to_nic(gpu, column, nearest.as_ref()));
        let node = gpu.numa_node.map_or_else(|| "?".to_owned(), |node| node.to_string());
        let cpus = if gpu.cpus.is_empty() { "?".to_owned() } else { gpu.cpus.to_string() };
        [label(gpu)].into_iter().chain(links).chain(nics).chain([node, cpus]).collect()
    };
    gpus.iter().map(row).collect()
}

fn link(topology: &Topology, gpu: &MachineGpu, other: &MachineGpu) -> String {
    if gpu.pci == other.pci && gpu.ordinal == other.ordinal {
        return "X".to_owned();
    }
    let distance = word(topology.distance(gpu.pci, other.pci));
    let ordinal = other.ordinal.and_then(|ordinal| usize::try_from(ordinal).ok());
    match ordinal.and_then(|ordinal| *gpu.links.get(ordinal)?) {
        Some(GpuLink::Nvlink) => "NVL".to_owned(),
        Some(GpuLink::None) => format!("{distance}!"),
        _ => distance,
    }
}

fn to_nic(gpu: &MachineGpu, column: &Column<'_>, nearest: Option<&NearNic>) -> String {
    let nics = if column.kind == NicKind::Rdma { &gpu.rdma } else { &gpu.interfaces };
    let nic = nics.iter().find(|nic| nic.name == column.name);
    let distance = word(nic.and_then(|nic| nic.distance));
    let first =
        nearest.is_some_and(|nic| (nic.kind, nic.name.as_str()) == (column.kind, column.name));
    if first { format!("{distance}*") } else { distance }
}

fn word(distance: Option<PciDistance>) -> String {
    distance.map_or_else(|| "?".to_owned(), |distance| distance.to_string())
}

/// Lays out cells in columns, two spaces apart.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column| rows.iter().filter_map(|row| row.get(column)).map(String::len).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "  {}", line.trim_end());
    }
    out
}

fn line(gpu: &MachineGpu) -> String {
    let parts = [
        gpu.ordinal.map(|_| gpu.pci.to_string()),
        gpu.name.clone().filter(|name| !name.is_empty()),
        gpu.memory_bytes.map(|bytes| gib(bytes as u64)),
        gpu.capability.map(|capability| format!("capability {capability}")),
        gpu.uuid.map(|uuid| uuid.to_string()),
        gpu.ordinal.is_none().then(|| "not seen by this process".to_owned()),
    ];
    let parts: Vec<_> = [label(gpu)].into_iter().chain(parts.into_iter().flatten()).collect();
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::examples::{Machine, two};

    fn rows_of(machine: &Machine, visible: &[uccl_device::cuda::VisibleGpu]) -> Vec<String> {
        let topology = machine.read();
        let text = matrix(&topology, &topology.machine_gpus(visible));
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).collect()
    }

    #[test]
    fn gpus_and_nics_meet_in_one_word_each() {
        let machine = Machine::two_sockets();
        let rows = rows_of(&machine, &two(GpuLink::Nvlink).visible);
        assert_eq!(rows[2], "GPU0 GPU1 mlx5_0 mlx5_1 NUMA CPUs");
        assert_eq!(rows[3], "GPU0 X NVL PHB* SYS 0 0-3");
        assert_eq!(rows[4], "GPU1 NVL X SYS PHB* 1 4-7");
        assert!(rows.iter().any(|row| row.starts_with("GPU1 0000:80:00.0 NVIDIA Imagined")));
    }

    #[test]
    fn the_matrix_marks_a_nic_that_is_down_and_gpus_without_peer_access() {
        let machine = Machine::two_sockets();
        machine.port(1, "1: DOWN");
        let rows = rows_of(&machine, &two(GpuLink::None).visible);
        assert_eq!(rows[2], "GPU0 GPU1 mlx5_0 mlx5_1(down) NUMA CPUs");
        assert_eq!(rows[3], "GPU0 X SYS! PHB* SYS 0 0-3");
        assert_eq!(rows[4], "GPU1 SYS! X SYS* PHB 1 4-7");
    }

    #[test]
    fn gpus_that_this_process_does_not_see_are_there_by_address() {
        let machine = Machine::two_sockets();
        let rows = rows_of(&machine, &two(GpuLink::Pcie).visible[1..]);
        // The driver shows one GPU only: the second one.
        assert!(rows[2].starts_with("GPU1 0000:10:00.0 mlx5_0"), "{rows:?}");
        assert!(rows.last().is_some_and(|row| row.ends_with("not seen by this process")));
        assert_eq!(rows_of(&Machine::new(), &[]), Vec::<String>::new());
    }
}
