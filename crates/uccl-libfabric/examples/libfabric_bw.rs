//! How fast one channel of libfabric's writes, both ends in one process.
//!
//! ```sh
//! cargo run --release -p uccl-libfabric --example libfabric_bw -- 'tcp;ofi_rxm' lo 1048576
//! ```
//!
//! Provider, domain and bytes a write; `UCCL_LIBFABRIC_SO` names another library. Prints one line,
//! in MB/s: with one write in flight, as `fi_pingpong` measures in two directions, and with
//! sixteen.

use std::{env, error::Error, thread, time::Instant};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::OpKind,
    mem::Span,
    rail::{Channel, Rail, Request},
    region::Rights,
};
use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings};

type AnyError = Box<dyn Error>;

fn main() -> Result<(), AnyError> {
    let mut args = env::args().skip(1);
    let provider = args.next().unwrap_or_else(|| "tcp;ofi_rxm".into());
    let domain = args.next().unwrap_or_else(|| "lo".into());
    let len: usize = args.next().map_or(Ok(1 << 20), |len| len.parse())?;
    let devices = if domain.is_empty() { Devices::All } else { Devices::Named(vec![domain]) };
    let settings = LibfabricSettings {
        library: env::var_os("UCCL_LIBFABRIC_SO").map(Into::into),
        provider: Some(provider.clone()),
        devices,
        ..LibfabricSettings::default()
    };
    let rails = LibfabricRail::open_all(&settings)?;
    let rail = rails.first().ok_or("no rail")?;
    let (source, target) = (vec![1u8; len], vec![0u8; len]);
    let register = |bytes: &[u8]| {
        rail.register(Span { addr: bytes.as_ptr() as usize, len }, MemoryKind::Host, Rights::ALL)
    };
    let (ours, theirs) = (register(&source)?, register(&target)?);
    let (mut a, mut b) = (rail.open()?, rail.open()?);
    a.connect(b.address())?;
    b.connect(a.address())?;
    let key = b.export_now(&*theirs)?;
    let request = Request {
        kind: OpKind::Write,
        local: Span { addr: source.as_ptr() as usize, len },
        local_key: ours.local_key(),
        remote_addr: key.base,
        remote_key: a.import(&key.key)?,
        tag: 0,
    };
    let count = ((2usize << 30) / len).clamp(100, 20_000);
    let server = Server::start(b);
    run(&mut *a, request, count / 10, 1)?;
    let (alone, many) = (run(&mut *a, request, count, 1)?, run(&mut *a, request, count, 16)?);
    drop(a);
    drop(server);
    println!("{provider}: {len} bytes: {alone:.0} MB/s one at a time, {many:.0} with 16 in flight");
    Ok(())
}

/// Makes so many writes, with so many in flight. Returns the rate in MB/s.
fn run(
    channel: &mut dyn Channel,
    one: Request,
    count: usize,
    depth: usize,
) -> Result<f64, AnyError> {
    let (mut posted, mut ended, mut done) = (0, Vec::with_capacity(64), 0);
    let start = Instant::now();
    while done < count {
        let batch = depth.saturating_sub(posted - done).min(count - posted);
        // SAFETY: the memory lives in `main` until after the channel is dropped, and is registered.
        posted += unsafe { channel.post(&vec![one; batch]) }?;
        channel.poll(&mut ended)?;
        done += ended.len();
        for ended in ended.drain(..) {
            ended.result?;
        }
    }
    Ok((count * one.local.len) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// A thread that keeps the other end going.
struct Server {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(mut channel: Box<dyn Channel>) -> Self {
        let stop = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
        let seen = std::sync::Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut ended = Vec::new();
            while !seen.load(std::sync::atomic::Ordering::Relaxed)
                && channel.poll(&mut ended).is_ok()
            {
                std::hint::spin_loop();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}
