//! The GPUs that this process sees.

use std::{
    ffi::{CStr, c_char},
    fmt,
    path::Path,
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::{pci::PciAddress, source::Source};

use super::{
    context::Context,
    driver::{Driver, Vendor},
    error::{GpuError, Unusable},
    facts::GpuLink,
    presence,
    raw::{DeviceId, Uuid, device_attribute, peer_attribute},
    uuid::GpuUuid,
};

/// What the first look found.
static GPUS: OnceLock<Gpus> = OnceLock::new();

/// The GPUs that this process sees, in the driver's order.
#[derive(Debug)]
pub struct Gpus {
    found: Result<Found, Refusal>,
}

/// Why there are none, and the same in words.
#[derive(Debug)]
struct Refusal {
    why: Unusable,
    words: String,
}

impl From<Unusable> for Refusal {
    fn from(why: Unusable) -> Self {
        Self { words: why.to_string(), why }
    }
}

impl Refusal {
    fn error(&self) -> GpuError {
        GpuError::Unavailable { reason: self.words.clone() }
    }
}

#[derive(Debug)]
struct Found {
    driver: &'static Driver,
    devices: Vec<Device>,
}

impl Gpus {
    /// Looks for them, the first time; then remembers.
    ///
    /// The driver obeys `CUDA_VISIBLE_DEVICES` as it is at the first look. From then on it works in this
    /// process alone and not in its forks.
    pub fn get() -> &'static Self {
        GPUS.get_or_init(|| Self::look(Vendor::Cuda.libraries()))
    }

    /// As [`Self::get`], if anyone in this process uses GPUs; else nothing, and the driver stays as it is:
    /// where nobody uses GPUs no address is a GPU's, and forks may begin to use them.
    pub fn in_use() -> Option<&'static Self> {
        (GPUS.get().is_some() || presence::cuda_is_in_use()).then(Self::get)
    }

    /// None, and why.
    pub fn none(reason: impl Into<String>) -> Self {
        Self { found: Err(Unusable::Unwanted(reason.into()).into()) }
    }

    fn look(libraries: &[&str]) -> Self {
        let found = Driver::load(Vendor::Cuda, libraries).and_then(|driver| {
            // Devices and their contexts refer to it for as long as the process runs.
            let driver: &'static Driver = Box::leak(Box::new(driver));
            let devices = Device::all(driver).map_err(Unusable::Unanswered)?;
            Ok(Found { driver, devices })
        });
        Self { found: found.map_err(Refusal::from) }
    }

    /// All of them; none without a driver.
    pub fn devices(&self) -> &[Device] {
        self.found.as_ref().map(|found| found.devices.as_slice()).unwrap_or_default()
    }

    /// Why there are none; nothing if there are some.
    pub fn why_none(&self) -> Option<&str> {
        match &self.found {
            Err(refusal) => Some(&refusal.words),
            Ok(found) if found.devices.is_empty() => Some("the driver sees no GPU"),
            Ok(_) => None,
        }
    }

    /// Why the driver cannot be used; nothing if it can, also where it sees no GPU.
    pub fn unusable(&self) -> Option<&Unusable> {
        self.found.as_ref().err().map(|refusal| &refusal.why)
    }

    /// Whether AMD's driver is there with every entry point that is needed, and the number that it gives as
    /// its version; else why not. Nothing here uses it yet: no AMD GPU was ever at hand to run on.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn look_for_hip() -> Result<i32, String> {
        let driver = Driver::load(Vendor::Hip, Vendor::Hip.libraries());
        driver.map(|driver| driver.version()).map_err(|why| why.to_string())
    }

    /// The CUDA version that the driver supports: major and minor.
    pub fn driver_version(&self) -> Option<(u32, u32)> {
        let version = u32::try_from(self.found.as_ref().ok()?.driver.version()).ok()?;
        Some((version / 1000, version % 1000 / 10))
    }

    /// The GPU with an ordinal.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] without a driver, [`GpuError::NoSuchDevice`] for an ordinal out of range.
    pub fn device(&self, ordinal: u32) -> Result<&Device, GpuError> {
        let devices = match &self.found {
            Ok(found) => &found.devices,
            Err(refusal) => return Err(refusal.error()),
        };
        let count = devices.len() as u32;
        (devices.get(ordinal as usize)).ok_or(GpuError::NoSuchDevice { ordinal, count })
    }

    /// The GPU with a UUID, if this process sees it.
    pub fn by_uuid(&self, uuid: GpuUuid) -> Option<&Device> {
        self.devices().iter().find(|device| device.uuid == uuid)
    }

    /// The GPU at a PCI address, if this process sees it.
    pub fn by_pci(&self, pci: PciAddress) -> Option<&Device> {
        self.devices().iter().find(|device| device.pci == pci)
    }

    pub(crate) fn driver(&self) -> Result<&'static Driver, GpuError> {
        match &self.found {
            Ok(found) => Ok(found.driver),
            Err(refusal) => Err(refusal.error()),
        }
    }
}

