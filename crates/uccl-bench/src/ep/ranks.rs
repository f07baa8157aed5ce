//! The ranks: processes that this one starts, or its threads.

use std::{
    io::{self, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Barrier, Mutex},
    thread,
};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use uccl_ep::Exchange;

use super::{
    task::{CallTimes, Ranks},
    work,
};

/// The hidden subcommand of a rank's process.
pub const RANK_SUBCOMMAND: &str = "bench-ep-rank";
/// The longest message of a rank: a card, or the times of its rounds.
const LONGEST: usize = 1 << 26;

impl Ranks {
    /// Runs each as a thread of this process.
    pub(crate) fn as_threads(self) -> Result<Vec<Vec<CallTimes>>> {
        let ranks = self.shape.ranks;
        let (given, all_gave) = (Mutex::new(vec![Vec::new(); ranks]), Barrier::new(ranks));
        let run = |rank: usize| {
            let mut exchange = |mine: Vec<u8>| {
                let lock = || given.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                lock()[rank] = mine;
                all_gave.wait();
                let all = lock().iter().cloned().map(Some).collect();
                // A rank writes its next card only after all ranks have read these.
                all_gave.wait();
                Ok(all)
            };
            work::measure(self, rank, &mut exchange)
        };
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.map(|done| done.map_err(|_| anyhow!("a rank's thread panicked"))?).collect()
        })
    }

    /// Runs each as a process.
    pub(crate) fn as_processes(self) -> Result<Vec<Vec<CallTimes>>> {
        let mut all = (0..self.shape.ranks).map(|_| Rank::start()).collect::<Result<Vec<_>>>()?;
        for (rank, process) in all.iter_mut().enumerate() {
            process.send(&serde_json::to_vec(&(rank, self))?)?;
        }
        loop {
            let said = all.iter_mut().map(Rank::hear).collect::<Result<Vec<_>>>()?;
            let mut results = Vec::new();
            let mut given = Vec::new();
            for message in said {
                match message {
                    Message::Gives(mine) => given.push(Some(mine)),
                    Message::Measured(timed) => results.push(timed),
                    Message::Failed(why) => bail!(why),
                }
            }
            if results.len() == all.len() {
                return Ok(results);
            }
            let given = serde_json::to_vec(&given)?;
            for process in &mut all {
                process.send(&given)?;
            }
        }
    }
}

/// A message of a rank's process.
#[derive(Serialize, Deserialize)]
enum Message {
    Gives(Vec<u8>),
    Measured(Vec<CallTimes>),
    Failed(String),
}

/// A rank's process, killed when this is dropped.
struct Rank {
    process: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
}

impl Rank {
    fn start() -> Result<Self> {
        let program = std::env::current_exe().context("where is this program?")?;
        let mut process = Command::new(program)
            .arg(RANK_SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a rank")?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else { bail!("a rank has no pipes") };
        Ok(Self { process, stdin, stdout })
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        write_message(&mut self.stdin, bytes).context("a rank does not listen")
    }

    fn hear(&mut self) -> Result<Message> {
        let bytes = read_message(&mut self.stdout).context("a rank has ended")?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // The rank has sent its result, or is of no use any more; an error means that it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn write_message(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

fn read_message(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|len| *len <= LONGEST);
    let mut bytes = vec![0; len.ok_or(io::ErrorKind::InvalidData)?];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Serves one rank in this process. Its parent carries the exchange among ranks.
pub fn serve_rank() -> Result<()> {
    let (mut stdin, mut stdout) = (io::stdin().lock(), io::stdout().lock());
    let (rank, ranks): (usize, Ranks) = serde_json::from_slice(&read_message(&mut stdin)?)?;
    let mut exchange = |mine: Vec<u8>| {
        let mut all = || -> Result<_> {
            write_message(&mut stdout, &serde_json::to_vec(&Message::Gives(mine.clone()))?)?;
            Ok(serde_json::from_slice(&read_message(&mut stdin)?)?)
        };
        all().map_err(|e| uccl_ep::Error::Invalid(format!("the exchange among ranks: {e:#}")))
    };
    let exchange: &mut Exchange<'_> = &mut exchange;
    let last = match work::measure(ranks, rank, exchange) {
        Ok(timed) => Message::Measured(timed),
        Err(e) => Message::Failed(format!("rank {rank}: {e:#}")),
    };
    Ok(write_message(&mut stdout, &serde_json::to_vec(&last)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::shape::tests::SMALL;

    #[test]
    fn ranks_measure_every_call_in_every_round() {
        let all = Ranks { shape: SMALL, rounds: 2 }.as_threads().expect("measured");
        assert_eq!(all.len(), 2);
        for timed in all.iter().flatten() {
            assert_eq!((timed.calls.len(), timed.copies.len()), (2, 2), "{}", timed.name);
            assert!(timed.foreign <= timed.bytes && timed.bytes > 0);
        }
    }

    #[test]
    fn a_message_is_bounded() {
        let mut long = Vec::from(u64::MAX.to_le_bytes());
        long.push(0);
        assert!(read_message(&mut &long[..]).is_err());
        let mut bytes = Vec::new();
        write_message(&mut bytes, b"abc").expect("written");
        assert_eq!(read_message(&mut &bytes[..]).expect("read"), b"abc");
    }
}
