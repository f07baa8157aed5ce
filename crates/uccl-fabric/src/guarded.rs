//! Copies to and from memory that may have been unmapped.
//!
//! Registered memory must stay allocated, but a program may err, and then a write of its peer, at a
//! time of the peer's choice, would end the process. System calls report such an address. These
//! copies report it too, without a system call. A short copy is one known stretch of instructions.
//! A longer copy is the C library's, called from one place that first puts two addresses into
//! callee-saved registers: its stack pointer, and the address at which the thread continues after a
//! fault. A handler for SIGSEGV and SIGBUS makes a thread continue at the copy's end if it faulted
//! in that stretch, or with those two addresses. Every other fault goes to the handler that was
//! installed before.

use std::{io, sync::Once};

use crate::mem::Span;

/// The length of the shortest pages, in bytes.
const PAGE: usize = 4096;

/// The memory cannot be touched. Some of the bytes may have been copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnmappedMemory;

impl From<UnmappedMemory> for io::Error {
    /// The error that system calls return for such memory.
    fn from(_: UnmappedMemory) -> Self {
        Self::from_raw_os_error(libc::EFAULT)
    }
}

/// Copies `from` to memory that should be writable.
///
/// # Errors
/// When it is not. Bytes that were copied before the fault stay copied.
///
/// # Safety
/// As far as the span is mapped, it must be memory that may be written, and none that Rust code
/// holds a reference to. The span must be as long as `from`.
pub unsafe fn copy_to(to: Span, from: &[u8]) -> Result<(), UnmappedMemory> {
    debug_assert_eq!(to.len, from.len());
    // SAFETY: the caller's promise; the slice is readable.
    unsafe { copy(from.as_ptr(), to.addr as *mut u8, from.len()) }
}

/// Copies memory of which either side may have been unmapped.
///
/// # Errors
/// When it has. Bytes that were copied before the fault stay copied.
///
/// # Safety
/// As far as the memory at `from` is mapped, `len` bytes of it must be memory that may be read, and
/// likewise those at `to` memory that may be written, and none that Rust code holds a reference to.
/// The two must not overlap.
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), UnmappedMemory> {
    INSTALLED.call_once(handler::install);
    // SAFETY: the caller's promise; a fault ends the copy.
    match unsafe { uccl_guarded_copy(to, from, len, libc::memcpy) } {
        0 => Ok(()),
        _ => Err(UnmappedMemory),
    }
}

/// Appends memory that should be readable to `to`. After a fault nothing is appended.
///
/// # Errors
/// When it is not.
///
/// # Safety
/// As far as the span is mapped, it must be memory that may be read. Other threads may write it
/// meanwhile: the appended bytes are then arbitrary.
pub unsafe fn append(to: &mut Vec<u8>, from: Span) -> Result<(), UnmappedMemory> {
    to.reserve(from.len);
    let room = to.spare_capacity_mut().as_mut_ptr().cast::<u8>();
    // SAFETY: there is room for as many bytes; the caller's promise for the rest.
    unsafe { copy(from.addr as *const u8, room, from.len) }?;
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
    let (mut byte, mut at, end) = (0, span.addr, span.addr.saturating_add(span.len));
    while at < end {
        // SAFETY: the caller's promise; a byte of this function.
        if unsafe { copy(at as *const u8, &raw mut byte, 1) }.is_err() {
            return false;
        }
        at = (at | (PAGE - 1)).saturating_add(1);
    }
    true
}

static INSTALLED: Once = Once::new();

/// The C library's `memcpy`.
type CopyLong =
    unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;

unsafe extern "C" {
    /// Copies. Returns 0, or 1 after a fault.
    fn uccl_guarded_copy(to: *mut u8, from: *const u8, len: usize, long: CopyLong) -> u32;
    /// The address at which a long copy continues after a fault.
    static uccl_guarded_copy_long_fault: u8;
}

// The instructions of the short copies lie between these two labels. After a fault a short copy
// continues at the second.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    static uccl_guarded_copy_short: u8;
    static uccl_guarded_copy_short_end: u8;
}

