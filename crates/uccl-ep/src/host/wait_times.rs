//! The time that a receive waits for each rank.

use std::time::{Duration, Instant};

/// By rank, the time that this rank waited for the first round of its data: from the begin of the
/// receive until the data was seen; zero for data that was there before.
#[derive(Debug)]
pub(crate) struct WaitTimes {
    since: Option<Instant>,
    waited: Vec<Option<Duration>>,
}

impl WaitTimes {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { since: None, waited: vec![None; ranks] }
    }

    /// Notes the ranks with data that has come. Called first when the receive begins, and then
    /// repeatedly.
    pub(crate) fn update(&mut self, has_first_rounds: impl Fn(usize) -> bool) {
        if self.since.is_some() && self.waited.iter().all(Option::is_some) {
            return;
        }
        for (rank, waited) in self.waited.iter_mut().enumerate() {
            if waited.is_none() && has_first_rounds(rank) {
                *waited = Some(self.since.map_or(Duration::ZERO, |since| since.elapsed()));
            }
        }
        self.since.get_or_insert_with(Instant::now);
    }

    /// The time waited for each rank; zero for one with data that has not been seen.
    pub(crate) fn waited(&self) -> Vec<Duration> {
        self.waited.iter().map(|waited| waited.unwrap_or_default()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_there_at_first_costs_nothing_and_a_later_one_its_time() {
        let mut wait_times = WaitTimes::new(3);
        wait_times.update(|rank| rank == 0);
        std::thread::sleep(Duration::from_millis(2));
        wait_times.update(|rank| rank < 2);
        let [own, second, third] = *wait_times.waited() else { panic!("three ranks") };
        assert_eq!((own, third), (Duration::ZERO, Duration::ZERO));
        assert!(second >= Duration::from_millis(2), "{second:?}");
        std::thread::sleep(Duration::from_millis(2));
        wait_times.update(|_| true);
        let waited = wait_times.waited();
        assert_eq!(waited[..2], [own, second]);
        assert!(waited[2] >= second + Duration::from_millis(2), "{waited:?}");
    }
}
