//! Messages between a check and its ranks: lines of JSON over a pair of unix sockets.

use std::{
    io::{BufRead, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The task of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) library: PathBuf,
    pub(crate) behaviour: String,
    /// The table's version; 0 for all.
    pub(crate) version: u32,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) call_limit_ms: u64,
    pub(crate) silence_s: u64,
    /// The length of one of the bench's measurements.
    pub(crate) batch_ms: u64,
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// All is as it must be; the text says how much was looked at.
    Passed(String),
    /// A rule is broken.
    Failed(String),
    /// The check does not apply.
    Skipped(String),
}

/// The fate of a rank: a signal for it, or its link to the other one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Fate {
    Killed,
    Stopped,
    Continued,
    Cut,
    Joined,
}

/// From a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// The part of the check that begins.
    Step(String),
    /// For another rank.
    Data {
        to: usize,
        bytes: Vec<u8>,
    },
    /// The check does this to a rank, and answers `Done`.
    Do {
        fate: Fate,
        to: usize,
    },
    End(Outcome),
}

/// To a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToRank {
    Job(Job),
    Data { from: usize, bytes: Vec<u8> },
    Done,
}

/// One end of a pair of sockets.
pub(crate) struct Lines {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Lines {
    pub(crate) fn new(stream: UnixStream) -> Result<Self> {
        let reader = BufReader::new(stream.try_clone().context("a second descriptor")?);
        Ok(Self { writer: stream, reader })
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.writer.write_all(&line).context("the other end of the check")
    }

    /// The next message; an error at the other end's end.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        let length = self.reader.read_line(&mut line)?;
        ensure!(length > 0, "the other end of the check has ended");
        Ok(serde_json::from_str(&line)?)
    }
}
