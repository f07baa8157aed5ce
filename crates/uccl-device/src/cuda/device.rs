//! A GPU, as the driver reports it.

mod context;

use std::{
    ffi::{CStr, c_char},
    fmt,
    path::Path,
    sync::{Mutex, OnceLock, PoisonError},
};

pub use self::context::{Context, Current};
pub(crate) use self::context::{LoadKernels, LoadedKernels};
use super::{
    driver::Driver,
    error::GpuError,
    link::GpuLink,
    raw::{DeviceId, Uuid, device_attribute, peer_attribute},
    uuid::GpuUuid,
};
use crate::{pci::PciAddress, source::Source};

/// A GPU's compute capability, which defines the code that it can execute: 9.0 for Hopper.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Capability {
    /// The number before the point.
    pub major: u32,
    /// The number after the point.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A GPU, as the driver reports it.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    id: DeviceId,
    ordinal: u32,
    name: String,
    uuid: GpuUuid,
    pci: PciAddress,
    numa_node: Option<u32>,
    capability: Capability,
    multiprocessors: u32,
    copy_engines: u32,
    memory_bytes: usize,
    exports_descriptors: bool,
    exports_fabric_handles: bool,
    needs_flush: bool,
    flushes_in_streams: bool,
    load_kernels: LoadKernels,
    context: OnceLock<&'static Context>,
    /// Held while the context is retained, which must happen only once.
    taking: Mutex<()>,
}

impl Device {
    /// The GPUs. `load_kernels` is called in the context of each, once it is retained.
    pub(crate) fn all(
        driver: &'static Driver,
        load_kernels: LoadKernels,
    ) -> Result<Vec<Self>, GpuError> {
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        let code = unsafe { (driver.device_count)(&raw mut count) };
        driver.check(code, format_args!("counting GPUs"))?;
        let source = Source::new(Path::new("/"));
        (0..u32::try_from(count).unwrap_or(0))
            .map(|ordinal| Self::read(driver, ordinal, &source, load_kernels))
            .collect()
    }

    fn read(
        driver: &'static Driver,
        ordinal: u32,
        source: &Source,
        load_kernels: LoadKernels,
    ) -> Result<Self, GpuError> {
        let mut id = 0;
        // SAFETY: the pointer is to a live integer; the ordinal is below the count.
        let code = unsafe { (driver.device_get)(&raw mut id, ordinal as i32) };
        driver.check(code, format_args!("asking for GPU {ordinal}"))?;
        let query = Query { driver, id, ordinal };
        let pci = query.pci()?;
        let numa =
            source.value(Path::new("sys/bus/pci/devices").join(pci.to_string()).join("numa_node"));
        Ok(Self {
            driver,
            id,
            ordinal,
            name: query.name()?,
            uuid: query.uuid()?,
            pci,
            numa_node: numa,
            capability: Capability {
                major: query.attribute(device_attribute::CAPABILITY_MAJOR)?,
                minor: query.attribute(device_attribute::CAPABILITY_MINOR)?,
            },
            multiprocessors: query.attribute(device_attribute::MULTIPROCESSORS)?,
            copy_engines: query.attribute(device_attribute::COPY_ENGINES)?,
            memory_bytes: query.memory_bytes()?,
            exports_descriptors: query.flag(device_attribute::EXPORTS_FILE_DESCRIPTORS),
            exports_fabric_handles: query.flag(device_attribute::EXPORTS_FABRIC_HANDLES),
            needs_flush: query.needs_flush(),
            flushes_in_streams: query.flag(device_attribute::FLUSHES_IN_STREAMS),
            load_kernels,
            context: OnceLock::new(),
            taking: Mutex::new(()),
        })
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The vendor's name for the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its UUID, the same in every process.
    pub fn uuid(&self) -> GpuUuid {
        self.uuid
    }

    /// Its PCI address.
    pub fn pci(&self) -> PciAddress {
        self.pci
    }

    /// The NUMA node that it is attached to; `None` if the kernel does not report it.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Its compute capability.
    pub fn capability(&self) -> Capability {
        self.capability
    }

    /// Whether other devices' writes to its memory have to be flushed before the GPU learns of them
    /// ([`flush_writes`](super::flush_writes)): it may see their writes in another order.
    pub fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    /// Whether a stream's wait for a word can flush such writes.
    pub(crate) fn flushes_in_streams(&self) -> bool {
        self.flushes_in_streams
    }

    /// Its context, if that was taken.
    pub(crate) fn taken(&self) -> Option<&'static Context> {
        self.context.get().copied()
    }

    /// How many multiprocessors (SMs) it has.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// How many copies can run at the same time, beside kernels.
    pub fn copy_engines(&self) -> u32 {
        self.copy_engines
    }

    /// All of its memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Whether memory made with `cuMemCreate` can be shared as a file descriptor.
    pub fn exports_descriptors(&self) -> bool {
        self.exports_descriptors
    }

    /// Whether memory made with `cuMemCreate` can have a fabric handle, by which GPUs of other
    /// hosts reach it over NVLink. A process without a channel of the IMEX service cannot make such
    /// memory all the same.
    pub fn exports_fabric_handles(&self) -> bool {
        self.exports_fabric_handles
    }

