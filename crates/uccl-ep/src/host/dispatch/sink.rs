//! Puts received tokens into the caller's memory.

use std::slice;

use smallvec::SmallVec;

use super::{DispatchContext, DispatchOutput, ReceiveCounts, RowLayout, memory::RowPosition};
use crate::shared::{
    error::{Error, Result},
    record::Record,
    routing::{MAX_TOP_K, first_of},
    streaming,
};

/// More bytes than this are copied past the caches, which would evict most of them before they are
/// read.
const CACHED: usize = 2 << 20;
/// Rows of an expert with scales that are written together: their words of one group of channels
/// fill a line.
const ROWS_OF_LINE: usize = 16;

/// By rank and expert, the row of the first token; and the least number of rows of the output.
fn first_rows(counts: &ReceiveCounts, starts: &[usize]) -> (Vec<usize>, usize) {
    let local = starts.len();
    let mut next = starts.to_vec();
    let mut first = Vec::with_capacity(counts.per_expert.len());
    for of_rank in counts.per_expert.chunks_exact(local.max(1)) {
        first.extend_from_slice(&next);
        for (next, count) in next.iter_mut().zip(of_rank) {
            *next += *count as usize;
        }
    }
    (first, next.into_iter().max().unwrap_or(0))
}

/// The destination of received tokens.
pub(super) struct Sink<'a> {
    outputs: DispatchOutput,
    layout: &'a RowLayout,
    /// By rank and expert, the row of its next token ([`RowLayout::ByExpert`]).
    next: Vec<usize>,
    /// By rank, its tokens that have been taken out.
    pub(super) taken: Vec<usize>,
    pub(super) table: Vec<i32>,
    pub(super) last_choices: Vec<u8>,
    /// Whether payloads are copied past the caches.
    streams: bool,
    /// Scales of tokens, and the rows that they belong to.
    scales: Vec<u32>,
    scaled_rows: Vec<ScaledRow>,
}

/// A row, and the index of its first word of scales.
#[derive(Clone, Copy)]
struct ScaledRow {
    row: usize,
    expert: usize,
    words: usize,
}

/// A received token.
#[derive(Clone, Copy)]
pub(super) struct ReceivedToken {
    pub(super) from: usize,
    /// The number of tokens before it.
    pub(super) at: usize,
    pub(super) record: *const u8,
    pub(super) payload: *const u8,
}

impl<'a> Sink<'a> {
    /// For the counted tokens.
    pub(super) fn new(
        outputs: DispatchOutput,
        layout: &'a RowLayout,
        counts: &ReceiveCounts,
        record: Record,
    ) -> Result<Self> {
        let top_k = record.top_k;
        let (next, last) = match layout {
            RowLayout::ByToken => (Vec::new(), counts.total()),
            RowLayout::ByExpert(starts) => first_rows(counts, starts),
        };
        let rows = match layout {
            RowLayout::ByToken => counts.total(),
            RowLayout::ByExpert(_) => counts.per_expert.iter().map(|count| *count as usize).sum(),
        };
        let streams = rows.saturating_mul(record.payload) > CACHED;
        if last > outputs.len {
            let why = format!("{last} rows arrive, and there is room for {}", outputs.len);
            return Err(Error::invalid(why));
        }
        let table = vec![-1; counts.total() * (2 + top_k)];
        let last_choices = vec![0; counts.total()];
        let taken = vec![0; counts.per_rank.len()];
        let (scales, scaled_rows) = (Vec::new(), Vec::new());
        Ok(Self { outputs, layout, next, taken, table, last_choices, streams, scales, scaled_rows })
    }

