//! Puts tokens that arrive where they belong.

use super::{Counts, Layout, Outputs, Part};
use crate::{
    error::{Error, Result},
    record::Record,
    routing::MAX_TOP_K,
};

/// By rank and expert, the row of the first token; and how many rows there must be.
fn first_rows(counts: &Counts, starts: &[usize]) -> (Vec<usize>, usize) {
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

/// Where tokens that arrive go.
pub(super) struct Sink<'a> {
    outputs: Outputs,
    layout: &'a Layout,
    /// By rank and expert, the row of its next token ([`Layout::Experts`]).
    next: Vec<usize>,
    /// By rank, how many of its tokens have been taken out.
    pub(super) taken: Vec<usize>,
    pub(super) table: Vec<i32>,
    pub(super) masters: Vec<u8>,
}

impl<'a> Sink<'a> {
    /// For as many tokens as were counted.
    pub(super) fn new(
        outputs: Outputs,
        layout: &'a Layout,
        counts: &Counts,
        top_k: usize,
    ) -> Result<Self> {
        let (next, last) = match layout {
            Layout::Rows => (Vec::new(), counts.total()),
            Layout::Experts(starts) => first_rows(counts, starts),
        };
        if last > outputs.len {
            let why = format!("{last} rows arrive, and there is room for {}", outputs.len);
            return Err(Error::invalid(why));
        }
        let table = vec![-1; counts.total() * (2 + top_k)];
        let masters = vec![0; counts.total()];
        let taken = vec![0; counts.from.len()];
        Ok(Self { outputs, layout, next, taken, table, masters })
    }

    /// Puts a record, the `at`th that arrives, where it belongs.
    ///
    /// # Safety
    /// `record` is all there.
    pub(super) unsafe fn put(&mut self, part: &Part, from: usize, at: usize, record: *const u8) {
        let (layout, routing, me) = (&part.areas.record, &part.routing, part.group.rank());
        let (top_k, local) = (layout.top_k, routing.local_experts());
        let mut choices = [0; MAX_TOP_K];
        let mut weights = [0.0; MAX_TOP_K];
        // SAFETY: a record is all there, and its numbers are aligned, as its parts are.
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
        self.masters[at] = routing.last_choice(me, &choices[..top_k]).unwrap_or(0) as u8;
        match self.layout {
            Layout::Rows => {
                // SAFETY: as the caller has it.
                unsafe { self.copy(layout, record, at, 0) };
                for k in 0..top_k {
                    let local = local_of(choices[k]);
                    let is_foreign = local.is_none() && self.outputs.zeroes_foreign_weights;
                    // SAFETY: there are `top_k` choices and weights for each row, as `receive` demands.
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
            Layout::Experts(_) => {
                for k in 0..top_k {
                    let Some(expert) = local_of(choices[k]) else { continue };
                    let next = &mut self.next[from * local + expert];
                    let row = *next;
                    // A peer whose counts are not those of its records gets no further than this.
                    if row >= self.outputs.len {
                        continue;
                    }
                    *next += 1;
                    self.table[at * width + 2 + k] = row as i32;
                    // SAFETY: as the caller has it.
                    unsafe { self.copy(layout, record, row, expert) };
                    if let Some(out) = self.outputs.weights {
                        // SAFETY: there is a weight for each row, as `receive` demands.
                        unsafe { out.add(row).write(weights[k]) };
                    }
                }
            }
        }
    }

    /// Copies a record's payload and scales to a row.
    ///
    /// # Safety
    /// `record` is all there.
    unsafe fn copy(&self, layout: &Record, record: *const u8, row: usize, expert: usize) {
        let Outputs { rows, stride, scales, .. } = self.outputs;
        // SAFETY: the record is all there, and there is room for each row, as `receive` demands.
        unsafe {
            rows.add(row * stride).copy_from_nonoverlapping(record, layout.payload);
            if let Some(out) = scales {
                let words = record.add(layout.scales_at()).cast::<u32>();
                let nth = match self.layout {
                    Layout::Rows => row,
                    Layout::Experts(starts) => row - starts[expert],
                };
                let (to, stride) = out.of_row((row, expert, nth), layout.scales);
                for word in 0..layout.scales {
                    to.add(word * stride).write(words.add(word).read());
                }
            }
        }
    }
}
