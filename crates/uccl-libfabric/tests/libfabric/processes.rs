//! Two processes: one is killed, and the other end notices.

use std::{
    env,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::Instant,
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use uccl_fabric::{
    lane::OpKind,
    rail::{Rail, RailError, Request},
};

use crate::pair::{End, Memory, PATIENCE, for_each_provider, open, pattern};

for_each_provider!(
    bytes_go_between_processes,
    a_killed_peer_ends_the_requests_in_flight,
    a_stopped_peer_is_not_waited_for_for_ever,
);

const PROVIDER: &str = "UCCL_TEST_LIBFABRIC_PROVIDER";
const LEN: usize = 1 << 20;

/// Not a test by itself: the second process of the tests here. It owns memory, and serves it until
/// its input ends.
#[test]
#[ignore = "the second process of the other tests"]
fn second_process() {
    let Ok(provider) = env::var(PROVIDER) else { return };
    let rail = open(&provider).expect("the first process has it");
    let mut memory = Memory::new(&rail, LEN, pattern);
    let mut channel = rail.open().expect("an end");
    let key = channel.export_now(&*memory.registration).expect("a key");
    println!("\n{} {} {}", hex(channel.address()), key.base, hex(&key.key));
    let line = || std::io::stdin().lines().next().and_then(Result::ok);
    let peer = line().expect("an address");
    channel.connect(&unhex(&peer)).expect("the first process's");
    println!("ready");
    let reader = thread::spawn(line);
    while !reader.is_finished() {
        if channel.poll(&mut Vec::new()).is_err() {
            break;
        }
        thread::yield_now();
    }
    drop(channel);
    // Checks the bytes that the first process wrote.
    let asked = reader.join().expect("a line or none");
    if asked.is_some() {
        println!("{}", memory.bytes.iter().enumerate().all(|(i, b)| *b == !pattern(i)));
    }
    memory.bytes.clear();
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.trim().chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

/// The second process, and our end of the channel with it.
struct Peer {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    end: End,
    base: u64,
    key: u64,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(provider: &str, rail: &dyn Rail) -> Self {
        let mut child = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "processes::second_process", "--ignored", "--nocapture"])
            .env(PROVIDER, provider)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a second process");
        let mut stdin = child.stdin.take();
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let words: Vec<String> = loop {
            let line = lines.next().expect("its address").expect("text");
            let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            if words.len() == 3 && words[0].starts_with("55464142") {
                break words;
            }
        };
        let mut channel = rail.open().expect("an end");
        channel.connect(&unhex(&words[0])).expect("its address");
        let key = channel.import(&unhex(&words[2])).expect("its key");
        let pipe = stdin.as_mut().expect("a pipe");
        writeln!(pipe, "{}", hex(channel.address())).expect("it listens");
        while lines.next().expect("a word").expect("text") != "ready" {}
        let end = End { channel, ended: Vec::new() };
        Self { child, stdin, lines, end, base: words[1].parse().expect("a number"), key }
    }

    fn request(&self, kind: OpKind, ours: &Memory) -> Request {
        Request {
            kind,
            local: ours.span(0, LEN),
            local_key: ours.registration.local_key(),
            remote_addr: self.base,
            remote_key: self.key,
            tag: 1,
        }
    }

    /// Posts one request, and polls until it has ended.
    fn run(&mut self, request: Request) -> Result<(), RailError> {
        let (before, start) = (self.end.ended.len(), Instant::now());
        // SAFETY: the callers keep their memory until the request has ended or the channel is
        // dropped.
        let posted = unsafe { self.end.channel.post(&[request]) }?;
        assert_eq!(posted, 1);
        while self.end.ended.len() == before {
            self.end.poll()?;
            assert!(start.elapsed() < PATIENCE, "a request does not end");
            thread::yield_now();
        }
        self.end.ended.last().expect("one").result.clone().expect("it goes");
        Ok(())
    }
}

fn bytes_go_between_processes(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut ours = Memory::new(&rail, LEN, |_| 0);
    let mut peer = Peer::start(provider, &rail);
    peer.run(peer.request(OpKind::Read, &ours)).expect("it goes");
    assert!(ours.bytes.iter().enumerate().all(|(i, byte)| *byte == pattern(i)));
    ours.bytes.iter_mut().for_each(|byte| *byte = !*byte);
    peer.run(peer.request(OpKind::Write, &ours)).expect("it goes");
    let stdin = peer.stdin.as_mut().expect("a pipe");
    writeln!(stdin, "check").expect("it listens");
    assert_eq!(peer.lines.next().expect("a verdict").expect("text"), "true");
}

fn a_killed_peer_ends_the_requests_in_flight(provider: &str) {
    fails_after(provider, |child| {
        child.kill().expect("it is ours");
        child.wait().expect("it ends");
    });
}

fn a_stopped_peer_is_not_waited_for_for_ever(provider: &str) {
    if ["verbs", "efa", "cxi"].iter().any(|nic| provider.starts_with(nic)) {
        return eprintln!(
            "skipped: {provider} lacks the need for its peer's process: the NIC answers"
        );
    }
    fails_after(provider, |child| {
        let pid = Pid::from_child(child);
        kill_process(pid, Signal::STOP).expect("it is ours");
        waitpid(Some(pid), WaitOptions::UNTRACED).expect("it stops");
    });
}

fn fails_after(provider: &str, harm: impl FnOnce(&mut Child)) {
    let Some(rail) = open(provider) else { return };
    let ours = Memory::new(&rail, LEN, |_| 0);
    let mut peer = Peer::start(provider, &rail);
    peer.run(peer.request(OpKind::Read, &ours)).expect("it goes");
    harm(&mut peer.child);
    // More bytes, in all, than the buffers between the two hold.
    let request = peer.request(OpKind::Write, &ours);
    let start = Instant::now();
    let mut posted = 0;
    let error = loop {
        if posted < 64 {
            // SAFETY: the memory lives until the channel is dropped.
            match unsafe { peer.end.channel.post(&[request]) } {
                Ok(count) => posted += count,
                Err(error) => break error,
            }
        }
        if let Err(error) = peer.end.poll() {
            break error;
        }
        // The first result is that of the read before.
        for ended in &peer.end.ended[1..] {
            assert!(ended.result.is_err(), "a write to a peer that is gone went well");
        }
        assert!(start.elapsed() < PATIENCE, "{} of {posted} ended", peer.end.ended.len() - 1);
        thread::yield_now();
    };
    assert!(matches!(error, RailError::Lost(_)), "{error}");
    drop(peer);
}
