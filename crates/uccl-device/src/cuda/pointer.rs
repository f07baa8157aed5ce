//! Finds the kind of memory at an address.

use std::ffi::c_void;

use crate::memory::MemoryKind;

use super::{
    driver::Driver,
    error::GpuError,
    gpus::Gpus,
    raw::{
        Code, DevicePtr, HANDLE_TYPE_FD, INVALID_CONTEXT, SUCCESS, memory_type,
        pointer_attribute as attribute,
    },
};

/// A piece of memory that was allocated as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Allocation {
    /// Its address.
    pub base: u64,
    /// Its length in bytes.
    pub len_bytes: usize,
    /// A number that is unique among all allocations that this process has ever had: the same
    /// address with another number is other memory.
    pub id: u64,
}

/// The driver's facts about an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Pointer {
    /// The memory's kind.
    pub kind: MemoryKind,
    /// The allocation it is part of. `None` for pageable memory, about which the driver knows
    /// nothing. If several pieces of physical memory are mapped side by side, it is the piece at
    /// the address.
    pub allocation: Option<Allocation>,
    /// Whether `cuIpcGetMemHandle` takes it.
    pub legacy_ipc: bool,
    /// Whether it can be shared as a file descriptor.
    pub shares_descriptor: bool,
    /// Whether it comes from a memory pool (`cudaMallocAsync`).
    pub pooled: bool,
}

impl Pointer {
    const PAGEABLE: Self = Self {
        kind: MemoryKind::Host,
        allocation: None,
        legacy_ipc: false,
        shares_descriptor: false,
        pooled: false,
    };
}

/// Asks the driver for the kind of memory at an address. If no code of this process uses a GPU, the
/// answer is pageable memory.
///
/// The calling thread needs no current context, and its context stays as it is.
///
/// # Errors
/// [`GpuError::Driver`] if the driver does not answer; [`GpuError::System`] for an address that is
/// reserved and has no memory behind it, if the driver recognises that (version 580 reports
/// pageable memory).
pub fn classify(address: u64) -> Result<Pointer, GpuError> {
    let Some(gpus) = Gpus::in_use() else { return Ok(Pointer::PAGEABLE) };
    match gpus.driver() {
        Ok(driver) if address != 0 => Answers::ask(gpus, driver, address)?.judge(address),
        _ => Ok(Pointer::PAGEABLE),
    }
}

/// The attributes that are asked for, in one call. Those that drivers before 12.0 do not know come
/// last.
const QUESTIONS: [i32; 13] = [
    attribute::MEMORY_TYPE,
    attribute::DEVICE_ORDINAL,
    attribute::IS_MANAGED,
    attribute::BUFFER_ID,
    attribute::RANGE_START,
    attribute::RANGE_SIZE,
    attribute::MAPPED,
    attribute::LEGACY_IPC_CAPABLE,
    attribute::ALLOWED_HANDLE_TYPES,
    attribute::MEMPOOL_HANDLE,
    attribute::MAPPING_BASE,
    attribute::MAPPING_SIZE,
    attribute::MEMORY_BLOCK_ID,
];

/// How many of them every driver since 11.2 knows: the first ones.
const OLD_QUESTIONS: usize = 9;

/// The answers, in the order of the questions. Each slot is wide enough for any answer. Bytes that
/// the driver does not write stay zero.
struct Answers([u64; QUESTIONS.len()]);

impl Answers {
    fn ask(gpus: &'static Gpus, driver: &Driver, address: DevicePtr) -> Result<Self, GpuError> {
        let mut answers = Self([0; QUESTIONS.len()]);
        let mut code = answers.fill(driver, address, QUESTIONS.len());
        if code == INVALID_CONTEXT {
            code = answers.fill_in_some_context(gpus, driver, address)?;
        }
        if code != SUCCESS {
            code = answers.fill(driver, address, OLD_QUESTIONS);
        }
        driver.check(code, format_args!("asking what memory is at {address:#x}"))?;
        Ok(answers)
    }

