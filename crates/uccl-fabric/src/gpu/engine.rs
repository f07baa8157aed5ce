//! Copies for one GPU, with a stream, the gather/scatter kernel, and events that mark the end.

use uccl_device::cuda::{
    Context, Direction, Event, GpuError, Priority, Stream,
    gather::{Completion, Flag, LaunchOptions, Launcher, LauncherConfig, Piece, WordChange},
};

/// Copy engines copy pieces of at least this many bytes on average. With smaller pieces, the time
/// that an engine takes to begin each piece costs more than it gains (measured on H200s over
/// NVLink, where one piece costs an engine 2.4 us and the kernel 30 ns; the engines are 8 % faster
/// on large pieces).
const ENGINE_PIECE: u64 = 4 << 20;
/// From this average size and this number of pieces on, the kernel and an engine share a push to
/// another GPU; the engine gets this percentage of the pieces. Together they are 1 to 2 % faster
/// than the kernel alone (measured as above; a pull is slower that way).
pub(super) const SHARED_PIECE: u64 = 512 << 10;
const SHARED_COUNT: usize = 16;
const ENGINE_PERCENT: usize = 30;

/// One GPU's copying, for one lane or half of one.
#[derive(Debug)]
pub struct Engine {
    pub(super) context: &'static Context,
    priority: Priority,
    pub(super) stream: Stream,
    /// The copy engine's stream beside the kernel's, and the event with which `stream` waits for
    /// it.
    aside: Option<(Stream, Event)>,
    pub(super) launcher: LazyLauncher,
    spare: Vec<Event>,
    /// A buffer for lists of pieces, which callers reuse.
    pub pieces: Vec<Piece>,
}

/// Marks the end of copies.
#[derive(Debug)]
pub struct Mark(MarkKind);

#[derive(Debug)]
enum MarkKind {
    Event(Event),
    /// The flag of the launch that ends last. Most looks at it need no call of the driver.
    Flag(Flag),
}

impl Mark {
    pub(super) fn of_flag(flag: Flag) -> Self {
        Self(MarkKind::Flag(flag))
    }

    /// Whether the copies have ended.
    ///
    /// # Errors
    /// The error with which the copies ended.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        match &self.0 {
            MarkKind::Event(event) => event.is_done(),
            MarkKind::Flag(flag) => flag.is_done(),
        }
    }
}

/// Properties that all copies of one call share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Between which kinds of memory.
    pub direction: Direction,
    /// The copies use only device memory and locked host memory, so the kernel can make them.
    pub by_kernel: bool,
    /// The copies go from this GPU's memory to another's.
    pub is_push: bool,
    /// The copy engines have long copies. An engine stays with one stream for as long as that
    /// stream has work: a short copy would wait for the end of all of it (seen on H200s).
    pub engines_are_busy: bool,
    /// A word to change once all bytes have been copied.
    pub word: Option<WordChange>,
    /// The most blocks of the kernel that copy, however large the pieces are; 0: no limit was asked
    /// for.
    pub blocks: u32,
}

impl Route {
    /// Whether the kernel copies pieces of `mean` bytes on average. It also copies a single piece
    /// that a change of a word follows, as one launch then does both.
    fn is_the_kernels(&self, count: usize, mean: u64) -> bool {
        let one_launch = count > 1 || self.word.is_some();
        let small = one_launch && mean < ENGINE_PIECE;
        self.by_kernel && (small || self.engines_are_busy || self.blocks > 0)
    }
}

/// The launcher of the kernel, made at its first use. `Err` if the driver rejects the kernels: then
/// engines copy.
#[derive(Debug)]
pub(super) struct LazyLauncher(Option<Result<Launcher, GpuError>>);

impl LazyLauncher {
    pub(super) fn get(&mut self, context: &'static Context) -> Result<&mut Launcher, GpuError> {
        let make = || Launcher::new(context, LauncherConfig::of(context));
        self.0.get_or_insert_with(make).as_mut().map_err(|e| e.clone())
    }
}

impl Engine {
    /// Makes an engine. With a high priority, its kernels begin before those that wait on streams
    /// of a normal one.
    pub fn new(context: &'static Context, priority: Priority) -> Result<Self, GpuError> {
        let stream = Stream::new(context, priority)?;
        Ok(Self {
            context,
            priority,
            stream,
            aside: None,
            launcher: LazyLauncher(None),
            spare: Vec::new(),
            pieces: Vec::new(),
        })
    }

