//! Memory with fabric handles, on a fake driver: it is opened in another process, as on another
//! host of an NVLink domain.

mod fake_driver;

use std::{
    env,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use uccl_device::cuda::{
    Context, DeviceBuffer, Direction, FabricExport, FabricHandle, Gpus, Importer, Priority, Stream,
    wait_until_given_back,
};

const LEN: usize = (3 << 20) + 4096;
const DOMAIN: i32 = 7;
const PATIENCE: Duration = Duration::from_secs(20);
/// What the other process is told, by its environment.
const EXPORT: &str = "UCCL_TEST_FABRIC_EXPORT";
const OTHER_DOMAIN: &str = "UCCL_TEST_FABRIC_DOMAIN";

fn context(gpu: u32) -> &'static Context {
    fake_driver::load();
    Gpus::get().device(gpu).expect("a GPU").context().expect("its context")
}

/// A domain for the whole process, which tests of one process take in turn.
fn in_domain(domain: i32) -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let held = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    fake_driver::load().fabric(domain);
    held
}

fn copy(context: &'static Context, (to, from): (u64, u64), len: usize) {
    let stream = Stream::new(context, Priority::Normal).expect("a stream");
    // SAFETY: the callers' memory of this length; the copy is waited for.
    unsafe { stream.copy(to, from, len, Direction::DeviceToDevice) }.expect("enqueued");
    stream.synchronize().expect("copied");
}

/// Host memory is the fake GPU's memory too.
fn write(context: &'static Context, to: u64, byte: u8) {
    copy(context, (to, vec![byte; LEN].as_ptr() as u64), LEN);
}

fn read(context: &'static Context, from: u64) -> Vec<u8> {
    let found = vec![0_u8; LEN];
    copy(context, (found.as_ptr() as u64, from), LEN);
    found
}

fn as_text(export: FabricExport) -> String {
    let hex: String = export.handle.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex} {}", export.len_bytes)
}

fn of_text(text: &str) -> FabricExport {
    let (hex, len) = text.split_once(' ').expect("a handle and a length");
    let mut handle = [0; 64];
    for (nth, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * nth..2 * nth + 2], 16).expect("hex");
    }
    FabricExport { handle: FabricHandle(handle), len_bytes: len.parse().expect("a length") }
}

/// Not a test: the program of the other process.
#[test]
#[ignore = "the other process of a test"]
fn other_process() {
    let Ok(export) = env::var(EXPORT) else { return };
    let domain = env::var(OTHER_DOMAIN).expect("a domain").parse().expect("a number");
    let context = context(0);
    let _held = in_domain(domain);
    let export = of_text(&export);
    let mapping = Importer::map_fabric(context, export);
    if domain != DOMAIN {
        let refused = mapping.map(|_| ()).expect_err("memory of another domain");
        assert!(refused.code().is_some() && refused.to_string().contains("fabric"), "{refused}");
        return;
    }
    let long = FabricExport { len_bytes: 2 * export.len_bytes, ..export };
    assert!(Importer::map_fabric(context, long).is_err(), "longer than it is");
    let mapping = mapping.expect("it is mapped");
    assert_eq!(mapping.len_bytes(), export.len_bytes);
    assert!(read(context, mapping.address()).iter().all(|byte| *byte == 10));
    write(context, mapping.address(), 11);
    drop(mapping);
    assert!(wait_until_given_back(PATIENCE), "the mapping is not given back");
}

/// Runs the other process to its end.
fn in_other_process(export: FabricExport, domain: i32) {
    let status = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "other_process", "--ignored", "--nocapture"])
        .env(EXPORT, as_text(export))
        .env(OTHER_DOMAIN, domain.to_string())
        .status()
        .expect("it starts");
    assert!(status.success(), "the other process failed in domain {domain}: {status}");
}

#[test]
fn another_process_of_the_domain_maps_the_memory() {
    let context = context(0);
    let _held = in_domain(DOMAIN);
    let memory = DeviceBuffer::in_fabric(context, LEN).expect("memory");
    let export = memory.fabric_export().expect("a handle");
    assert!(memory.len_bytes() == LEN && export.len_bytes >= LEN);
    write(context, memory.address(), 10);
    in_other_process(export, DOMAIN);
    assert!(read(context, memory.address()).iter().all(|byte| *byte == 11));
    in_other_process(export, DOMAIN + 1);
    memory.allow_peer(self::context(1)).expect("another GPU of this process reaches it");
    drop(memory);
    assert!(wait_until_given_back(PATIENCE), "the memory is not given back");
}

/// The fake driver ends the process when memory is unmapped under a copy.
#[test]
fn memory_is_unmapped_behind_the_work_that_uses_it() {
    let context = context(0);
    let fake = fake_driver::load();
    let _held = in_domain(DOMAIN);
    let memory = DeviceBuffer::in_fabric(context, LEN).expect("memory");
    let mapping = Importer::map_fabric(context, memory.fabric_export().expect("a handle"));
    let mapping = mapping.expect("it is mapped here too");
    let stream = Stream::new(context, Priority::Normal).expect("a stream");
    fake.pause(true);
    // SAFETY: mapped memory of this length, which is unmapped behind the copy.
    unsafe { stream.copy(mapping.address(), memory.address(), LEN, Direction::DeviceToDevice) }
        .expect("enqueued");
    drop((memory, mapping));
    assert!(!wait_until_given_back(Duration::from_millis(50)), "it was not waited for");
    fake.pause(false);
    stream.synchronize().expect("copied");
    assert!(wait_until_given_back(PATIENCE), "the memory is not given back");
}

#[test]
fn where_there_are_no_handles_the_reason_is_said() {
    let held = in_domain(0);
    let refused = DeviceBuffer::in_fabric(context(0), LEN).map(|_| ()).expect_err("no channel");
    assert!(refused.code().is_some(), "{refused}");
    drop(held);
    let _held = in_domain(DOMAIN);
    let last = Gpus::get().devices().len() as u32 - 1;
    let refused = DeviceBuffer::in_fabric(context(last), LEN).map(|_| ()).expect_err("no handles");
    assert!(refused.to_string().contains("fabric handles"), "{refused}");
    let plain = DeviceBuffer::new(context(0), LEN).expect("memory");
    assert_eq!(plain.fabric_export(), None);
    plain.allow_peer(context(1)).expect("another GPU of this process reaches it");
}
