//! An end: one of the two processes.

mod fork;
mod hand;
mod keeper;
mod notifs;
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
    hand::Hand,
    keeper::Keeper,
    world::{Counts, Peer, Shared, World},
};
use crate::{clock, history, link::Link, plot::Ground, watch, word::Word};

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
    pub(crate) hands: usize,
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

/// Runs hands and keeper until the driver sends [`Word::End`].
pub(crate) fn run(args: &EndArgs) -> Result<()> {
    thread::spawn(|| clock::run(watch::look));
    let mut rng = fastrand::Rng::with_seed(args.seed);
    let world = World::new(args.link, &mut rng)?;
    let unique = u64::from(args.number) << 31 | u64::from(args.incarnation & 0xff) << 23;
    let shared = Arc::new(Shared {
        link: args.link,
        number: args.number,
        world: RwLock::new(world),
        peer: Mutex::new(None),
        ending: AtomicBool::new(false),
        hands_ended: AtomicU64::new(0),
        counts: Counts::default(),
        next_grant: AtomicU64::new(unique << 20),
        next_stamp: AtomicU64::new(unique),
    });
    let mut doors = Vec::new();
    let mut hands = Vec::new();
    for number in 0..args.hands {
        let (door, words) = mpsc::channel();
        doors.push(door);
        let ground = ground(&shared)?;
        let hand = Hand::new(number, &shared, args, ground, words, rng.u64(..));
        hands.push(thread::Builder::new().name(format!("hand {number}")).spawn(|| hand.run())?);
    }
    let keeper = Keeper::new(&shared, args, doors.clone(), rng.u64(..));
    let keeper = thread::Builder::new().name("keeper".into()).spawn(|| keeper.run())?;
    {
        let shared = Arc::clone(&shared);
        thread::spawn(move || listen(&shared, &doors));
    }
    for hand in hands {
        join(hand);
    }
    join(keeper);
    let counts = &shared.counts;
    history::say(&Word::Ended {
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

fn ground(shared: &Shared) -> Result<Ground> {
    Ok(match shared.link.maps_memory() {
        true => Ground::shared(shared.world().ep.alloc(hand::GROUND)?),
        false => Ground::private(hand::GROUND),
    })
}

/// Reads the driver's words and passes each to its hand.
fn listen(shared: &Shared, doors: &[Sender<Word>]) {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match Word::parse(&line) {
            Some(Word::Up { addr, instance }) => {
                history::note(format!("the peer is at {addr}, instance {instance:x}"));
                *shared.peer.lock() = Some(Peer { addr, instance });
            }
            Some(Word::End) => shared.ending.store(true, SeqCst),
            Some(Word::Tell) => {
                history::tell();
                std::process::exit(0);
            }
            Some(
                word @ (Word::Grant { hand, .. }
                | Word::Return { hand, .. }
                | Word::Revoked { hand, .. }
                | Word::Refused { hand, .. }),
            ) => {
                // Hands that have ended receive no more words.
                let _ = doors[hand].send(word);
            }
            _ => {}
        }
    }
    // The driver is gone.
    std::process::exit(4);
}
