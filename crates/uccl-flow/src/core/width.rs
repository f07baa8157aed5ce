//! The number of streams that carry chunks: more of them while that helps.
//!
//! The rate of all streams together is measured over time in which they have work. When all of them
//! are busy, twice as many are tried. They stay if the rate grows by a quarter of their share at
//! least; else the number goes back, and the next trial waits. It comes early when the rate shows
//! that the link has changed.

/// Constants of a [`Width`]; times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WidthParams {
    /// Streams that carry chunks at first.
    pub(crate) first: usize,
    /// The time with work over which a rate is measured. New streams have as much to get up to
    /// speed.
    pub(crate) sample_us: u64,
    /// The pause after a trial that did not help. It doubles with each further one.
    pub(crate) pause_us: u64,
}

/// The longest pause, in first pauses.
const MOST_PAUSES: u64 = 16;
/// A trial waits for its streams to open for so many samples.
const PATIENCE: u64 = 20;
/// The least acknowledgements of a sample.
const LEAST_ACKS: u64 = 16;

/// The streams at a moment.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Census {
    /// Streams that are open.
    pub(crate) open: usize,
    /// Streams that carry chunks.
    pub(crate) active: usize,
    /// Those of them for which there is no chunk.
    pub(crate) idle: usize,
}

#[derive(Default, Debug)]
struct Sample {
    bytes: u64,
    busy_us: u64,
    acks: u64,
    /// Sums of each acknowledgement's census.
    active: u64,
    idle: u64,
}

/// A larger number that is tried.
#[derive(Debug)]
struct Trial {
    /// The number before, and its rate.
    before: usize,
    rate: u64,
}

/// The number of streams that carry chunks.
#[derive(Debug)]
pub(crate) struct Width {
    params: WidthParams,
    most: usize,
    count: usize,
    /// The greatest number until now.
    reached: usize,
    /// Until when time with work has been counted.
    mark_us: u64,
    sample: Sample,
    /// The present sample does not count; nor do the next ones, until then or until all streams
    /// are open.
    settles_us: Option<u64>,
    trial: Option<Trial>,
    /// The rate at which more streams did not help.
    plain_rate: Option<u64>,
    ended_us: u64,
    next_us: u64,
    pause_us: u64,
}

impl Width {
    pub(crate) fn new(params: WidthParams, most: usize) -> Self {
        let count = params.first.clamp(1, most);
        Self {
            most,
            count,
            reached: count,
            mark_us: 0,
            sample: Sample::default(),
            settles_us: Some(0),
            trial: None,
            plain_rate: None,
            ended_us: 0,
            next_us: 0,
            pause_us: params.pause_us,
            params,
        }
    }

    /// Streams that carry chunks.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Streams that are to be open: those beyond [`Width::count`] rest.
    pub(crate) fn reached(&self) -> usize {
        self.reached
    }

    /// Whether all streams carry chunks for good.
    pub(crate) fn is_final(&self) -> bool {
        self.count == self.most && self.trial.is_none()
    }

    /// A chunk is under way after there was none.
    pub(crate) fn on_busy(&mut self, now_us: u64) {
        self.mark_us = now_us;
    }

    /// So many bytes have been acknowledged. True if the number has changed.
    pub(crate) fn on_acked(&mut self, bytes: u64, census: Census, now_us: u64) -> bool {
        if self.is_final() {
            return false;
        }
        let sample = &mut self.sample;
        sample.bytes += bytes;
        sample.busy_us += now_us.saturating_sub(self.mark_us);
        sample.acks += 1;
        sample.active += census.active as u64;
        sample.idle += census.idle as u64;
        self.mark_us = now_us;
        if sample.busy_us < self.params.sample_us || sample.acks < LEAST_ACKS {
            return false;
        }
        let sample = std::mem::take(&mut self.sample);
        if let Some(until_us) = self.settles_us {
            if census.open >= self.count || now_us >= until_us {
                self.settles_us = None;
            }
            return false;
        }
        match self.trial.take() {
            Some(trial) => self.end(&trial, sample.rate(), now_us),
            None => self.begin(&sample, now_us),
        }
    }

    /// Tries more streams, when all are busy and it is time.
    fn begin(&mut self, sample: &Sample, now_us: u64) -> bool {
        if sample.idle * 8 > sample.active {
            return false;
        }
        let rate = sample.rate();
        if self.plain_rate.is_some_and(|plain| rate * 4 < plain * 3 || rate * 3 > plain * 4) {
            self.plain_rate = None;
            self.pause_us = self.params.pause_us;
            self.next_us = self.ended_us + self.pause_us / 4;
        }
        if now_us < self.next_us {
            return false;
        }
        self.trial = Some(Trial { before: self.count, rate });
        self.set(self.most.min(2 * self.count), now_us);
        true
    }

    /// Ends a trial. True if its streams did not help.
    fn end(&mut self, trial: &Trial, rate: u64, now_us: u64) -> bool {
        let &Trial { before, rate: rate_before } = trial;
        let share = rate_before * (self.count - before) as u64 / before as u64;
        if rate >= rate_before + share / 4 {
            (self.plain_rate, self.pause_us) = (None, self.params.pause_us);
            return false;
        }
        self.plain_rate = Some(rate_before);
        (self.ended_us, self.next_us) = (now_us, now_us + self.pause_us);
        self.pause_us = (2 * self.pause_us).min(MOST_PAUSES * self.params.pause_us);
        self.set(before, now_us);
        true
    }

    fn set(&mut self, count: usize, now_us: u64) {
        self.count = count;
        self.reached = self.reached.max(count);
        self.settles_us = Some(now_us + PATIENCE * self.params.sample_us);
    }
}

impl Sample {
    /// Bytes per second.
    fn rate(&self) -> u64 {
        self.bytes.saturating_mul(1_000_000) / self.busy_us.max(1)
    }
}
