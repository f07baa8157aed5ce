//! Files that stand for a machine.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use uccl_device::Topology;

/// Files that stand for a machine.
pub(crate) struct Machine {
    root: TempDir,
}

struct Device<'a> {
    /// From the host bridge down: `pci0000:10/0000:10:01.0/0000:11:00.0`.
    way: &'a str,
    class: &'a str,
    vendor: &'a str,
    numa_node: &'a str,
    driver: &'a str,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self { root: TempDir::new().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.path().join(path)
    }

    pub(crate) fn file(&self, path: impl AsRef<Path>, text: &str) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
        fs::write(path, format!("{text}\n")).expect("a file");
        self
    }

    pub(crate) fn link(&self, path: impl AsRef<Path>, to: impl AsRef<Path>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
        symlink(to, path).expect("a link");
        self
    }

    /// Makes a PCI device and returns its folder.
    fn device(&self, device: &Device<'_>) -> PathBuf {
        let folder = Path::new("sys/devices").join(device.way);
        let address = folder.file_name().expect("an address");
        self.file(folder.join("class"), device.class)
            .file(folder.join("vendor"), device.vendor)
            .file(folder.join("device"), "0x2330")
            .file(folder.join("numa_node"), device.numa_node)
            .link(folder.join("driver"), Path::new("/bus/pci/drivers").join(device.driver))
            .link(Path::new("sys/bus/pci/devices").join(address), self.path(&folder));
        folder
    }

    /// Two sockets with a GPU each, and `eth0` on the first.
    pub(crate) fn of_two_sockets() -> Self {
        let machine = Self::new();
        machine.numa_node(0, "0-3", "10 21");
        machine.numa_node(1, "4-7", "21 10");
        machine.gpu("pci0000:10/0000:10:00.0", "0");
        machine.gpu("pci0000:80/0000:80:00.0", "1");
        machine.nic("pci0000:10/0000:10:02.0", "0", "eth0");
        machine
    }

    pub(crate) fn gpu(&self, way: &str, numa_node: &str) -> PathBuf {
        let (class, vendor, driver) = ("0x030200", "0x10de", "nvidia");
        self.device(&Device { way, class, vendor, numa_node, driver })
    }

    pub(crate) fn nic(&self, way: &str, numa_node: &str, name: &str) -> PathBuf {
        let (class, vendor, driver) = ("0x020000", "0x15b3", "mlx5_core");
        let device = self.device(&Device { way, class, vendor, numa_node, driver });
        let folder = device.join("net").join(name);
        self.file(folder.join("type"), "1")
            .file(folder.join("mtu"), "9000")
            .file(folder.join("speed"), "400000")
            .file(folder.join("operstate"), "up")
            .link(folder.join("device"), "../..")
            .link(Path::new("sys/class/net").join(name), self.path(&folder));
        device
    }

    pub(crate) fn rdma(&self, device: &Path, name: &str, state: &str) {
        let folder = device.join("infiniband").join(name);
        self.file(folder.join("ports/1/state"), state)
            .file(folder.join("ports/1/rate"), "400 Gb/sec (4X NDR)")
            .file(folder.join("ports/1/link_layer"), "InfiniBand")
            .link(folder.join("device"), "../..")
            .link(Path::new("sys/class/infiniband").join(name), self.path(&folder));
    }

    /// An address of a port, as a RoCE device lists it.
    pub(crate) fn gid(&self, device: &str, index: u32, gid: (&str, &str, &str)) {
        let (address, kind, interface) = gid;
        let port = PathBuf::from(format!("sys/class/infiniband/{device}/ports/1"));
        self.file(port.join(format!("gids/{index}")), address)
            .file(port.join(format!("gid_attrs/types/{index}")), kind)
            .file(port.join(format!("gid_attrs/ndevs/{index}")), interface);
    }

    pub(crate) fn numa_node(&self, id: u32, cpus: &str, distance: &str) {
        let folder = PathBuf::from(format!("sys/devices/system/node/node{id}"));
        let memory = format!("Node {id} MemTotal:       1048576 kB\nNode {id} MemFree:  1 kB");
        self.file(folder.join("cpulist"), cpus)
            .file(folder.join("meminfo"), &memory)
            .file(folder.join("distance"), distance);
    }

    pub(crate) fn read(&self) -> Topology {
        Topology::read(self.root.path()).expect("a topology")
    }

    /// Another speed for a network interface.
    pub(crate) fn speed(&self, nic: &Path, name: &str, mbps: u32) -> &Self {
        self.file(nic.join("net").join(name).join("speed"), &mbps.to_string())
    }

    /// The entry of NVIDIA's driver for a GPU.
    pub(crate) fn in_driver(&self, pci: &str, uuid: &str) -> &Self {
        let text =
            format!("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}");
        self.file(format!("proc/driver/nvidia/gpus/{pci}/information"), &text)
    }
}
