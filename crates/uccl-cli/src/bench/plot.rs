//! The plot: GB/s against size as an SVG that any browser shows.

use std::fmt::Write;

use super::{report::Row, size::Size};

/// One line of the plot.
#[derive(Debug, PartialEq)]
struct Series {
    label: String,
    /// Bytes of a transfer, and GB/s.
    points: Vec<(f64, f64)>,
    /// A limit is drawn dashed, and across the whole width if it has one point.
    limit: bool,
}

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 230.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 64.0;
const LEGEND_STEP: f64 = 22.0;
/// Half of a marker's width.
const MARKER: f64 = 4.0;

/// Okabe and Ito's colours, told apart by the colour-blind too, without the yellow that white swallows.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#882255"];
const LIMIT_COLOURS: [&str; 4] = ["#555555", "#888888", "#a0764a", "#6b7fa3"];

/// Draws the rows that have a rate.
pub(crate) fn svg(rows: &[Row], title: &str) -> String {
    let series = series(rows);
    let axes = Axes::of(&series);
    let mut out = String::new();
    head(&mut out, title, HEIGHT.max(TOP + LEGEND_STEP * (series.len() as f64 + 1.0)));
    grid(&mut out, &axes);
    out.push_str("<g clip-path=\"url(#inside)\">\n");
    for (index, series) in series.iter().enumerate() {
        line(&mut out, &axes, series, &Style::of(index, series));
    }
    out.push_str("</g>\n");
    legend(&mut out, &series);
    out.push_str("</svg>\n");
    out
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

/// From values to places on the page.
struct Axes {
    /// Base-2 logarithms of the smallest and largest size.
    x: (f64, f64),
    y_top: f64,
    y_step: f64,
}

impl Axes {
    fn of(series: &[Series]) -> Self {
        let points = || series.iter().flat_map(|series| series.points.iter());
        let sizes = || points().map(|point| point.0.max(1.0).log2());
        let (low, high) = (sizes().fold(f64::MAX, f64::min), sizes().fold(f64::MIN, f64::max));
        let x = match low <= high {
            true if high - low >= 1.0 => (low, high),
            true => (low - 1.0, high + 1.0),
            false => (6.0, 26.0),
        };
        let most = highest(series);
        let y_step = nice_step(if most > 0.0 { most } else { 1.0 });
        Self { x, y_top: (most / y_step).ceil().max(1.0) * y_step, y_step }
    }

    fn x(&self, bytes: f64) -> f64 {
        let along = (bytes.max(1.0).log2() - self.x.0) / (self.x.1 - self.x.0);
        LEFT + along * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, rate: f64) -> f64 {
        HEIGHT - BOTTOM - rate / self.y_top * (HEIGHT - TOP - BOTTOM)
    }

    /// Powers of two to label, at most about twelve.
    fn ticks(&self) -> Vec<f64> {
        let (first, last) = (self.x.0.ceil() as i32, self.x.1.floor() as i32);
        let step = (last - first) as usize / 12 + 1;
        (first..=last).step_by(step).map(|power| f64::from(power).exp2()).collect()
    }
}

/// The rate that the plot must reach: all of the transfers', and as much of the limits' as leaves the
/// transfers half of the height. A copy within the cache would flatten them otherwise.
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

/// 1, 2 or 5 times a power of ten, so that four to ten of them cover `most`.
fn nice_step(most: f64) -> f64 {
    let rough = most / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough);
    step.unwrap_or(10.0) * power
}

/// How a line looks.
struct Style {
    colour: &'static str,
    marker: Marker,
    dash: &'static str,
}

#[derive(Clone, Copy)]
enum Marker {
    Circle,
    Diamond,
    None,
    Square,
    Triangle,
}

impl Style {
    fn of(index: usize, series: &Series) -> Self {
        const MARKERS: [Marker; 4] =
            [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Diamond];
        const DASHES: [&str; 3] = ["7 5", "2 4", "11 4 2 4"];
        match series.limit {
            true => Self {
                colour: LIMIT_COLOURS[index % LIMIT_COLOURS.len()],
                marker: Marker::None,
                dash: DASHES[index % DASHES.len()],
            },
            false => Self {
                colour: COLOURS[index % COLOURS.len()],
                marker: MARKERS[index % MARKERS.len()],
                dash: "none",
            },
        }
    }
}

fn head(out: &mut String, title: &str, height: f64) {
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <title>{title}</title>\n\
         <clipPath id=\"inside\"><rect x=\"{clip_x}\" y=\"{TOP}\" width=\"{clip_width}\" \
         height=\"{clip_height}\"/></clipPath>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"30\" font-size=\"16\" fill=\"#111111\">{title}</text>",
        title = escaped(title),
        // Markers on the edges stay whole.
        clip_x = LEFT - MARKER * 1.5,
        clip_width = WIDTH - LEFT - RIGHT + MARKER * 3.0,
        clip_height = HEIGHT - TOP - BOTTOM + MARKER * 1.5,
    );
}

