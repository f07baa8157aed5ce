//! The plot: GB/s against size as an SVG that any browser shows.

use std::{fmt::Write, ops::Range};

use anyhow::Result;
use plotters::{coord::Shift, element::DashedPathElement, prelude::*, series::DashedLineSeries};

use super::{
    palette::{COLOURS, FONT},
    report::Row,
    size::Size,
};

/// One line of the plot.
#[derive(Debug, PartialEq)]
struct Series {
    label: String,
    /// Bytes of a transfer, and GB/s.
    points: Vec<(f64, f64)>,
    /// A limit is drawn dashed, and across the whole width if it has one point.
    limit: bool,
}

type Page<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (960, 560);
/// Where the legend begins.
const RIGHT: u32 = 740;
const LEGEND_STEP: i32 = 22;
const TITLE_SIZE: i32 = 16;

const LIMIT_COLOURS: [RGBColor; 4] = [
    RGBColor(0x55, 0x55, 0x55),
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0xa0, 0x76, 0x4a),
    RGBColor(0x6b, 0x7f, 0xa3),
];
/// Pixels that are drawn, and pixels that are not.
const DASHES: [(i32, i32); 3] = [(7, 5), (2, 4), (14, 4)];

/// Draws the rows that have a rate.
pub(crate) fn svg(rows: &[Row], title: &str) -> Result<String> {
    let series = series(rows);
    let height = SIZE.1.max(LEGEND_STEP as u32 * (series.len() as u32 + 3));
    let mut out = String::new();
    let page = SVGBackend::with_string(&mut out, (SIZE.0, height)).into_drawing_area();
    page.fill(&WHITE)?;
    let (left, right) = page.split_horizontally(RIGHT);
    chart(&left, &series, title)?;
    legend(&right, &series)?;
    page.present()?;
    drop((left, right, page));
    Ok(out)
}

