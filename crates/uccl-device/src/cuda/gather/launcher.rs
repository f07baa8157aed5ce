//! Launches the copy kernels, with tables in memory that the launcher keeps for this purpose.

use std::sync::Arc;

use crate::cuda::{
    copy::Direction,
    device::{Context, LoadedKernels},
    error::GpuError,
    event::Event,
    memory::{DeviceBuffer, PinnedBuffer},
    module::{Function, Grid, Module},
    stream::{Priority, Stream},
};

use super::{
    flag::Flag,
    params::{
        CopySmall, CopyTable, CopyWide, Cursor, Head, Inline, InlineTables, LANES, MOST_THREADS,
        Piece, SMALL_PIECES, SMALL_WARPS, WIDE_PIECES, WIDE_WARPS, WordChange,
    },
    partition::{partition, warps_worth},
    table_places::TablePlaces,
};

/// How a launch reports that it has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Completion {
    /// An event is recorded after it on the stream.
    #[default]
    Event,
    /// The kernel writes to host memory, which costs neither call nor interrupt.
    Flag,
}

/// How the tables of pieces reach the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tables {
    /// Chosen by the number of pieces and bytes.
    #[default]
    Auto,
    /// With the launch's parameters, in 4 KiB; falls back to `Wide` for more.
    Small,
    /// With the launch's parameters, in 32 KiB; falls back to `Host` for more.
    Wide,
    /// The GPU reads them from host memory.
    Host,
    /// They are first copied to the GPU's memory, on the same stream.
    Device,
}

/// The capacity of a launcher.
#[derive(Clone, Copy, Debug)]
pub struct LauncherConfig {
    /// How many launches can be under way.
    pub slots: usize,
    /// How many pieces one launch takes. More pieces are split into several launches, one after the
    /// other.
    pub pieces: usize,
    /// Most blocks of threads of one launch. Each block has 8 warps.
    pub most_blocks: u32,
    /// Let the driver compile the kernels, even if this build has machine code for the GPU.
    pub portable: bool,
}

impl LauncherConfig {
    /// The configuration for a GPU: 16 slots, 4096 pieces, and as many blocks as it has
    /// multiprocessors.
    pub fn of(context: &Context) -> Self {
        let most_blocks = context.device().multiprocessors().max(1);
        Self { slots: 16, pieces: 4096, most_blocks, portable: false }
    }
}

/// The options of one launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LaunchOptions {
    /// Most blocks of threads; 0 means the launcher's own limit.
    pub blocks: u32,
    /// How the launch reports that it has ended.
    pub completion: Completion,
    /// How the tables reach the GPU.
    pub tables: Tables,
    /// A word to change when all bytes are there. A reader that sees the change with acquire order
    /// sees the bytes.
    pub word: Option<WordChange>,
}

/// A launch that was enqueued. [`Launcher::is_done`] shows its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the memory must stay as it is until the launch has ended"]
pub struct Launch {
    slot: usize,
    ticket: u64,
}

/// Warps of a block.
const BLOCK_WARPS: u32 = MOST_THREADS / LANES;
/// Flags and counters lie this many bytes apart, so that no two share a cache line.
const LINE: usize = 128;
/// Launches the copy kernels in one context.
#[derive(Debug)]
pub struct Launcher {
    context: &'static Context,
    kernels: Arc<Kernels>,
    config: LauncherConfig,
    /// For each slot its flag, cursors and pieces.
    host: Arc<PinnedBuffer>,
    /// For each slot its counter, cursors and pieces.
    device: DeviceBuffer,
    /// For tables that stay on the GPU.
    places: Arc<TablePlaces>,
    /// The end of the fill that zeroes the counters; `None` once it has ended.
    filled: Option<Event>,
    slots: Vec<Slot>,
    next: usize,
    tickets: u64,
    small: Box<CopySmall>,
    wide: Box<CopyWide>,
}

/// Tables in a slot's host memory: the cursors, and the pieces behind them.
pub(super) struct HostTables {
    /// The warps that have work.
    pub(super) warps: u32,
    /// The address of the first cursor.
    pub(super) cursors: u64,
    pub(super) len_bytes: usize,
}

/// The copy kernels in a context.
#[derive(Debug)]
struct Kernels {
    table: Function,
    small: Function,
    wide: Function,
    /// The module that holds them. It must stay loaded.
    _module: Module,
}

