//! The driver: starts two ends, forwards their messages, and stops, continues and kills them.

mod child;

use std::{
    fmt,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Args, ValueEnum};

use self::child::Child;
use crate::{control::ControlMessage, end::EndArgs, link::Link};

/// Time that the two ends have to finish their operations after [`ControlMessage::End`].
const LAST_WORDS: Duration = Duration::from_secs(90);

#[derive(Args)]
pub(crate) struct DriverArgs {
    /// Links to use [default: the links that every machine has]
    #[arg(long, value_delimiter = ',')]
    link: Vec<Link>,
    /// Duration in minutes
    #[arg(long, conflicts_with = "seconds")]
    minutes: Option<u64>,
    /// Duration in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run one round per link, with this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds of a round before its ends are asked to finish; more while nothing is done
    #[arg(long, default_value_t = 4)]
    round_seconds: u64,
    /// Disturbances to leave out: stop, kill, close, fork, disconnect
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Lines of each end's history that are shown after a failure
    #[arg(long, default_value_t = 80)]
    tail: usize,
}

/// An event of an end, which its number and incarnation identify.
enum Event {
    Said(usize, u32, ControlMessage),
    /// The end has closed its output.
    Gone(usize, u32),
}

pub(crate) fn run(args: &DriverArgs) -> Result<ExitCode> {
    let time = Duration::from_secs(args.minutes.map_or(args.seconds, |minutes| 60 * minutes));
    let links = if args.link.is_empty() { &Link::EVERYWHERE[..] } else { &args.link[..] };
    let until = Instant::now() + time;
    let mut seeds = fastrand::Rng::new();
    let mut all_totals: Vec<_> = links.iter().map(|_| Totals::default()).collect();
    for number in 0.. {
        let (link, totals) = (links[number % links.len()], &all_totals[number % links.len()]);
        let is_over = Instant::now() >= until || (args.seed.is_some() && number >= links.len());
        if is_over && all_totals.iter().all(|totals| !totals.is_idle()) {
            break;
        }
        if is_over && !totals.is_idle() {
            continue;
        }
        let seed = args.seed.unwrap_or_else(|| seeds.u64(..1 << 48));
        let name =
            link.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let Some(seconds) = totals.next_round(args.round_seconds) else {
            println!("{name} FAILED: nothing was done in any round");
            return Ok(ExitCode::FAILURE);
        };
        let mut round = Round::new(args, link, seed);
        match round.run(seconds) {
            Ok(what) => println!("{name} --seed {seed}: {what}"),
            Err(broken) => {
                println!("{name} --seed {seed} FAILED: {broken}\n");
                round.tell(args.tail);
                println!("\n{name} FAILED: {broken}\nonce more: --link {name} --seed {seed}");
                return Ok(ExitCode::FAILURE);
            }
        }
        all_totals[number % links.len()].add(&round.ended);
    }
    for (link, totals) in links.iter().zip(&all_totals) {
        println!("{link:?}: {totals}");
    }
    Ok(ExitCode::SUCCESS)
}

/// What the rounds over a link have done.
#[derive(Default)]
struct Totals {
    rounds: u32,
    done: u64,
    failed: u64,
    refused: u64,
    kept: u64,
}

/// Rounds over a link in which nothing is done before the storm fails.
const IDLE_ROUNDS: u32 = 6;

impl Totals {
    fn is_idle(&self) -> bool {
        self.done == 0
    }

    /// The seconds of the next round. On a busy machine two ends may take longer to start than a
    /// round lasts, so each round is twice as long as the one before until something is done.
    /// `None` if that was of no use.
    fn next_round(&self, seconds: u64) -> Option<u64> {
        match self.is_idle() {
            false => Some(seconds),
            true if self.rounds < IDLE_ROUNDS => Some(seconds << self.rounds),
            true => None,
        }
    }

    fn add(&mut self, ends: &[Option<ControlMessage>]) {
        self.rounds += 1;
        for end in ends.iter().flatten() {
            if let ControlMessage::Ended { done, failed, refused, kept } = end {
                self.done += done;
                self.failed += failed;
                self.refused += refused;
                self.kept += kept;
            }
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, done, failed, refused, kept } = self;
        write!(f, "{rounds} rounds, {done} done, {failed} failed, {refused} refused, {kept} kept")
    }
}

/// One round: two ends over one link.
struct Round<'a> {
    args: &'a DriverArgs,
    rng: fastrand::Rng,
    link: Link,
    workers: usize,
    ends: Vec<Child>,
    /// The latest [`ControlMessage::Up`] of each end, for a peer that restarts.
    up: [Option<ControlMessage>; 2],
    sender: Sender<Event>,
    events: Receiver<Event>,
    stopped: [Option<Instant>; 2],
    ended: [Option<ControlMessage>; 2],
    told: Vec<(u64, usize, String)>,
    stops: u32,
    kills: u32,
}

impl<'a> Round<'a> {
    fn new(args: &'a DriverArgs, link: Link, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let workers = rng.usize(1..=3);
        let (sender, events) = mpsc::channel();
        Self {
            args,
            rng,
            link,
            workers,
            ends: vec![],
            up: [None, None],
            sender,
            events,
            stopped: [None, None],
            ended: [None, None],
            told: vec![],
            stops: 0,
            kills: 0,
        }
    }

