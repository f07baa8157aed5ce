//! Registered memory.
//!
//! The provider's `mr_mode` decides whether peers name memory by its address or by an offset, which
//! side chooses the key, and whether the key is a number. Keys that are ours to choose are random.
//!
//! **The end of a registration.** The device, or the provider's software in its place, looks up key
//! and range when a request arrives. Once the registration is closed, it finds none. A software
//! provider (`tcp`, `sockets`) looks them up only at a request's first byte: the rest of a request
//! that has begun to arrive still lands.

use std::{collections::HashMap, ffi::c_void, ptr, sync::Arc};

use parking_lot::{Mutex, RwLock};
use uccl_device::MemoryKind;
use uccl_fabric::{
    mem::Span,
    rail::{KeyBytes, RailError, Registration, RemoteKey},
    region::Rights,
};
use uccl_wire::libfabric::{FabricKey, MAX_RAW_KEY};

use super::{domain::Domain, object::Object, raw};

/// The largest number of keys to try when keys are taken already.
const KEY_ATTEMPTS: usize = 16;
/// Some providers use the keys below this themselves: `cxi` has its faster regions there,
/// `tcp;ofi_rxm` its buffers.
const FIRST_KEY: u64 = 1 << 10;

/// Memory that is registered with the provider.
pub(super) struct Region {
    mr: Object<raw::Mr>,
    base: u64,
}

impl Region {
    /// Registers memory for the whole domain, or, if the provider ties regions to endpoints, for
    /// this endpoint only.
    pub(super) fn register(
        domain: &Domain,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
        ep: Option<&Object<raw::Ep>>,
    ) -> Result<Self, RailError> {
        let (iface, device) = interface(domain, kind)?;
        let iov = libc::iovec { iov_base: span.addr as *mut c_void, iov_len: span.len };
        let mut attr = raw::MrAttr {
            mr_iov: &raw const iov,
            iov_count: 1,
            access: access(rights),
            offset: 0,
            requested_key: 0,
            context: ptr::null_mut(),
            auth_key_size: 0,
            auth_key: ptr::null_mut(),
            iface,
            device,
            later: [0; 8],
        };
        let mr = Self::with_some_key(domain, &mut attr)?;
        let base = if domain.has_mode(raw::FI_MR_VIRT_ADDR) { span.addr as u64 } else { 0 };
        let region = Self { mr, base };
        if let Some(ep) = ep.filter(|_| domain.has_mode(raw::FI_MR_ENDPOINT)) {
            region.mr.bind(ep, 0).map_err(|code| domain.error("fi_mr_bind", code))?;
            region.mr.enable().map_err(|code| domain.error("fi_mr_enable", code))?;
        }
        Ok(region)
    }

    fn with_some_key(
        domain: &Domain,
        attr: &mut raw::MrAttr,
    ) -> Result<Object<raw::Mr>, RailError> {
        // SAFETY: an open domain's table is the provider's for as long.
        let ops = unsafe { domain.object().get().mr.as_ref() };
        let register = ops.and_then(|ops| ops.regattr);
        let register = register.ok_or_else(|| domain.error("fi_mr_regattr", libc::ENOSYS))?;
        let mut attempts = 0;
        loop {
            attr.requested_key = requested_key(domain)?;
            let attr: *const raw::MrAttr = attr;
            // SAFETY: the domain is open, the attributes live on; the call makes a region or fails.
            // It does not touch the memory, which its owner keeps valid until the registration's
            // end.
            let made = unsafe {
                Object::<raw::Mr>::made(|made| register(domain.object().fid(), attr, 0, made))
            };
            attempts += 1;
            match made {
                Err(code) if code == -raw::FI_ENOKEY && attempts < KEY_ATTEMPTS => {}
                made => return made.map_err(|code| domain.error("fi_mr_regattr", code)),
            }
        }
    }

    /// The descriptor by which our own requests name it. Null if the provider wants none.
    pub(super) fn descriptor(&self) -> *mut c_void {
        self.mr.get().mem_desc
    }

