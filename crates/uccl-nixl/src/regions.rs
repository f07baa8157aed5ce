//! The agent's regions: memory that is registered twice is one region, counted.
//!
//! NIXL lists a region for each registration, and an agent that loads the list refuses it if two
//! entries are of the same memory and have different metadata. So equal memory has one region, with
//! one key.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use uccl_p2p::{
    Endpoint,
    device::{MemoryKind, PageAccess, make_resident},
    wire::advert::Advert,
};

use crate::{
    memory::{Local, Memory},
    status::{Error, Result},
};

/// The regions of one agent, by address and length.
#[derive(Default)]
pub(crate) struct Regions {
    by_place: Mutex<HashMap<(usize, usize), Region>>,
    numbers: AtomicU64,
}

struct Region {
    local: Local,
    /// `None` of memory without bytes, which belongs to no device.
    kind: Option<MemoryKind>,
    registrations: usize,
}

impl Region {
    fn check_kind(&self, vram: bool) -> Result<()> {
        if vram && self.kind == Some(MemoryKind::Host) {
            let addr = self.local.advert.addr;
            return Err(Error::Invalid(format!(
                "{addr:#x} was registered as VRAM and is no GPU's memory"
            )));
        }
        Ok(())
    }
}

impl Regions {
    /// Registers memory. `vram`: NIXL says that it is a GPU's. Memory that is registered already
    /// shares its region.
    pub(crate) fn register(
        &self,
        endpoint: &Endpoint,
        addr: usize,
        len: usize,
        vram: bool,
    ) -> Result<Memory> {
        if let Some(shared) = self.share(addr, len, vram) {
            return shared;
        }
        // Without the lock: pinning takes long, and others register other memory meanwhile.
        let made = self.make(endpoint, addr, len)?;
        if let Err(e) = made.check_kind(vram) {
            made.local.mr.map_or(Ok(()), |mr| endpoint.deregister(mr))?;
            return Err(e);
        }
        let local = made.local;
        let mut by_place = self.by_place.lock();
        let Some(other) = by_place.get_mut(&(addr, len)) else {
            by_place.insert((addr, len), made);
            return Ok(Memory::Local(local));
        };
        // Another thread has registered the same meanwhile.
        other.registrations += 1;
        let shared = Memory::Local(other.local);
        drop(by_place);
        local.mr.map_or(Ok(()), |mr| endpoint.deregister(mr))?;
        Ok(shared)
    }

    fn share(&self, addr: usize, len: usize, vram: bool) -> Option<Result<Memory>> {
        let mut by_place = self.by_place.lock();
        let known = by_place.get_mut(&(addr, len))?;
        Some(known.check_kind(vram).map(|()| {
            known.registrations += 1;
            Memory::Local(known.local)
        }))
    }

