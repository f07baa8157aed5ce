//! Copies to and from memory that may have been unmapped.
//!
//! Registered memory must stay allocated, but a program may err, and then its peers decide when the memory is touched: a
//! write of theirs would end the process. System calls report such an address, and these copies do as well, without
//! one: a copy is one known stretch of instructions, and a handler for SIGSEGV and SIGBUS takes a fault at just that
//! stretch to its end. Every other fault goes to the handler that was there before.

use std::sync::Once;

use crate::mem::Span;

/// No page is shorter.
const PAGE: usize = 4096;

/// The memory cannot be touched. Some of the bytes may have been copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unmapped;

/// Copies `from` to memory that should be writable.
///
/// # Errors
/// When it is not. What was copied before the fault stays copied.
///
/// # Safety
/// As far as the span is mapped, it must be memory that may be written, and none that Rust code holds a reference to.
/// The span must be as long as `from`.
pub unsafe fn copy_to(to: Span, from: &[u8]) -> Result<(), Unmapped> {
    debug_assert_eq!(to.len, from.len());
    // SAFETY: the caller's promise; the slice is readable.
    unsafe { copy(to.addr as *mut u8, from.as_ptr(), from.len()) }
}

/// Appends memory that should be readable to `to`. Where it is not, nothing is appended.
///
/// # Errors
/// When it is not.
///
/// # Safety
/// As far as the span is mapped, it must be memory that may be read. Other threads may write it meanwhile: the bytes are
/// then any.
pub unsafe fn append(to: &mut Vec<u8>, from: Span) -> Result<(), Unmapped> {
    to.reserve(from.len);
    let room = to.spare_capacity_mut().as_mut_ptr().cast::<u8>();
    // SAFETY: there is room for as many bytes; the caller's promise for the rest.
    unsafe { copy(room, from.addr as *const u8, from.len) }?;
    // SAFETY: all of them were written.
    unsafe { to.set_len(to.len() + from.len) };
    Ok(())
}

/// Whether memory can be read, by a look at one byte of each page.
///
/// # Safety
/// As for [`append`].
#[must_use]
pub unsafe fn is_readable(span: Span) -> bool {
    let mut byte = 0;
    let last = span.len.checked_sub(1);
    let looks = (0..span.len).step_by(PAGE).chain(last);
    // SAFETY: the caller's promise; a byte of this function.
    looks
        .map(|at| (span.addr + at) as *const u8)
        .all(|at| unsafe { copy(&raw mut byte, at, 1) }.is_ok())
}

/// # Safety
/// As far as the memory at `from` is mapped it must be memory that may be read, and likewise that at `to` written. Rust
/// code holds no reference to either but what the callers here were given.
unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), Unmapped> {
    if len == 0 {
        return Ok(());
    }
    INSTALLED.call_once(handler::install);
    // SAFETY: the caller's promise; a fault ends the copy.
    match unsafe { uccl_guarded_copy(to, from, len) } {
        0 => Ok(()),
        _ => Err(Unmapped),
    }
}

static INSTALLED: Once = Once::new();

unsafe extern "C" {
    /// Copies; returns how many bytes were not copied.
    fn uccl_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> usize;
    /// Where a fault belongs to a copy: from here on, and before the end.
    static uccl_guarded_copy_begin: u8;
    /// Where such a copy goes on.
    static uccl_guarded_copy_end: u8;
}

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.uccl_guarded_copy, \"ax\", @progbits",
    ".hidden uccl_guarded_copy",
    ".hidden uccl_guarded_copy_begin",
    ".hidden uccl_guarded_copy_end",
    ".globl uccl_guarded_copy",
    ".globl uccl_guarded_copy_begin",
    ".globl uccl_guarded_copy_end",
    ".type uccl_guarded_copy, @function",
    "uccl_guarded_copy:",
    ".cfi_startproc",
    "mov rcx, rdx",
    "uccl_guarded_copy_begin:",
    "rep movsb",
    "uccl_guarded_copy_end:",
    "mov rax, rcx",
    "ret",
    ".cfi_endproc",
    ".size uccl_guarded_copy, . - uccl_guarded_copy",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text.uccl_guarded_copy, \"ax\", @progbits",
    ".hidden uccl_guarded_copy",
    ".hidden uccl_guarded_copy_begin",
    ".hidden uccl_guarded_copy_end",
    ".globl uccl_guarded_copy",
    ".globl uccl_guarded_copy_begin",
    ".globl uccl_guarded_copy_end",
    ".type uccl_guarded_copy, @function",
    "uccl_guarded_copy:",
    ".cfi_startproc",
    "uccl_guarded_copy_begin:",
    "2:",
    "cmp x2, #16",
    "b.lo 3f",
    "ldp x3, x4, [x1]",
    "stp x3, x4, [x0]",
    "add x1, x1, #16",
    "add x0, x0, #16",
    "sub x2, x2, #16",
    "b 2b",
    "3:",
    "cbz x2, uccl_guarded_copy_end",
    "ldrb w3, [x1], #1",
    "strb w3, [x0], #1",
    "sub x2, x2, #1",
    "b 3b",
    "uccl_guarded_copy_end:",
    "mov x0, x2",
    "ret",
    ".cfi_endproc",
    ".size uccl_guarded_copy, . - uccl_guarded_copy",
    ".popsection",
);

mod handler {
    use std::{mem::MaybeUninit, ptr, sync::OnceLock};