    /// The key by which peers name it.
    pub(super) fn remote_key(&self, domain: &Domain) -> Result<RemoteKey, RailError> {
        let mut key = KeyBytes::new();
        if !domain.has_mode(raw::FI_MR_RAW) {
            let plain = FabricKey::Plain(self.mr.get().key);
            plain.encode_to(&mut key).map_err(|_| domain.error("fi_mr_key", libc::EMSGSIZE))?;
            return Ok(RemoteKey { base: self.base, key });
        }
        let (mut base, mut bytes, mut len) = (0, [0; MAX_RAW_KEY], MAX_RAW_KEY);
        let mut attr = raw::MrRawAttr {
            flags: 0,
            base_addr: &raw mut base,
            raw_key: bytes.as_mut_ptr(),
            key_size: &raw mut len,
        };
        // SAFETY: the command takes such a struct; its pointers point to live variables of the
        // lengths given in it.
        unsafe { self.mr.control(raw::FI_GET_RAW_MR, (&raw mut attr).cast()) }
            .map_err(|code| domain.error("fi_mr_raw_attr", code))?;
        let bytes = bytes.get(..len).unwrap_or_default();
        FabricKey::Raw { base, bytes }
            .encode_to(&mut key)
            .map_err(|_| domain.error("fi_mr_raw_attr", libc::EMSGSIZE))?;
        Ok(RemoteKey { base: self.base, key })
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// When the provider did not close it: the memory may still be reachable.
    pub(super) fn close(&mut self, domain: &Domain) -> Result<(), RailError> {
        let _serial = domain.serialize();
        self.mr.close().map_err(|code| domain.error("deregistering memory: fi_close", code))
    }
}

/// Our own requests may read and write; peers have their rights.
fn access(rights: Rights) -> u64 {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let remote = flag(rights.read, raw::FI_REMOTE_READ) | flag(rights.write, raw::FI_REMOTE_WRITE);
    raw::FI_READ | raw::FI_WRITE | remote
}

/// The libfabric interface for this kind of memory, and the device's number in the first bytes of
/// the union.
fn interface(domain: &Domain, kind: MemoryKind) -> Result<(i32, u64), RailError> {
    let Some(device) = kind.device_only() else { return Ok((raw::FI_HMEM_SYSTEM, 0)) };
    if domain.info.first().caps() & raw::FI_HMEM == 0 {
        return Err(RailError::Unavailable(format!(
            "libfabric's provider {} does not reach GPU memory here: it offers no FI_HMEM, for which libfabric must be \
             built for this GPU (`fi_info -p {} -c FI_HMEM` shows whether it is)",
            domain.provider, domain.provider
        )));
    }
    // So far only CUDA's driver is asked about memory, so all GPU memory is CUDA's.
    let mut union = [0; 8];
    union[..4].copy_from_slice(&device.to_ne_bytes());
    Ok((raw::FI_HMEM_CUDA, u64::from_ne_bytes(union)))
}

/// The key to ask for: 0 if the provider chooses keys, else a random one as long as the provider's
/// keys are.
fn requested_key(domain: &Domain) -> Result<u64, RailError> {
    if domain.has_mode(raw::FI_MR_PROV_KEY) {
        return Ok(0);
    }
    let len = domain.info.first().domain().map_or(0, |attr| attr.mr_key_size);
    // The highest bit stays 0: layered providers mark their own keys with it.
    let bits = if (1..8).contains(&len) { 8 * len as u32 } else { 63 };
    let random = getrandom::u64().map_err(|_| RailError::os("getrandom", libc::EIO))?;
    Ok((random & ((1 << bits) - 1)).max(FIRST_KEY))
}

/// Memory that is registered for the channels of a domain, until this is dropped.
pub(super) struct LibfabricRegistration {
    domain: Arc<Domain>,
    lendings: Arc<RegionLoans>,
    held: RegionKind,
}

enum RegionKind {
    /// One region for all channels.
    Whole { region: Mutex<Region>, descriptor: u64, key: RemoteKey },
    /// The provider ties regions to endpoints: each channel makes a region of its own when it
    /// exports this registration, which it finds by this number.
    PerChannel(u64),
}

impl LibfabricRegistration {
    pub(super) fn new(
        domain: Arc<Domain>,
        lendings: Arc<RegionLoans>,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Self, RailError> {
        interface(&domain, kind)?;
        if domain.has_mode(raw::FI_MR_ENDPOINT) {
            let id = domain.unique();
            lendings.add(id, LoanableRegion { span, kind, rights, lent: Vec::new(), making: 0 });
            return Ok(Self { domain, lendings, held: RegionKind::PerChannel(id) });
        }
        let serial = domain.serialize();
        let region = Region::register(&domain, span, kind, rights, None)?;
        let key = region.remote_key(&domain)?;
        drop(serial);
        let (descriptor, region) = (region.descriptor() as u64, Mutex::new(region));
        Ok(Self { domain, lendings, held: RegionKind::Whole { region, descriptor, key } })
    }
}

impl Registration for LibfabricRegistration {
    fn end(&self) -> Result<(), RailError> {
        match &self.held {
            RegionKind::Whole { region, .. } => region.lock().close(&self.domain),
            RegionKind::PerChannel(id) => self.lendings.end(*id, &self.domain),
        }
    }

    fn local_key(&self) -> u64 {
        match &self.held {
            RegionKind::Whole { descriptor, .. } => *descriptor,
            RegionKind::PerChannel(id) => *id,
        }
    }

