//! Two pretended hosts: network namespaces of this process, with links between them.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
};

/// Two namespaces.
pub(crate) struct Hosts {
    spaces: [File; 2],
    /// A process in the second one: `ip` takes a namespace by a process.
    holder: Child,
}

impl Hosts {
    /// Two hosts without a link. `None`, with the reason on stderr, where they cannot be had.
    pub(crate) fn new() -> Option<Self> {
        let spaces = [namespace(), namespace()];
        let [Ok(first), Ok(second)] = spaces else {
            eprintln!("skipped: lacks the right to make network namespaces");
            return None;
        };
        let spaces = [first, second];
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        let holder = within(&spaces[1], || sleep.spawn()).expect("sleep");
        let hosts = Self { spaces, holder };
        if !hosts.try_run(0, "ip link set lo up") {
            eprintln!("skipped: lacks ip");
            return None;
        }
        hosts.run(1, "ip link set lo up");
        Some(hosts)
    }

    /// Joins the hosts by a link. Its ends have the same name.
    pub(crate) fn link(&self, name: &str) {
        let pid = self.holder.id();
        self.run(0, &format!("ip link add {name} type veth peer name {name} netns {pid}"));
        for host in 0..2 {
            self.run(host, &format!("ip link set {name} up"));
        }
    }

    /// Runs a command on a host.
    pub(crate) fn run(&self, host: usize, command: &str) {
        assert!(self.try_run(host, command), "{command}");
    }

    pub(crate) fn try_run(&self, host: usize, command: &str) -> bool {
        let mut words = command.split(' ');
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).stdin(Stdio::null());
        within(&self.spaces[host], || command.status()).is_ok_and(|status| status.success())
    }

    /// Calls a function on a host. Threads and sockets that it makes belong to the host.
    pub(crate) fn on<T: Send>(&self, host: usize, work: impl FnOnce() -> T + Send) -> T {
        within(&self.spaces[host], work)
    }

    /// Bytes that a host's interface has sent.
    pub(crate) fn sent(&self, host: usize, name: &str) -> u64 {
        let read = || std::fs::read_to_string("/proc/thread-self/net/dev");
        let text = self.on(host, read).expect("the interfaces");
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'));
        let words = line.expect("the interface").split_whitespace();
        words.skip(8).map(|word| word.parse().expect("a number")).next().expect("its bytes")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.holder.kill().expect("the process");
        self.holder.wait().expect("its end");
    }
}

fn namespace() -> io::Result<File> {
    let make = || {
        // SAFETY: takes a number, and changes this thread alone.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        File::open("/proc/thread-self/ns/net")
    };
    std::thread::scope(|scope| scope.spawn(make).join().expect("no panic"))
}

fn within<T: Send>(space: &File, work: impl FnOnce() -> T + Send) -> T {
    let enter = || {
        // SAFETY: takes two numbers, and changes this thread alone.
        assert_eq!(unsafe { libc::setns(space.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
        work()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().expect("no panic"))
}
