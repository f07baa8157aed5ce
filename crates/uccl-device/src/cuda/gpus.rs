//! The GPUs that this process sees.

use std::sync::OnceLock;

use super::{
    device::Device,
    driver::{Driver, Vendor},
    error::{DriverError, GpuError},
    gather, presence,
    uuid::GpuUuid,
};
use crate::pci::PciAddress;

/// The result of the first search.
static GPUS: OnceLock<Gpus> = OnceLock::new();

/// The GPUs that this process sees, in the driver's order.
#[derive(Debug)]
pub struct Gpus {
    found: Result<DriverDevices, Refusal>,
}

/// Why no GPU can be used, also as text.
#[derive(Debug)]
struct Refusal {
    why: DriverError,
    words: String,
}

impl From<DriverError> for Refusal {
    fn from(why: DriverError) -> Self {
        Self { words: why.to_string(), why }
    }
}

impl Refusal {
    fn error(&self) -> GpuError {
        GpuError::Unavailable { reason: self.words.clone() }
    }
}

#[derive(Debug)]
struct DriverDevices {
    driver: &'static Driver,
    devices: Vec<Device>,
}

impl Gpus {
    /// Looks for the GPUs at the first call, and returns the same result from then on.
    ///
    /// The driver uses the value that `CUDA_VISIBLE_DEVICES` has at the first call. After that call
    /// the driver works in this process, but not in its forks.
    pub fn get() -> &'static Self {
        GPUS.get_or_init(|| Self::look(Vendor::Cuda.libraries()))
    }

    /// Like [`Self::get`], if any code of this process uses GPUs; else `None`, without starting the
    /// driver. Where GPUs are not used, no address is a GPU's; and as the driver is not started,
    /// forks can still use GPUs.
    pub fn in_use() -> Option<&'static Self> {
        (GPUS.get().is_some() || presence::cuda_is_in_use()).then(Self::get)
    }

    /// A value without GPUs, for the given reason.
    pub fn none(reason: impl Into<String>) -> Self {
        Self { found: Err(DriverError::Unwanted(reason.into()).into()) }
    }

    fn look(libraries: &[&str]) -> Self {
        let found = Driver::load(Vendor::Cuda, libraries).and_then(|driver| {
            // Devices and their contexts refer to the driver for as long as the process runs.
            let driver: &'static Driver = Box::leak(Box::new(driver));
            let devices =
                Device::all(driver, gather::load_kernels).map_err(DriverError::Unanswered)?;
            Ok(DriverDevices { driver, devices })
        });
        Self { found: found.map_err(Refusal::from) }
    }

    /// All GPUs; empty without a driver.
    pub fn devices(&self) -> &[Device] {
        self.found.as_ref().map(|found| found.devices.as_slice()).unwrap_or_default()
    }

    /// Why there are no GPUs; `None` if there are some.
    pub fn why_none(&self) -> Option<&str> {
        match &self.found {
            Err(refusal) => Some(&refusal.words),
            Ok(found) if found.devices.is_empty() => Some("the driver sees no GPU"),
            Ok(_) => None,
        }
    }

    /// Why the driver cannot be used; `None` if it can, even if it sees no GPU.
    pub fn unusable(&self) -> Option<&DriverError> {
        self.found.as_ref().err().map(|refusal| &refusal.why)
    }

    /// Checks whether AMD's driver exists and has every entry point that is needed, and returns the
    /// number that it gives as its version. Nothing here uses it yet: there was never an AMD GPU to
    /// run it on.
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
    /// [`GpuError::Unavailable`] without a driver, [`GpuError::NoSuchDevice`] for an ordinal out of
    /// range.
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
        self.devices().iter().find(|device| device.uuid() == uuid)
    }

    /// The GPU at a PCI address, if this process sees it.
    pub fn by_pci(&self, pci: PciAddress) -> Option<&Device> {
        self.devices().iter().find(|device| device.pci() == pci)
    }

    pub(crate) fn driver(&self) -> Result<&'static Driver, GpuError> {
        match &self.found {
            Ok(found) => Ok(found.driver),
            Err(refusal) => Err(refusal.error()),
        }
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
        // On any machine, the search ends and its answers are consistent.
        let gpus = Gpus::get();
        assert_eq!(gpus.devices().is_empty(), gpus.why_none().is_some());
        assert!(gpus.device(u32::MAX).is_err());
    }
}