    /// The ordinal of the GPU.
    pub fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Enqueues copies, and the change of the route's word behind them. The mark shows their end.
    /// After an error some copies may have been enqueued, but the word does not change: then get a
    /// [fence](Self::fence) that marks their end, or [settle](Self::settle).
    ///
    /// # Safety
    /// The memory must stay valid, of the kinds that the route says, and reachable by this GPU,
    /// until the copies have ended. The word is as for [`Launcher::launch`].
    pub unsafe fn copy(&mut self, pieces: &[Piece], route: Route) -> Result<Mark, GpuError> {
        let total: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let mean = total / (pieces.len().max(1) as u64);
        // An error of the launcher must come before a byte moves.
        if route.word.is_some() {
            self.launcher.get(self.context)?;
        }
        let by_kernel =
            route.is_the_kernels(pieces.len(), mean) && self.launcher.get(self.context).is_ok();
        let shares = by_kernel && route.is_push && !route.engines_are_busy && route.blocks == 0;
        let shared = shares && mean >= SHARED_PIECE && pieces.len() >= SHARED_COUNT;
        let aside = if shared { pieces.len() * ENGINE_PERCENT / 100 } else { 0 };
        // SAFETY: the caller's promise.
        unsafe {
            if !by_kernel {
                enqueue(&self.stream, pieces, route.direction)?;
            } else if aside == 0 {
                return self.launch(pieces, route.word, route.blocks);
            } else {
                self.launch(&pieces[aside..], None, 0)?;
                self.copy_aside(&pieces[..aside], route.direction)?;
            }
            // Behind all copies.
            match route.word {
                Some(_) => self.launch(&[], route.word, 0),
                None => self.record(),
            }
        }
    }

    /// Makes copies that are enqueued from now on wait for an event.
    pub fn wait_behind(&self, event: &Event) -> Result<(), GpuError> {
        self.stream.wait(event)?;
        self.aside.iter().try_for_each(|(aside, _)| aside.wait(event))
    }

    /// Makes work that is enqueued on a stream from now on wait for all copies that are enqueued
    /// now.
    pub fn lead(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let mark = self.fence()?;
        if let MarkKind::Event(event) = &mark.0 {
            stream.wait(event)?;
        }
        self.reuse(mark);
        Ok(())
    }

    /// A mark after all enqueued copies, even if the last call of [`copy`](Self::copy) failed
    /// halfway.
    pub fn fence(&mut self) -> Result<Mark, GpuError> {
        if let Some((aside, joined)) = &self.aside {
            joined.record(aside)?;
            self.stream.wait(joined)?;
        }
        self.record()
    }

    fn record(&mut self) -> Result<Mark, GpuError> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::new(self.context)?,
        };
        event.record(&self.stream)?;
        Ok(Mark(MarkKind::Event(event)))
    }

    /// Copies with the kernel, which then changes a word.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn launch(
        &mut self,
        pieces: &[Piece],
        word: Option<WordChange>,
        blocks: u32,
    ) -> Result<Mark, GpuError> {
        let most = self.launcher.get(self.context)?.most_pieces().max(1);
        let mut rest = pieces;
        loop {
            let (part, others) = rest.split_at(rest.len().min(most));
            let word = word.filter(|_| others.is_empty());
            // SAFETY: the caller's promise.
            let flag = unsafe { self.launch_part(part, word, blocks)? };
            if others.is_empty() {
                return Ok(Mark(MarkKind::Flag(flag)));
            }
            rest = others;
        }
    }

    /// Launches the kernel once, as soon as the launcher has room.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn launch_part(
        &mut self,
        part: &[Piece],
        word: Option<WordChange>,
        blocks: u32,
    ) -> Result<Flag, GpuError> {
        let completion = Completion::Flag;
        let options = LaunchOptions { word, completion, blocks, ..LaunchOptions::default() };
        let launcher = self.launcher.get(self.context)?;
        loop {
            // SAFETY: the caller's promise.
            match unsafe { launcher.launch(&self.stream, part, options) } {
                Ok(launch) => return Ok(launcher.flag(launch)),
                // Earlier launches end by themselves.
                Err(GpuError::Busy { .. }) => std::thread::yield_now(),
                Err(e) => return Err(e),
            }
        }
    }

    /// Copies with an engine beside the kernel. The stream waits until both have ended.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn copy_aside(
        &mut self,
        pieces: &[Piece],
        direction: Direction,
    ) -> Result<(), GpuError> {
        let (stream, joined) = match &mut self.aside {
            Some(aside) => aside,
            none => {
                let stream = Stream::new(self.context, self.priority)?;
                none.insert((stream, Event::new(self.context)?))
            }
        };
        // SAFETY: the caller's promise.
        unsafe { enqueue(stream, pieces, direction)? };
        joined.record(stream)?;
        self.stream.wait(joined)
    }

    /// Takes back the mark of copies that have ended.
    pub fn reuse(&mut self, mark: Mark) {
        if let MarkKind::Event(event) = mark.0 {
            self.spare.push(event);
        }
    }

    /// Waits until no copy runs any more. After an error none does.
    pub fn settle(&self) {
        let _ = self.stream.synchronize();
        if let Some((aside, _)) = &self.aside {
            let _ = aside.synchronize();
        }
    }
}

/// Makes a copy engine copy pieces, one after the other.
///
/// # Safety
/// As for [`Engine::copy`].
unsafe fn enqueue(stream: &Stream, pieces: &[Piece], direction: Direction) -> Result<(), GpuError> {
    for piece in pieces.iter().filter(|piece| piece.len_bytes > 0) {
        let (to, from, len) = (piece.destination, piece.source, piece.len_bytes as usize);
        // SAFETY: the caller's promise.
        unsafe { stream.copy(to, from, len, direction)? };
    }
    Ok(())
}