impl Kernels {
    /// Loads the kernels and looks up each of them: the driver might load a kernel only when it is
    /// looked up.
    fn load(context: &'static Context, portable: bool) -> Result<Self, GpuError> {
        let module = Module::load(context, &uccl_kernels::COPY, portable)?;
        Ok(Self {
            table: module.function(c"uccl_copy_table")?,
            small: module.function(c"uccl_copy_small")?,
            wide: module.function(c"uccl_copy_wide")?,
            _module: module,
        })
    }

    /// Those of the context, which have been loaded with it.
    fn of(context: &'static Context) -> Result<Arc<Self>, GpuError> {
        match context.kernels_by(load_kernels)?.downcast() {
            Ok(kernels) => Ok(kernels),
            Err(_) => Self::load(context, false).map(Arc::new),
        }
    }
}

/// Loads the kernels for a context, which keeps them.
pub(crate) fn load_kernels(context: &'static Context) -> LoadedKernels {
    let kernels = Kernels::load(context, false)?;
    Ok(Arc::new(kernels))
}

#[derive(Debug)]
struct Slot {
    event: Event,
    /// The last launch, if it has not been seen to end, and its flag if it has one.
    under_way: Option<(u64, Option<Flag>)>,
}

/// The offsets of the parts of a slot's memory.
#[derive(Clone, Copy)]
struct SlotOffsets {
    flag: usize,
    cursors: usize,
    pieces: usize,
    len: usize,
}

impl SlotOffsets {
    fn of(config: &LauncherConfig) -> Self {
        let cursors = LINE;
        let warps = config.most_blocks as usize * BLOCK_WARPS as usize;
        let pieces = cursors + (warps + 1) * size_of::<Cursor>();
        let len = (pieces + config.pieces * size_of::<Piece>()).next_multiple_of(LINE);
        Self { flag: 0, cursors, pieces, len }
    }
}

impl Launcher {
    /// Allocates memory for the slots. Uses the context's kernels, or with `portable` a set of its
    /// own.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not take the kernels (CUDA before 12.1, a GPU before
    /// Ampere), or gives no memory.
    pub fn new(context: &'static Context, config: LauncherConfig) -> Result<Self, GpuError> {
        let config = LauncherConfig {
            slots: config.slots.clamp(1, 1 << 10),
            pieces: config.pieces.clamp(1, 1 << 20),
            most_blocks: config.most_blocks.clamp(1, 1 << 12),
            portable: config.portable,
        };
        let kernels = match config.portable {
            true => Arc::new(Kernels::load(context, true)?),
            false => Kernels::of(context)?,
        };
        let len = SlotOffsets::of(&config).len * config.slots;
        let host = Arc::new(PinnedBuffer::new(context, len)?);
        let device = DeviceBuffer::new(context, len)?;
        let places = TablePlaces::new(context, SlotOffsets::of(&config).len)?;
        let stream = Stream::new(context, Priority::Normal)?;
        // SAFETY: nobody else has it yet, and launches wait for the stream.
        unsafe { stream.fill(device.address(), 0, len) }?;
        // The CPU does not wait: the fill may stand behind another stream's wait in a hardware
        // queue.
        let filled = Event::new(context)?;
        filled.record(&stream)?;
        let slot = |_| Event::new(context).map(|event| Slot { event, under_way: None });
        let slots = (0..config.slots).map(slot).collect::<Result<_, _>>()?;
        let (small, wide) = (Box::new(CopySmall::new()), Box::new(CopyWide::new()));
        let filled = Some(filled);
        let (next, tickets) = (0, 0);
        Ok(Self {
            context,
            kernels,
            config,
            host,
            device,
            places,
            filled,
            slots,
            next,
            tickets,
            small,
            wide,
        })
    }

    /// Whether this build has the kernels as machine code, so that drivers need not compile them.
    pub fn has_machine_code() -> bool {
        uccl_kernels::COPY.machine_code().is_some()
    }

    /// The most pieces that [`Self::launch`] takes.
    pub fn most_pieces(&self) -> usize {
        self.config.slots * self.config.pieces
    }

