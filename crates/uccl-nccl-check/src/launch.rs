//! Starts the ranks of a check, carries their messages, and ends them.

use std::{
    fs::File,
    io::{Read as _, Seek as _},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    SUBCOMMAND,
    behaviours::Behaviour,
    hosts,
    message::{Fate, FromRank, Job, Lines, Outcome, ToRank},
};

/// The time that other ranks have to tell of their failures behind the first one.
const OTHERS: Duration = Duration::from_millis(500);

/// Settings of all checks.
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) library: PathBuf,
    pub(crate) limit: Duration,
    pub(crate) call_limit_ms: u64,
    pub(crate) silence_s: u64,
    pub(crate) batch_ms: u64,
}

/// A message of a rank, or its end.
type Event = (usize, Option<FromRank>);

/// A rank's process.
struct Process {
    child: Child,
    lines: Lines,
    stdout: File,
    stderr: File,
    step: String,
    outcome: Option<Outcome>,
    /// Ended on request.
    killed: bool,
    gone: bool,
    reader: Option<JoinHandle<()>>,
}

impl Launch {
    /// Runs a check to its end, or to the end of its time.
    pub(crate) fn run(&self, behaviour: &Behaviour, version: u32) -> Result<Outcome> {
        if let Some(lacking) = behaviour.is_apart.then(hosts::lacking).flatten() {
            return Ok(Outcome::Skipped(lacking.into()));
        }
        let (events, inbox) = channel();
        let mut ranks = Vec::new();
        for rank in 0..behaviour.ranks {
            match self.start(rank, behaviour.is_apart, events.clone()) {
                Ok(process) => ranks.push(process),
                Err(error) => {
                    end(&mut ranks);
                    return Err(error);
                }
            }
        }
        drop(events);
        let begun = self.begin(behaviour, version, &mut ranks);
        let served = begun.and_then(|()| self.serve(&mut ranks, &inbox));
        end(&mut ranks);
        let outcome = served?.unwrap_or_else(|| sum(&mut ranks));
        Ok(outcome)
    }

    fn start(&self, rank: usize, is_apart: bool, events: Sender<Event>) -> Result<Process> {
        let (ours, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let [stdout, stderr] = [tempfile::tempfile()?, tempfile::tempfile()?];
        let mut command = Command::new(&self.program);
        command
            .arg(SUBCOMMAND)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        if is_apart {
            command.env_remove("UCCL_SOCKET_IFNAME").env("NCCL_SOCKET_IFNAME", hosts::INTERFACE);
            hosts::move_out(&mut command);
        }
        let child = command.spawn().with_context(|| self.program.display().to_string())?;
        let mut reader = Lines::new(ours.try_clone()?)?;
        let reading = move || {
            while let Ok(message) = reader.receive() {
                if events.send((rank, Some(message))).is_err() {
                    return;
                }
            }
            let _check_has_ended = events.send((rank, None));
        };
        let lines = Lines::new(ours)?;
        let (step, reader) = (String::new(), Some(thread::spawn(reading)));
        let (outcome, killed, gone) = (None, false, false);
        Ok(Process { child, lines, stdout, stderr, step, outcome, killed, gone, reader })
    }

    /// Gives the ranks their job.
    fn begin(&self, behaviour: &Behaviour, version: u32, ranks: &mut [Process]) -> Result<()> {
        if let (true, [one, other]) = (behaviour.is_apart, &*ranks) {
            hosts::join([one.child.id(), other.child.id()])?;
        }
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.lines.send(&ToRank::Job(Job {
                library: self.library.clone(),
                behaviour: behaviour.name.into(),
                version,
                rank,
                ranks: behaviour.ranks,
                call_limit_ms: self.call_limit_ms,
                silence_s: self.silence_s,
                batch_ms: self.batch_ms,
            }))?;
        }
        Ok(())
    }

