//! A child process of the driver, and the threads that read and write for it.

use std::{
    io::{BufRead, BufReader, Write},
    process::{self, Command, Stdio},
    sync::mpsc::{self, Sender},
    thread,
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::Event;
use crate::{control::ControlMessage, end::EndArgs};

pub(super) struct Child {
    process: process::Child,
    /// Lines for a thread that writes them, so that the driver never waits for a stopped child.
    messages: Sender<String>,
    pub(super) incarnation: u32,
}

impl Child {
    pub(super) fn start(
        end: &EndArgs,
        number: usize,
        incarnation: u32,
        events: Sender<Event>,
    ) -> Result<Self> {
        let link = end.link.to_possible_value().context("a link has a name")?;
        let mut process = Command::new(std::env::current_exe()?)
            .args(["end", "--link", link.get_name()])
            .args(["--number", &end.number.to_string()])
            .args(["--incarnation", &end.incarnation.to_string()])
            .args(["--workers", &end.workers.to_string()])
            .args(["--seed", &end.seed.to_string()])
            .args([format!("--without={}", end.without.join(","))])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = process.stdin.take().context("its input")?;
        let output = BufReader::new(process.stdout.take().context("its output")?);
        let (messages, lines) = mpsc::channel::<String>();
        thread::spawn(move || {
            // Lines that a dead process has not read are lost.
            lines.into_iter().try_for_each(|line| writeln!(input, "{line}"))
        });
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(message) = ControlMessage::parse(&line) {
                    let _ = events.send(Event::Said(number, incarnation, message));
                }
            }
            let _ = events.send(Event::Gone(number, incarnation));
        });
        Ok(Self { process, messages, incarnation })
    }

    pub(super) fn say(&self, message: &ControlMessage) {
        let _ = self.messages.send(message.line());
    }

    pub(super) fn signal(&mut self, signal: i32) {
        // The id of a child that was reaped may be another process's.
        if matches!(self.process.try_wait(), Ok(None)) {
            // SAFETY: a plain system call without pointers. The child was not reaped, so the id is
            // its own.
            unsafe { libc::kill(self.process.id() as i32, signal) };
        }
    }

    pub(super) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    pub(super) fn status(&mut self) -> String {
        match self.process.wait() {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}
