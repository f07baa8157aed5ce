//! Sizes and speeds as people write them.

pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// `25 Gbit/s`, `2.5 Gbit/s`, `100 Mbit/s`.
pub(crate) fn gbits(mbps: u32) -> String {
    match mbps {
        1000.. => format!("{} Gbit/s", f64::from(mbps) / 1000.0),
        _ => format!("{mbps} Mbit/s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_written_in_the_unit_that_fits() {
        assert_eq!(gbits(400_000), "400 Gbit/s");
        assert_eq!(gbits(2500), "2.5 Gbit/s");
        assert_eq!(gbits(100), "100 Mbit/s");
    }
}
