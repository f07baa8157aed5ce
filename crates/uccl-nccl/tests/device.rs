//! One-sided calls on GPU memory, on a fake driver.

#[path = "../../uccl-device/tests/fake_driver/mod.rs"]
mod fake_driver;

use std::{
    ffi::{c_int, c_void},
    io::{BufRead, BufReader, Write as _},
    process::{Child, Command, Stdio},
    ptr::null_mut,
    sync::atomic::{AtomicU64, Ordering::Acquire},
    thread,
    time::{Duration, Instant},
};

use nccl_net_uccl::rma::tables::ncclRmaPlugin_v16 as TABLE;
use uccl_device::cuda::{DeviceBuffer, Gpus};
use uccl_nccl_abi::{
    HANDLE_BYTES, NcclResult, memory,
    rma::{RmaConfig, signal},
};

const NAME: &str = "puts_between_gpus_launch_no_kernel_and_allocate_nothing";
/// The variable that makes this program a rank, and the mark of lines for the other one.
const RANK: &str = "UCCL_TEST_RMA_RANK";
const MARK: &str = "@@";
const LEN: usize = 1 << 20;
const WORDS: usize = 64;
const FIRST: u64 = 20;
const PUTS: u64 = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// A pointer of the plugin's.
#[derive(Clone, Copy)]
struct Pointer(*mut c_void);

/// A function of the table.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let function = TABLE.functions.$name.expect("a function");
        // SAFETY: called as NCCL does, with objects of this plugin.
        let result = unsafe { function($($argument),*) };
        assert_eq!(result, NcclResult::SUCCESS, stringify!($name));
    }};
}

/// A rank with GPU memory: source, target, and words.
struct Rank {
    rank: usize,
    coll: Pointer,
    contexts: Pointer,
    memory: [DeviceBuffer; 3],
    mrs: [Pointer; 3],
}

type Handle = [u8; HANDLE_BYTES];

fn listen(context: Pointer) -> (Handle, Pointer) {
    let (mut handle, mut comm) = ([0; HANDLE_BYTES], null_mut());
    call!(listen(context.0, 0, handle.as_mut_ptr().cast(), &mut comm));
    (handle, Pointer(comm))
}

impl Rank {
    fn join(context: Pointer, mut handles: [Handle; 2], rank: usize, listen: Pointer) -> Self {
        let mut at = handles.each_mut().map(|handle| handle.as_mut_ptr().cast::<c_void>());
        let (mut coll, mut contexts) = (null_mut(), null_mut());
        call!(connect(context.0, at.as_mut_ptr(), 2, rank as c_int, listen.0, &mut coll));
        call!(close_listen(listen.0));
        let mut config = RmaConfig { contexts: 1, traffic_class: -1 };
        call!(create_context(coll, &mut config, &mut contexts));
        let gpu = Gpus::get().device(rank as u32).expect("a GPU").context().expect("its context");
        let memory = [LEN, LEN, WORDS].map(|len| DeviceBuffer::new(gpu, len).expect("memory"));
        let mrs = memory.each_ref().map(|memory| {
            let (mut mr, at) = (null_mut(), memory.address() as *mut c_void);
            call!(reg_mr_sym(coll, at, memory.len_bytes(), memory::CUDA, 0, &mut mr));
            Pointer(mr)
        });
        let mut joined =
            Self { rank, coll: Pointer(coll), contexts: Pointer(contexts), memory, mrs };
        joined.bytes(0).fill(rank as u8 + 1);
        joined
    }

    /// The fake driver's memory, which the CPU reaches too.
    fn bytes(&mut self, at: usize) -> &mut [u8] {
        let memory = &self.memory[at];
        // SAFETY: memory of the fake driver, which is mapped; nothing is under way there.
        unsafe { std::slice::from_raw_parts_mut(memory.address() as *mut u8, memory.len_bytes()) }
    }

    fn word(&self) -> u64 {
        // SAFETY: the fake driver's memory, which is mapped and aligned to pages.
        unsafe { AtomicU64::from_ptr(self.memory[2].address() as *mut u64) }.load(Acquire)
    }

    /// Puts to a rank, and adds 3 to its word.
    fn put(&self, to: usize) -> Pointer {
        let [source, target, words] = self.mrs;
        let mut request = null_mut();
        call!(put_signal(
            self.contexts.0,
            0,
            0,
            source.0,
            LEN,
            0,
            target.0,
            to as u32,
            0,
            words.0,
            3,
            signal::ADD,
            true,
            0,
            &mut request,
        ));
        Pointer(request)
    }

