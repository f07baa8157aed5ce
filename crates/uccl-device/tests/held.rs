//! A stream that waits for the host holds up no work of ours: on a fake driver with calls that
//! block as the real one's do.

mod fake_driver;

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use uccl_device::cuda::{
    Context, DeviceBuffer, Direction, Gpus, HostRegistration, PinnedBuffer, Priority, Signal,
    Stream, flush_writes,
    gather::{LaunchOptions, Launcher, LauncherConfig, Piece},
    wait_until_given_back,
};

const PATIENCE: Duration = Duration::from_secs(20);

fn context() -> &'static Context {
    fake_driver::load();
    Gpus::get().device(0).expect("a GPU").context().expect("its context")
}

/// Fails if `run` does not end in time.
fn ends<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(run()));
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} does not end"))
}

fn held(context: &'static Context) -> (Signal, Stream) {
    let stream = Stream::new(context, Priority::Normal).expect("a stream");
    let signal = Signal::new(context).expect("a signal");
    signal.hold(&stream).expect("it waits");
    (signal, stream)
}

fn copy_works(context: &'static Context) {
    let stream = Stream::new(context, Priority::High).expect("a stream");
    let (from, to) = (DeviceBuffer::new(context, 4096), DeviceBuffer::new(context, 4096));
    let (from, to) = (from.expect("memory"), to.expect("memory"));
    // SAFETY: memory of these lengths, which nobody else has; the copy is waited for.
    unsafe { stream.copy(to.address(), from.address(), 4096, Direction::DeviceToDevice) }
        .expect("enqueued");
    stream.synchronize().expect("copied");
}

/// This driver's last GPU sees writes of other devices in order.
#[test]
fn writes_of_other_devices_are_flushed_for_gpus_that_need_it() {
    let context = context();
    let fake = fake_driver::load();
    let gpus = Gpus::get();
    let last = gpus.devices().last().expect("a GPU");
    last.context().expect("its context");
    assert!(context.device().needs_flush() && !last.needs_flush());
    let before = fake.flushes();
    flush_writes().expect("flushed");
    assert_eq!(fake.flushes() - before, 1, "once, for the one that is used and needs it");
    let stream = Stream::new(context, Priority::Normal).expect("a stream");
    let memory = DeviceBuffer::new(context, 4096).expect("memory");
    // The word has reached the value already.
    stream.wait_for_word(memory.address(), 0).expect("it waits");
    assert_eq!(fake.flushes() - before, 2);
    ends("the stream", move || stream.synchronize().expect("it goes on"));
}

#[test]
fn giving_memory_back_waits_for_no_stream() {
    let context = context();
    let device = DeviceBuffer::new(context, 1 << 20).expect("memory");
    let pinned = PinnedBuffer::new(context, 1 << 16).expect("memory");
    let pages = vec![0_u8; 1 << 16].into_boxed_slice();
    // SAFETY: the bytes stay where they are until they are dropped.
    let locked =
        unsafe { HostRegistration::new(context, pages.as_ptr() as u64, pages.len(), pages) };
    let locked = locked.expect("locked");
    let (signal, stream) = held(context);
    ends("giving memory back", move || drop((device, pinned, locked)));
    ends("a copy meanwhile", move || copy_works(context));
    assert!(!stream.is_idle().expect("it works"), "the stream did not wait");
    assert!(!wait_until_given_back(Duration::ZERO), "memory went back while a stream waited");
    assert_eq!(fake_driver::load().blocked(), 0);
    drop(signal);
    ends("the stream", move || stream.synchronize().expect("it goes on"));
    assert!(wait_until_given_back(PATIENCE), "memory is not given back");
}

#[test]
fn no_kernel_is_loaded_while_a_stream_waits() {
    let context = context();
    let (signal, stream) = held(context);
    ends("a launcher's first copy", move || {
        let mut launcher = Launcher::new(context, LauncherConfig::of(context)).expect("a launcher");
        let through = Stream::new(context, Priority::High).expect("a stream");
        let memory = DeviceBuffer::new(context, 1 << 16).expect("memory");
        let pieces: Vec<_> = (0..100)
            .map(|i| Piece {
                destination: memory.address() + i * 200,
                source: memory.address() + (1 << 15) + i * 200,
                len_bytes: 100,
            })
            .collect();
        // SAFETY: the pieces lie within memory that nobody else has, and do not overlap; they are
        // waited for.
        let launch = unsafe { launcher.launch(&through, &pieces, LaunchOptions::default()) };
        let _ = launch.expect("launched");
        through.synchronize().expect("copied");
    });
    drop(signal);
    ends("the stream", move || stream.synchronize().expect("it goes on"));
}

/// A new hold begins after the reaper's current call, and not in the middle of it.
#[test]
fn memory_goes_back_between_two_holds() {
    let context = context();
    for round in 0..50 {
        let (signal, stream) = held(context);
        drop(DeviceBuffer::new(context, 4096).expect("memory"));
        let until = Instant::now() + Duration::from_micros(round * 7);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        drop(signal);
        let (second, other) = ends("the next hold", move || held(context));
        copy_works(context);
        drop(second);
        stream.synchronize().expect("it goes on");
        other.synchronize().expect("it goes on");
    }
    assert!(wait_until_given_back(PATIENCE), "memory is not given back");
}