// Each short copy reads its first and its last bytes, which may overlap. A long copy keeps its
// stack pointer in rbx, and the address at which it continues after a fault in r12.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.uccl_guarded_copy, \"ax\", @progbits",
    ".hidden uccl_guarded_copy",
    ".hidden uccl_guarded_copy_short",
    ".hidden uccl_guarded_copy_short_end",
    ".hidden uccl_guarded_copy_long_fault",
    ".globl uccl_guarded_copy",
    ".globl uccl_guarded_copy_short",
    ".globl uccl_guarded_copy_short_end",
    ".globl uccl_guarded_copy_long_fault",
    ".type uccl_guarded_copy, @function",
    ".p2align 6",
    "uccl_guarded_copy:",
    ".cfi_startproc",
    "cmp rdx, 64",
    "ja 7f",
    "uccl_guarded_copy_short:",
    "cmp edx, 8",
    "jb 3f",
    "cmp edx, 16",
    "ja 5f",
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    // 0 to 7 bytes.
    "3:",
    "cmp edx, 4",
    "jb 4f",
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    // 0 to 3 bytes: the first, the one in the middle, the last.
    "4:",
    "test edx, edx",
    "jz 2f",
    "mov r8, rdx",
    "shr r8",
    "movzx eax, byte ptr [rsi]",
    "movzx ecx, byte ptr [rsi + r8]",
    "movzx r9d, byte ptr [rsi + rdx - 1]",
    "mov [rdi], al",
    "mov [rdi + r8], cl",
    "mov [rdi + rdx - 1], r9b",
    "2:",
    "xor eax, eax",
    "ret",
    // 17 to 64 bytes.
    "5:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "cmp edx, 32",
    "ja 6f",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "6:",
    "movups xmm2, [rsi + 16]",
    "movups xmm3, [rsi + rdx - 32]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm2",
    "movups [rdi + rdx - 32], xmm3",
    "movups [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "uccl_guarded_copy_short_end:",
    "mov eax, 1",
    "ret",
    // More than 64 bytes.
    "7:",
    "push rbx",
    ".cfi_adjust_cfa_offset 8",
    ".cfi_offset rbx, -16",
    "push r12",
    ".cfi_adjust_cfa_offset 8",
    ".cfi_offset r12, -24",
    "sub rsp, 8",
    ".cfi_adjust_cfa_offset 8",
    "mov rbx, rsp",
    "lea r12, [rip + uccl_guarded_copy_long_fault]",
    "call rcx",
    "xor eax, eax",
    "8:",
    "add rsp, 8",
    ".cfi_remember_state",
    ".cfi_adjust_cfa_offset -8",
    "pop r12",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore r12",
    "pop rbx",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore rbx",
    "ret",
    "uccl_guarded_copy_long_fault:",
    ".cfi_restore_state",
    "cld",
    "mov eax, 1",
    "jmp 8b",
    ".cfi_endproc",
    ".size uccl_guarded_copy, . - uccl_guarded_copy",
    ".popsection",
);

// All copies are long ones. They keep their stack pointer in x19, and the address at which they
// continue after a fault in x20.
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text.uccl_guarded_copy, \"ax\", @progbits",
    ".hidden uccl_guarded_copy",
    ".hidden uccl_guarded_copy_long_fault",
    ".globl uccl_guarded_copy",
    ".globl uccl_guarded_copy_long_fault",
    ".type uccl_guarded_copy, @function",
    ".p2align 2",
    "uccl_guarded_copy:",
    ".cfi_startproc",
    "stp x29, x30, [sp, #-32]!",
    ".cfi_def_cfa_offset 32",
    ".cfi_offset x29, -32",
    ".cfi_offset x30, -24",
    "stp x19, x20, [sp, #16]",
    ".cfi_offset x19, -16",
    ".cfi_offset x20, -8",
    "mov x29, sp",
    "mov x19, sp",
    "adr x20, uccl_guarded_copy_long_fault",
    "blr x3",
    "mov x0, #0",
    "2:",
    "ldp x19, x20, [sp, #16]",
    "ldp x29, x30, [sp], #32",
    ".cfi_remember_state",
    ".cfi_def_cfa_offset 0",
    ".cfi_restore x19",
    ".cfi_restore x20",
    ".cfi_restore x29",
    ".cfi_restore x30",
    "ret",
    "uccl_guarded_copy_long_fault:",
    ".cfi_restore_state",
    "mov x0, #1",
    "b 2b",
    ".cfi_endproc",
    ".size uccl_guarded_copy, . - uccl_guarded_copy",
    ".popsection",
);