    /// Stores a token, without its scales: see [`write_scales`](Self::write_scales).
    ///
    /// # Safety
    /// Its record and its payload are complete.
    pub(super) unsafe fn put(&mut self, context: &DispatchContext, received: ReceivedToken) {
        let ReceivedToken { from, at, record, .. } = received;
        let (layout, routing, me) = (&context.areas.record, &context.routing, context.group.rank());
        let (top_k, local) = (layout.top_k, routing.local_experts());
        let mut choices = [0; MAX_TOP_K];
        let mut weights = [0.0; MAX_TOP_K];
        // SAFETY: the record is complete, and its numbers are aligned, as its parts are.
        let token = unsafe {
            record
                .add(layout.choices_at())
                .cast::<i32>()
                .copy_to_nonoverlapping(choices.as_mut_ptr(), top_k);
            record
                .add(layout.weights_at())
                .cast::<f32>()
                .copy_to_nonoverlapping(weights.as_mut_ptr(), top_k);
            record.add(layout.token_at()).cast::<u32>().read()
        };
        let local_of = |choice| {
            routing.owner(choice).filter(|(rank, _)| *rank == me).map(|(_, expert)| expert)
        };
        let width = 2 + top_k;
        let table = &mut self.table[at * width..][..width];
        (table[0], table[1]) = (token as i32, from as i32);
        self.last_choices[at] = routing.last_choice(me, &choices[..top_k]).unwrap_or(0) as u8;
        if self.outputs.scales.is_some() {
            // SAFETY: the record is complete, and has aligned words for its scales.
            let words = unsafe {
                slice::from_raw_parts(record.add(layout.scales_at()).cast(), layout.scales)
            };
            self.scales.extend_from_slice(words);
        }
        match self.layout {
            RowLayout::ByToken => {
                // SAFETY: the caller guarantees it.
                unsafe { self.copy(layout, received, at, 0) };
                for k in 0..top_k {
                    let local = local_of(choices[k]);
                    let is_foreign = local.is_none() && self.outputs.zero_foreign_weights;
                    // SAFETY: there are `top_k` choices and weights for each row, as `receive`
                    // demands.
                    unsafe {
                        if let Some(out) = self.outputs.choices {
                            out.put(at * top_k + k, local.map_or(-1, |local| local as i32));
                        }
                        if let Some(out) = self.outputs.weights {
                            out.add(at * top_k + k).write(if is_foreign {
                                0.0
                            } else {
                                weights[k]
                            });
                        }
                    }
                }
            }
            RowLayout::ByExpert(_) => {
                for k in 0..top_k {
                    let Some(expert) = local_of(choices[k]) else { continue };
                    let first = first_of(&choices[..top_k], k);
                    if first < k {
                        let row = self.table[at * width + 2 + first];
                        // SAFETY: the row was written for an earlier choice, or is -1 and has no
                        // weight.
                        unsafe { self.add_weight(row, weights[k]) };
                        continue;
                    }
                    let next = &mut self.next[from * local + expert];
                    let row = *next;
                    // Bounds the rows of a peer with counts that contradict its records.
                    if row >= self.outputs.len {
                        continue;
                    }
                    *next += 1;
                    self.table[at * width + 2 + k] = row as i32;
                    // SAFETY: the caller guarantees it.
                    unsafe { self.copy(layout, received, row, expert) };
                    if let Some(out) = self.outputs.weights {
                        // SAFETY: there is a weight for each row, as `receive` demands.
                        unsafe { out.add(row).write(weights[k]) };
                    }
                }
            }
        }
    }

    /// Adds a weight to that of a row, if there is such a row.
    ///
    /// # Safety
    /// The row has been written.
    unsafe fn add_weight(&self, row: i32, weight: f32) {
        let Some((out, row)) = self.outputs.weights.zip(usize::try_from(row).ok()) else { return };
        // SAFETY: there is a weight for each row, as `receive` demands.
        unsafe { *out.add(row) += weight };
    }

