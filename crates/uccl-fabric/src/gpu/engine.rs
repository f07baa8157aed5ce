//! What copies for one GPU: a stream, the gather/scatter kernel, and events that tell of the end.

use uccl_device::cuda::{
    Context, Direction, Event, GpuError, Priority, Stream,
    gather::{Completion, LaunchOptions, Launcher, LauncherConfig, Piece, Tables},
};

/// Pieces of this many bytes on average are the copy engines'; with smaller ones, what the engines take
/// to begin each piece costs more than they gain (measured on H200s over NVLink, where one piece costs an
/// engine 2.4 us and the kernel 30 ns; the engines are 8 % faster on what is large).
const ENGINE_PIECE: u64 = 4 << 20;

/// One GPU's copying, for one lane or half of one.
#[derive(Debug)]
pub(crate) struct Engine {
    context: &'static Context,
    stream: Stream,
    /// Made at its first use. `Err` where the driver does not take the kernels: engines copy then.
    launcher: Option<Result<Launcher, GpuError>>,
    spare: Vec<Event>,
}

/// Copies that travel together: in which direction, and whether GPUs reach every address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    pub(crate) direction: Direction,
    /// All of it is device memory or locked host memory.
    pub(crate) by_kernel: bool,
}

impl Engine {
    pub(crate) fn new(context: &'static Context) -> Result<Self, GpuError> {
        let stream = Stream::new(context, Priority::High)?;
        Ok(Self { context, stream, launcher: None, spare: Vec::new() })
    }

    /// The ordinal of the GPU.
    pub(crate) fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Enqueues copies; the event tells of their end. After an error some may have been enqueued: the
    /// stream must be waited for.
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
        let many = pieces.len() > 1 && total / (pieces.len() as u64) < ENGINE_PIECE;
        // SAFETY: the caller's promise.
        let by_kernel = many && route.by_kernel && unsafe { self.launch(pieces)? };
        if !by_kernel {
            for piece in pieces.iter().filter(|piece| piece.len_bytes > 0) {
                let len = piece.len_bytes as usize;
                // SAFETY: the caller's promise.
                unsafe {
                    self.stream.copy(piece.destination, piece.source, len, route.direction)?;
                }
            }
        }
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

    /// Takes back an event that has happened.
    pub(crate) fn reuse(&mut self, event: Event) {
        self.spare.push(event);
    }

    /// Waits until nothing runs any more. After an error nothing does.
    pub(crate) fn settle(&self) {
        let _ = self.stream.synchronize();
    }
}