mod handler {
    use std::{mem::MaybeUninit, ptr, sync::OnceLock};

    use super::uccl_guarded_copy_long_fault;
    #[cfg(target_arch = "x86_64")]
    use super::{uccl_guarded_copy_short, uccl_guarded_copy_short_end};

    const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

    /// The most bytes that `memcpy` puts on the stack. A handler of another signal that interrupts
    /// the copy and faults itself is further away: the kernel's frame for it is longer.
    const NEAR: u64 = 256;

    /// The handlers that were installed before, by signal.
    static BEFORE: [OnceLock<libc::sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

    /// Keeps the shared library that contains this code loaded, if there is one: the handler must
    /// stay in memory.
    fn stay() {
        // SAFETY: all zeroes is a value of the struct.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is a valid place for the answer.
        let known = unsafe { libc::dladdr(handle as *const () as *const _, &raw mut info) } != 0;
        if known && !info.dli_fname.is_null() {
            let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            // SAFETY: the name of a loaded library, which lives as long as the library; nothing is
            // loaded anew. A program is not found by its name, and is never unloaded anyway.
            unsafe { libc::dlopen(info.dli_fname, flags) };
        }
    }

    /// Installs the handler in the place of the current ones, for good.
    pub(super) fn install() {
        stay();
        for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
            let mut old = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: only asks for the current handler; all zeroes is a value of the struct.
            if unsafe { libc::sigaction(signal, ptr::null(), old.as_mut_ptr()) } != 0 {
                continue;
            }
            // SAFETY: it was written.
            let old = unsafe { old.assume_init() };
            // The handler reads it, so it is set before the handler can run.
            let _ = before.set(old);
            // SAFETY: all zeroes is a value of the struct.
            let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
            ours.sa_sigaction = handle as *const () as usize;
            // Runs on the thread's alternate stack, if there is one, so that it can handle a thread
            // with a full stack.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (old.sa_flags & libc::SA_NODEFER);
            ours.sa_mask = old.sa_mask;
            // SAFETY: the handler only does things that are allowed in signal handlers.
            unsafe { libc::sigaction(signal, &raw const ours, ptr::null_mut()) };
        }
    }

    /// If the interrupted thread was copying, makes it continue at the end of the copy. False if it
    /// was not.
    ///
    /// # Safety
    /// `context` is the one that the kernel gave to a handler, which must not use it otherwise
    /// meanwhile.
    unsafe fn end_copy(context: *mut libc::c_void) -> bool {
        // SAFETY: the caller's promise.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
        let go_on = (&raw const uccl_guarded_copy_long_fault) as u64;
        #[cfg(target_arch = "x86_64")]
        {
            let [at, stack, frame, kept] =
                [libc::REG_RIP, libc::REG_RSP, libc::REG_RBX, libc::REG_R12].map(|at| at as usize);
            let registers = &mut registers.gregs;
            let end = (&raw const uccl_guarded_copy_short_end) as u64;
            let short = (&raw const uccl_guarded_copy_short) as u64..end;
            if short.contains(&(registers[at] as u64)) {
                registers[at] = end as i64;
                return true;
            }
            let depth = registers[frame].wrapping_sub(registers[stack]) as u64;
            if registers[kept] as u64 != go_on || depth > NEAR {
                return false;
            }
            (registers[stack], registers[at]) = (registers[frame], registers[kept]);
        }
        #[cfg(target_arch = "aarch64")]
        {
            let (frame, kept) = (registers.regs[19], registers.regs[20]);
            if kept != go_on || frame.wrapping_sub(registers.sp) > NEAR {
                return false;
            }
            (registers.sp, registers.pc) = (frame, kept);
        }
        true
    }

    extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel gave them. A signal that a process sent is no fault.
        if unsafe { (*info).si_code > 0 && end_copy(context) } {
            return;
        }
        let at = SIGNALS.iter().position(|known| *known == signal);
        match at.and_then(|at| BEFORE[at].get()) {
            Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    // SAFETY: the flag SA_SIGINFO, set by its installer, says that it is a function
                    // of this type.
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
                // SAFETY: all zeroes is the default action. The fault repeats, and ends the process
                // as it would have without us.
                unsafe {
                    let default: libc::sigaction = std::mem::zeroed();
                    libc::sigaction(signal, &raw const default, ptr::null_mut());
                }
                // A signal that a process sent does not repeat by itself.
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

    /// Two pages, of which the second is not accessible.
    fn half_mapped() -> (usize, usize) {
        // SAFETY: only a query.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let (rw, private) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 2 * page, rw, private, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: the second page, which nobody uses. It stays mapped, without access, so that no
        // other mapping takes its place.
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
            assert_eq!(unsafe { copy_to(across, &bytes[..across.len]) }, Err(UnmappedMemory));
            let mut back = vec![9];
            // SAFETY: as above.
            assert_eq!(unsafe { append(&mut back, across) }, Err(UnmappedMemory));
            assert_eq!(back, [9]);
        }
    }

    /// Wherever a copy of the C library faults, the callee-saved registers keep their values.
    #[test]
    fn copies_of_all_lengths_end_where_memory_ends() {
        let (at, page) = half_mapped();
        let bytes: Vec<u8> = (0..2 * page).map(|i| (i * 7 + 1) as u8).collect();
        let mut room = vec![0; 2 * page];
        for len in (0..300).chain([page - 1, page]) {
            let end = at + page - len;
            // SAFETY: memory of this test, here and below.
            assert_eq!(unsafe { copy(bytes.as_ptr(), end as *mut u8, len) }, Ok(()));
            room.fill(0xee);
            // SAFETY: as above.
            let read = unsafe { copy(end as *const u8, room.as_mut_ptr().add(5), len) };
            assert!(read.is_ok() && room[5..][..len] == bytes[..len], "{len}");
            assert!(room[..5].iter().chain(&room[5 + len..]).all(|byte| *byte == 0xee), "{len}");
            for over in [1, 64, page] {
                let len = len + over;
                // SAFETY: as far as it is mapped, memory of this test.
                unsafe {
                    assert_eq!(copy(bytes.as_ptr(), end as *mut u8, len), Err(UnmappedMemory));
                    assert_eq!(copy(end as *const u8, room.as_mut_ptr(), len), Err(UnmappedMemory));
                }
            }
        }
    }

    #[test]
    fn a_look_sees_each_page() {
        let (at, page) = half_mapped();
        let seen = |addr, len| {
            // SAFETY: as far as it is mapped, memory of this test.
            unsafe { is_readable(Span { addr, len }) }
        };
        assert!(seen(at, page) && seen(at + page - 1, 1) && seen(at + page, 0));
        assert!(!seen(at + page - 1, 2) && !seen(at, page + 1) && !seen(at + page, 1));
        assert!(!seen(at, 2 * page) && !seen(0, 1));
    }

    #[test]
    fn threads_meet_it_at_once() {
        let (at, page) = half_mapped();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    for round in 0..1000 {
                        let gone = round % 2 == 0;
                        let len = if round % 4 < 2 { 8 } else { 100 };
                        let addr = at + if gone { page } else { 0 } + thread * len;
                        // SAFETY: as far as it is mapped, memory of this test.
                        let copied = unsafe { copy_to(Span { addr, len }, &[1; 100][..len]) };
                        assert_eq!(copied.is_err(), gone);
                    }
                });
            }
        });
    }
}
