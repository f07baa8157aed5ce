//! `fi_info`: describes a provider's offer, or a request for one.

use std::{
    ffi::CString,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ptr::{self, NonNull},
    slice,
};

use uccl_device::PciAddress;
use uccl_fabric::rail::RailError;

use super::{
    library::{Library, split_version, text},
    raw,
    signals::Signals,
};

/// A list of infos, which the library allocated and will free.
pub(super) struct InfoList {
    library: &'static Library,
    first: NonNull<raw::Info>,
}

// SAFETY: a list is plain memory, changed by nobody but its owner, and only through `&mut`.
unsafe impl Send for InfoList {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for InfoList {}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: the library made it, we own it, and nothing outlives us that points into it.
        unsafe { (self.library.free_info)(self.first.as_ptr()) };
    }
}

impl InfoList {
    /// An empty info, to be filled in as hints.
    pub(super) fn hints(library: &'static Library) -> Result<Self, RailError> {
        Self::copy(library, ptr::null())
    }

    fn copy(library: &'static Library, info: *const raw::Info) -> Result<Self, RailError> {
        // SAFETY: null, or an info of the library's that lives on; it is copied without its
        // successors.
        let first = unsafe { (library.dup_info)(info) };
        let first = NonNull::new(first).ok_or_else(|| RailError::os("fi_dupinfo", libc::ENOMEM))?;
        Ok(Self { library, first })
    }

    /// Asks the library for offers that satisfy the hints. `None` if there are none.
    pub(super) fn query(
        library: &'static Library,
        hints: &Self,
    ) -> Result<Option<Self>, RailError> {
        let (none, mut first) = (ptr::null(), ptr::null_mut());
        let hints = hints.first.as_ptr();
        // The first query loads and initialises providers.
        let _signals = Signals::keep();
        // SAFETY: no node and no service are named, the hints live on, and the last argument points
        // to a live pointer, which is set to a list that is then ours.
        let code = unsafe {
            (library.get_info)(library.api_version(), none, none, 0, hints, &raw mut first)
        };
        match (code, NonNull::new(first)) {
            (0, Some(first)) => Ok(Some(Self { library, first })),
            (0, None) => Ok(None),
            (code, _) if -code == libc::ENODATA || -code == libc::ENODEV => Ok(None),
            (code, _) => Err(library.error("fi_getinfo", code)),
        }
    }

    /// Each info in turn.
    pub(super) fn iter(&self) -> impl Iterator<Item = Info<'_>> {
        let mut next = Some(self.first);
        std::iter::from_fn(move || {
            let info = next?;
            // SAFETY: the list's infos live as long as it does.
            next = NonNull::new(unsafe { info.as_ref() }.next);
            // SAFETY: as above.
            Some(Info { library: self.library, raw: unsafe { info.as_ref() } })
        })
    }

    /// The first info.
    pub(super) fn first(&self) -> Info<'_> {
        // SAFETY: the list's infos live as long as it does.
        Info { library: self.library, raw: unsafe { self.first.as_ref() } }
    }

    /// A pointer for calls that take an info. They may read all of it, and change the fields that
    /// they are documented to change.
    pub(super) fn as_ptr(&self) -> *mut raw::Info {
        self.first.as_ptr()
    }

    /// The parts of the first info, for changing. `None` if the library has not allocated all of
    /// them, which it normally does.
    pub(super) fn parts(&mut self) -> Option<InfoParts<'_>> {
        // SAFETY: the info is ours alone while we are borrowed, and its parts are parts of it.
        unsafe {
            let info = self.first.as_mut();
            Some(InfoParts {
                tx: info.tx_attr.as_mut()?,
                rx: info.rx_attr.as_mut()?,
                ep: info.ep_attr.as_mut()?,
                domain: info.domain_attr.as_mut()?,
                fabric: info.fabric_attr.as_mut()?,
                caps: &mut info.caps,
                mode: &mut info.mode,
            })
        }
    }
}

/// Parts of an info.
pub(super) struct InfoParts<'a> {
    pub(super) tx: &'a mut raw::TxAttr,
    pub(super) rx: &'a mut raw::RxAttr,
    pub(super) ep: &'a mut raw::EpAttr,
    pub(super) domain: &'a mut raw::DomainAttr,
    pub(super) fabric: &'a mut raw::FabricAttr,
    pub(super) caps: &'a mut u64,
    pub(super) mode: &'a mut u64,
}

/// A copy of text, which the library frees with the info that it is put into. Null if the text
/// contains a zero byte.
pub(super) fn owned_text(text: &str) -> *mut libc::c_char {
    // SAFETY: the string ends with 0; the copy is allocated as the library's own strings are.
    CString::new(text).map_or(ptr::null_mut(), |text| unsafe { libc::strdup(text.as_ptr()) })
}

/// One info of a list.
#[derive(Clone, Copy)]
pub(super) struct Info<'a> {
    library: &'static Library,
    raw: &'a raw::Info,
}