    /// Carries messages until all ranks have an outcome or have ended; otherwise the reason for
    /// which the check has failed.
    fn serve(&self, ranks: &mut [Process], inbox: &Receiver<Event>) -> Result<Option<Outcome>> {
        let mut end = Instant::now() + self.limit;
        let mut failures = Vec::new();
        while ranks.iter().any(|rank| rank.outcome.is_none() && !rank.gone) {
            let left = end.saturating_duration_since(Instant::now());
            let (from, message) = match inbox.recv_timeout(left) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if !failures.is_empty() => break,
                Err(RecvTimeoutError::Timeout) => {
                    let steps: Vec<_> = ranks
                        .iter()
                        .enumerate()
                        .filter(|(_, rank)| rank.outcome.is_none())
                        .map(|(number, rank)| format!("rank {number} was at: {}", rank.step))
                        .collect();
                    let said = format!("no end within {:?}; {}", self.limit, steps.join("; "));
                    return Ok(Some(Outcome::Failed(said)));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match message {
                None => {
                    ranks[from].gone = true;
                    let is_lost = ranks[from].outcome.is_none() && !ranks[from].killed;
                    if is_lost && failures.is_empty() {
                        // The others wait for it.
                        return Ok(None);
                    }
                }
                Some(FromRank::Step(step)) => ranks[from].step = step,
                Some(FromRank::End(Outcome::Failed(reason))) => {
                    // It may have failed because another rank did, which tells that soon.
                    end = end.min(Instant::now() + OTHERS);
                    failures.push(format!("rank {from}: {reason}"));
                    ranks[from].outcome = Some(Outcome::Failed(reason));
                }
                Some(FromRank::End(outcome)) => ranks[from].outcome = Some(outcome),
                Some(FromRank::Data { to, bytes }) => {
                    let to = ranks.get_mut(to).context("a message for a rank that is not there")?;
                    // One that was killed takes none.
                    let _ended = to.lines.send(&ToRank::Data { from, bytes });
                }
                Some(FromRank::Do { fate, to }) => {
                    let rank = ranks.get_mut(to).context("a fate for a rank that is not there")?;
                    match rank.suffer(fate) {
                        Ok(()) => ranks[from].lines.send(&ToRank::Done)?,
                        Err(error) => {
                            // The link of a rank that has failed ends with it.
                            end = end.min(Instant::now() + OTHERS);
                            failures.push(format!("{error:#}"));
                        }
                    }
                }
            }
        }
        Ok((!failures.is_empty()).then(|| Outcome::Failed(failures.join("; "))))
    }
}

impl Process {
    fn suffer(&mut self, fate: Fate) -> Result<()> {
        let signal = match fate {
            Fate::Killed => Signal::KILL,
            Fate::Stopped => Signal::STOP,
            Fate::Continued => Signal::CONT,
            Fate::Cut | Fate::Joined => {
                return hosts::set_link(self.child.id(), fate == Fate::Joined);
            }
        };
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).context("a signal for a rank")?;
        if fate == Fate::Killed {
            self.killed = true;
            self.child.wait().context("the end of a rank")?;
        }
        Ok(())
    }

    /// A fault of the process itself: its end, or output that belongs to no plugin.
    fn fault(&mut self, number: usize) -> Result<Option<String>> {
        if self.killed {
            return Ok(None);
        }
        let status = self.child.wait()?;
        if self.outcome.is_none() {
            let end = match status.signal() {
                Some(signal) => format!("signal {signal}"),
                None => status.to_string(),
            };
            let said = text_of(&mut self.stderr)?;
            let last = said.lines().last().unwrap_or("it wrote nothing to standard error");
            return Ok(Some(format!("rank {number} ended by {end} at: {}; {last}", self.step)));
        }
        let printed = text_of(&mut self.stdout)?;
        match printed.lines().next() {
            Some(line) => Ok(Some(format!("the plugin wrote to standard output: {line}"))),
            None => Ok(None),
        }
    }
}

fn text_of(file: &mut File) -> Result<String> {
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Ends the ranks that are left, and their readers.
fn end(ranks: &mut [Process]) {
    for rank in ranks {
        if rank.outcome.is_none() && !rank.gone {
            rank.killed = true;
            // It has ended already where that fails.
            let _ended = rank.child.kill();
        }
        let _ended = kill_process(Pid::from_child(&rank.child), Signal::CONT);
        wait_or_kill(&mut rank.child);
        if let Some(reader) = rank.reader.take() {
            let _nothing_to_return = reader.join();
        }
    }
}

/// A rank with an outcome ends by itself; a plugin may keep it from that.
fn wait_or_kill(child: &mut Child) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let end = Instant::now() + PATIENCE;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > end {
            let _ended = child.kill();
            let _ended = child.wait();
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The outcome of all ranks together: the first fault, or the first rank's outcome.
fn sum(ranks: &mut [Process]) -> Outcome {
    for (number, rank) in ranks.iter_mut().enumerate() {
        match rank.fault(number) {
            Ok(None) => {}
            Ok(Some(fault)) => return Outcome::Failed(fault),
            Err(error) => return Outcome::Failed(format!("rank {number}: {error:#}")),
        }
    }
    let first = ranks.first().and_then(|rank| rank.outcome.clone());
    first.unwrap_or_else(|| Outcome::Failed("no rank has an outcome".into()))
}
