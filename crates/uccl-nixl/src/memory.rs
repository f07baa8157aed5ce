//! Memory that NIXL has metadata of: registered here, or known from another agent.

use uccl_p2p::{Iov, MrId, wire::advert::Advert};

use crate::status::{Error, Result};

/// The memory that the metadata of one registration stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// A region of this agent.
    Local(Local),
    /// A region that its owner advertises: another agent, or this one, to itself.
    Remote(Advert),
}

/// A region of this agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    /// Which of the agent's regions it is; no two have the same number.
    pub(crate) number: u64,
    /// The engine's region. `None` of memory without bytes, as an empty tensor has: its advert
    /// grants nothing.
    pub(crate) mr: Option<MrId>,
    pub(crate) advert: Advert,
}

impl Memory {
    /// From the data of the owner's `getPublicData`, and from NIXL's address and length of the
    /// memory.
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
            Self::Local(Local { advert, .. }) | Self::Remote(advert) => advert,
        }
    }

    /// A piece of a region of this agent; `None` of memory without bytes.
    pub(crate) fn iov(&self, addr: usize, len: usize) -> Result<Option<Iov>> {
        inside(self.advert(), addr, len)?;
        match self {
            Self::Local(local) => Ok(local.mr.map(|mr| Iov { mr, ptr: addr, len })),
            Self::Remote(_) => {
                Err(Error::Invalid("memory of another agent where local memory should be".into()))
            }
        }
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
    fn pieces_lie_inside_the_registered_region() {
        let memory = Memory::Remote(REGION);
        let whole = memory.piece(0x1000, 0x100).expect("all of it");
        assert_eq!(whole, REGION);
        assert_eq!(memory.piece(0x1100, 0).expect("nothing, at its end").len, 0);
        for (addr, len) in
            [(0xfff, 1), (0x10ff, 2), (0x1101, 0), (0x1000, usize::MAX), (usize::MAX, 1)]
        {
            assert!(memory.piece(addr, len).is_err(), "{addr:#x} {len}");
        }
        let local = Memory::Local(Local { number: 1, mr: Some(MrId(1)), advert: REGION });
        assert!(local.iov(0x10ff, 1).is_ok_and(|iov| iov.is_some()));
        assert!(local.iov(0x10ff, 2).is_err());
        assert!(memory.iov(0x1000, 1).is_err(), "not this agent's");
    }

    #[test]
    fn memory_without_bytes_has_pieces_without_bytes() {
        let advert = Advert { len: 0, ..REGION };
        let empty = Memory::Local(Local { number: 1, mr: None, advert });
        assert!(empty.iov(0x1000, 0).is_ok_and(|iov| iov.is_none()));
        assert!(empty.iov(0x1000, 1).is_err() && empty.iov(0xfff, 0).is_err());
        assert!(empty.piece(0x1000, 1).is_err());
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
