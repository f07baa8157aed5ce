//! Memory that NIXL has metadata of: registered here, or known from another agent.

use uccl_p2p::{Iov, MrId, wire::advert::Advert};

use crate::status::{Error, Result};

/// What the metadata of one registered piece of memory stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// A region of this agent.
    Local(MrId, Advert),
    /// A region that its owner advertises: another agent, or this one, to itself.
    Remote(Advert),
}

impl Memory {
    /// From what the owner's `getPublicData` gave, and where NIXL says that the memory is.
    pub(crate) fn load(addr: usize, len: usize, data: &[u8]) -> Result<Self> {
        let advert = Advert::decode(data)
            .map_err(|e| Error::Invalid(format!("metadata of {len} bytes at {addr:#x}: {e}")))?;
        if (advert.addr, advert.len) != (addr as u64, len as u64) {
            return Err(Error::Invalid(format!(
                "metadata of {len} bytes at {addr:#x} is of {} bytes at {:#x}",
                advert.len, advert.addr
            )));
        }
        Ok(Self::Remote(advert))
    }

    pub(crate) fn advert(&self) -> &Advert {
        match self {
            Self::Local(_, advert) | Self::Remote(advert) => advert,
        }
    }

    /// A piece of a region of this agent.
    pub(crate) fn iov(&self, addr: usize, len: usize) -> Result<Iov> {
        let &Self::Local(mr, advert) = self else {
            return Err(Error::Invalid(
                "memory of another agent where local memory should be".into(),
            ));
        };
        inside(&advert, addr, len)?;
        Ok(Iov { mr, ptr: addr, len })
    }

    /// A piece of the owner's region.
    pub(crate) fn piece(&self, addr: usize, len: usize) -> Result<Advert> {
        let advert = self.advert();
        inside(advert, addr, len)?;
        Ok(Advert { addr: addr as u64, len: len as u64, ..*advert })
    }
}

fn inside(region: &Advert, addr: usize, len: usize) -> Result<()> {
    let offset = (addr as u64).checked_sub(region.addr);
    match offset.and_then(|offset| region.len.checked_sub(offset)) {
        Some(room) if len as u64 <= room => Ok(()),
        _ => Err(Error::Invalid(format!(
            "{len} bytes at {addr:#x} are not inside what was registered: {} bytes at {:#x}",
            region.len, region.addr
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: Advert = Advert { addr: 0x1000, len: 0x100, key: 7, slot: 1, instance: 2 };

    #[test]
    fn pieces_lie_inside_what_was_registered() {
        let memory = Memory::Remote(REGION);
        let whole = memory.piece(0x1000, 0x100).expect("all of it");
        assert_eq!(whole, REGION);
        assert_eq!(memory.piece(0x1100, 0).expect("nothing, at its end").len, 0);
        for (addr, len) in
            [(0xfff, 1), (0x10ff, 2), (0x1101, 0), (0x1000, usize::MAX), (usize::MAX, 1)]
        {
            assert!(memory.piece(addr, len).is_err(), "{addr:#x} {len}");
        }
        let local = Memory::Local(MrId(1), REGION);
        assert!(local.iov(0x10ff, 1).is_ok() && local.iov(0x10ff, 2).is_err());
        assert!(memory.iov(0x1000, 1).is_err(), "not this agent's");
    }

    #[test]
    fn metadata_is_of_the_memory_that_it_comes_with() {
        let data = REGION.encode();
        assert!(Memory::load(0x1000, 0x100, &data).is_ok());
        for (addr, len) in [(0x1000, 0x200), (0x2000, 0x100)] {
            assert!(Memory::load(addr, len, &data).is_err());
        }
        assert!(Memory::load(0x1000, 0x100, &data[1..]).is_err());
    }
}