    /// Copies a token's payload to a row.
    ///
    /// # Safety
    /// The payload is complete.
    unsafe fn copy(&mut self, layout: &Record, received: ReceivedToken, row: usize, expert: usize) {
        let payload = received.payload;
        // SAFETY: it is complete, and there is room for each row, as `receive` demands.
        unsafe {
            let to = self.outputs.rows.add(row * self.outputs.stride);
            match self.streams {
                true => streaming::copy(payload, to, layout.payload),
                false => to.copy_from_nonoverlapping(payload, layout.payload),
            }
        }
        if self.outputs.scales.is_some() {
            let words = self.scales.len() - layout.scales;
            self.scaled_rows.push(ScaledRow { row, expert, words });
        }
    }

    /// Writes the scales of all tokens. Token by token, each word would go to another line and page
    /// where the words of a row are far apart.
    ///
    /// # Safety
    /// Outputs have room for all rows.
    pub(super) unsafe fn write_scales(&mut self, count: usize) {
        let Some(out) = self.outputs.scales else { return };
        self.scaled_rows.sort_unstable_by_key(|scaled| scaled.row);
        let of_experts = self.scaled_rows.chunk_by(|one, next| one.expert == next.expert);
        for rows in of_experts.flat_map(|rows| rows.chunks(ROWS_OF_LINE)) {
            let place = |scaled: &ScaledRow| {
                let nth = match self.layout {
                    RowLayout::ByToken => scaled.row,
                    RowLayout::ByExpert(starts) => scaled.row - starts[scaled.expert],
                };
                let position = RowPosition { row: scaled.row, expert: scaled.expert, nth };
                // SAFETY: the caller guarantees that there is such a row.
                let (to, stride) = unsafe { out.of_row(position, count) };
                (&self.scales[scaled.words..][..count], to, stride)
            };
            let places: SmallVec<[_; ROWS_OF_LINE]> = rows.iter().map(place).collect();
            for word in 0..count {
                for (words, to, stride) in &places {
                    // SAFETY: the caller guarantees that a row has room for all of its words.
                    unsafe { to.add(word * stride).write(words[word]) };
                }
            }
        }
    }

    /// Fills the rows of tokens that were counted and did not come, because their rank was lost
    /// after its first round.
    ///
    /// # Safety
    /// Outputs have room for all rows.
    pub(super) unsafe fn blank_missing(&mut self, counts: &ReceiveCounts, record: Record) {
        let is_missing = |from: &usize| self.taken[*from] < counts.per_rank[*from] as usize;
        for from in (0..self.taken.len()).filter(is_missing) {
            match self.layout {
                RowLayout::ByToken => {
                    let rows = counts.rows_from(from);
                    for at in rows.start + self.taken[from]..rows.end {
                        let position = RowPosition { row: at, expert: 0, nth: at };
                        // SAFETY: the caller guarantees it.
                        unsafe { self.blank(position, record, record.top_k) };
                    }
                }
                RowLayout::ByExpert(starts) => {
                    let (first, local) = (first_rows(counts, starts).0, starts.len());
                    for (expert, start) in starts.iter().enumerate() {
                        let nth = from * local + expert;
                        let end = first[nth] + counts.per_expert[nth] as usize;
                        for row in self.next[nth]..end {
                            let position = RowPosition { row, expert, nth: row - start };
                            // SAFETY: the caller guarantees it; a row of an expert has one weight.
                            unsafe { self.blank(position, record, 1) };
                        }
                    }
                }
            }
        }
    }

    /// Fills a row with zeros, and its weights: so many.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn blank(&self, position: RowPosition, record: Record, weights: usize) {
        let row = position.row;
        // SAFETY: the caller guarantees it.
        unsafe {
            self.outputs.rows.add(row * self.outputs.stride).write_bytes(0, record.payload);
            if let Some(out) = self.outputs.scales {
                let (to, stride) = out.of_row(position, record.scales);
                (0..record.scales).for_each(|word| to.add(word * stride).write(0));
            }
            if let Some(out) = self.outputs.choices {
                (0..record.top_k).for_each(|k| out.put(row * record.top_k + k, -1));
            }
            if let Some(out) = self.outputs.weights {
                out.add(row * weights).write_bytes(0, weights);
            }
        }
    }
}