impl<'a> Info<'a> {
    /// A list of this one alone.
    pub(super) fn to_list(self) -> Result<InfoList, RailError> {
        InfoList::copy(self.library, self.raw)
    }

    pub(super) fn caps(self) -> u64 {
        self.raw.caps
    }

    pub(super) fn address_format(self) -> u32 {
        self.raw.addr_format
    }

    pub(super) fn tx(self) -> Option<&'a raw::TxAttr> {
        // SAFETY: null or a part of the info, which outlives it.
        unsafe { self.raw.tx_attr.as_ref() }
    }

    pub(super) fn ep(self) -> Option<&'a raw::EpAttr> {
        // SAFETY: as above.
        unsafe { self.raw.ep_attr.as_ref() }
    }

    pub(super) fn domain(self) -> Option<&'a raw::DomainAttr> {
        // SAFETY: as above.
        unsafe { self.raw.domain_attr.as_ref() }
    }

    pub(super) fn fabric(self) -> Option<&'a raw::FabricAttr> {
        // SAFETY: as above.
        unsafe { self.raw.fabric_attr.as_ref() }
    }

    fn nic(self) -> Option<&'a raw::Nic> {
        // SAFETY: as above.
        unsafe { self.raw.nic.as_ref() }
    }

    /// The provider's name, with those of the layers on top: `tcp;ofi_rxm`.
    pub(super) fn provider(self) -> String {
        self.fabric().and_then(|fabric| text(fabric.prov_name)).unwrap_or_default()
    }

    pub(super) fn provider_version(self) -> (u32, u32) {
        split_version(self.fabric().map_or(0, |fabric| fabric.prov_version))
    }

    pub(super) fn fabric_name(self) -> String {
        self.fabric().and_then(|fabric| text(fabric.name)).unwrap_or_default()
    }

    pub(super) fn domain_name(self) -> String {
        self.domain().and_then(|domain| text(domain.name)).unwrap_or_default()
    }

    pub(super) fn mr_mode(self) -> i32 {
        self.domain().map_or(0, |domain| domain.mr_mode)
    }

    /// Our own address, if it is an IP address.
    pub(super) fn ip(self) -> Option<IpAddr> {
        let (pointer, len) = (self.raw.src_addr.cast::<u8>(), self.raw.src_addrlen);
        if pointer.is_null() || !is_socket_address(self.raw.addr_format) {
            return None;
        }
        // SAFETY: the address is that long.
        ip_of(unsafe { slice::from_raw_parts(pointer, len) })
    }

    /// The device's PCI address.
    pub(super) fn pci(self) -> Option<PciAddress> {
        // SAFETY: null or a part of the info.
        let bus = unsafe { self.nic()?.bus_attr.as_ref() }?;
        let raw::PciAttr { domain_id, bus_id, device_id, function_id } = bus.pci;
        (bus.kind == raw::FI_BUS_PCI).then_some(PciAddress {
            domain: domain_id.into(),
            bus: bus_id,
            device: device_id,
            function: function_id,
        })
    }

    fn link(self) -> Option<&'a raw::LinkAttr> {
        // SAFETY: null or a part of the info.
        unsafe { self.nic()?.link_attr.as_ref() }
    }

    /// The speed of the device's port in Mbit/s.
    pub(super) fn speed_mbps(self) -> Option<u64> {
        let mbps = self.link()?.speed as u64 / 1_000_000;
        (mbps > 0).then_some(mbps)
    }

    /// Whether the device reported, when the info was made, that its port is down.
    pub(super) fn is_down(self) -> bool {
        self.link().is_some_and(|link| link.state == raw::FI_LINK_DOWN)
    }
}

/// Whether endpoint names of this format are the system's socket addresses.
pub(super) fn is_socket_address(format: u32) -> bool {
    matches!(format, raw::FI_SOCKADDR | raw::FI_SOCKADDR_IN | raw::FI_SOCKADDR_IN6)
}

/// The IP in a socket address.
pub(super) fn ip_of(bytes: &[u8]) -> Option<IpAddr> {
    let family = u16::from_ne_bytes(*bytes.first_chunk()?);
    match i32::from(family) {
        libc::AF_INET => {
            let octets: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
            Some(Ipv4Addr::from(octets).into())
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// The port in a socket address of a known family and exact length.
pub(super) fn port_of(bytes: &[u8]) -> Option<u16> {
    ip_of(bytes)?;
    Some(u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_are_read_as_the_system_lays_them_out() {
        let mut v4 = vec![0; 16];
        v4[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        v4[2..8].copy_from_slice(&[0x6d, 0xc4, 192, 0, 2, 7]);
        assert_eq!(ip_of(&v4), Some([192, 0, 2, 7].into()));
        assert_eq!(port_of(&v4), Some(28_100));
        let mut v6 = vec![0; 28];
        v6[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        v6[23] = 1;
        assert_eq!(ip_of(&v6), Some(Ipv6Addr::LOCALHOST.into()));
        assert_eq!(ip_of(&v4[..7]), None);
        assert_eq!(ip_of(&[]), None);
        assert_eq!(port_of(&[9; 16]), None);
    }
}
