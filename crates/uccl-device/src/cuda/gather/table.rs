//! Tables of pieces that stay in the GPU's memory.

use crate::cuda::{copy::Direction, error::GpuError, memory::DeviceBuffer, stream::Stream};

use super::{
    launcher::{Completion, Launch, LaunchOptions, Launcher},
    params::{CopyTable, Head, Piece},
};

/// The tables of a launch, in the GPU's memory. Launches with it copy the same pieces, and their
/// cost does not depend on the number of these.
#[derive(Debug)]
pub struct DeviceTable {
    /// The cursors, and the pieces behind them.
    memory: DeviceBuffer,
    pieces_offset: u64,
    /// The warps that have work.
    warps: u32,
}

impl Launcher {
    /// The most pieces of a [`DeviceTable`].
    pub fn most_table_pieces(&self) -> usize {
        self.config().pieces
    }

    /// Enqueues the upload of a table of these pieces. Launches on the same stream find it there.
    ///
    /// # Errors
    /// [`GpuError::Busy`] if too many launches are under way; [`GpuError::TooManyIovs`] for more
    /// than [`Self::most_table_pieces`]; [`GpuError::Driver`] if the driver refuses.
    ///
    /// # Safety
    /// The stream is of this launcher's context.
    pub unsafe fn upload(
        &mut self,
        stream: &Stream,
        pieces: &[Piece],
    ) -> Result<DeviceTable, GpuError> {
        let (count, most) = (pieces.len(), self.most_table_pieces());
        if count > most {
            return Err(GpuError::TooManyIovs { count, most });
        }
        self.make_room(stream, 1)?;
        let pieces_offset = self.pieces_offset();
        let memory = DeviceBuffer::new(self.context(), pieces_offset + size_of_val(pieces))?;
        let _ = self.begin(LaunchOptions { completion: Completion::Event, ..Default::default() });
        let blocks = self.config().most_blocks;
        // SAFETY: there is a free slot, which takes so many pieces.
        let tables = unsafe { self.write_tables(pieces, blocks) };
        let (to, from) = (memory.address(), tables.cursors);
        // SAFETY: the slot's memory stays as it is until its event; the buffer is as long, and is
        // freed when the GPU has no more work with it.
        unsafe { stream.copy(to, from, tables.len_bytes, Direction::HostToDevice)? };
        let _ = self.end(stream, None)?;
        Ok(DeviceTable { memory, pieces_offset: pieces_offset as u64, warps: tables.warps })
    }

    /// Enqueues a copy of all pieces of a table, and then the change of the word, as
    /// [`launch`](Self::launch) does. The limit of blocks is the launcher's.
    ///
    /// # Errors
    /// As for `launch`.
    ///
    /// # Safety
    /// As for `launch`, for the pieces of the table. The stream is that of its upload. The table is
    /// not dropped before the launch has ended.
    pub unsafe fn launch_table_again(
        &mut self,
        stream: &Stream,
        table: &DeviceTable,
        options: LaunchOptions,
    ) -> Result<Launch, GpuError> {
        self.make_room(stream, 1)?;
        let (flag, head) = self.begin(options);
        let cursors = table.memory.address();
        let head = Head { warps: table.warps, ..head };
        let p = CopyTable { head, pieces: cursors + table.pieces_offset, cursors };
        // SAFETY: the caller's promise.
        unsafe { self.launch_tables(stream, &p)? };
        self.end(stream, flag)
    }
}
