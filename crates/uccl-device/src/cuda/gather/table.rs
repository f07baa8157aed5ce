//! Tables of pieces that stay in the GPU's memory.

use std::sync::Arc;

use crate::cuda::{copy::Direction, error::GpuError, stream::Stream};

use super::{
    launcher::{Completion, Launch, LaunchOptions, Launcher},
    params::{CopyTable, Head, Piece},
    table_places::TablePlaces,
};

/// The tables of a launch, in the GPU's memory. Launches with it copy the same pieces, and their
/// cost does not depend on the number of these.
#[derive(Debug)]
pub struct DeviceTable {
    places: Arc<TablePlaces>,
    /// The address of the cursors; the pieces are behind them.
    cursors: u64,
    pieces_offset: u64,
    /// The warps that have work.
    warps: u32,
}

impl Drop for DeviceTable {
    fn drop(&mut self) {
        self.places.give_back(self.cursors);
    }
}

impl Launcher {
    /// The most pieces of a [`DeviceTable`].
    pub fn most_table_pieces(&self) -> usize {
        self.config().pieces
    }

    /// Enqueues the upload of a table of these pieces; `None` while 16 other tables are there.
    /// Launches on the same stream find it. Allocates nothing.
    ///
    /// # Errors
    /// [`GpuError::Busy`] if too many launches are under way; [`GpuError::TooManyIovs`] for more
    /// than [`Self::most_table_pieces`]; [`GpuError::Driver`] if the driver refuses.
    ///
    /// # Safety
    /// The stream is of this launcher's context, and that of all its tables.
    pub unsafe fn upload(
        &mut self,
        stream: &Stream,
        pieces: &[Piece],
    ) -> Result<Option<DeviceTable>, GpuError> {
        let (count, most) = (pieces.len(), self.most_table_pieces());
        if count > most {
            return Err(GpuError::TooManyIovs { count, most });
        }
        self.make_room(stream, 1)?;
        let Some(cursors) = self.places().take() else { return Ok(None) };
        let (places, pieces_offset) = (Arc::clone(self.places()), self.pieces_offset() as u64);
        let mut table = DeviceTable { places, cursors, pieces_offset, warps: 0 };
        let _ = self.begin(LaunchOptions { completion: Completion::Event, ..Default::default() });
        let blocks = self.config().most_blocks;
        // SAFETY: there is a free slot, which takes so many pieces.
        let tables = unsafe { self.write_tables(pieces, blocks) };
        table.warps = tables.warps;
        // SAFETY: the slot's memory stays as it is until its event. The place is as long, and the
        // launches with the table that was there before have ended.
        unsafe { stream.copy(cursors, tables.cursors, tables.len_bytes, Direction::HostToDevice)? };
        let _ = self.end(stream, None)?;
        Ok(Some(table))
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
        let cursors = table.cursors;
        let head = Head { warps: table.warps, ..head };
        let p = CopyTable { head, pieces: cursors + table.pieces_offset, cursors };
        // SAFETY: the caller's promise.
        unsafe { self.launch_tables(stream, &p)? };
        self.end(stream, flag)
    }
}