    /// Whether it can reach the other's memory once peer access is enabled.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not answer.
    pub fn can_access(&self, other: &Self) -> Result<bool, GpuError> {
        let mut can = 0;
        // SAFETY: the pointer is to a live integer, and both are devices that the driver named.
        let code = unsafe { (self.driver.device_can_access_peer)(&raw mut can, self.id, other.id) };
        let (from, to) = (self.ordinal, other.ordinal);
        self.driver.check(code, format_args!("asking whether GPU {from} can reach GPU {to}"))?;
        Ok(can != 0)
    }

    /// How it reaches the other's memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not answer.
    pub fn link_to(&self, other: &Self) -> Result<GpuLink, GpuError> {
        if self.id == other.id {
            return Ok(GpuLink::Itself);
        }
        if !self.can_access(other)? {
            return Ok(GpuLink::None);
        }
        let Some(ask) = self.driver.device_peer_attribute else { return Ok(GpuLink::Pcie) };
        let (mut atomics, which) = (0, peer_attribute::NATIVE_ATOMICS);
        // SAFETY: the pointer is to a live integer, and both are devices that the driver named.
        let code = unsafe { ask(&raw mut atomics, which, self.id, other.id) };
        let (from, to) = (self.ordinal, other.ordinal);
        self.driver.check(code, format_args!("asking how GPU {from} reaches GPU {to}"))?;
        Ok(if atomics != 0 { GpuLink::Nvlink } else { GpuLink::Pcie })
    }

    /// Its primary context. The first call retains it and loads the copy kernels. That takes some
    /// hundred milliseconds and some hundred MiB of the GPU's memory, unless other code of the
    /// process has retained it already.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, for example because the GPU has too little
    /// memory left.
    pub fn context(&'static self) -> Result<&'static Context, GpuError> {
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        // Leaked, as the GPU's context is never released.
        let context: &'static Context = Box::leak(Box::new(Context::retain(self.driver, self)?));
        // Load the kernels before others have the context and can hold one of its streams: see
        // `reaper`. If the kernels cannot be used, copy engines do the copying.
        let _ = context.kernels_by(self.load_kernels);
        Ok(self.context.get_or_init(|| context))
    }

    /// Whether any code of this process has retained its primary context.
    pub(crate) fn is_active(&self) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both pointers are to live integers, and the device is one that the driver named.
        let code = unsafe {
            (self.driver.primary_context_state)(self.id, &raw mut flags, &raw mut active)
        };
        code == 0 && active != 0
    }
}

/// Questions to the driver about one device.
struct Query {
    driver: &'static Driver,
    id: DeviceId,
    ordinal: u32,
}

impl Query {
    fn attribute(&self, which: i32) -> Result<u32, GpuError> {
        let mut value = 0;
        // SAFETY: the pointer is to a live integer, and the device is one that the driver named.
        let code = unsafe { (self.driver.device_attribute)(&raw mut value, which, self.id) };
        let ordinal = self.ordinal;
        self.driver.check(code, format_args!("asking for attribute {which} of GPU {ordinal}"))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn flag(&self, which: i32) -> bool {
        self.attribute(which).is_ok_and(|yes| yes != 0)
    }

    /// Whether writes of other devices are not in order for the GPU, and the host can flush them.
    fn needs_flush(&self) -> bool {
        /// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`.
        const FOR_OWNER: u32 = 100;
        /// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
        const BY_HOST: u32 = 1;
        let ordering = self.attribute(device_attribute::WRITES_ORDERING).unwrap_or(FOR_OWNER);
        let options = self.attribute(device_attribute::FLUSH_OPTIONS).unwrap_or(0);
        self.driver.flush_writes.is_some() && ordering < FOR_OWNER && options & BY_HOST != 0
    }

    fn name(&self) -> Result<String, GpuError> {
        let mut name = [0_u8; 256];
        let (text, len) = (name.as_mut_ptr().cast::<c_char>(), name.len() as i32);
        // SAFETY: the pointer is to that many bytes.
        let code = unsafe { (self.driver.device_name)(text, len, self.id) };
        self.driver.check(code, format_args!("asking for the name of GPU {}", self.ordinal))?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// The second version of the call returns another UUID for a part of a GPU (MIG) than for the
    /// whole GPU.
    fn uuid(&self) -> Result<GpuUuid, GpuError> {
        let mut uuid = Uuid::default();
        let ask = Driver::need(
            self.driver.device_uuid_v2.or(self.driver.device_uuid),
            "cuDeviceGetUuid",
        )?;
        // SAFETY: the pointer is to a live UUID, and the device is one that the driver named.
        let code = unsafe { ask(&raw mut uuid, self.id) };
        self.driver.check(code, format_args!("asking for the UUID of GPU {}", self.ordinal))?;
        Ok(GpuUuid(uuid.0))
    }

    /// A GPU is function 0 of its device; the driver does not report the function.
    fn pci(&self) -> Result<PciAddress, GpuError> {
        Ok(PciAddress {
            domain: self.attribute(device_attribute::PCI_DOMAIN)?,
            bus: self.attribute(device_attribute::PCI_BUS)? as u8,
            device: self.attribute(device_attribute::PCI_DEVICE)? as u8,
            function: 0,
        })
    }

    fn memory_bytes(&self) -> Result<usize, GpuError> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live integer, and the device is one that the driver named.
        let code = unsafe { (self.driver.device_total_memory)(&raw mut bytes, self.id) };
        self.driver.check(code, format_args!("asking for the memory of GPU {}", self.ordinal))?;
        Ok(bytes)
    }
}
