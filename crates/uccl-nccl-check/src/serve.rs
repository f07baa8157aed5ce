//! A rank's process: takes a job, does it, tells the outcome.

use std::os::{fd::AsFd as _, unix::net::UnixStream};

use anyhow::{Context as _, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    behaviours::BEHAVIOURS,
    bench::BENCH,
    message::{Lines, Outcome},
    rank::{NotApplicable, Rank},
};

/// Takes the job from standard input, which is a socket, and does it.
pub(crate) fn serve() -> Result<()> {
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    raise_open_files();
    let mut rank = Rank::new(Lines::new(stream)?)?;
    let outcome = match run(&mut rank) {
        Ok(said) => Outcome::Passed(said),
        Err(error) => match error.downcast_ref::<NotApplicable>() {
            Some(reason) => Outcome::Skipped(reason.0.clone()),
            None => Outcome::Failed(format!("{error:#}")),
        },
    };
    rank.end(outcome)
}

fn run(rank: &mut Rank) -> Result<String> {
    let name = rank.job.behaviour.clone();
    let mut all = BEHAVIOURS.iter().chain([&BENCH]);
    let found = all.find(|behaviour| behaviour.name == name);
    (found.context("a check that this program does not know")?.run)(rank)
}

/// A thousand communicators need more descriptors than the usual limit.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // The limit that is there serves most checks.
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
