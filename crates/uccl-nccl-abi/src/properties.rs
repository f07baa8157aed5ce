//! Properties of network devices, in the layouts of each version.

use std::ffi::{c_char, c_int};

/// The physical devices of one device, v9 to v11 with 4 and v12 with 8 places.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VirtualDevice<const N: usize> {
    /// The number of physical devices.
    pub count: c_int,
    /// Their numbers.
    pub devices: [c_int; N],
}

/// Properties of v8.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV8 {
    /// A name that no other device has.
    pub name: *const c_char,
    /// The device's folder in /sys; null for a virtual device.
    pub pci_path: *const c_char,
    /// A number that no other port has.
    pub guid: u64,
    /// Bits of [`crate::memory`].
    pub memory: c_int,
    /// Whether a registration serves every communicator.
    pub registration_is_global: c_int,
    /// Mbit/s.
    pub speed_mbps: c_int,
    /// The port's number.
    pub port: c_int,
    /// Microseconds.
    pub latency_us: f32,
    /// The most communicators.
    pub max_comms: c_int,
    /// The most receives of a group.
    pub max_recvs: c_int,
    /// 0: a network of the host.
    pub device_type: c_int,
    /// The version of the device type.
    pub device_version: c_int,
}

/// The fields that v9 and all later versions begin with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesHead {
    /// A name that no other device has.
    pub name: *const c_char,
    /// The device's folder in /sys; null for a virtual device.
    pub pci_path: *const c_char,
    /// A number that no other port has.
    pub guid: u64,
    /// Bits of [`crate::memory`].
    pub memory: c_int,
    /// Whether a registration serves every communicator.
    pub registration_is_global: c_int,
    /// Whether receives into GPU memory need a flush on every GPU.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed_mbps: c_int,
    /// The port's number.
    pub port: c_int,
    /// Microseconds.
    pub latency_us: f32,
    /// The most communicators.
    pub max_comms: c_int,
    /// The most receives of a group.
    pub max_recvs: c_int,
    /// 0: a network of the host.
    pub device_type: c_int,
    /// The version of the device type.
    pub device_version: c_int,
}

/// Properties of v9 and v10.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV9 {
    /// The common fields.
    pub head: PropertiesHead,
    /// The physical devices.
    pub virtual_device: VirtualDevice<4>,
    /// The longest message of a send or receive in bytes.
    pub max_p2p_bytes: usize,
    /// The longest message of a collective in bytes.
    pub max_coll_bytes: usize,
}

/// Properties of v11 (`N` = 4) and v12 (`N` = 8).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV11<const N: usize> {
    /// The common fields.
    pub head: PropertiesHead,
    /// The physical devices.
    pub virtual_device: VirtualDevice<N>,
    /// The longest message of a send or receive in bytes.
    pub max_p2p_bytes: usize,
    /// The longest message of a collective in bytes.
    pub max_coll_bytes: usize,
    /// The most requests of one multi-request.
    pub max_multi_request: c_int,
    /// v12: the rail's index, or -1. v11 has unused bytes here.
    pub rail: i16,
    /// v12: the plane's index, or -1.
    pub plane: i16,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<PropertiesV8>() == 64);
    assert!(offset_of!(PropertiesV8, speed_mbps) == 32);
    assert!(offset_of!(PropertiesV8, latency_us) == 40);
    assert!(offset_of!(PropertiesV8, max_comms) == 44);
    assert!(offset_of!(PropertiesV8, device_type) == 52);
    assert!(size_of::<PropertiesHead>() == 64);
    assert!(offset_of!(PropertiesHead, memory) == 24);
    assert!(offset_of!(PropertiesHead, force_flush) == 32);
    assert!(offset_of!(PropertiesHead, speed_mbps) == 36);
    assert!(offset_of!(PropertiesHead, latency_us) == 44);
    assert!(offset_of!(PropertiesHead, max_comms) == 48);
    assert!(offset_of!(PropertiesHead, device_type) == 56);
    assert!(size_of::<PropertiesV9>() == 104);
    assert!(offset_of!(PropertiesV9, virtual_device) == 64);
    assert!(offset_of!(PropertiesV9, max_p2p_bytes) == 88);
    assert!(size_of::<PropertiesV11<4>>() == 112);
    assert!(offset_of!(PropertiesV11<4>, max_multi_request) == 104);
    assert!(size_of::<PropertiesV11<8>>() == 128);
    assert!(offset_of!(PropertiesV11<8>, max_p2p_bytes) == 104);
    assert!(offset_of!(PropertiesV11<8>, max_multi_request) == 120);
    assert!(offset_of!(PropertiesV11<8>, rail) == 124);
    assert!(offset_of!(PropertiesV11<8>, plane) == 126);
};
