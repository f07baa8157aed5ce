//! An end: one of the two processes.

mod fork;
mod manager;
mod notifs;
mod worker;
mod world;

use std::{
    io::BufRead,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc::{self, Sender},
    },
    thread,
};

use anyhow::Result;
use clap::Args;
use parking_lot::{Mutex, RwLock};

use self::{
    manager::Manager,
    worker::Worker,
    world::{Counts, Peer, SharedState, World},
};
use crate::{buffer::Arena, clock, control::ControlMessage, history, link::Link, watch};

/// Arguments of an end.
#[derive(Args, Clone, Debug)]
pub(crate) struct EndArgs {
    #[arg(long)]
    pub(crate) link: Link,
    /// 0 connects, 1 accepts.
    #[arg(long)]
    pub(crate) number: u32,
    /// Number of earlier processes in this end's place.
    #[arg(long)]
    pub(crate) incarnation: u32,
    #[arg(long)]
    pub(crate) workers: usize,
    #[arg(long)]
    pub(crate) seed: u64,
    /// Actions to leave out: `close`, `fork`, `disconnect`.
    #[arg(long, value_delimiter = ',')]
    pub(crate) without: Vec<String>,
}

impl EndArgs {
    pub(crate) fn does(&self, what: &str) -> bool {
        !self.without.iter().any(|without| without == what)
    }
}

/// Runs workers and manager until the driver sends [`ControlMessage::End`].
pub(crate) fn run(args: &EndArgs) -> Result<()> {
    thread::spawn(|| clock::run(watch::look));
    let mut rng = fastrand::Rng::with_seed(args.seed);
    let world = World::new(args.link, &mut rng)?;
    let unique = u64::from(args.number) << 31 | u64::from(args.incarnation & 0xff) << 23;
    let shared = Arc::new(SharedState {
        link: args.link,
        number: args.number,
        world: RwLock::new(world),
        peer: Mutex::new(None),
        ending: AtomicBool::new(false),
        workers_ended: AtomicU64::new(0),
        counts: Counts::default(),
        next_grant: AtomicU64::new(unique << 20),
        next_stamp: AtomicU64::new(unique),
    });
    let mut senders = Vec::new();
    let mut workers = Vec::new();
    for number in 0..args.workers {
        let (sender, messages) = mpsc::channel();
        senders.push(sender);
        let arena = arena(&shared)?;
        let worker = Worker::new(number, &shared, args, arena, messages, rng.u64(..));
        workers
            .push(thread::Builder::new().name(format!("worker {number}")).spawn(|| worker.run())?);
    }
    let manager = Manager::new(&shared, args, senders.clone(), rng.u64(..));
    let manager = thread::Builder::new().name("manager".into()).spawn(|| manager.run())?;
    {
        let shared = Arc::clone(&shared);
        thread::spawn(move || listen(&shared, &senders));
    }
    for worker in workers {
        join(worker);
    }
    join(manager);
    let counts = &shared.counts;
    history::say(&ControlMessage::Ended {
        done: counts.done.load(SeqCst),
        failed: counts.failed.load(SeqCst),
        refused: counts.refused.load(SeqCst),
        kept: counts.kept.load(SeqCst),
    });
    Ok(())
}

/// Joins a thread. Its panic counts as a broken promise too, if only of this program.
fn join(thread: thread::JoinHandle<()>) {
    if let Err(panic) = thread.join() {
        let what = panic.downcast_ref::<String>().cloned();
        history::broken(format!("a thread panicked: {}", what.unwrap_or_default()));
    }
}

fn arena(shared: &SharedState) -> Result<Arena> {
    Ok(match shared.link.maps_memory() {
        true => Arena::shared(shared.world().ep.alloc(worker::ARENA_LEN)?),
        false => Arena::private(worker::ARENA_LEN),
    })
}

/// Reads the driver's messages and passes each to its worker.
fn listen(shared: &SharedState, senders: &[Sender<ControlMessage>]) {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match ControlMessage::parse(&line) {
            Some(ControlMessage::Up { addr, instance }) => {
                history::note(format!("the peer is at {addr}, instance {instance:x}"));
                *shared.peer.lock() = Some(Peer { addr, instance });
            }
            Some(ControlMessage::End) => shared.ending.store(true, SeqCst),
            Some(ControlMessage::Tell) => {
                history::tell();
                std::process::exit(0);
            }
            Some(
                message @ (ControlMessage::Grant { worker, .. }
                | ControlMessage::Return { worker, .. }
                | ControlMessage::Revoked { worker, .. }
                | ControlMessage::Refused { worker, .. }),
            ) => {
                // Workers that have ended receive no more messages.
                let _ = senders[worker].send(message);
            }
            _ => {}
        }
    }
    // The driver is gone.
    std::process::exit(4);
}