    /// Enqueues a copy of all pieces, in any order, and then the change of the word. Without pieces
    /// only the word changes. Never blocks, and allocates nothing.
    ///
    /// # Errors
    /// [`GpuError::Busy`] if too many launches are under way, and nothing was enqueued;
    /// [`GpuError::TooManyIovs`] for more than [`Self::most_pieces`]; [`GpuError::Driver`] if the
    /// driver refuses, and then a part may have been enqueued.
    ///
    /// # Safety
    /// The stream is of this launcher's context. The kernels reach every address through that
    /// context (peer access is enabled, host memory is locked) until the launch has ended; no
    /// destination overlaps another or a source; and nothing else writes to either or reads a
    /// destination until then. The word is aligned, and others access it only as an atomic; where
    /// it is to be added to, the link to it carries atomic operations.
    pub unsafe fn launch(
        &mut self,
        stream: &Stream,
        pieces: &[Piece],
        options: LaunchOptions,
    ) -> Result<Launch, GpuError> {
        let (count, most) = (pieces.len(), self.most_pieces());
        if count > most {
            return Err(GpuError::TooManyIovs { count, most });
        }
        self.make_room(stream, count.div_ceil(self.config.pieces).max(1))?;
        let (mut rest, size) = (pieces, self.config.pieces);
        loop {
            let (these, others) = rest.split_at(rest.len().min(size));
            let word = options.word.filter(|_| others.is_empty());
            // SAFETY: the caller's promise.
            let launch =
                unsafe { self.launch_one(stream, these, LaunchOptions { word, ..options }) }?;
            if others.is_empty() {
                return Ok(launch);
            }
            rest = others;
        }
    }

    /// Whether a launch has ended.
    ///
    /// # Errors
    /// The launch's error.
    pub fn is_done(&mut self, launch: Launch) -> Result<bool, GpuError> {
        let Some(slot) = self.slots.get_mut(launch.slot) else { return Ok(true) };
        let Some((ticket, flag)) = &slot.under_way else { return Ok(true) };
        if *ticket != launch.ticket {
            // A later launch uses the slot, which happens only after its last launch has ended.
            return Ok(true);
        }
        let done = match flag {
            None => slot.event.is_done()?,
            Some(flag) => flag.is_done()?,
        };
        if done {
            slot.under_way = None;
        }
        Ok(done)
    }

    /// The flag of a launch that [reports](Completion) by one.
    pub fn flag(&self, launch: Launch) -> Flag {
        self.flag_at(launch.slot, launch.ticket)
    }

    fn flag_at(&self, slot: usize, ticket: u64) -> Flag {
        let offsets = SlotOffsets::of(&self.config);
        Flag::new(self.context, &self.host, slot * offsets.len + offsets.flag, ticket)
    }

