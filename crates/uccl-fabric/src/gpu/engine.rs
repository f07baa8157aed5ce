//! Copies for one GPU, with a stream, the gather/scatter kernel, and events that mark the end.

use uccl_device::cuda::{
    Context, Direction, Event, GpuError, Priority, Stream,
    gather::{Completion, LaunchOptions, Launcher, LauncherConfig, Piece, WordChange},
};

/// Copy engines copy pieces of at least this many bytes on average. With smaller pieces, the time that an engine
/// takes to begin each piece costs more than it gains (measured on H200s over NVLink, where one piece costs an engine
/// 2.4 us and the kernel 30 ns; the engines are 8 % faster on large pieces).
const ENGINE_PIECE: u64 = 4 << 20;
/// From this average size and this number of pieces on, the kernel and an engine share a push to another GPU; the
/// engine gets this percentage of the pieces. Together they are 1 to 2 % faster than the kernel alone (measured as
/// above; a pull is slower that way).
const SHARED_PIECE: u64 = 512 << 10;
const SHARED_COUNT: usize = 16;
const ENGINE_PERCENT: usize = 30;

/// One GPU's copying, for one lane or half of one.
#[derive(Debug)]
pub struct Engine {
    context: &'static Context,
    priority: Priority,
    stream: Stream,
    /// The copy engine's stream beside the kernel's, and the event with which `stream` waits for it.
    aside: Option<(Stream, Event)>,
    /// Made at its first use. `Err` if the driver rejects the kernels: then engines copy.
    launcher: Option<Result<Launcher, GpuError>>,
    spare: Vec<Event>,
    /// A buffer for lists of pieces, which callers reuse.
    pub pieces: Vec<Piece>,
}

/// What the copies of one call have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Between which kinds of memory.
    pub direction: Direction,
    /// All of it is device memory or locked host memory, so the kernel can copy it.
    pub by_kernel: bool,
    /// The copies go from this GPU's memory to another's.
    pub is_push: bool,
    /// The copy engines have long copies. An engine stays with one stream for as long as that stream has work: a
    /// short copy would wait for the end of all of it (seen on H200s).
    pub engines_are_busy: bool,
    /// A word to change once all of it is there.
    pub word: Option<WordChange>,
}

impl Route {
    /// Whether the kernel copies pieces of so many bytes on average. It also copies a single piece that a change of a
    /// word follows, as one launch then does both.
    fn is_the_kernels(&self, count: usize, mean: u64) -> bool {
        let one_launch = count > 1 || self.word.is_some();
        self.by_kernel && (one_launch && mean < ENGINE_PIECE || self.engines_are_busy)
    }
}

impl Engine {
    /// Makes an engine. With a high priority, its kernels begin before those that wait on streams of a normal one.
    pub fn new(context: &'static Context, priority: Priority) -> Result<Self, GpuError> {
        let stream = Stream::new(context, priority)?;
        Ok(Self {
            context,
            priority,
            stream,
            aside: None,
            launcher: None,
            spare: Vec::new(),
            pieces: Vec::new(),
        })
    }

    /// The ordinal of the GPU.
    pub fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Enqueues copies, and the change of the route's word behind them. The event marks their end. After an error some
    /// copies may have been enqueued, but the word does not change: then get a [fence](Self::fence) that marks their
    /// end, or [settle](Self::settle).
    ///
    /// # Safety
    /// The memory must stay valid, of the kinds that the route says, and reachable by this GPU, until the event has
    /// happened. The word is as for [`Launcher::launch`].
    pub unsafe fn copy(&mut self, pieces: &[Piece], route: Route) -> Result<Event, GpuError> {
        let total: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let mean = total / (pieces.len().max(1) as u64);
        let by_kernel = route.is_the_kernels(pieces.len(), mean);
        let shares = route.is_push && !route.engines_are_busy;
        let shared = shares && mean >= SHARED_PIECE && pieces.len() >= SHARED_COUNT;
        let aside = if shared { pieces.len() * ENGINE_PERCENT / 100 } else { 0 };
        // Known before anything moves.
        if route.word.is_some() {
            self.launcher()?;
        }
        // With the launch itself where that has all pieces, else by another one behind all copies.
        let within = route.word.filter(|_| aside == 0);
        // SAFETY: the caller's promise.
        let changed = unsafe {
            if by_kernel && self.launch(&pieces[aside..], within)? {
                if aside > 0 {
                    self.copy_aside(&pieces[..aside], route.direction)?;
                }
                within
            } else {
                enqueue(&self.stream, pieces, route.direction)?;
                None
            }
        };
        if changed != route.word {
            // SAFETY: the caller's promise.
            unsafe { self.launch(&[], route.word)? };
        }
        self.record()
    }

    /// An event after all enqueued copies, even if the last call of [`copy`](Self::copy) failed halfway.
    pub fn fence(&mut self) -> Result<Event, GpuError> {
        if let Some((aside, joined)) = &self.aside {
            joined.record(aside)?;
            self.stream.wait(joined)?;
        }
        self.record()
    }

    fn record(&mut self) -> Result<Event, GpuError> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::new(self.context)?,
        };
        event.record(&self.stream)?;
        Ok(event)
    }

    /// What launches the kernel.
    fn launcher(&mut self) -> Result<&mut Launcher, GpuError> {
        let context = self.context;
        let make = || Launcher::new(context, LauncherConfig::of(context));
        self.launcher.get_or_insert_with(make).as_mut().map_err(|e| e.clone())
    }

    /// Copies with the kernel, and has it change a word then; false if it cannot be used.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn launch(
        &mut self,
        pieces: &[Piece],
        word: Option<WordChange>,
    ) -> Result<bool, GpuError> {
        let Ok(most) = self.launcher().map(|launcher| launcher.most_pieces().max(1)) else {
            return Ok(false);
        };
        let mut rest = pieces;
        loop {
            let (part, others) = rest.split_at(rest.len().min(most));
            let word = word.filter(|_| others.is_empty());
            // The launcher looks at a flag, and not at an event of its own beside the one that marks the end of all.
            let completion = Completion::Flag;
            let options = LaunchOptions { word, completion, ..LaunchOptions::default() };
            // SAFETY: the caller's promise.
            unsafe { self.launch_part(part, options)? };
            if others.is_empty() {
                return Ok(true);
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
        options: LaunchOptions,
    ) -> Result<(), GpuError> {
        let Some(Ok(launcher)) = &mut self.launcher else { return Ok(()) };
        loop {
            // SAFETY: the caller's promise.
            match unsafe { launcher.launch(&self.stream, part, options) } {
                Ok(_) => return Ok(()),
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

    /// Takes back an event that has happened.
    pub fn reuse(&mut self, event: Event) {
        self.spare.push(event);
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