fn series(rows: &[Row]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows {
        let Some(rate) = row.gb_per_s.filter(|rate| rate.is_finite()) else { continue };
        let mut label = match row.is_limit() {
            true => format!("raw {}", row.op),
            false => format!("{} {}", row.op_label(), row.path_label),
        };
        if row.iovs > 1 {
            let _ = write!(label, " \u{d7}{} iovs", row.iovs);
        }
        let point = (row.size_bytes as f64 * row.iovs as f64, rate);
        match all.iter_mut().find(|series| series.label == label) {
            Some(series) => series.points.push(point),
            None => all.push(Series { label, points: vec![point], limit: row.is_limit() }),
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// The parts of a line that are no higher than `top`. The library would draw higher points along
/// the edge.
fn below(points: &[(f64, f64)], top: f64) -> Vec<Vec<(f64, f64)>> {
    let mut line = points[..1].to_vec();
    for pair in points.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        if (from.1 > top) != (to.1 > top) {
            // Sizes are drawn by their logarithms.
            let along = (top - from.1) / (to.1 - from.1);
            line.push((from.0 * (to.0 / from.0).powf(along), top));
        }
        line.push(to);
    }
    let parts = line.split(|point| point.1 > top).filter(|part| !part.is_empty());
    parts.map(<[_]>::to_vec).collect()
}

/// The rate that the plot must reach: all of the transfers', and as much of the limits' as leaves
/// the transfers half of the height. A copy within the cache would flatten them otherwise.
fn highest(series: &[Series]) -> f64 {
    let most = |limit: bool| {
        let chosen = series.iter().filter(|series| series.limit == limit);
        chosen.flat_map(|series| &series.points).map(|point| point.1).fold(0.0, f64::max)
    };
    let (transfers, limits) = (most(false), most(true));
    match transfers > 0.0 {
        true => transfers.max(limits.min(2.0 * transfers)),
        false => limits,
    }
}

/// From the smallest size to the largest, with room for a marker; not so narrow that there is no
/// power of two to label.
fn sizes(series: &[Series]) -> Range<f64> {
    let sizes = || series.iter().flat_map(|series| &series.points).map(|point| point.0);
    let (low, high) = (sizes().fold(f64::MAX, f64::min), sizes().fold(1.0, f64::max));
    match low <= high {
        true if high >= 4.0 * low => low / 1.1..high * 1.1,
        true => low / 2.2..high * 2.2,
        false => 64.0..1e8,
    }
}

fn chart(page: &Page<'_>, series: &[Series], title: &str) -> Result<()> {
    let (sizes, highest) = (sizes(series), highest(series));
    let top = if highest > 0.0 { highest * 1.05 } else { 1.0 };
    let mut chart = ChartBuilder::on(page)
        .caption(title, (FONT.0, TITLE_SIZE))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(sizes.clone().log_scale().base(2.0), 0.0..top)?;
    chart
        .configure_mesh()
        .bold_line_style(BLACK.mix(0.1))
        .light_line_style(TRANSPARENT)
        .x_labels(13)
        .x_label_formatter(&|bytes| Size(*bytes as u64).to_string())
        .x_desc("bytes of a transfer (log scale)")
        .y_desc("GB/s (10\u{2079} bytes a second)")
        .label_style(FONT)
        .draw()?;
    for (index, one) in series.iter().enumerate() {
        let LineStyle { line, dash } = LineStyle::of(index, one);
        let Some((drawn, not)) = dash else {
            chart.draw_series(LineSeries::new(one.points.iter().copied(), line))?;
            let marked = |&place| EmptyElement::at(place) + Polygon::new(corners(index), line);
            chart.draw_series(one.points.iter().map(marked))?;
            continue;
        };
        let across = match one.points[..] {
            [(_, rate)] => &[(sizes.start, rate), (sizes.end, rate)],
            _ => &one.points[..],
        };
        for part in below(across, top) {
            chart.draw_series(DashedLineSeries::new(part, drawn, not, line))?;
        }
    }
    Ok(())
}

/// Draws the legend beside the chart, where it hides nothing.
fn legend(page: &Page<'_>, series: &[Series]) -> Result<()> {
    for (index, series) in series.iter().enumerate() {
        let look = LineStyle::of(index, series);
        let y = LEGEND_STEP * (index as i32 + 2);
        let ends = [(0, y), (30, y)];
        match look.dash {
            Some((drawn, not)) => {
                page.draw(&DashedPathElement::new(ends, drawn, not, look.line))?;
            }
            None => {
                page.draw(&PathElement::new(ends, look.line))?;
                page.draw(&(EmptyElement::at((15, y)) + Polygon::new(corners(index), look.line)))?;
            }
        }
        page.draw(&Text::new(series.label.as_str(), (38, y - 6), FONT))?;
    }
    Ok(())
}

/// How a line looks.
struct LineStyle {
    line: ShapeStyle,
    dash: Option<(i32, i32)>,
}

impl LineStyle {
    fn of(index: usize, series: &Series) -> Self {
        let (colour, dash) = match series.limit {
            true => {
                (LIMIT_COLOURS[index % LIMIT_COLOURS.len()], Some(DASHES[index % DASHES.len()]))
            }
            false => (COLOURS[index % COLOURS.len()], None),
        };
        Self { line: colour.filled().stroke_width(2), dash }
    }
}

/// The corners of a marker, around its point.
fn corners(index: usize) -> &'static [(i32, i32)] {
    const MARKERS: [&[(i32, i32)]; 4] = [
        &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
        &[(0, -5), (5, 0), (0, 5), (-5, 0)],
        &[(0, -5), (5, 4), (-5, 4)],
        &[(0, 5), (5, -4), (-5, -4)],
    ];
    MARKERS[index % MARKERS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::row;

    #[test]
    fn one_line_an_op_and_path() {
        let rows = [
            row("write", "cma", 1 << 20, 5.0),
            row("write", "cma", 64, 0.1),
            row("write", "tcp", 64, 0.2),
            row("memcpy", "raw", 64, 9.0),
        ];
        let series = series(&rows);
        let labels: Vec<_> = series.iter().map(|series| series.label.as_str()).collect();
        assert_eq!(labels, ["write cma", "write tcp", "raw memcpy"]);
        assert_eq!(series[0].points, [(64.0, 0.1), (1048576.0, 5.0)]);
        assert!(series[2].limit && !series[0].limit);
    }

    #[test]
    fn limits_far_above_leave_room_for_transfers() {
        let drawn = |limit: f64| {
            let rows = [row("write", "cma", 64, 4.0), row("memcpy", "raw", 64, limit)];
            highest(&series(&rows))
        };
        assert_eq!(drawn(100.0), 8.0);
        assert_eq!(drawn(5.0), 5.0);
        assert_eq!(highest(&series(&[row("memcpy", "raw", 64, 100.0)])), 100.0);
    }

    #[test]
    fn a_line_leaves_the_picture_and_comes_back() {
        let points = [(4.0, 5.0), (16.0, 15.0), (64.0, 15.0), (256.0, 5.0), (1024.0, 5.0)];
        let mut parts = below(&points, 10.0);
        parts.iter_mut().flatten().for_each(|point| point.0 = point.0.round());
        assert_eq!(parts[0], [(4.0, 5.0), (8.0, 10.0)]);
        assert_eq!(parts[1], [(128.0, 10.0), (256.0, 5.0), (1024.0, 5.0)]);
        assert_eq!(parts.len(), 2);
    }

    #[test]
    fn nothing_to_draw_is_still_a_picture() {
        for rows in [&[][..], &[row("write", "a<b>&c", 64, 0.0)][..]] {
            let svg = svg(rows, "a \"title\" & more").expect("a picture");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
            assert!(svg.contains("title&quot; &amp; more") && !svg.contains("a<b>"));
        }
    }
}
