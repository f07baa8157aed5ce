//! The logger that plugins are given in NCCL's place.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use parking_lot::Mutex;
use uccl_nccl_abi::{Logger, level};

/// Lines at WARN that plugins have written in this process.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The most lines that are kept.
const KEPT: usize = 1000;

/// Words behind the format that are passed on.
type Words = [usize; 7];

/// Receives a line. NCCL's logger takes any number of arguments, which Rust cannot define: this one
/// takes seven words, and the calling conventions of x86-64 and AArch64 let it be called in that
/// one's place. Words that the caller did not pass are never read, since the format names none.
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn take(
    at: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
    seventh: usize,
) {
    if format.is_null() || at != level::WARN {
        return;
    }
    // SAFETY: the caller passes a format with an end.
    let format = unsafe { CStr::from_ptr(format) };
    let words = [first, second, third, fourth, fifth, sixth, seventh];
    let mut warnings = WARNINGS.lock();
    if warnings.len() < KEPT {
        // SAFETY: the words are those of the format's caller.
        warnings.push(unsafe { text(format, &words) });
    }
}

/// Fills in a format.
///
/// # Safety
///
/// The words are the arguments that the format names.
unsafe fn text(format: &CStr, words: &Words) -> String {
    let shown = format.to_string_lossy();
    let arguments = shown.matches('%').count() - 2 * shown.matches("%%").count();
    // Numbers with a point are in registers of their own, and are not passed on.
    if arguments > words.len() || has_float(&shown) {
        return shown.into_owned();
    }
    let mut line = [0_u8; 1024];
    let [a, b, c, d, e, f, g] = *words;
    // SAFETY: `snprintf` stays within the line and reads the arguments that the format names.
    let length = unsafe {
        libc::snprintf(line.as_mut_ptr().cast(), line.len(), format.as_ptr(), a, b, c, d, e, f, g)
    };
    let length = usize::try_from(length).unwrap_or(0).min(line.len() - 1);
    String::from_utf8_lossy(&line[..length]).into_owned()
}

fn has_float(format: &str) -> bool {
    let conversion = |rest: &str| {
        rest.find(|letter: char| letter.is_ascii_alphabetic() && !"hlzjtL".contains(letter))
            .and_then(|at| rest[at..].chars().next())
    };
    format.split('%').skip(1).filter_map(conversion).any(|letter| "aefgAEFGn".contains(letter))
}

/// The function, as NCCL's interface has it.
pub(crate) fn logger() -> Logger {
    let function = take as *const c_void;
    // SAFETY: both are function pointers of C; the difference is the one that `take` explains.
    unsafe { std::mem::transmute::<*const c_void, Logger>(function) }
}

/// The warnings since the last call.
pub(crate) fn warnings() -> Vec<String> {
    std::mem::take(&mut WARNINGS.lock())
}

/// The last warning, which stays.
pub(crate) fn last_warning() -> Option<String> {
    WARNINGS.lock().last().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_filled_in() {
        let log = logger().expect("a function");
        // SAFETY: NCCL's convention, with arguments that the format names.
        unsafe {
            log(level::WARN, 0, c"f".as_ptr(), 1, c"%s: %d%%".as_ptr(), c"peer".as_ptr(), 7);
            log(level::INFO, 0, c"f".as_ptr(), 1, c"not kept".as_ptr());
        }
        assert_eq!(warnings(), ["peer: 7%"]);
        assert!(has_float("%8.3f GB/s") && !has_float("%lu of %s"));
    }
}