    /// Waits until a launch has ended, by polling without a pause.
    ///
    /// # Errors
    /// The launch's error.
    pub fn wait(&mut self, launch: Launch) -> Result<(), GpuError> {
        while !self.is_done(launch)? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// The launch of a slot that has not been seen to end.
    fn under_way(&self, slot: usize) -> Option<Launch> {
        let (ticket, _) = self.slots.get(slot)?.under_way.as_ref()?;
        Some(Launch { slot, ticket: *ticket })
    }

    /// How many of the next slots are free, up to `wanted`.
    fn free_slots(&mut self, wanted: usize) -> Result<usize, GpuError> {
        for free in 0..wanted {
            let slot = (self.next + free) % self.slots.len();
            if let Some(launch) = self.under_way(slot)
                && !self.is_done(launch)?
            {
                return Ok(free);
            }
        }
        Ok(wanted)
    }

    /// # Safety
    /// As for [`Self::launch`]; the next slot is free and takes the pieces.
    unsafe fn launch_one(
        &mut self,
        stream: &Stream,
        pieces: &[Piece],
        options: LaunchOptions,
    ) -> Result<Launch, GpuError> {
        let (flag, head) = self.begin(options);
        let blocks = match options.blocks {
            0 => self.config.most_blocks,
            blocks => blocks.min(self.config.most_blocks),
        };
        // SAFETY: the caller's promise.
        unsafe {
            match choose(options.tables, pieces, blocks * BLOCK_WARPS) {
                Tables::Small => {
                    let (kernel, p) = (self.kernels.small, &mut *self.small);
                    launch_inline(stream, (kernel, p), pieces, head, blocks)?;
                }
                Tables::Wide => {
                    let (kernel, p) = (self.kernels.wide, &mut *self.wide);
                    launch_inline(stream, (kernel, p), pieces, head, blocks)?;
                }
                Tables::Device => self.launch_table(stream, pieces, (head, true), blocks)?,
                Tables::Host | Tables::Auto => {
                    self.launch_table(stream, pieces, (head, false), blocks)?;
                }
            }
        }
        self.end(stream, flag)
    }

    /// Begins a launch in the next slot: its flag, if it reports by one, and its parameters.
    pub(super) fn begin(&mut self, options: LaunchOptions) -> (Option<Flag>, Head) {
        self.tickets += 1;
        let (slot, ticket) = (self.next, self.tickets);
        let offsets = SlotOffsets::of(&self.config);
        let flagged = options.completion == Completion::Flag;
        let flag = flagged.then(|| self.flag_at(slot, ticket));
        let mut head = Head {
            flag: flag.as_ref().map_or(0, Flag::address),
            ticket,
            counter: self.device_at(slot, offsets.flag),
            ..Head::default()
        };
        if let Some(WordChange { address, value, adds }) = options.word {
            head = Head { word: address, value, adds: u32::from(adds), ..head };
        }
        (flag, head)
    }

    /// Ends the begun launch, which is on the stream now. Without a flag an event reports its end.
    pub(super) fn end(&mut self, stream: &Stream, flag: Option<Flag>) -> Result<Launch, GpuError> {
        let (slot, ticket) = (self.next, self.tickets);
        self.next = (slot + 1) % self.config.slots;
        if let Some(used) = self.slots.get_mut(slot) {
            let has_flag = flag.is_some();
            used.under_way = Some((ticket, flag));
            if !has_flag {
                used.event.record(stream)?;
            }
        }
        Ok(Launch { slot, ticket })
    }

    /// Makes sure that the next `needed` slots are free, and that launches on this stream find
    /// their counters zeroed.
    pub(super) fn make_room(&mut self, stream: &Stream, needed: usize) -> Result<(), GpuError> {
        if self.free_slots(needed)? < needed {
            return Err(GpuError::Busy { slots: self.slots.len() });
        }
        if let Some(filled) = &self.filled {
            if filled.is_done()? {
                self.filled = None;
            } else {
                stream.wait(filled)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Self::launch`]; the next slot is free and takes the pieces.
    unsafe fn launch_table(
        &mut self,
        stream: &Stream,
        pieces: &[Piece],
        (head, on_device): (Head, bool),
        blocks: u32,
    ) -> Result<(), GpuError> {
        let (slot, offsets) = (self.next, SlotOffsets::of(&self.config));
        // SAFETY: the caller's promise.
        let tables = unsafe { self.write_tables(pieces, blocks) };
        let HostTables { warps, cursors: from, len_bytes } = tables;
        let mut p = CopyTable {
            head: Head { warps, ..head },
            pieces: self.host_at(slot, offsets.pieces),
            cursors: from,
        };
        if on_device {
            let to = self.device_at(slot, offsets.cursors);
            // SAFETY: this slot's memory, which stays as it is until the kernel that follows has
            // ended.
            unsafe { stream.copy(to, from, len_bytes, Direction::HostToDevice) }?;
            p.pieces = self.device_at(slot, offsets.pieces);
            p.cursors = to;
        }
        // SAFETY: the kernel takes this struct; the caller's promise.
        unsafe { stream.launch(self.kernels.table, grid(warps, blocks), &p) }
    }

    /// Writes the tables of a launch of `blocks` blocks to the next slot's host memory.
    ///
    /// # Safety
    /// The next slot is free and takes the pieces.
    pub(super) unsafe fn write_tables(&mut self, pieces: &[Piece], blocks: u32) -> HostTables {
        let (slot, offsets) = (self.next, SlotOffsets::of(&self.config));
        let most_warps = blocks * BLOCK_WARPS;
        let cursors = self.host_at(slot, offsets.cursors);
        let at = cursors as usize as *mut Cursor;
        // SAFETY: this part of the slot, which is free, is that long; it is aligned, and any bytes
        // are valid cursors.
        let shares = unsafe { std::slice::from_raw_parts_mut(at, most_warps as usize + 1) };
        let warps = partition(pieces, most_warps, shares);
        let table = self.host_at(slot, offsets.pieces) as usize as *mut Piece;
        // SAFETY: this part of the slot, which is free, has room for as many pieces as a launch
        // takes.
        unsafe { table.copy_from_nonoverlapping(pieces.as_ptr(), pieces.len()) };
        let len_bytes = offsets.pieces - offsets.cursors + size_of_val(pieces);
        HostTables { warps, cursors, len_bytes }
    }

    /// Launches the kernel of tables in memory with as many warps as these have.
    ///
    /// # Safety
    /// As for [`Self::launch`].
    pub(super) unsafe fn launch_tables(
        &self,
        stream: &Stream,
        p: &CopyTable,
    ) -> Result<(), GpuError> {
        let grid = grid(p.head.warps, self.config.most_blocks);
        // SAFETY: the kernel takes this struct; the caller's promise.
        unsafe { stream.launch(self.kernels.table, grid, p) }
    }

    pub(super) fn places(&self) -> &Arc<TablePlaces> {
        &self.places
    }

    pub(super) fn config(&self) -> &LauncherConfig {
        &self.config
    }

    /// The bytes from the cursors of a slot to its pieces.
    pub(super) fn pieces_offset(&self) -> usize {
        let offsets = SlotOffsets::of(&self.config);
        offsets.pieces - offsets.cursors
    }

    fn host_at(&self, slot: usize, place: usize) -> u64 {
        self.host.address() + (slot * SlotOffsets::of(&self.config).len + place) as u64
    }

    fn device_at(&self, slot: usize, place: usize) -> u64 {
        self.device.address() + (slot * SlotOffsets::of(&self.config).len + place) as u64
    }
}

impl Inline<'_> {
    /// Writes a launch's tables, which must fit. Returns how many warps have work.
    fn fill(self, pieces: &[Piece], head: Head, most_warps: u32) -> u32 {
        let warps = partition(pieces, most_warps, self.cursors);
        self.pieces.iter_mut().zip(pieces).for_each(|(place, piece)| *place = *piece);
        *self.head = Head { warps, ..head };
        warps
    }
}

impl Drop for Launcher {
    /// Waits for the launches under way, as they read this memory.
    fn drop(&mut self) {
        for slot in 0..self.slots.len() {
            while let Some(launch) = self.under_way(slot) {
                // After an error nothing runs any more.
                if self.is_done(launch).unwrap_or(true) {
                    break;
                }
                std::hint::spin_loop();
            }
        }
    }
}

/// Launches a kernel with the tables in its parameters.
///
/// # Safety
/// As for [`Launcher::launch`], the pieces fit, and the kernel takes `P`.
unsafe fn launch_inline<P: InlineTables>(
    stream: &Stream,
    (kernel, p): (Function, &mut P),
    pieces: &[Piece],
    head: Head,
    blocks: u32,
) -> Result<(), GpuError> {
    let warps = p.inline().fill(pieces, head, blocks * BLOCK_WARPS);
    // SAFETY: the caller's promise.
    unsafe { stream.launch(kernel, grid(warps, blocks), p) }
}

/// How the tables reach the GPU: as wanted, if they fit.
fn choose(wanted: Tables, pieces: &[Piece], most_warps: u32) -> Tables {
    let worth = warps_worth(pieces).min(u64::from(most_warps));
    let small = pieces.len() <= SMALL_PIECES;
    let wide = pieces.len() <= WIDE_PIECES;
    match wanted {
        Tables::Auto if small && worth <= SMALL_WARPS as u64 => Tables::Small,
        Tables::Auto if wide && worth <= WIDE_WARPS as u64 => Tables::Wide,
        Tables::Small if small => Tables::Small,
        Tables::Small | Tables::Wide if wide => Tables::Wide,
        Tables::Auto | Tables::Small | Tables::Wide | Tables::Host => Tables::Host,
        Tables::Device => Tables::Device,
    }
}

/// Spreads the warps over as many blocks as allowed: few warps on many multiprocessors are better
/// than many on few.
fn grid(warps: u32, blocks: u32) -> Grid {
    let blocks = blocks.max(1);
    let per_block = warps.div_ceil(blocks).clamp(1, BLOCK_WARPS);
    Grid { blocks: warps.div_ceil(per_block).max(1), threads: per_block * LANES }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_warp_has_a_place_in_the_grid() {
        for (warps, blocks) in (0..2000).flat_map(|warps| [1, 8, 132].map(|blocks| (warps, blocks)))
        {
            let warps = warps.min(blocks * BLOCK_WARPS);
            let Grid { blocks: used, threads } = grid(warps, blocks);
            assert!(used >= 1 && used <= blocks && threads <= MOST_THREADS);
            assert!(used * threads / LANES >= warps, "{warps} warps in {used} blocks of {threads}");
        }
    }

    #[test]
    fn tables_travel_with_the_launch_if_they_fit() {
        let pieces = |count: usize, len_bytes: u64| {
            vec![Piece { destination: 0, source: 0, len_bytes }; count]
        };
        let auto = |count, len| choose(Tables::Auto, &pieces(count, len), 1056);
        assert_eq!(auto(1, 4096), Tables::Small);
        assert_eq!(auto(64, 4096), Tables::Small);
        assert_eq!(auto(1, 64 << 20), Tables::Wide);
        assert_eq!(auto(256, 4096), Tables::Wide);
        assert_eq!(auto(257, 1), Tables::Host);
        assert_eq!(choose(Tables::Small, &pieces(101, 1), 8), Tables::Wide);
        assert_eq!(choose(Tables::Wide, &pieces(300, 1), 8), Tables::Host);
    }
}