    fn make(&self, endpoint: &Endpoint, addr: usize, len: usize) -> Result<Region> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        if len == 0 {
            // Adverts have the instance's low half.
            let instance = endpoint.instance() as u32;
            let advert = Advert { addr: addr as u64, len: 0, key: 0, slot: 0, instance };
            let local = Local { number, mr: None, advert };
            return Ok(Region { local, kind: None, registrations: 1 });
        }
        // SAFETY: NIXL's callers keep registered memory allocated until they deregister it.
        let mr = unsafe { endpoint.register(addr, len) }?;
        let kind = Some(endpoint.region_info(mr)?.kind);
        if kind == Some(MemoryKind::Host)
            && let Err(e) = make_resident(addr, len, PageAccess::Write)
        {
            // Transfers touch it as it is.
            tracing::debug!("{len} bytes at {addr:#x} are registered, but not all resident: {e}");
        }
        let local = Local { number, mr: Some(mr), advert: endpoint.advertise(mr, addr, len)? };
        Ok(Region { local, kind, registrations: 1 })
    }

    /// Ends one registration, and says whether it was the last. With the last one the region ends,
    /// and first the transfers that still use it: its memory may be freed next, whether NIXL's
    /// caller looks at the result or not. Nothing lands in it any more.
    pub(crate) fn deregister(&self, endpoint: &Endpoint, memory: &Memory) -> Result<bool> {
        let &Memory::Local(local) = memory else {
            return Err(Error::Invalid(
                "memory of another agent cannot be deregistered here".into(),
            ));
        };
        let place = (local.advert.addr as usize, local.advert.len as usize);
        let mut by_place = self.by_place.lock();
        let known = by_place.get_mut(&place).filter(|known| known.local.number == local.number);
        if let Some(region) = known {
            region.registrations -= 1;
            if region.registrations > 0 {
                return Ok(false);
            }
            // Memory that is registered from now on has a region of its own.
            by_place.remove(&place);
        }
        drop(by_place);
        if let Some(mr) = local.mr {
            endpoint.cancel_all_using(mr)?;
            endpoint.deregister(mr)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use uccl_p2p::{Config, device::numa::node_at};

    use super::*;

    fn endpoint() -> Endpoint {
        let bind = Some(Ipv4Addr::LOCALHOST.into());
        Endpoint::new(Config { bind, ..Config::default() }).expect("an endpoint")
    }

    fn key_of(memory: &Memory) -> [u8; 64] {
        memory.advert().encode()
    }

    #[test]
    fn equal_memory_is_one_region_until_its_last_registration_ends() {
        let (endpoint, regions) = (endpoint(), Regions::default());
        let bytes = vec![0_u8; 8192];
        let addr = bytes.as_ptr() as usize;
        let register = |len| regions.register(&endpoint, addr, len, false).expect("a region");
        let (first, again, part) = (register(8192), register(8192), register(4096));
        assert_eq!(key_of(&first), key_of(&again));
        assert_ne!(key_of(&first), key_of(&part), "other memory");
        assert!(!regions.deregister(&endpoint, &first).expect("one of two"));
        assert!(endpoint.region_holding(addr, 8192).is_some());
        assert!(regions.deregister(&endpoint, &again).expect("the last"));
        assert!(endpoint.region_holding(addr, 8192).is_none());
        let later = register(8192);
        assert_ne!(key_of(&first), key_of(&later), "the old key is revoked");
        // A registration that has ended ends nothing else.
        assert!(regions.deregister(&endpoint, &first).is_err());
        assert!(endpoint.region_holding(addr, 8192).is_some());
        for memory in [later, part] {
            regions.deregister(&endpoint, &memory).expect("the last");
        }
        assert!(regions.by_place.lock().is_empty());
    }

    #[test]
    fn threads_that_register_the_same_memory_share_it() {
        let (endpoint, regions) = (endpoint(), Regions::default());
        let bytes = vec![0_u8; 1 << 20];
        let addr = bytes.as_ptr() as usize;
        let register = || regions.register(&endpoint, addr, 1 << 20, false).expect("a region");
        for _ in 0..20 {
            let all: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(register)).collect();
                threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
            });
            assert!(all.iter().all(|memory| key_of(memory) == key_of(&all[0])));
            for memory in &all {
                regions.deregister(&endpoint, memory).expect("it is registered");
            }
            assert!(endpoint.region_holding(addr, 1).is_none());
        }
    }

    #[test]
    fn memory_of_the_host_has_its_pages_once_it_is_registered() {
        let (endpoint, regions) = (endpoint(), Regions::default());
        // The allocator maps so many zeros without touching them.
        let bytes = vec![0_u8; 8 << 20];
        let middle = bytes.as_ptr() as usize + (4 << 20);
        assert_eq!(node_at(middle), None, "nobody has touched it");
        let memory = regions.register(&endpoint, bytes.as_ptr() as usize, 8 << 20, false);
        assert!(node_at(middle).is_some());
        regions.deregister(&endpoint, &memory.expect("a region")).expect("the only one");
    }

    #[test]
    fn memory_without_bytes_has_no_region() {
        let (endpoint, regions) = (endpoint(), Regions::default());
        let empty = regions.register(&endpoint, 0x1000, 0, false).expect("it is nothing");
        assert!(matches!(Memory::load(0x1000, 0, &key_of(&empty)), Ok(Memory::Remote(_))));
        let again = regions.register(&endpoint, 0x1000, 0, true).expect("it is nothing");
        assert_eq!(key_of(&empty), key_of(&again));
        assert!(!regions.deregister(&endpoint, &empty).expect("one of two"));
        assert!(regions.deregister(&endpoint, &again).expect("the last"));
    }

    #[test]
    fn memory_of_the_host_is_no_gpus_also_when_it_is_shared() {
        let (endpoint, regions) = (endpoint(), Regions::default());
        let bytes = [0_u8; 64];
        let addr = bytes.as_ptr() as usize;
        assert!(regions.register(&endpoint, addr, 64, true).is_err());
        assert!(endpoint.region_holding(addr, 64).is_none());
        let host = regions.register(&endpoint, addr, 64, false).expect("a region");
        assert!(regions.register(&endpoint, addr, 64, true).is_err());
        regions.deregister(&endpoint, &host).expect("the only registration");
        assert!(endpoint.region_holding(addr, 64).is_none());
    }
}