    fn does(&self, what: &str) -> bool {
        !self.args.without.iter().any(|without| without == what)
    }

    /// Runs the round for so many seconds. `Ok` holds its counts, `Err` the broken promise.
    fn run(&mut self, seconds: u64) -> Result<String, String> {
        for number in 0..2 {
            let child = self.start(number, 0)?;
            self.ends.push(child);
        }
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            let next = Duration::from_millis(self.rng.u64(1..100));
            self.pass_on(next)?;
            self.disturb()?;
        }
        for number in 0..2 {
            self.go_on(number);
            self.ends[number].say(&ControlMessage::End);
        }
        let until = Instant::now() + LAST_WORDS;
        while self.ended.iter().any(Option::is_none) {
            if Instant::now() > until {
                return Err("an end does not come to its end".into());
            }
            self.pass_on(Duration::from_millis(50))?;
        }
        Ok(format!(
            "{:?}, stops: {}, kills: {}",
            self.ended.each_ref().map(counts),
            self.stops,
            self.kills
        ))
    }

    fn start(&mut self, number: usize, incarnation: u32) -> Result<Child, String> {
        let end = EndArgs {
            link: self.link,
            number: number as u32,
            incarnation,
            workers: self.workers,
            seed: self.rng.u64(..),
            without: self.args.without.clone(),
        };
        Child::start(&end, number, incarnation, self.sender.clone()).map_err(|e| format!("{e:#}"))
    }

    /// Handles the events of the next `time`.
    fn pass_on(&mut self, time: Duration) -> Result<(), String> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) => self.take(event)?,
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err("nobody is left".into()),
            }
        }
    }

    fn take(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Said(number, incarnation, message) => {
                if self.ends[number].incarnation != incarnation {
                    return Ok(());
                }
                match message {
                    ControlMessage::Broken { what } => return Err(format!("end {number}: {what}")),
                    ControlMessage::Told { at_ns, what } => self.told.push((at_ns, number, what)),
                    ControlMessage::Ended { .. } => self.ended[number] = Some(message),
                    message if message.is_for_peer() => {
                        if let Some(other) = self.ends.get(1 - number) {
                            other.say(&message);
                        }
                        if let ControlMessage::Up { .. } = message {
                            self.up[number] = Some(message);
                        }
                    }
                    _ => {}
                }
            }
            Event::Gone(number, incarnation) => {
                let end = &self.ends[number];
                if end.incarnation == incarnation && self.ended[number].is_none() {
                    return Err(format!("end {number} died: {}", self.ends[number].status()));
                }
            }
        }
        Ok(())
    }

    fn go_on(&mut self, number: usize) {
        if self.stopped[number].take().is_some() {
            self.ends[number].signal(libc::SIGCONT);
        }
    }

    /// Stops, continues or kills an end, at random.
    fn disturb(&mut self) -> Result<(), String> {
        let now = Instant::now();
        for number in 0..2 {
            if self.stopped[number].is_some_and(|until| until <= now) {
                self.go_on(number);
            }
        }
        let number = self.rng.usize(0..2);
        match self.rng.u32(0..40) {
            0..6 if self.does("stop") && self.stopped[number].is_none() => {
                let time = Duration::from_millis(1 << self.rng.u32(0..12));
                self.stopped[number] = Some(now + time);
                self.stops += 1;
                self.ends[number].signal(libc::SIGSTOP);
            }
            6 if self.does("kill") && self.rng.u32(0..4) == 0 => {
                self.stopped[number] = None;
                self.kills += 1;
                self.ends[number].kill();
                let incarnation = self.ends[number].incarnation + 1;
                self.up[number] = None;
                self.ends[number] = self.start(number, incarnation)?;
                if let Some(up) = &self.up[1 - number] {
                    self.ends[number].say(up);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Shows the latest actions of both ends, in order of time.
    fn tell(&mut self, tail: usize) {
        for end in &mut self.ends {
            end.signal(libc::SIGCONT);
            end.say(&ControlMessage::Tell);
        }
        let until = Instant::now() + Duration::from_secs(2);
        while let Ok(event) =
            self.events.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            if let Event::Said(number, incarnation, ControlMessage::Told { at_ns, what }) = event
                && self.ends[number].incarnation == incarnation
            {
                self.told.push((at_ns, number, what));
            }
        }
        self.told.sort();
        let from = self.told.len().saturating_sub(2 * tail);
        for (at_ns, number, what) in &self.told[from..] {
            println!("{:>14.6} end {number}: {what}", *at_ns as f64 / 1e9);
        }
    }
}

fn counts(ended: &Option<ControlMessage>) -> String {
    match ended {
        Some(ControlMessage::Ended { done, failed, refused, kept }) => {
            format!("{done} done, {failed} failed, {refused} refused, {kept} kept")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_that_does_nothing_fails() {
        let mut totals = Totals::default();
        let ended = |done| Some(ControlMessage::Ended { done, failed: 1, refused: 0, kept: 0 });
        for round in 0..IDLE_ROUNDS {
            assert_eq!(totals.next_round(4), Some(4 << round));
            totals.add(&[None, ended(0)]);
        }
        assert_eq!(totals.next_round(4), None);
        totals.add(&[ended(2), ended(3)]);
        assert_eq!((totals.next_round(4), totals.done, totals.failed), (Some(4), 5, 8));
    }
}
