//! GPUs or a reason, memory with known bytes, and a second process.

use std::{
    env,
    io::IoSlice,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};
use uccl_device::cuda::{Context, DeviceBuffer, Direction, Gpus, PinnedBuffer, Priority, Stream};

/// The contexts of the first `count` GPUs, or nothing after a message about the missing ones.
pub(crate) fn gpus(count: usize) -> Option<Vec<&'static Context>> {
    let found = Gpus::get();
    if found.devices().len() < count {
        let why = found.why_none().map(|why| format!(" ({why})")).unwrap_or_default();
        let have = found.devices().len();
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        eprintln!("skipped: {name}: lacks {count} GPUs, has {have}{why}");
        return None;
    }
    let contexts = found.devices().iter().take(count).map(|device| device.context());
    Some(contexts.collect::<Result<_, _>>().expect("each GPU has a context"))
}

/// Two GPUs that reach each other, or nothing after a message about the missing ones.
pub(crate) fn peers() -> Option<(&'static Context, &'static Context)> {
    let found = gpus(2)?;
    let (a, b) = (found[0], found[1]);
    if !a.device().can_access(b.device()).expect("an answer") {
        eprintln!("skipped: lacks two GPUs that reach each other's memory");
        return None;
    }
    a.enable_peer(b).expect("a reaches b");
    b.enable_peer(a).expect("b reaches a");
    Some((a, b))
}

pub(crate) fn stream(context: &'static Context) -> Stream {
    Stream::new(context, Priority::Normal).expect("a stream")
}

/// Bytes that differ at every place and for every seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Writes to a GPU's memory, through its own context.
pub(crate) fn upload(context: &'static Context, address: u64, bytes: &[u8]) {
    let stream = stream(context);
    let mut pinned = PinnedBuffer::new(context, bytes.len()).expect("pinned memory");
    // SAFETY: nobody else has it yet.
    unsafe { pinned.as_mut_slice() }.copy_from_slice(bytes);
    // SAFETY: both live until the stream has been waited for.
    unsafe { stream.copy(address, pinned.address(), bytes.len(), Direction::HostToDevice) }
        .expect("a copy");
    stream.synchronize().expect("it ends well");
}

/// Reads a GPU's memory, through a context that reaches it.
pub(crate) fn download(context: &'static Context, address: u64, len: usize) -> Vec<u8> {
    let stream = stream(context);
    let pinned = PinnedBuffer::new(context, len).expect("pinned memory");
    // SAFETY: both live until the stream has been waited for.
    unsafe { stream.copy(pinned.address(), address, len, Direction::DeviceToHost) }
        .expect("a copy");
    stream.synchronize().expect("it ends well");
    // SAFETY: the copy has ended.
    unsafe { pinned.as_slice() }.to_vec()
}

/// Device memory with these bytes.
pub(crate) fn buffer(context: &'static Context, bytes: &[u8]) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(context, bytes.len()).expect("device memory");
    upload(context, buffer.address(), bytes);
    buffer
}

/// The first difference of the two, which is more readable than both in full.
pub(crate) fn assert_same(found: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let wrong = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    if let Some(at) = wrong {
        let count = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count();
        panic!(
            "{what}: {count} bytes differ, the first at {at}: {} is not {}",
            found[at], wanted[at]
        );
    }
}

const ROLE: &str = "UCCL_GPU_TEST_ROLE";
const SOCKET: &str = "UCCL_GPU_TEST_SOCKET";
/// Far more than any answer takes.
const LIMIT: Duration = Duration::from_secs(60);

/// The other process of a test, or the way back to the first.
pub(crate) struct Peer {
    socket: OwnedFd,
    process: Option<Child>,
}

impl Peer {
    /// Starts this same program as another process, with a role to play.
    pub(crate) fn start(role: &str) -> Self {
        Self::start_with(role, &[])
    }

    pub(crate) fn start_with(role: &str, environment: &[(&str, &str)]) -> Self {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a pair of sockets");
        let number = theirs.as_raw_fd();
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", "two_processes::other_process", "--nocapture"]);
        command.env(ROLE, role).env(SOCKET, number.to_string());
        command.envs(environment.iter().copied());
        let keep = move || {
            // SAFETY: open until the child has been started.
            let theirs = unsafe { BorrowedFd::borrow_raw(number) };
            rustix::io::fcntl_setfd(theirs, rustix::io::FdFlags::empty())?;
            Ok(())
        };
        // SAFETY: one system call, between fork and exec.
        unsafe { command.pre_exec(keep) };
        let process = command.spawn().expect("a second process");
        Self::limited(ours, Some(process))
    }

    /// In the other process: its role and the way back; nothing where this is no other process.
    pub(crate) fn of_this_process() -> Option<(String, Self)> {
        let role = env::var(ROLE).ok()?;
        let number: RawFd = env::var(SOCKET).ok()?.parse().ok()?;
        // SAFETY: left open for this process by the one that started it.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        Some((role, Self::limited(socket, None)))
    }

    fn limited(socket: OwnedFd, process: Option<Child>) -> Self {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LIMIT)).expect("a limit");
        Self { socket, process }
    }

    pub(crate) fn say(&self, bytes: &[u8]) {
        self.send(bytes, &[]);
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        let parts = [IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()));
    }

    pub(crate) fn hear(&self) -> Vec<u8> {
        self.receive().0
    }

    pub(crate) fn receive(&self) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; 8192];
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(&self.socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC)
            .expect("the other process answers");
        assert!(got.bytes > 0, "the other process has ended");
        let fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        let fds = fds.collect();
        bytes.truncate(got.bytes);
        (bytes, fds)
    }

    /// Waits until the other process has ended well.
    pub(crate) fn finish(mut self) {
        let mut process = self.process.take().expect("there is another process");
        let status = process.wait().expect("it ends");
        assert!(status.success(), "the other process: {status}");
    }

    /// Ends the other process in the middle of things.
    pub(crate) fn kill(&mut self) {
        let mut process = self.process.take().expect("there is another process");
        process.kill().expect("it can be killed");
        process.wait().expect("it ends");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // The process may be left from a test that failed.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// For functions that want something with a descriptor.
pub(crate) fn borrowed<F: AsFd>(fds: &[F]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
