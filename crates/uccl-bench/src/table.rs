//! The table: one line a row, printed as soon as it is known.

use super::{report::Row, size::Size};

struct Column {
    title: &'static str,
    width: usize,
    left: bool,
}

const fn column(title: &'static str, width: usize, left: bool) -> Column {
    Column { title, width, left }
}

/// Widths hold the longest value that is expected; a longer one pushes its own line only.
const COLUMNS: [Column; 10] = [
    column("op", 10, true),
    column("path", 15, true),
    column("size", 8, false),
    column("iovs", 5, false),
    column("count", 9, false),
    column("GB/s", 8, false),
    column("p50 us", 10, false),
    column("p99 us", 10, false),
    column("min us", 10, false),
    column("verified", 8, true),
];

pub(crate) fn header() -> String {
    let titles = COLUMNS.map(|column| column.title.to_owned());
    let rule = COLUMNS.map(|column| "-".repeat(column.width));
    format!("{}\n{}", line(&titles), line(&rule))
}

pub(crate) fn row(row: &Row) -> String {
    let latency = row.latency_us;
    let text = line(&[
        row.op_label(),
        row.path_label.clone(),
        Size(row.size_bytes).to_string(),
        row.iovs.to_string(),
        row.count.to_string(),
        optional(row.gb_per_s),
        optional(latency.map(|l| l.p50)),
        optional(latency.map(|l| l.p99)),
        optional(latency.map(|l| l.min)),
        row.verified.name().to_owned(),
    ]);
    match &row.note {
        Some(note) => format!("{text}  {note}"),
        None => text,
    }
}

fn line(cells: &[String; COLUMNS.len()]) -> String {
    let cells = COLUMNS.iter().zip(cells).map(|(column, cell)| match column.left {
        true => format!("{cell:<width$}", width = column.width),
        false => format!("{cell:>width$}", width = column.width),
    });
    cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), number)
}

/// About three digits, never an exponent.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.995 || v == 0.0 => format!("{value:.2}"),
        v if v >= 0.0995 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::row as sample;

    #[test]
    fn every_line_is_aligned() {
        let header = header();
        let lines: Vec<_> = header.lines().collect();
        let first = row(&sample("write", "cma", 64, 0.0123));
        let second = row(&sample("memcpy", "raw", 64 << 20, 123.4));
        // Where a column of figures ends, every line ends a figure.
        for title in ["size", "count", "GB/s", "p50 us", "min us"] {
            let end = lines[0].find(title).expect(title) + title.len();
            for line in [lines[1], &first, &second] {
                assert!(line.len() >= end, "{line:?}");
                assert_ne!(line.as_bytes()[end - 1], b' ', "{title}: {line:?}");
                assert_eq!(line.as_bytes()[end], b' ', "{title}: {line:?}");
            }
        }
        let verified = lines[0].find("verified").expect("a column");
        assert!(first[verified..].starts_with("yes"));
    }

    #[test]
    fn a_missing_number_is_a_dash_and_a_note_follows() {
        let mut missing = crate::report::Row::limit("vm-read", 4096);
        missing.note = Some("refused".into());
        let line = row(&missing);
        assert_eq!(line.matches(" -").count(), 5, "{line}");
        assert!(line.ends_with("  refused"), "{line}");
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0.00"),
            (0.01234, "0.0123"),
            (0.5, "0.500"),
            (0.999, "1.00"),
            (1.0, "1.00"),
            (12.34, "12.3"),
            (99.97, "100.0"),
            (12345.6, "12346"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