fn grid(out: &mut String, axes: &Axes) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let steps = (axes.y_top / axes.y_step).round() as usize;
    let digits = (-axes.y_step.log10().floor()).max(0.0) as usize;
    for step in 0..=steps {
        let rate = step as f64 * axes.y_step;
        let y = axes.y(rate);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#e3e3e3\"/>\n\
             <text x=\"{x}\" y=\"{base:.1}\" text-anchor=\"end\" fill=\"#444444\">{rate:.digits$}</text>",
            x = LEFT - 8.0,
            base = y + 4.0,
        );
    }
    for bytes in axes.ticks() {
        let x = axes.x(bytes);
        let _ = writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#f0f0f0\"/>\n\
             <text x=\"{x:.1}\" y=\"{base}\" text-anchor=\"middle\" fill=\"#444444\">{size}</text>",
            base = bottom + 18.0,
            size = Size(bytes as u64),
        );
    }
    let (middle_x, middle_y) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#444444\"/>\n\
         <text x=\"{middle_x}\" y=\"{base}\" text-anchor=\"middle\" fill=\"#111111\">\
         bytes of a transfer (log scale)</text>\n\
         <text transform=\"translate(20 {middle_y}) rotate(-90)\" text-anchor=\"middle\" \
         fill=\"#111111\">GB/s (10\u{2079} bytes a second)</text>",
        base = HEIGHT - 18.0,
    );
}

fn line(out: &mut String, axes: &Axes, series: &Series, style: &Style) {
    let places: Vec<_> =
        series.points.iter().map(|&(bytes, rate)| (axes.x(bytes), axes.y(rate))).collect();
    let across = match places[..] {
        [(_, y)] if series.limit => vec![(LEFT, y), (WIDTH - RIGHT, y)],
        _ => places.clone(),
    };
    let _ = write!(out, "<g><title>{}</title>", escaped(&series.label));
    polyline(out, &across, style);
    places.iter().for_each(|&place| marker(out, place, style));
    out.push_str("</g>\n");
}

fn polyline(out: &mut String, places: &[(f64, f64)], style: &Style) {
    let points: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = write!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" \
         stroke-dasharray=\"{}\" stroke-linejoin=\"round\"/>",
        points.join(" "),
        style.colour,
        style.dash,
    );
}

fn marker(out: &mut String, (x, y): (f64, f64), style: &Style) {
    let r = MARKER;
    let corners: &[(f64, f64)] = match style.marker {
        Marker::None => return,
        Marker::Circle => {
            let _ = write!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\" fill=\"{}\"/>",
                style.colour
            );
            return;
        }
        Marker::Diamond => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
        Marker::Square => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        Marker::Triangle => &[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    };
    let corners = corners.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx * r, y + dy * r));
    let points = corners.collect::<Vec<_>>().join(" ");
    let _ = write!(out, "<polygon points=\"{points}\" fill=\"{}\"/>", style.colour);
}

fn legend(out: &mut String, series: &[Series]) {
    let x = WIDTH - RIGHT + 22.0;
    for (index, series) in series.iter().enumerate() {
        let y = TOP + 10.0 + LEGEND_STEP * index as f64;
        let style = Style::of(index, series);
        polyline(out, &[(x, y), (x + 30.0, y)], &style);
        marker(out, (x + 15.0, y), &style);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" fill=\"#111111\">{}</text>",
            x + 38.0,
            y + 4.0,
            escaped(&series.label),
        );
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::row;

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
    fn values_stay_on_the_page() {
        let rows = [row("write", "cma", 64, 0.001), row("write", "cma", 64 << 20, 19.9)];
        let axes = Axes::of(&series(&rows));
        assert_eq!((axes.x(64.0), axes.x((64u64 << 20) as f64)), (LEFT, WIDTH - RIGHT));
        assert_eq!((axes.y_step, axes.y_top), (5.0, 20.0));
        assert_eq!(axes.y(0.0), HEIGHT - BOTTOM);
        assert!(axes.y(19.9) >= TOP);
        assert!(axes.ticks().len() <= 13);
    }

    #[test]
    fn limits_far_above_leave_room_for_transfers() {
        let top = |limit: f64| {
            let rows = [row("write", "cma", 64, 4.0), row("memcpy", "raw", 64, limit)];
            Axes::of(&series(&rows)).y_top
        };
        assert_eq!(top(100.0), 8.0);
        assert_eq!(top(5.0), 5.0);
        assert_eq!(Axes::of(&series(&[row("memcpy", "raw", 64, 100.0)])).y_top, 100.0);
    }

    #[test]
    fn steps_are_nice() {
        for (most, step) in [(1.0, 0.2), (6.0, 1.0), (19.9, 5.0), (55.0, 10.0), (0.003, 0.0005)] {
            assert!((nice_step(most) - step).abs() < step * 1e-9, "{most}: {}", nice_step(most));
        }
    }

    #[test]
    fn nothing_to_draw_is_still_a_picture() {
        for rows in [&[][..], &[row("write", "a<b>&c", 64, 0.0)][..]] {
            let svg = svg(rows, "a \"title\" & more");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
            assert!(svg.contains("&quot;title&quot; &amp; more") && !svg.contains("a<b>"));
        }
    }
}
