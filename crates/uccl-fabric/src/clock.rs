//! A clock that costs nothing to read: for liveness, not for measuring.

/// Milliseconds of the coarse monotonic clock (a few milliseconds of resolution).
pub fn coarse_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // The C library's function also works on kernels without a vDSO.
    // SAFETY: it writes only to `now`, which is alive.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_goes_on_and_never_back() {
        let begun = super::coarse_ms();
        assert!(begun > 0);
        let mut last = begun;
        while last == begun {
            let now = super::coarse_ms();
            assert!(now >= last);
            last = now;
        }
    }
}