    use super::{uccl_guarded_copy_begin, uccl_guarded_copy_end};

    const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

    /// What was there before, by signal.
    static BEFORE: [OnceLock<libc::sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

    /// Keeps the library that this is part of loaded, if it is one: the handler must not go with it.
    fn stay() {
        // SAFETY: all zeroes is a value of the struct.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the answer.
        let known = unsafe { libc::dladdr(handle as *const () as *const _, &raw mut info) } != 0;
        if known && !info.dli_fname.is_null() {
            let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            // SAFETY: the name of what is loaded, which lives as long; nothing is loaded anew. A program is not found by
            // its name, and stays anyway.
            unsafe { libc::dlopen(info.dli_fname, flags) };
        }
    }

    /// Puts the handler in the place of those that are there. It stays.
    pub(super) fn install() {
        stay();
        for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
            let mut old = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: asks for what is there; all zeroes is a value of the struct.
            if unsafe { libc::sigaction(signal, ptr::null(), old.as_mut_ptr()) } != 0 {
                continue;
            }
            // SAFETY: it was written.
            let old = unsafe { old.assume_init() };
            // Before the handler can run.
            let _ = before.set(old);
            // SAFETY: all zeroes is a value of the struct.
            let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
            ours.sa_sigaction = handle as *const () as usize;
            // On the stack that others may have provided: a thread whose own stack is full gets there.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (old.sa_flags & libc::SA_NODEFER);
            ours.sa_mask = old.sa_mask;
            // SAFETY: a handler that does nothing but what signal handlers may do.
            unsafe { libc::sigaction(signal, &raw const ours, ptr::null_mut()) };
        }
    }

    /// Where the interrupted thread is, and will go on.
    ///
    /// # Safety
    /// What the kernel gave to a handler.
    unsafe fn place<'a>(context: *mut libc::c_void) -> &'a mut u64 {
        let context = context.cast::<libc::ucontext_t>();
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise; a register is a word, whatever its sign.
        unsafe {
            &mut *(&raw mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize]).cast()
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the caller's promise.
        unsafe {
            &mut *(&raw mut (*context).uc_mcontext.pc).cast()
        }
    }

    extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel gave it.
        let place = unsafe { place(context) };
        let copy =
            (&raw const uccl_guarded_copy_begin) as u64..(&raw const uccl_guarded_copy_end) as u64;
        if copy.contains(place) {
            *place = copy.end;
            return;
        }
        let at = SIGNALS.iter().position(|known| *known == signal);
        match at.and_then(|at| BEFORE[at].get()) {
            Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    // SAFETY: whoever installed it said that it is one of these.
                    let handle: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        unsafe { std::mem::transmute(before.sa_sigaction) };
                    handle(signal, info, context);
                } else {
                    // SAFETY: as above.
                    let handle: extern "C" fn(i32) =
                        unsafe { std::mem::transmute(before.sa_sigaction) };
                    handle(signal);
                }
            }
            _ => {
                // SAFETY: all zeroes is the default action. The fault comes again, and ends the process as it would
                // have without us.
                unsafe {
                    let default: libc::sigaction = std::mem::zeroed();
                    libc::sigaction(signal, &raw const default, ptr::null_mut());
                }
                // One that was sent by a process does not come again by itself.
                // SAFETY: the kernel gave it; raising is allowed in handlers.
                unsafe {
                    if (*info).si_code <= 0 {
                        libc::raise(signal);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two pages, of which the second is not there.
    fn half_mapped() -> (usize, usize) {
        // SAFETY: a question.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let (rw, private) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 2 * page, rw, private, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: the second page, which nobody uses. It is kept from others' use, as no memory at all would not be.
        assert_eq!(unsafe { libc::mprotect(at.byte_add(page), page, libc::PROT_NONE) }, 0);
        (at as usize, page)
    }

    #[test]
    fn copies_end_where_memory_ends() {
        let (at, page) = half_mapped();
        let bytes: Vec<u8> = (0..page).map(|i| i as u8).collect();
        for len in [0, 1, 7, 8, 16, 17, 100, page] {
            let end = Span { addr: at + page - len, len };
            // SAFETY: memory of this test.
            assert_eq!(unsafe { copy_to(end, &bytes[..len]) }, Ok(()));
            let mut back = vec![9];
            // SAFETY: as above.
            assert_eq!(unsafe { append(&mut back, end) }, Ok(()));
            assert!(back[0] == 9 && back[1..] == bytes[..len]);
        }
        for before in [0, 1, 15, 16, 33] {
            let across = Span { addr: at + page - before, len: before + 40 };
            // SAFETY: as far as it is mapped, memory of this test.
            assert_eq!(unsafe { copy_to(across, &bytes[..across.len]) }, Err(Unmapped));
            let mut back = vec![9];
            // SAFETY: as above.
            assert_eq!(unsafe { append(&mut back, across) }, Err(Unmapped));
            assert_eq!(back, [9]);
        }
    }

    #[test]
    fn threads_meet_it_at_once() {
        let (at, page) = half_mapped();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    for round in 0..1000 {
                        let gone = round % 2 == 0;
                        let addr = at + if gone { page } else { 0 } + thread * 8;
                        // SAFETY: as far as it is mapped, memory of this test.
                        let copied = unsafe { copy_to(Span { addr, len: 8 }, &[1; 8]) };
                        assert_eq!(copied.is_err(), gone);
                    }
                });
            }
        });
    }
}