    /// An empty key if each channel has its own.
    fn remote_key(&self) -> RemoteKey {
        match &self.held {
            RegionKind::Whole { key, .. } => key.clone(),
            RegionKind::PerChannel(_) => RemoteKey { base: 0, key: KeyBytes::new() },
        }
    }
}

impl Drop for LibfabricRegistration {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "memory stays registered until the process ends");
        }
    }
}

/// Registered memory of a domain with a provider that ties regions to endpoints. Only `cxi` is
/// known to do so, and this code was never run on it.
#[derive(Default)]
pub(super) struct RegionLoans(Mutex<HashMap<u64, LoanableRegion>>);

struct LoanableRegion {
    span: Span,
    kind: MemoryKind,
    rights: Rights,
    lent: Vec<Arc<RegionLoan>>,
    /// How many regions are being made of it.
    making: usize,
}

/// The regions that are made for one channel. Any thread may make one, and none is made once the
/// channel ends.
pub(super) struct Borrower {
    domain: Arc<Domain>,
    lendings: Arc<RegionLoans>,
    /// The channel's endpoint, until that is about to be closed. A thread that makes a region locks
    /// it for reading meanwhile.
    ep: RwLock<Option<Object<raw::Ep>>>,
    /// By the number of the memory that they are made of.
    lent: Mutex<HashMap<u64, Arc<RegionLoan>>>,
}

impl Borrower {
    /// # Safety
    /// The endpoint must stay open until [`Self::end`] has returned.
    pub(super) unsafe fn new(
        domain: Arc<Domain>,
        lendings: Arc<RegionLoans>,
        ep: &Object<raw::Ep>,
    ) -> Self {
        // SAFETY: the caller's promise.
        let ep = RwLock::new(Some(unsafe { ep.alias() }));
        Self { domain, lendings, ep, lent: Mutex::default() }
    }

    /// The key of the region that was made of the memory of this number, if it lives.
    pub(super) fn key_of(&self, id: u64) -> Option<RemoteKey> {
        let lent = self.lent.lock();
        lent.get(&id).filter(|lent| lent.is_live()).map(|lent| lent.key.clone())
    }

    /// Makes a region of the memory of this number. That locks the memory, which may take long.
    pub(super) fn make(&self, id: u64) -> Result<(), RailError> {
        let ep = self.ep.read();
        let ep = ep.as_ref().ok_or_else(|| RailError::Gone("the channel has ended".into()))?;
        let made = self.lendings.lend(id, &self.domain, ep)?;
        let mut lent = self.lent.lock();
        lent.retain(|_, lent| lent.is_live());
        lent.insert(id, made);
        Ok(())
    }

    /// Ends all regions, after those that are being made. No more are made.
    pub(super) fn end(&self) {
        *self.ep.write() = None;
        let lent = std::mem::take(&mut *self.lent.lock());
        for error in lent.values().filter_map(|lent| lent.end(&self.domain).err()) {
            // The error is reported when the memory is deregistered.
            tracing::debug!(%error, "a channel ends before its regions");
        }
    }
}

/// A region for one channel. It ends with the channel or with the registration, whichever ends
/// first.
struct RegionLoan {
    region: Mutex<Option<Region>>,
    key: RemoteKey,
}

impl RegionLoan {
    fn make(
        domain: &Domain,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
        ep: &Object<raw::Ep>,
    ) -> Result<Self, RailError> {
        let _serial = domain.serialize();
        let region = Region::register(domain, span, kind, rights, Some(ep))?;
        let key = region.remote_key(domain)?;
        Ok(Self { region: Mutex::new(Some(region)), key })
    }

    /// Whether the region has not ended yet.
    fn is_live(&self) -> bool {
        self.region.lock().is_some()
    }

    /// Ends the region. Does nothing if it has ended.
    ///
    /// # Errors
    /// As for [`Region::close`].
    fn end(&self, domain: &Domain) -> Result<(), RailError> {
        let mut region = self.region.lock();
        region.as_mut().map_or(Ok(()), |region| region.close(domain))?;
        *region = None;
        Ok(())
    }
}

impl RegionLoans {
    fn add(&self, id: u64, lendable: LoanableRegion) {
        self.0.lock().insert(id, lendable);
    }

    /// Ends the registration and the regions that channels made of it. Channels make no more of
    /// them.
    fn end(&self, id: u64, domain: &Domain) -> Result<(), RailError> {
        let mut lendings = self.0.lock();
        let Some(lendable) = lendings.get(&id) else { return Ok(()) };
        if lendable.making > 0 {
            return Err(RailError::Unavailable("it is being registered for a channel".into()));
        }
        lendable.lent.iter().map(|lent| lent.end(domain)).fold(Ok(()), Result::and)?;
        lendings.remove(&id);
        Ok(())
    }

