//! Contexts, streams, events and plain copies.

use uccl_device::cuda::{
    BatchArrays, BatchCopy, DeviceBuffer, Direction, Event, Gpus, PinnedBuffer,
};

use crate::support::{assert_same, buffer, download, gpus, pattern, peers, stream, upload};

#[test]
fn a_context_is_current_only_while_its_guard_lives() {
    let Some(found) = gpus(2) else { return };
    // The current context shows in an allocation: memory comes from its GPU.
    let outer = found[0].make_current().expect("current");
    {
        let _inner = found[1].make_current().expect("current");
        let _again = found[1].make_current().expect("current");
        found[1].probe().expect("it works");
    }
    let buffer = DeviceBuffer::new(found[1], 1 << 20).expect("device memory");
    drop(buffer);
    found[0].probe().expect("it works");
    drop(outer);
    assert!(!found[0].is_poisoned());
}

#[test]
fn the_same_context_is_given_every_time() {
    let Some(found) = gpus(1) else { return };
    let again = Gpus::get().device(0).expect("a GPU").context().expect("a context");
    assert!(std::ptr::eq(found[0], again));
    let (free, total) = found[0].memory_info().expect("numbers");
    assert!(free <= total && total <= found[0].device().memory_bytes());
}

#[test]
fn one_stream_waits_for_another_by_an_event() {
    let Some(found) = gpus(1) else { return };
    let (first, second) = (stream(found[0]), stream(found[0]));
    let wanted = pattern(1, 64 << 20);
    let source = buffer(found[0], &wanted);
    let middle = DeviceBuffer::new(found[0], wanted.len()).expect("device memory");
    let last = DeviceBuffer::new(found[0], wanted.len()).expect("device memory");
    let event = Event::new(found[0]).expect("an event");
    assert_eq!(event.is_done(), Ok(true));
    let way = Direction::DeviceToDevice;
    // SAFETY: all buffers live until both streams have been waited for.
    unsafe {
        first.fill(last.address(), 0x5a, wanted.len()).expect("enqueued");
        first.copy(middle.address(), source.address(), wanted.len(), way).expect("enqueued");
        event.record(&first).expect("recorded");
        second.wait(&event).expect("waits");
        second.copy(last.address(), middle.address(), wanted.len(), way).expect("enqueued");
    }
    second.synchronize().expect("it ends well");
    assert_eq!((event.is_done(), first.is_idle()), (Ok(true), Ok(true)));
    event.synchronize().expect("it has happened");
    assert_same(&download(found[0], last.address(), wanted.len()), &wanted, "two streams");
}

#[test]
fn copies_between_gpus_arrive_with_and_without_peer_access() {
    let Some((a, b)) = peers() else { return };
    let wanted = pattern(2, (1 << 20) + 13);
    let source = buffer(a, &wanted);
    let through = stream(a);
    for peer in [true, false] {
        let destination = buffer(b, &vec![0xee; wanted.len()]);
        let len = wanted.len();
        // SAFETY: both buffers live until the stream has been waited for.
        unsafe {
            if peer {
                let way = Direction::DeviceToDevice;
                through.copy(destination.address(), source.address(), len, way)
            } else {
                through.copy_between((b, destination.address()), (a, source.address()), len)
            }
        }
        .expect("enqueued");
        through.synchronize().expect("it ends well");
        assert_same(&download(b, destination.address(), len), &wanted, "a copy between GPUs");
    }
}

#[test]
fn a_batch_of_copies_arrives_whole() {
    let Some(found) = gpus(1) else { return };
    let through = stream(found[0]);
    if !through.has_batches() {
        eprintln!("skipped: lacks a driver with cuMemcpyBatchAsync (CUDA 12.8)");
        return;
    }
    let wanted = pattern(3, 64 * 4096);
    let source = buffer(found[0], &wanted);
    let destination = buffer(found[0], &vec![0xee; wanted.len()]);
    let copies: BatchArrays = (0..64_u64)
        .map(|index| BatchCopy {
            destination: destination.address() + index * 4096,
            source: source.address() + index * 4096,
            len_bytes: 4096,
        })
        .chain([BatchCopy { destination: 1, source: 1, len_bytes: 0 }])
        .collect();
    // SAFETY: both buffers live until the stream has been waited for.
    unsafe { through.copy_batch(&copies) }.expect("enqueued");
    through.synchronize().expect("it ends well");
    assert_same(&download(found[0], destination.address(), wanted.len()), &wanted, "a batch");
}

#[test]
fn a_refusal_of_the_driver_is_an_error_with_its_name() {
    let Some(found) = gpus(1) else { return };
    let huge = found[0].device().memory_bytes() * 4;
    let error = DeviceBuffer::new(found[0], huge).expect_err("too much").to_string();
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
    let error = PinnedBuffer::new(found[0], 0).map(|_| ()).expect_err("nothing").to_string();
    // The driver itself reports success for 0 bytes.
    assert!(error.contains("locking 0 bytes"), "{error}");
    found[0].probe().expect("nothing is lost");
    let bytes = pattern(4, 1000);
    let device = buffer(found[0], &bytes);
    upload(found[0], device.address(), &bytes);
}