    fn fill(&mut self, driver: &Driver, address: DevicePtr, count: usize) -> Code {
        self.0 = [0; QUESTIONS.len()];
        let slots = self.0.as_mut_ptr();
        let places: [*mut c_void; QUESTIONS.len()] =
            std::array::from_fn(|index| slots.wrapping_add(index).cast());
        // SAFETY: as many places as questions, each in bounds of the array and wide enough for any
        // answer.
        unsafe {
            (driver.pointer_attributes)(count as u32, QUESTIONS.as_ptr(), places.as_ptr(), address)
        }
    }

    /// Asks with a context current, for drivers that need one. Any context will do.
    fn fill_in_some_context(
        &mut self,
        gpus: &'static Gpus,
        driver: &Driver,
        address: DevicePtr,
    ) -> Result<Code, GpuError> {
        let Some(device) = gpus.devices().iter().find(|device| device.is_active()) else {
            // No GPU has been used yet, so no memory can be a GPU's.
            self.0 = [0; QUESTIONS.len()];
            return Ok(SUCCESS);
        };
        let _current = device.context()?.make_current()?;
        Ok(self.fill(driver, address, QUESTIONS.len()))
    }

    fn get(&self, question: i32) -> u64 {
        let place = QUESTIONS.iter().position(|asked| *asked == question);
        place.and_then(|place| self.0.get(place)).copied().unwrap_or(0)
    }

    fn judge(&self, address: u64) -> Result<Pointer, GpuError> {
        let device = u32::try_from(self.get(attribute::DEVICE_ORDINAL) as i32).unwrap_or(0);
        let kind = match self.get(attribute::MEMORY_TYPE) as u32 {
            _ if self.get(attribute::IS_MANAGED) as u8 != 0 => MemoryKind::Managed { device },
            memory_type::HOST => MemoryKind::Pinned,
            memory_type::DEVICE | memory_type::UNIFIED => MemoryKind::Cuda { device },
            _ if self.get(attribute::RANGE_SIZE) != 0 => return Err(hole(address)),
            _ => return Ok(Pointer::PAGEABLE),
        };
        let legacy_ipc = self.get(attribute::LEGACY_IPC_CAPABLE) as u8 != 0;
        let pooled = self.get(attribute::MEMPOOL_HANDLE) != 0;
        let in_pieces = matches!(kind, MemoryKind::Cuda { .. }) && !legacy_ipc && !pooled;
        if in_pieces && self.get(attribute::MAPPED) as u8 == 0 {
            return Err(hole(address));
        }
        let types = self.get(attribute::ALLOWED_HANDLE_TYPES);
        let shares_descriptor = types & HANDLE_TYPE_FD as u64 != 0;
        let allocation = self.allocation(in_pieces);
        Ok(Pointer { kind, allocation, legacy_ipc, shares_descriptor, pooled })
    }

    /// The allocation of memory that was mapped piece by piece is the piece at the address, as its
    /// range spans all pieces. The allocation of other memory is its range, as small allocations
    /// share a physical piece.
    fn allocation(&self, in_pieces: bool) -> Option<Allocation> {
        let whole = [attribute::RANGE_START, attribute::RANGE_SIZE, attribute::BUFFER_ID];
        let piece = [attribute::MAPPING_BASE, attribute::MAPPING_SIZE, attribute::MEMORY_BLOCK_ID];
        let known = in_pieces && self.get(attribute::MAPPING_SIZE) != 0;
        let [base, len, id] = (if known { piece } else { whole }).map(|which| self.get(which));
        (len > 0).then_some(Allocation { base, len_bytes: len as usize, id })
    }
}