    fn until(&self, what: &str, is_it: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_it() {
            assert!(Instant::now() < end, "rank {}: {what}", self.rank);
            call!(progress(self.contexts.0));
            thread::yield_now();
        }
    }

    fn wait(&self, request: Pointer) {
        self.until("a request", || {
            let mut done = 0;
            call!(test(self.coll.0, request.0, &mut done));
            done != 0
        });
    }

    fn close(self) {
        call!(destroy_context(self.contexts.0));
        for mr in self.mrs {
            call!(dereg_mr_sym(self.coll.0, mr.0));
        }
        call!(close_coll(self.coll.0));
    }
}

/// Gives the other rank's process a line, and takes one of its.
fn swap(line: &str) -> String {
    println!("\n{MARK}{line}");
    let mut other = String::new();
    std::io::stdin().read_line(&mut other).expect("the other rank's line");
    other.trim().to_owned()
}

fn joined(rank: usize, context: Pointer) -> Rank {
    let (own, comm) = listen(context);
    let numbers: Vec<String> = own.iter().map(ToString::to_string).collect();
    let said = swap(&numbers.join(" "));
    let theirs: Vec<u8> = said.split(' ').map(|byte| byte.parse().expect("a byte")).collect();
    let theirs: Handle = theirs.try_into().expect("a handle");
    let handles = if rank == 0 { [own, theirs] } else { [theirs, own] };
    Rank::join(context, handles, rank, comm)
}

fn work(rank: usize) {
    let (fake, mut context) = (fake_driver::load(), null_mut());
    // SAFETY: as NCCL does.
    let begun = unsafe { TABLE.init.expect("a function")(&mut context, 1, None) };
    assert_eq!(begun, NcclResult::SUCCESS);
    let (context, peer) = (Pointer(context), 1 - rank);
    let mut rank = joined(rank, context);
    let before = (fake.kernels(), fake.allocations());
    assert_eq!(before.0, 0, "kernels");
    // In both directions, and to itself.
    for _ in 0..FIRST {
        let requests = [rank.put(peer), rank.put(rank.rank)];
        for request in requests {
            rank.wait(request);
        }
    }
    rank.until("the first signals", || rank.word() == 6 * FIRST);
    swap("the first have come");
    for _ in 0..PUTS {
        rank.wait(rank.put(peer));
    }
    rank.until("all signals", || rank.word() == 6 * FIRST + 3 * PUTS);
    assert_eq!((fake.kernels(), fake.allocations()), before, "kernels, and memory of the GPU's");
    let wanted = peer as u8 + 1;
    assert!(rank.bytes(1).iter().all(|byte| *byte == wanted), "bytes of rank {peer}");
    swap("all have come");
    rank.close();
    call!(finalize(context.0));
}

/// Starts a rank, which runs the same test.
fn start(rank: usize, transport: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", NAME, "--nocapture"])
        .env(RANK, rank.to_string())
        .env("UCCL_NCCL_RMA", "1")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("UCCL_P2P_TRANSPORT", transport)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program runs")
}

/// The next line that a rank has for the other one; none at its end.
fn line_of(rank: &mut impl BufRead) -> Option<String> {
    rank.lines().map_while(Result::ok).find_map(|line| Some(line.strip_prefix(MARK)?.to_owned()))
}

#[test]
fn puts_between_gpus_launch_no_kernel_and_allocate_nothing() {
    if let Ok(rank) = std::env::var(RANK) {
        return work(rank.parse().expect("a rank"));
    }
    // Compiled once, and not by both at a time.
    fake_driver::load();
    for transport in ["tcp", "auto"] {
        let mut ranks = [0, 1].map(|rank| start(rank, transport));
        let mut outputs =
            ranks.each_mut().map(|rank| BufReader::new(rank.stdout.take().expect("piped")));
        let mut inputs = ranks.each_mut().map(|rank| rank.stdin.take().expect("piped"));
        while let [Some(one), Some(other)] = outputs.each_mut().map(line_of) {
            for (input, line) in inputs.iter_mut().zip([other, one]) {
                // A rank that has failed takes none, and its status says so.
                let _taken = writeln!(input, "{line}");
            }
        }
        drop(inputs);
        for rank in &mut ranks {
            assert!(rank.wait().expect("a rank").success(), "{transport}");
        }
    }
}