/// What a GPU can execute: 9.0 for Hopper.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Capability {
    /// Before the point.
    pub major: u32,
    /// After it.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A GPU as the driver shows it.
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
    context: OnceLock<&'static Context>,
    /// Held while the context is taken, which must happen once.
    taking: Mutex<()>,
}

impl Device {
    fn all(driver: &'static Driver) -> Result<Vec<Self>, GpuError> {
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        let code = unsafe { (driver.device_count)(&raw mut count) };
        driver.check(code, format_args!("counting GPUs"))?;
        let source = Source::new(Path::new("/"));
        (0..u32::try_from(count).unwrap_or(0))
            .map(|ordinal| Self::read(driver, ordinal, &source))
            .collect()
    }

    fn read(driver: &'static Driver, ordinal: u32, source: &Source) -> Result<Self, GpuError> {
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
            exports_descriptors: (query.attribute(device_attribute::EXPORTS_FILE_DESCRIPTORS))
                .is_ok_and(|yes| yes != 0),
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

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What names it in every process.
    pub fn uuid(&self) -> GpuUuid {
        self.uuid
    }

    /// Where it is on the PCI bus.
    pub fn pci(&self) -> PciAddress {
        self.pci
    }

    /// The NUMA node that it hangs off, where the kernel says.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// What it can execute.
    pub fn capability(&self) -> Capability {
        self.capability
    }

    /// How many multiprocessors (SMs) it has.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// How many copies can run beside each other and beside kernels.
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

    /// Whether it can reach the other's memory, once that is enabled.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not say.
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
    /// [`GpuError::Driver`] if the driver does not say.
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

    /// Its primary context, retained at the first call, which also loads the copy kernels. That takes some hundred milliseconds and some
    /// hundred MiB of the GPU's memory, unless someone in the process has it already.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, as it does if the memory does not suffice.
    pub fn context(&'static self) -> Result<&'static Context, GpuError> {
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        // The GPU's, which is never let go of.
        let context: &'static Context = Box::leak(Box::new(Context::retain(self.driver, self)?));
        // Before others have the context, and can hold a stream of it: see `reaper`. Where they cannot be used, copy
        // engines copy.
        let _ = context.kernels();
        Ok(self.context.get_or_init(|| context))
    }

    /// Whether anyone in this process has its primary context.
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

    fn name(&self) -> Result<String, GpuError> {
        let mut name = [0_u8; 256];
        let (text, len) = (name.as_mut_ptr().cast::<c_char>(), name.len() as i32);
        // SAFETY: the pointer is to that many bytes.
        let code = unsafe { (self.driver.device_name)(text, len, self.id) };
        self.driver.check(code, format_args!("asking for the name of GPU {}", self.ordinal))?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// The second version differs for parts of a GPU (MIG), which are not the whole.
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

    /// A GPU is function 0 of its device; the driver does not say which function it is.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_there_are_no_gpus_and_a_reason() {
        for gpus in [Gpus::look(&["libno-such-driver.so.1"]), Gpus::none("switched off")] {
            assert!(gpus.devices().is_empty());
            assert!(gpus.why_none().is_some_and(|reason| !reason.is_empty()));
            assert_eq!(gpus.driver_version(), None);
            let error = gpus.device(0).expect_err("no GPU");
            assert!(matches!(&error, GpuError::Unavailable { .. }), "{error}");
            assert!(gpus.driver().is_err());
            assert!(gpus.by_uuid(GpuUuid([0; 16])).is_none());
        }
    }

    #[test]
    fn a_driver_without_gpus_says_so() {
        // Whatever this machine has, a look at it ends and is consistent.
        let gpus = Gpus::get();
        assert_eq!(gpus.devices().is_empty(), gpus.why_none().is_some());
        assert!(gpus.device(u32::MAX).is_err());
    }
}