    /// Makes a region of registered memory, for one endpoint. Other memory can be lent and ended
    /// meanwhile.
    fn lend(
        &self,
        id: u64,
        domain: &Domain,
        ep: &Object<raw::Ep>,
    ) -> Result<Arc<RegionLoan>, RailError> {
        let gone = || domain.error("fi_mr_regattr", libc::ENOENT);
        let (span, kind, rights) = {
            let mut lendings = self.0.lock();
            let lendable = lendings.get_mut(&id).ok_or_else(gone)?;
            lendable.making += 1;
            (lendable.span, lendable.kind, lendable.rights)
        };
        let made = RegionLoan::make(domain, span, kind, rights, ep);
        let mut lendings = self.0.lock();
        let lendable = lendings.get_mut(&id).ok_or_else(gone)?;
        lendable.making -= 1;
        let lent = Arc::new(made?);
        lendable.lent.retain(|lent| lent.is_live());
        lendable.lent.push(Arc::clone(&lent));
        Ok(lent)
    }
}

/// Maps a peer's raw key to the number that requests use.
pub(super) fn map_raw_key(domain: &Domain, base: u64, bytes: &[u8]) -> Result<u64, RailError> {
    let (mut bytes, mut key) = (bytes.to_vec(), 0);
    let mut attr = raw::MrMapRaw {
        flags: 0,
        base_addr: base,
        raw_key: bytes.as_mut_ptr(),
        key_size: bytes.len(),
        key: &raw mut key,
    };
    // SAFETY: the command takes such a struct; its pointers point to live variables of the lengths
    // given in it.
    unsafe { domain.object().control(raw::FI_MAP_RAW_MR, (&raw mut attr).cast()) }
        .map_err(|code| domain.error("fi_mr_map_raw", code))?;
    Ok(key)
}

/// Unmaps a number that [`map_raw_key`] returned.
pub(super) fn unmap_key(domain: &Domain, mut key: u64) {
    // SAFETY: the command takes a pointer to a key.
    let unmapped = unsafe { domain.object().control(raw::FI_UNMAP_KEY, (&raw mut key).cast()) };
    if let Err(code) = unmapped {
        tracing::debug!(code, "a peer's key was not unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            discover,
            endpoint::Endpoint,
            library::Library,
            queue::Queue,
            settings::{Devices, LibfabricSettings},
        },
        *,
    };

    fn domain() -> Result<Domain, RailError> {
        let settings = LibfabricSettings {
            library: std::env::var_os("UCCL_LIBFABRIC_SO").map(Into::into),
            provider: Some("tcp;ofi_rxm".into()),
            devices: Devices::Named(vec!["lo".into()]),
            ..LibfabricSettings::default()
        };
        let library = Library::load(settings.library.as_deref())?;
        let mut chosen = discover::choose(library, &settings)?;
        Domain::open(library, chosen.remove(0), &settings)
    }

    /// No provider here ties regions to endpoints. This one is taken for one that does, and then
    /// binds none.
    #[test]
    fn memory_that_no_channel_gets_is_let_go_of() {
        let mut domain = match domain() {
            Ok(domain) => domain,
            Err(why) => return eprintln!("skipped: {why}"),
        };
        domain.mr_mode |= raw::FI_MR_ENDPOINT;
        let (domain, lendings) = (Arc::new(domain), Arc::<RegionLoans>::default());
        let queue = Queue::open(&domain, 16).expect("a queue");
        let endpoint = Endpoint::open(&domain, &queue).expect("an endpoint");
        let bytes = vec![0_u8; 4096];
        let span = Span { addr: bytes.as_ptr() as usize, len: bytes.len() };
        let ours = || (Arc::clone(&domain), Arc::clone(&lendings));
        let (of, all) = ours();
        let registration = LibfabricRegistration::new(of, all, span, MemoryKind::Host, Rights::ALL)
            .expect("known");
        let (of, all) = ours();
        // SAFETY: the endpoint is closed at the end of this function, after the borrower has ended.
        let borrower = unsafe { Borrower::new(of, all, endpoint.object()) };
        let id = registration.local_key();
        assert!(borrower.key_of(id).is_none());
        let refused = borrower.make(id).expect_err("it binds none").to_string();
        assert!(refused.contains("fi_mr_bind"), "{refused}");
        assert!(borrower.key_of(id).is_none());
        let set = |making| lendings.0.lock().get_mut(&id).expect("it lives").making = making;
        set(1);
        registration.end().expect_err("a channel may get it yet");
        set(0);
        registration.end().expect("no channel has it");
        let gone = borrower.make(id).expect_err("there is none").to_string();
        assert!(gone.contains("fi_mr_regattr"), "{gone}");
        borrower.end();
        assert!(matches!(borrower.make(id), Err(RailError::Gone(_))));
    }
}
