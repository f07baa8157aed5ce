//! A GPU's memory as a file for other devices' drivers.

use uccl_device::cuda::{DeviceBuffer, DmaBuf, GpuError};

use crate::support::gpus;

#[test]
fn memory_is_exported_in_whole_pages() {
    let Some(contexts) = gpus(1) else { return };
    let buffer = DeviceBuffer::new(contexts[0], 4 << 20).expect("memory");
    for (at, len) in [(0, 4 << 20), (100, 5000), (4095, 2), (1 << 20, 1)] {
        match DmaBuf::export(buffer.address() + at, len) {
            Ok(file) => {
                assert_eq!(file.offset, (buffer.address() + at) % 4096);
                eprintln!("{len} bytes at {at}: {file:?}");
            }
            Err(error @ (GpuError::Driver { .. } | GpuError::Missing { .. })) => {
                return eprintln!("skipped: lacks dma-buf for GPU memory: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn host_memory_is_refused() {
    let Some(_) = gpus(1) else { return };
    let bytes = [0u8; 64];
    let refused = DmaBuf::export(bytes.as_ptr().expose_provenance() as u64, bytes.len());
    assert!(matches!(refused, Err(GpuError::NotExportable { .. })), "{refused:?}");
}
