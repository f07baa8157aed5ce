//! The contract of every link, as checks that run over a pair of its lanes.
//!
//! A link's own tests call [`run`] with a function that makes two joined [`End`]s, both in this
//! process; wrappers around lanes do the same. Each check gets a pair of its own. Its name and
//! first lines say its subject; the contract is in [`uccl_fabric::lane`].
//!
//! [`run_on_gpu`] runs the checks over memory of a GPU, which may belong to a driver that a test
//! loads.

#![allow(missing_docs, reason = "only this workspace's tests call it")]

mod checks;
mod done;
mod end;
mod memory;
mod pair;
mod rails;

use uccl_device::cuda::Context;

pub use self::{
    end::{Devices, End, Inbox},
    rails::over_rails,
};

/// A check, and its name.
type Check = (&'static str, fn(&pair::Pair));

/// Runs every check, each over a new pair. The first end connects and the second accepts, where
/// that makes a difference.
///
/// # Panics
/// When a check does not hold. The output names the check and the link.
pub fn run(link: &str, join: impl Fn() -> [End; 2]) {
    run_where(link, None, join);
}

/// As [`run`], with all memory of both ends on a GPU.
///
/// # Panics
/// As for [`run`].
pub fn run_on_gpu(link: &str, gpu: &'static Context, join: impl Fn() -> [End; 2]) {
    run_where(link, Some(gpu), join);
}

fn run_where(link: &str, gpu: Option<&'static Context>, join: impl Fn() -> [End; 2]) {
    for (check, holds) in checks::ALL {
        let _told = CheckName(link, check);
        holds(&pair::Pair::new(join(), gpu));
    }
}

/// Names the check that does not hold.
struct CheckName<'a>(&'a str, &'a str);

impl Drop for CheckName<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: {} does not hold", self.0, self.1);
        }
    }
}
