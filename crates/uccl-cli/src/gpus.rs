//! The state of CUDA's driver, as values that a test can construct.

use std::env;

use uccl_device::{
    GpuVendor, Topology,
    cuda::{self, DriverError, VisibleGpu},
};

/// The GPUs that this process sees, or why there are none.
#[derive(Default)]
pub(crate) struct Gpus {
    pub(crate) visible: Vec<VisibleGpu>,
    /// Why the driver cannot be used; nothing if it can.
    pub(crate) unusable: Option<DriverError>,
    /// The CUDA version that the driver supports.
    pub(crate) version: Option<(u32, u32)>,
    /// `CUDA_VISIBLE_DEVICES`, if it is set.
    pub(crate) mask: Option<String>,
}

impl Gpus {
    /// Loads the driver and queries it.
    pub(crate) fn look() -> Self {
        let gpus = cuda::Gpus::get();
        Self {
            visible: gpus.facts(),
            unusable: gpus.unusable().cloned(),
            version: gpus.driver_version(),
            mask: env::var("CUDA_VISIBLE_DEVICES").ok(),
        }
    }

    /// The GPUs of another machine: none, because its driver cannot be queried.
    pub(crate) fn elsewhere() -> Self {
        let why = "the driver of another machine cannot be asked".to_owned();
        Self { unusable: Some(DriverError::Unwanted(why)), ..Self::default() }
    }

    /// The reason why no GPU can be used, on a machine that has some.
    pub(crate) fn why_none(&self, topology: &Topology) -> String {
        match &self.unusable {
            Some(_) if topology.gpus.iter().all(|gpu| gpu.vendor == GpuVendor::Amd) => {
                "AMD's GPUs are not used yet".to_owned()
            }
            Some(why) => why.to_string(),
            None => "the driver shows none to this process".to_owned(),
        }
    }
}

/// Machines for tests: a tree of files in place of the kernel's, and answers of a driver.
#[cfg(test)]
pub(crate) mod examples {
    use std::{
        fs,
        os::unix::fs::symlink,
        path::{Path, PathBuf},
    };

    use tempfile::TempDir;
    use uccl_device::{
        Topology,
        cuda::{DriverError, Failure, GpuLink, GpuUuid, VisibleGpu},
    };

    use super::Gpus;

    pub(crate) struct Machine(TempDir);

    impl Machine {
        pub(crate) fn new() -> Self {
            Self(TempDir::new().expect("a temporary folder"))
        }

        /// Two sockets with a GPU and an RDMA device each, side by side below a host bridge.
        pub(crate) fn two_sockets() -> Self {
            let machine = Self::new();
            for (node, bus) in [(0, "10"), (1, "80")] {
                let folder = format!("sys/devices/system/node/node{node}");
                machine
                    .file(format!("{folder}/cpulist"), &format!("{}-{}", node * 4, node * 4 + 3));
                machine.device(
                    &format!("pci0000:{bus}/0000:{bus}:00.0"),
                    "0x030200",
                    "0x10de",
                    node,
                );
                let way = format!("pci0000:{bus}/0000:{bus}:02.0");
                let nic = machine.device(&way, "0x020000", "0x15b3", node);
                let rdma = nic.join("infiniband").join(format!("mlx5_{node}"));
                machine.file(rdma.join("ports/1/state"), "4: ACTIVE");
                machine.link(rdma.join("device"), Path::new("../.."));
                let class = format!("sys/class/infiniband/mlx5_{node}");
                machine.link(class, &machine.0.path().join(rdma));
            }
            machine
        }

        /// Sets the port state of a socket's RDMA device.
        pub(crate) fn port(&self, node: u32, state: &str) {
            let port = format!("sys/class/infiniband/mlx5_{node}/ports/1/state");
            self.file(port, state);
        }

        /// Makes a socket's RDMA device a network interface too.
        pub(crate) fn interface(&self, node: u32, name: &str) {
            let bus = if node == 0 { "10" } else { "80" };
            let device = format!("sys/devices/pci0000:{bus}/0000:{bus}:02.0");
            let folder = format!("{device}/net/{name}");
            self.file(format!("{folder}/operstate"), "up");
            self.link(format!("{folder}/device"), Path::new("../.."));
            self.link(format!("sys/class/net/{name}"), &self.0.path().join(&folder));
        }

        /// Takes away a device's NUMA node.
        pub(crate) fn homeless(&self, pci: &str) {
            self.file(format!("sys/bus/pci/devices/{pci}/numa_node"), "-1");
        }

        pub(crate) fn read(&self) -> Topology {
            Topology::read(self.0.path()).expect("a topology")
        }

        fn device(&self, way: &str, class: &str, vendor: &str, node: u32) -> PathBuf {
            let folder = Path::new("sys/devices").join(way);
            for (name, text) in [("class", class), ("vendor", vendor), ("device", "0x2330")] {
                self.file(folder.join(name), text);
            }
            self.file(folder.join("numa_node"), &node.to_string());
            let address = folder.file_name().expect("an address").to_owned();
            let device = self.0.path().join(&folder);
            self.link(Path::new("sys/bus/pci/devices").join(address), &device);
            folder
        }

        fn file(&self, path: impl AsRef<Path>, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, text).expect("a file");
        }

        fn link(&self, path: impl AsRef<Path>, to: &Path) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            symlink(to, path).expect("a link");
        }
    }

    /// The two GPUs of such a machine, joined by `link`.
    pub(crate) fn two(link: GpuLink) -> Gpus {
        let gpu = |ordinal: u32, pci: &str| {
            let address = pci.parse().expect("an address");
            let mut gpu = VisibleGpu::new(ordinal, GpuUuid([ordinal as u8 + 1; 16]), address);
            gpu.links = vec![Some(link); 2];
            gpu.links[ordinal as usize] = Some(GpuLink::Itself);
            gpu.name = "NVIDIA Imagined".to_owned();
            gpu
        };
        let visible = vec![gpu(0, "0000:10:00.0"), gpu(1, "0000:80:00.0")];
        Gpus { visible, version: Some((12, 4)), ..Gpus::default() }
    }

    /// A driver that gives this error.
    pub(crate) fn refusing(code: i32) -> Gpus {
        let failure = Failure { code, name: "CUDA_ERROR_SOMETHING", text: "something" };
        let library = "libcuda.so.1".to_owned();
        let unusable = Some(DriverError::Refused { library, failure, version: 12040 });
        Gpus { unusable, ..Gpus::default() }
    }

    pub(crate) fn no_library() -> Gpus {
        let why = "libcuda.so.1: cannot open shared object file".to_owned();
        Gpus { unusable: Some(DriverError::NoLibrary(why)), ..Gpus::default() }
    }
}
