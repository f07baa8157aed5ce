//! Probes of facts that no file states, on processes and sockets of our own.

use std::{
    hint::black_box,
    io::{self, Read},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use uccl_bench::vm::{Way, copy};

/// The hidden subcommand that the probing child runs.
pub(crate) const SUBCOMMAND: &str = "probe-memory";

/// Which memory of which process to reach.
#[derive(Args)]
pub(crate) struct ProbeArgs {
    pid: u32,
    address: u64,
}

/// The error of each copy; `None` where it worked.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProbeResult {
    /// The child's own memory, by the same calls.
    pub(crate) own: Option<String>,
    pub(crate) read: Option<String>,
    pub(crate) write: Option<String>,
}

impl ProbeResult {
    /// Whether the other process's memory was reached both ways.
    pub(crate) fn works(&self) -> bool {
        self.read.is_none() && self.write.is_none()
    }
}

const WORD: u64 = 0x7563_636c_2070_726f;
const ANSWER: u64 = 0x626f_6421_2062_6f64;

/// Whether a process may copy to and from the memory of one that is not its child, as two programs
/// of one host would. The child that is started to try it reaches back into this process.
pub(crate) fn process_memory() -> Result<ProbeResult> {
    let mut word = Box::new(WORD);
    let target: *mut u64 = &mut *word;
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let mut child = Command::new(program)
        .args([SUBCOMMAND, &std::process::id().to_string(), &(target as u64).to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a process to try with")?;
    let mut answer = String::new();
    let read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut answer));
    let status = child.wait()?;
    read.transpose()?;
    if !status.success() {
        // A seccomp filter that kills the process is one cause.
        bail!("the process that tried ended with {status}");
    }
    let reached: ProbeResult = serde_json::from_str(&answer).context("it gave no answer")?;
    // SAFETY: the box lives; read as volatile because another process wrote it.
    let after = unsafe { black_box(target).read_volatile() };
    if reached.works() && after != ANSWER {
        bail!("the kernel said that a word was written, but it was not");
    }
    Ok(reached)
}

/// The child's part: reads a word of its own, then the parent's, and writes another there. A
/// seccomp filter that kills for such a call kills this process, not the parent.
pub(crate) fn serve_parent(args: &ProbeArgs) -> Result<()> {
    let source = Box::new(WORD);
    let mut word = 0;
    let own = ProbeArgs { pid: std::process::id(), address: &raw const *source as u64 };
    let own = reach(&own, &mut word, Way::Read).err().map(|error| error.to_string());
    drop(source);
    word = 0;
    let read = reach(args, &mut word, Way::Read).err().map(|error| error.to_string());
    if read.is_none() && word != WORD {
        bail!("another word was read than the parent wrote");
    }
    word = ANSWER;
    let write = reach(args, &mut word, Way::Write).err().map(|error| error.to_string());
    println!("{}", serde_json::to_string(&ProbeResult { own, read, write })?);
    Ok(())
}

fn reach(args: &ProbeArgs, word: &mut u64, way: Way) -> io::Result<()> {
    let word: *mut u64 = word;
    // SAFETY: the word is the caller's; the parent waits for its own to be overwritten.
    unsafe { copy(args.pid, args.address, word.cast(), size_of::<u64>(), way) }
}

/// Whether memory can be shared through a file descriptor.
pub(crate) fn shared_memory() -> io::Result<()> {
    let fd = memfd_create("uccl-probe", MemfdFlags::CLOEXEC)?;
    Ok(ftruncate(&fd, 4096)?)
}

/// Whether two sockets can meet on loopback, and whether the one that connects may choose cubic.
pub(crate) fn loopback() -> io::Result<Cubic> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let stream = TcpStream::connect(listener.local_addr()?)?;
    listener.accept()?;
    let chosen = socket2::SockRef::from(&stream).set_tcp_congestion(b"cubic");
    Ok(match chosen {
        Ok(()) => Cubic::Works,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Cubic::Forbidden,
        Err(_) => Cubic::Missing,
    })
}

/// Whether a socket may use cubic, the congestion control that suits loopback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cubic {
    /// The kernel has cubic, but only CAP_NET_ADMIN may choose it.
    Forbidden,
    /// The kernel has no cubic.
    Missing,
    Works,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_can_be_shared_and_sockets_meet() {
        shared_memory().expect("shared memory");
        loopback().expect("loopback");
    }

    #[test]
    fn reaching_is_both_ways() {
        let refused = || Some("refused".to_owned());
        assert!(ProbeResult::default().works());
        assert!(!ProbeResult { read: refused(), ..ProbeResult::default() }.works());
        assert!(!ProbeResult { write: refused(), ..ProbeResult::default() }.works());
    }
}
