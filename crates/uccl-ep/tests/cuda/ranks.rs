//! Ranks in threads of one process.

use std::{
    sync::{Condvar, Mutex},
    thread,
    time::Duration,
};

use uccl_ep::{Error, Result};

/// Far more than any test takes from one meeting to the next.
const LIMIT: Duration = Duration::from_secs(100);

/// The meeting point of ranks.
pub(crate) struct Ranks {
    board: Mutex<Vec<Option<Vec<u8>>>>,
    /// The number of times that ranks have come.
    came: Mutex<usize>,
    changed: Condvar,
}

impl Ranks {
    /// Waits for all ranks; fails if one does not come, because its test has failed.
    pub(crate) fn meet(&self) {
        let ranks = self.board.lock().unwrap().len();
        let mut came = self.came.lock().unwrap();
        *came += 1;
        let all = came.div_ceil(ranks) * ranks;
        self.changed.notify_all();
        let (came, waited) =
            self.changed.wait_timeout_while(came, LIMIT, |came| *came < all).unwrap();
        drop(came);
        assert!(!waited.timed_out(), "another rank does not come");
    }

    /// Takes part in an exchange of the others, as a rank that is absent.
    pub(crate) fn stays_away(&self, me: usize) {
        self.board.lock().unwrap()[me] = None;
        self.meet();
        self.meet();
    }

    /// An exchange: it returns the bytes of every rank.
    pub(crate) fn exchange(
        &self,
        me: usize,
    ) -> impl FnMut(Vec<u8>) -> Result<Vec<Option<Vec<u8>>>, Error> {
        move |mine| {
            self.board.lock().unwrap()[me] = Some(mine);
            self.meet();
            let all = self.board.lock().unwrap().clone();
            self.meet();
            Ok(all)
        }
    }
}

/// Runs `rank` for each rank, in threads of their own.
pub(crate) fn world<T: Send>(count: usize, rank: impl Fn(&Ranks, usize) -> T + Sync) -> Vec<T> {
    let (board, came, changed) = (Mutex::new(vec![None; count]), Mutex::new(0), Condvar::new());
    let ranks = Ranks { board, came, changed };
    thread::scope(|scope| {
        let (ranks, rank) = (&ranks, &rank);
        let all: Vec<_> = (0..count).map(|me| scope.spawn(move || rank(ranks, me))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
