//! Each kind of memory is classified correctly.

use std::{sync::Arc, time::Duration};

use uccl_device::{
    MemoryKind,
    cuda::{
        AddressRange, DeviceBuffer, HostRegistration, ManagedBuffer, Physical, PinnedBuffer,
        PoolBuffer, classify, wait_until_given_back,
    },
};

use crate::support::{gpus, stream};

const LEN: usize = 1 << 20;

#[test]
fn host_memory_is_pageable_until_it_is_locked() {
    let Some(found) = gpus(1) else { return };
    let page = 4096;
    let bytes: Arc<[u8]> = vec![0_u8; 4 * page].into();
    let address = bytes.as_ptr().addr().next_multiple_of(page) as u64;
    assert_eq!(classify(address).expect("an answer").kind, MemoryKind::Host);
    // SAFETY: within these bytes, which the registration keeps.
    let locked = unsafe { HostRegistration::new(found[0], address, 2 * page, Arc::clone(&bytes)) };
    let locked = locked.expect("locked");
    assert_eq!(classify(address + 5).expect("an answer").kind, MemoryKind::Pinned);
    drop(locked);
    assert!(wait_until_given_back(Duration::from_secs(10)));
    assert_eq!(classify(address).expect("an answer").kind, MemoryKind::Host);

    let pinned = PinnedBuffer::new(found[0], LEN).expect("pinned memory");
    let known = classify(pinned.address() + 77).expect("an answer");
    assert_eq!(known.kind, MemoryKind::Pinned);
    let allocation = known.allocation.expect("an allocation");
    assert!(allocation.base <= pinned.address() && allocation.len_bytes >= LEN);
}

#[test]
fn device_memory_knows_its_gpu_on_a_thread_that_never_used_one() {
    for context in gpus(1).into_iter().flat_map(|_| gpus_all()) {
        let buffer = DeviceBuffer::new(context, LEN).expect("device memory");
        let address = buffer.address() + 4097;
        let known = std::thread::spawn(move || classify(address)).join().expect("a thread");
        let known = known.expect("an answer");
        assert_eq!(known.kind, MemoryKind::Cuda { device: context.device().ordinal() });
        let allocation = known.allocation.expect("an allocation");
        assert!(allocation.base <= buffer.address());
        assert!(allocation.base + allocation.len_bytes as u64 >= buffer.address() + LEN as u64);
        assert!(known.legacy_ipc && !known.pooled, "{known:?}");
    }
}

fn gpus_all() -> Vec<&'static uccl_device::cuda::Context> {
    gpus(uccl_device::cuda::Gpus::get().devices().len()).unwrap_or_default()
}

#[test]
fn memory_at_an_old_address_is_another_allocation() {
    let Some(found) = gpus(1) else { return };
    let allocation = || {
        // Large enough that the driver frees it, and likely reuses its address.
        let buffer = DeviceBuffer::new(found[0], 64 << 20).expect("device memory");
        classify(buffer.address()).expect("an answer").allocation.expect("an allocation")
    };
    let (first, second) = (allocation(), allocation());
    println!("first {first:x?}, second {second:x?}");
    assert_ne!(first.id, second.id);
}

#[test]
fn managed_memory_is_managed() {
    let Some(found) = gpus(1) else { return };
    let buffer = ManagedBuffer::new(found[0], LEN).expect("managed memory");
    let kind = classify(buffer.address()).expect("an answer").kind;
    assert!(matches!(kind, MemoryKind::Managed { .. }), "{kind}");
}

#[test]
fn memory_of_a_pool_says_so() {
    let Some(found) = gpus(1) else { return };
    let stream = stream(found[0]);
    let buffer = PoolBuffer::new(&stream, LEN).expect("memory of a pool");
    stream.synchronize().expect("it is there");
    let known = classify(buffer.address()).expect("an answer");
    assert_eq!(known.kind, MemoryKind::Cuda { device: 0 });
    assert!(known.pooled && !known.legacy_ipc, "{known:?}");
}

#[test]
fn pieces_side_by_side_are_allocations_of_their_own() {
    let Some(found) = gpus(1) else { return };
    let context = found[0];
    let piece = Physical::granularity(context).expect("a granularity");
    let mut range = AddressRange::reserve(context, 3 * piece).expect("addresses");
    for (index, shareable) in [(0, true), (1, false)] {
        let physical = Physical::new(context, piece, shareable).expect("physical memory");
        range.map(index * piece, piece, &physical).expect("mapped");
    }
    let at = |offset: usize| classify(range.address() + offset as u64);
    let (first, second) = (at(piece - 1).expect("an answer"), at(piece).expect("an answer"));
    println!("{first:x?}\n{second:x?}");
    let base = |known: &uccl_device::cuda::Pointer| {
        known.allocation.map(|allocation| (allocation.base - range.address(), allocation.len_bytes))
    };
    assert_eq!(base(&first), Some((0, piece)));
    assert_eq!(base(&second), Some((piece as u64, piece)));
    assert_ne!(first.allocation.map(|a| a.id), second.allocation.map(|a| a.id));
    assert!(!first.legacy_ipc && !second.legacy_ipc);
    assert!(first.shares_descriptor && !second.shares_descriptor);
    // Addresses that are reserved and have no memory behind them are no GPU's: some drivers do not
    // know them, others report them as not mapped.
    let hole = at(2 * piece);
    assert!(hole.as_ref().map_or(true, |known| known.kind == MemoryKind::Host), "{hole:?}");
}