fn hole(address: u64) -> GpuError {
    GpuError::System {
        doing: format!("asking what memory is at {address:#x}"),
        reason: "the address is reserved and has no memory behind it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(given: &[(i32, u64)]) -> Answers {
        Answers(QUESTIONS.map(|question| {
            given.iter().find(|(asked, _)| *asked == question).map_or(0, |(_, answer)| *answer)
        }))
    }

    const DEVICE_MEMORY: [(i32, u64); 6] = [
        (attribute::MEMORY_TYPE, memory_type::DEVICE as u64),
        (attribute::DEVICE_ORDINAL, 3),
        (attribute::MAPPED, 1),
        (attribute::RANGE_START, 0x7000_0000),
        (attribute::RANGE_SIZE, 0x20_0000),
        (attribute::BUFFER_ID, 17),
    ];

    #[test]
    fn memory_that_the_driver_does_not_know_is_pageable() {
        assert_eq!(answers(&[]).judge(0x1000), Ok(Pointer::PAGEABLE));
        let here = 0_u8;
        let pointer = classify((&raw const here).addr() as u64).expect("an answer");
        assert_eq!((pointer.kind, pointer.allocation), (MemoryKind::Host, None));
        assert_eq!(classify(0), Ok(Pointer::PAGEABLE));
    }

    #[test]
    fn device_memory_knows_its_device_and_allocation() {
        let pointer = answers(&DEVICE_MEMORY).judge(0x7000_1000).expect("device memory");
        assert_eq!(pointer.kind, MemoryKind::Cuda { device: 3 });
        let allocation = Allocation { base: 0x7000_0000, len_bytes: 0x20_0000, id: 17 };
        assert_eq!(pointer.allocation, Some(allocation));
    }

    #[test]
    fn the_piece_at_the_address_counts_and_not_the_whole_reservation() {
        let mapping = [
            (attribute::MAPPING_BASE, 0x7010_0000),
            (attribute::MAPPING_SIZE, 0x10_0000),
            (attribute::MEMORY_BLOCK_ID, 99),
            (attribute::ALLOWED_HANDLE_TYPES, 1),
        ];
        let plain = [(attribute::LEGACY_IPC_CAPABLE, 1)];
        let shared: Vec<_> = DEVICE_MEMORY.into_iter().chain(mapping).chain(plain).collect();
        let pointer = answers(&shared).judge(0x7010_1000).expect("device memory");
        assert_eq!(pointer.allocation.map(|a| (a.base, a.id)), Some((0x7000_0000, 17)));
        let all: Vec<_> = DEVICE_MEMORY.into_iter().chain(mapping).collect();
        let pointer = answers(&all).judge(0x7010_1000).expect("device memory");
        let allocation = Allocation { base: 0x7010_0000, len_bytes: 0x10_0000, id: 99 };
        assert_eq!(pointer.allocation, Some(allocation));
        assert!(pointer.shares_descriptor && !pointer.legacy_ipc);
    }

    #[test]
    fn a_hole_in_a_reservation_is_an_error() {
        let hole: Vec<_> =
            DEVICE_MEMORY.into_iter().filter(|(asked, _)| *asked != attribute::MAPPED).collect();
        assert!(answers(&hole).judge(0x7000_1000).is_err());
        let range = [(attribute::RANGE_START, 0x7000_0000), (attribute::RANGE_SIZE, 1 << 21)];
        assert!(answers(&range).judge(0x7000_1000).is_err());
    }

    #[test]
    fn managed_and_pinned_memory_are_told_apart() {
        let managed =
            [(attribute::IS_MANAGED, 1), (attribute::MAPPED, 1), (attribute::MEMORY_TYPE, 2)];
        let kind = answers(&managed).judge(1).expect("managed").kind;
        assert_eq!(kind, MemoryKind::Managed { device: 0 });
        let pinned = [(attribute::MEMORY_TYPE, 1), (attribute::MAPPED, 1)];
        assert_eq!(answers(&pinned).judge(1).expect("pinned").kind, MemoryKind::Pinned);
    }
}
