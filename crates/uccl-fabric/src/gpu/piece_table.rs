//! Copies of the same pieces again and again.

use uccl_device::cuda::{
    GpuError,
    gather::{Completion, DeviceTable, Flag, LaunchOptions, Piece, WordChange},
};

use super::engine::{Engine, Mark, SHARED_PIECE};

/// The least number of pieces in a table: the parameters of a launch have room for fewer.
const LEAST_PIECES: usize = 257;

/// Pieces in the memory of an engine's GPU, which the kernel alone copies.
#[derive(Debug)]
pub struct PieceTable {
    /// Not empty.
    tables: Vec<DeviceTable>,
}

impl Engine {
    /// Enqueues the upload of pieces that the kernel copies, as [`copy`](Self::copy) would; `None`
    /// if an engine copies a part of them, they are too few or too many, or there are too many
    /// tables.
    ///
    /// # Errors
    /// The driver refuses, or has no memory.
    pub fn upload(&mut self, pieces: &[Piece]) -> Result<Option<PieceTable>, GpuError> {
        let total: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let launcher = self.launcher.get(self.context)?;
        let are_few = pieces.len() < LEAST_PIECES || pieces.len() > launcher.most_pieces();
        if are_few || total / pieces.len() as u64 >= SHARED_PIECE {
            return Ok(None);
        }
        let parts = pieces.chunks(launcher.most_table_pieces());
        // SAFETY: the stream is of this context.
        let tables = parts.map(|part| unsafe { launcher.upload(&self.stream, part) });
        let tables = tables.collect::<Result<Option<_>, _>>()?;
        Ok(tables.map(|tables| PieceTable { tables }))
    }

    /// Enqueues copies of a table's pieces, and the change of the word behind them. The mark shows
    /// their end. After an error a part may have been enqueued, as with [`copy`](Self::copy).
    ///
    /// # Safety
    /// The table is of this engine, and lives until the copies have ended. For its pieces and the
    /// word: as for [`copy`](Self::copy).
    pub unsafe fn copy_table(
        &mut self,
        table: &PieceTable,
        word: Option<WordChange>,
    ) -> Result<Mark, GpuError> {
        let (completion, count) = (Completion::Flag, table.tables.len());
        let mut flag = None;
        for (at, part) in table.tables.iter().enumerate() {
            let word = word.filter(|_| at + 1 == count);
            let options = LaunchOptions { word, completion, ..LaunchOptions::default() };
            // SAFETY: the caller's promise.
            flag = Some(unsafe { self.launch_table(part, options)? });
        }
        match flag {
            Some(flag) => Ok(Mark::of_flag(flag)),
            None => self.fence(),
        }
    }

    /// Launches the kernel with a table, as soon as the launcher has room.
    ///
    /// # Safety
    /// As for [`Self::copy_table`].
    unsafe fn launch_table(
        &mut self,
        table: &DeviceTable,
        options: LaunchOptions,
    ) -> Result<Flag, GpuError> {
        let launcher = self.launcher.get(self.context)?;
        loop {
            // SAFETY: the caller's promise.
            match unsafe { launcher.launch_table_again(&self.stream, table, options) } {
                Ok(launch) => return Ok(launcher.flag(launch)),
                // Earlier launches end by themselves.
                Err(GpuError::Busy { .. }) => std::thread::yield_now(),
                Err(e) => return Err(e),
            }
        }
    }
}
