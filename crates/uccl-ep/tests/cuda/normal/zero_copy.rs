//! Zero-copy views of received rows, compared as if they were contiguous.

use std::{sync::Arc, thread, time::Duration};

use uccl_ep::{
    Result,
    cuda::{Group, normal},
    record::Record,
};

use super::{super::Gpu, Normal, on_gpu::GpuCalls};

/// Longer than peers take to begin their next call.
const PAUSE: Duration = Duration::from_millis(30);

impl Normal {
    fn spread(&self) -> usize {
        let record = Record { payload: self.row_len(), scales: self.scales, top_k: self.top_k };
        record.spread(self.local_experts, self.slots)
    }

    /// The number of rows of the GPU's tables, and of its combine's input.
    pub(super) fn rows_on_gpu(&self) -> usize {
        if self.zero_copy {
            (self.ranks - 1) * self.spread() + self.slots
        } else {
            self.most_rows()
        }
    }

    /// The numbers of the received rows, in the order of the CPU, and then of the others.
    fn rows_in_order(&self, starts: &[u32]) -> Vec<usize> {
        let (mut used, mut rest) = (Vec::new(), Vec::new());
        for row in 0..self.rows_on_gpu() {
            let (from, nth) = (row / self.spread(), row % self.spread());
            let came = (starts[from + 1] - starts[from]) as usize;
            if nth < came { used.push(row) } else { rest.push(row) }
        }
        used.extend(rest);
        used
    }

    /// Extends `values` to the GPU's number of rows; the additional rows repeat the last value.
    pub(super) fn widened<T: Copy>(&self, values: &[T]) -> Vec<T> {
        if !self.zero_copy {
            return values.to_vec();
        }
        let width = values.len() / self.most_rows();
        let more = values.last().map_or(&[][..], std::slice::from_ref);
        let all = values.iter().chain(more.iter().cycle());
        all.copied().take(width * self.rows_on_gpu()).collect()
    }

    /// Values of rows, in the order of the CPU.
    pub(super) fn in_order<T: Copy>(&self, starts: &[u32], values: Vec<T>) -> Vec<T> {
        if !self.zero_copy {
            return values;
        }
        let width = values.len() / self.rows_on_gpu();
        let rows = self.rows_in_order(starts).into_iter().take(self.most_rows());
        rows.flat_map(|row| values[row * width..][..width].to_vec()).collect()
    }

    /// Values of rows, in the order of the GPU.
    fn as_on_gpu<T: Copy>(&self, starts: &[u32], values: &[T]) -> Vec<T> {
        let (width, mut wide) = (values.len() / self.most_rows(), self.widened(values));
        for (row, values) in self.rows_in_order(starts).into_iter().zip(values.chunks(width.max(1)))
        {
            wide[row * width..][..width].copy_from_slice(values);
        }
        wide
    }
}

impl GpuCalls<'_> {
    /// Takes rows in place, copies them to the outputs, and puts the rows to send back where the
    /// GPU takes them. Meanwhile peers go on, and wait for nothing but this rank's next call; a
    /// layout is no such call.
    pub(super) fn receive_zero_copy(
        &self,
        case: &Normal,
        (group, gpu): (&Arc<Group>, &Gpu),
        (dispatch, outputs): (normal::Dispatch, &normal::DispatchOutput),
    ) -> Result<normal::Handle> {
        let place = dispatch.zero_copy_view().expect("rows can stay");
        assert_eq!((place.len, place.spread), (case.rows_on_gpu(), case.spread()), "{case:?}");
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        let handle = unsafe { dispatch.receive_zero_copy(outputs, &gpu.stream)? };
        gpu.stream.synchronize().expect("kernels end well");
        if group.rank() == 0 {
            // A case that is laid out has overwritten the choices.
            if !case.has_layout {
                self.lay_out(case, group, gpu)?;
            }
            thread::sleep(PAUSE);
        }
        let starts: Vec<u32> = gpu.download(self.tables.starts, 1 + case.ranks);
        let all: Vec<u8> = gpu.download(place.rows, place.len * place.stride);
        let rows = case.rows_in_order(&starts).into_iter().take(starts[case.ranks] as usize);
        let part = |at: usize, len: usize| -> Vec<u8> {
            rows.clone().flat_map(|row| &all[row * place.stride + at..][..len]).copied().collect()
        };
        gpu.write(outputs.rows, &part(0, case.row_len()));
        if let Some((to, from)) = outputs.scales.zip(place.scales) {
            gpu.write(to.words, &part((from.words - place.rows) as usize, 4 * case.scales));
        }
        gpu.write(self.made, &case.as_on_gpu(&starts, &self.inputs.made));
        if self.made_weights != 0 {
            gpu.write(self.made_weights, &case.as_on_gpu(&starts, &self.inputs.made_weights));
        }
        Ok(handle)
    }
}
