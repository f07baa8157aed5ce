//! The picture: completion times and queues as an SVG that any browser shows.

use anyhow::Result;
use plotters::{coord::Shift, prelude::*};
use uccl_bench::palette::{COLOURS, FONT};
use uccl_sim::GroupReport;

use super::Run;

type Page<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A line of a chart.
struct Series {
    label: String,
    points: Vec<(f64, f64)>,
}

const SIZE: (u32, u32) = (1100, 480);
const CHART_WIDTH: u32 = 420;
const LEGEND_STEP: i32 = 20;
const TITLE_SIZE: i32 = 15;

/// Draws the completion times of all groups, and the queues of all runs.
pub(super) fn svg(runs: &[Run], title: &str) -> Result<String> {
    let times: Vec<_> = runs
        .iter()
        .flat_map(|run| run.report.groups.iter().map(move |group| of_group(run, group)))
        .collect();
    let queues: Vec<_> = runs.iter().map(of_queue).collect();
    let height = SIZE.1.max(LEGEND_STEP as u32 * (times.len() as u32 + 4));
    let mut out = String::new();
    let page = SVGBackend::with_string(&mut out, (SIZE.0, height)).into_drawing_area();
    page.fill(&WHITE)?;
    let (left, rest) = page.split_horizontally(CHART_WIDTH);
    let (middle, right) = rest.split_horizontally(CHART_WIDTH);
    chart(&left, &times, title, ("time of a message / ideal", "part of the messages"))?;
    chart(&middle, &queues, "longest queue of a switch", ("microseconds", "KiB"))?;
    legend(&right, &times)?;
    page.present()?;
    drop((left, middle, right, rest, page));
    Ok(out)
}

fn of_group(run: &Run, group: &GroupReport) -> Series {
    let count = group.slowdowns.len() as f64;
    let steps = group.slowdowns.iter().enumerate();
    let points = steps.map(|(at, slowdown)| (*slowdown, (at + 1) as f64 / count)).collect();
    let paths = if run.paths == 1 { "1 path".to_owned() } else { format!("{} paths", run.paths) };
    Series { label: format!("{}, {paths}", group.name), points }
}

fn of_queue(run: &Run) -> Series {
    let timeline = &run.report.queue_timeline;
    let part_us = run.report.elapsed_us / timeline.len().max(1) as f64;
    let parts = timeline.iter().enumerate();
    let points = parts.map(|(at, bytes)| (at as f64 * part_us, *bytes as f64 / 1024.0)).collect();
    Series { label: String::new(), points }
}

fn chart(page: &Page<'_>, series: &[Series], title: &str, axes: (&str, &str)) -> Result<()> {
    let points = || series.iter().flat_map(|series| &series.points);
    let low = points().map(|point| point.0).fold(f64::MAX, f64::min).min(1.0);
    let right = points().map(|point| point.0).fold(low + 1e-3, f64::max);
    let top = points().map(|point| point.1).fold(1e-3, f64::max);
    let mut chart = ChartBuilder::on(page)
        .caption(title, (FONT.0, TITLE_SIZE))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(low..right * 1.02, 0.0..top * 1.05)?;
    chart
        .configure_mesh()
        .bold_line_style(BLACK.mix(0.1))
        .light_line_style(TRANSPARENT)
        .x_desc(axes.0)
        .y_desc(axes.1)
        .label_style(FONT)
        .draw()?;
    for (index, one) in series.iter().enumerate() {
        chart.draw_series(LineSeries::new(one.points.iter().copied(), style(index)))?;
    }
    Ok(())
}

fn legend(page: &Page<'_>, series: &[Series]) -> Result<()> {
    for (index, one) in series.iter().enumerate() {
        let y = LEGEND_STEP * (index as i32 + 2);
        page.draw(&PathElement::new([(4, y), (28, y)], style(index)))?;
        page.draw(&Text::new(one.label.as_str(), (34, y - 6), FONT))?;
    }
    Ok(())
}

fn style(index: usize) -> ShapeStyle {
    COLOURS[index % COLOURS.len()].filled().stroke_width(2)
}

#[cfg(test)]
mod tests {
    use uccl_sim::{Scenario, Simulation};

    use super::*;

    #[test]
    fn runs_are_drawn_and_nothing_is_still_a_picture() {
        let scenario = Scenario { message_bytes: 10_000, ..Scenario::default() };
        let simulation = Simulation::named(&scenario, "round-robin", "time", "fixed");
        let report = simulation.expect("a scenario").run(|_| ());
        for runs in [Vec::new(), vec![Run { paths: 16, report }]] {
            let svg = svg(&runs, "a <title>").expect("a picture");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
            assert!(!svg.contains("NaN") && !svg.contains("<title>"));
            assert_eq!(svg.contains("16 paths"), !runs.is_empty());
        }
    }
}
