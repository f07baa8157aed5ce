//! Two processes spin on memory that both have mapped.

use std::{
    fs::{File, OpenOptions},
    os::fd::{AsFd, AsRawFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use super::{Channel, LimitRequest, Reply, Row, Spin, latencies};
use crate::control::{Request, unexpected};

const PAGE: usize = 4096;
const WORDS: usize = 8;

/// 64 bytes of message, and the cache line with its number.
#[repr(C, align(128))]
struct Mailbox {
    message: [AtomicU64; WORDS],
    turn: TurnWord,
}

#[repr(C, align(64))]
struct TurnWord(AtomicU64);

/// The leading side's mailbox, then the other's.
#[repr(C)]
struct Mailboxes {
    ping: Mailbox,
    pong: Mailbox,
}

const _: () = assert!(size_of::<Mailboxes>() <= PAGE);

/// The number that ends the exchange.
const OVER: u64 = u64::MAX;

/// A shared page, zeroed when it is new.
struct Page(NonNull<Mailboxes>);

impl Page {
    fn map(fd: impl AsFd) -> Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let page = unsafe { mmap(std::ptr::null_mut(), PAGE, prot, flags, fd, 0) };
        let page = page.context("cannot map a page of shared memory")?;
        Ok(Self(NonNull::new(page.cast()).context("a mapping at address zero")?))
    }

    fn boxes(&self) -> &Mailboxes {
        // SAFETY: page aligned, at least as long as Boxes, and made of atomics alone, which any
        // bytes are and which another process may change.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and no reference to it is left.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

impl Mailbox {
    fn send(&self, turn: u64, message: &[u64; WORDS]) {
        for (word, value) in self.message.iter().zip(message) {
            word.store(*value, Ordering::Relaxed);
        }
        self.turn.0.store(turn, Ordering::Release);
    }

    /// Waits until the turn is another than `last`, and returns it.
    fn receive(&self, last: u64, message: &mut [u64; WORDS]) -> Result<u64> {
        let mut spin = Spin::new();
        loop {
            let turn = self.turn.0.load(Ordering::Acquire);
            if turn != last {
                for (word, value) in self.message.iter().zip(message) {
                    *value = word.load(Ordering::Relaxed);
                }
                return Ok(turn);
            }
            spin.turn()?;
        }
    }
}

pub(super) fn serve(pid: u32, fd: i32, channel: &mut Channel) -> Result<Reply> {
    let file = open(pid, fd)?;
    let page = Page::map(&file)?;
    channel.send(&Reply::Ready)?;
    echo(page.boxes())?;
    Ok(Reply::Done)
}

fn open(pid: u32, fd: i32) -> Result<File> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = OpenOptions::new().read(true).write(true).open(&path);
    file.with_context(|| format!("cannot open {path}"))
}

fn echo(boxes: &Mailboxes) -> Result<()> {
    let mut message = [0; WORDS];
    let mut turn = 0;
    loop {
        turn = boxes.ping.receive(turn, &mut message)?;
        if turn == OVER {
            return Ok(());
        }
        boxes.pong.send(turn, &message);
    }
}

pub(super) fn measure(channel: &mut Channel, time: Duration) -> Result<Row> {
    let row = Row::limit("shm-rtt", 8 * WORDS as u64);
    let shared = memfd_create("uccl-bench", MemfdFlags::CLOEXEC)
        .map_err(anyhow::Error::from)
        .and_then(|fd| Ok(ftruncate(&fd, PAGE as u64).map(|()| fd)?));
    let fd = match shared {
        Ok(fd) => fd,
        Err(error) => return Ok(Row { note: Some(format!("no shared memory: {error}")), ..row }),
    };
    let page = Page::map(&fd)?;
    let request = LimitRequest::Shared { pid: std::process::id(), fd: fd.as_raw_fd() };
    match channel.ask(&Request::Limit(request)) {
        Ok(Reply::Ready) => {}
        Ok(other) => return Err(unexpected(&other)),
        Err(error) => return Ok(Row { note: Some(format!("{error:#}")), ..row }),
    }
    let latencies = ping(page.boxes(), time);
    page.boxes().ping.send(OVER, &[0; WORDS]);
    let latencies = latencies?;
    match channel.reply()? {
        Reply::Done => {}
        other => return Err(unexpected(&other)),
    }
    Ok(Row { count: latencies.count(), latency_us: latencies.summary(1), ..row })
}

fn ping(boxes: &Mailboxes, time: Duration) -> Result<super::Latencies> {
    let mut message = [1; WORDS];
    let mut turn = 0;
    latencies(time, || {
        boxes.ping.send(turn + 1, &message);
        turn = boxes.pong.receive(turn, &mut message)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn messages_go_round_through_two_mappings_of_one_page() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, PAGE as u64).expect("a page");
        let other = open(std::process::id(), fd.as_raw_fd()).expect("opened by name");
        let page = Page::map(&fd).expect("mapped");
        thread::scope(|scope| {
            let echoing = scope.spawn(|| echo(Page::map(&other)?.boxes()));
            let boxes = page.boxes();
            for turn in 1..=100 {
                let (sent, mut got) = ([turn * 3; WORDS], [0; WORDS]);
                boxes.ping.send(turn, &sent);
                assert_eq!(boxes.pong.receive(turn - 1, &mut got).expect("an echo"), turn);
                assert_eq!(sent, got);
            }
            boxes.ping.send(OVER, &[0; WORDS]);
            echoing.join().expect("no panic").expect("an orderly end");
        });
    }
}
