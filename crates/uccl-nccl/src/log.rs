//! NCCL's log: the only place that this library writes to.

use std::{
    ffi::{CStr, CString, c_int, c_ulong, c_void},
    fmt::{self, Write as _},
    ptr::null_mut,
    sync::{
        Once,
        atomic::{AtomicPtr, Ordering::Relaxed},
    },
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};
use uccl_nccl_abi::{Logger, flags, level};

/// NCCL's function; null before the first `init`. NCCL's functions outlive its plugins.
static LOGGER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Takes NCCL's function, and has this process's flows write to it.
pub(crate) fn begin(logger: Logger) {
    if let Some(function) = logger {
        LOGGER.store(function as *mut c_void, Relaxed);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // This library has its own copy of `tracing`, so that it is the first.
        let _set_before = tracing::subscriber::set_global_default(ToNccl);
    });
}

pub(crate) fn warn(text: &str) {
    write(level::WARN, flags::ALL, text);
}

pub(crate) fn info(subsystem: c_ulong, text: &str) {
    write(level::INFO, subsystem, text);
}

fn write(at: c_int, subsystem: c_ulong, text: &str) {
    let function = LOGGER.load(Relaxed);
    // SAFETY: it is null or a `Logger` of `begin`, which has the same layout.
    let logger = unsafe { std::mem::transmute::<*mut c_void, Logger>(function) };
    let Some(logger) = logger else { return };
    let text: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    let Ok(text) = CString::new([b"NET/UCCL: ", &text[..]].concat()) else { return };
    let place: &CStr = c"uccl";
    // SAFETY: the format has one argument, a text with an end.
    unsafe { logger(at, subsystem, place.as_ptr(), 0, c"%s".as_ptr(), text.as_ptr()) };
}

/// Passes on warnings and notes of this library's other crates.
struct ToNccl;

impl Subscriber for ToNccl {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        match *event.metadata().level() {
            Level::ERROR | Level::WARN => warn(&line.0),
            _ => info(flags::NET, &line.0),
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The text of an event.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let begin = if self.0.is_empty() { "" } else { "; " };
        // Writing to a text does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{begin}{value:?}"),
            name => write!(self.0, "{begin}{name}: {value:?}"),
        };
    }
}
