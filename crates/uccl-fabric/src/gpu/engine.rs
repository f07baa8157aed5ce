//! What copies for one GPU: a stream, the gather/scatter kernel, and events that tell of the end.

use uccl_device::cuda::{
    Context, Direction, Event, GpuError, Priority, Stream,
    gather::{Completion, LaunchOptions, Launcher, LauncherConfig, Piece, Tables},
};

/// Pieces of this many bytes on average are the copy engines'; with smaller ones, what the engines take
/// to begin each piece costs more than they gain (measured on H200s over NVLink, where one piece costs an
/// engine 2.4 us and the kernel 30 ns; the engines are 8 % faster on what is large).
const ENGINE_PIECE: u64 = 4 << 20;
/// From this average on, and with this many pieces, the kernel and an engine share what is pushed to another GPU:
/// together they are 1 to 2 % faster than the kernel alone, with this part of the bytes for the engine (measured
/// as above; what is pulled is slower so).
const SHARED_PIECE: u64 = 512 << 10;
const SHARED_COUNT: usize = 16;
const ENGINE_PERCENT: usize = 30;

/// One GPU's copying, for one lane or half of one.
#[derive(Debug)]
pub(crate) struct Engine {
    context: &'static Context,
    priority: Priority,
    stream: Stream,
    /// What copies beside the kernel, and where the stream waits for it.
    aside: Option<(Stream, Event)>,
    /// Made at its first use. `Err` where the driver does not take the kernels: engines copy then.
    launcher: Option<Result<Launcher, GpuError>>,
    spare: Vec<Event>,
    /// For whoever lists pieces: room that is used again.
    pub(crate) pieces: Vec<Piece>,
}

/// Copies that travel together: in which direction, and whether GPUs reach every address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    pub(crate) direction: Direction,
    /// All of it is device memory or locked host memory.
    pub(crate) by_kernel: bool,
    /// From this GPU's memory to another's.
    pub(crate) is_push: bool,
    /// The copy engines have long copies. An engine keeps to the stream that it is at for as long as there is more
    /// on it: what is short would wait for the end of all (seen on H200s).
    pub(crate) engines_are_busy: bool,
}

impl Engine {
    /// With a high priority, its kernels begin before those that wait on streams of a normal one.
    pub(crate) fn new(context: &'static Context, priority: Priority) -> Result<Self, GpuError> {
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
    pub(crate) fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Enqueues copies; the event tells of their end. After an error some may have been enqueued: a
    /// [fence](Self::fence) tells of their end, or it must [settle](Self::settle).
    ///
    /// # Safety
    /// The memory is there, of the kinds that the route says, and reachable by this GPU, until the event
    /// has happened.
    pub(crate) unsafe fn copy(
        &mut self,
        pieces: &[Piece],
        route: Route,
    ) -> Result<Event, GpuError> {
        let total: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let mean = total / (pieces.len().max(1) as u64);
        let is_the_kernels = pieces.len() > 1 && mean < ENGINE_PIECE || route.engines_are_busy;
        let by_kernel = route.by_kernel && is_the_kernels;
        let shares = route.is_push && !route.engines_are_busy;
        let shared = shares && mean >= SHARED_PIECE && pieces.len() >= SHARED_COUNT;
        let aside = if shared { pieces.len() * ENGINE_PERCENT / 100 } else { 0 };
        // SAFETY: the caller's promise.
        unsafe {
            if by_kernel && self.launch(&pieces[aside..])? {
                if aside > 0 {
                    self.copy_aside(&pieces[..aside], route.direction)?;
                }
            } else {
                enqueue(&self.stream, pieces, route.direction)?;
            }
        }
        self.record()
    }

    /// An event after all that was enqueued, also where the last copy was refused halfway.
    pub(crate) fn fence(&mut self) -> Result<Event, GpuError> {
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

    /// Has the kernel copy; false if it cannot.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn launch(&mut self, pieces: &[Piece]) -> Result<bool, GpuError> {
        let context = self.context;
        let make = || Launcher::new(context, LauncherConfig::of(context));
        let Ok(launcher) = self.launcher.get_or_insert_with(make) else { return Ok(false) };
        let options =
            LaunchOptions { blocks: 0, completion: Completion::Event, tables: Tables::Auto };
        for part in pieces.chunks(launcher.most_pieces().max(1)) {
            loop {
                // SAFETY: the caller's promise.
                match unsafe { launcher.launch(&self.stream, part, options) } {
                    Ok(_) => break,
                    // Launches end without anybody's help.
                    Err(GpuError::Busy { .. }) => std::thread::yield_now(),
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(true)
    }

    /// Has an engine copy while the kernel does; the stream goes on when both have ended.
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
    pub(crate) fn reuse(&mut self, event: Event) {
        self.spare.push(event);
    }

    /// Waits until nothing runs any more. After an error nothing does.
    pub(crate) fn settle(&self) {
        let _ = self.stream.synchronize();
        if let Some((aside, _)) = &self.aside {
            let _ = aside.synchronize();
        }
    }
}

/// Has an engine copy pieces, one after the other.
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
