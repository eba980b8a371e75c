//! A map as an SVG figure: a panel for each fleet, SLO and share of repeated images; cells by text length and images.

use super::{Map, MapAxes, Place};
use std::fmt::Write as _;

/// Side of a cell, and distances, in pixels.
const CELL: f64 = 44.0;
const GAP: f64 = 56.0;
const LEFT: f64 = 190.0;
const TOP: f64 = 104.0;
/// Ratio, and its inverse, from which on a cluster counts as ahead.
const AHEAD: f64 = 1.08;
/// Ratio of the full colour.
const FULL: f64 = 2.0;
/// Disaggregated ahead, colocated ahead, level, neither serves.
const COLOURS: [(f64, f64, f64); 2] = [(33.0, 102.0, 172.0), (178.0, 82.0, 24.0)];
const LEVEL: &str = "#e8e8e8";
const NEITHER: &str = "#ffffff";

/// Draws a map; cells that were not made are left out.
pub fn svg(title: &str, axes: &MapAxes, map: &Map) -> String {
    let panel = (axes.images.len() as f64 * CELL, axes.text.len() as f64 * CELL);
    let n_rows = axes.workers.len() * axes.slos.len();
    let width = LEFT + axes.reuse.len() as f64 * (panel.0 + GAP);
    let height = TOP + n_rows as f64 * (panel.1 + GAP) + 60.0;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#fff\"/>\n"
    );
    label(
        &mut out,
        (12.0, 24.0),
        "start",
        &format!("{title}: goodput of separate encoders over workers with both"),
    );
    label(
        &mut out,
        (12.0, 44.0),
        "start",
        "blue: separate encoders serve more; brown: workers with both do; grey: within 8 %",
    );
    for (column, reuse) in axes.reuse.iter().enumerate() {
        let x = LEFT + column as f64 * (panel.0 + GAP) + panel.0 / 2.0;
        label(&mut out, (x, TOP - 24.0), "middle", &format!("{:.0} % of images repeated", reuse * 100.0));
    }
    let rows = axes.workers.iter().flat_map(|workers| axes.slos.iter().map(move |slo| (*workers, slo)));
    for (row, (workers, slo)) in rows.enumerate() {
        let y = TOP + row as f64 * (panel.1 + GAP);
        label(&mut out, (12.0, y + 14.0), "start", &format!("{workers} workers"));
        for (i, part) in slo.to_string().split(',').enumerate() {
            label(&mut out, (12.0, y + 32.0 + 16.0 * i as f64), "start", &limit(part));
        }
        for (column, reuse) in axes.reuse.iter().enumerate() {
            let at = (LEFT + column as f64 * (panel.0 + GAP), y);
            let place = Place { workers, slo: slo.to_string(), reuse: *reuse, text: 0, images: 0 };
            draw_panel(&mut out, at, axes, (&place, map));
        }
    }
    label(&mut out, (LEFT, height - 20.0), "start", "across: images of a request; down: tokens of text");
    out.push_str("</svg>\n");
    out
}

/// `ttft=2000ms` as `TTFT 2000ms`.
fn limit(part: &str) -> String {
    part.split_once('=').map_or_else(|| part.to_owned(), |(name, at)| format!("{} {at}", name.to_uppercase()))
}

fn label(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

fn draw_panel(out: &mut String, (x0, y0): (f64, f64), axes: &MapAxes, (panel, map): (&Place, &Map)) {
    for (row, text) in axes.text.iter().enumerate() {
        let y = y0 + row as f64 * CELL;
        label(out, (x0 - 4.0, y + CELL / 2.0 + 4.0), "end", &text.to_string());
        for (column, images) in axes.images.iter().enumerate() {
            let x = x0 + column as f64 * CELL;
            if row == 0 {
                label(out, (x + CELL / 2.0, y0 - 4.0), "middle", &images.to_string());
            }
            let place = Place { text: *text, images: *images, ..panel.clone() };
            let Some(cell) = map.cell(&place) else { continue };
            let ratio = cell.ratio();
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" stroke=\"#ccc\"><title>{} \
                 {:.1}/s, both {:.1}/s</title></rect>",
                y + 2.0,
                CELL - 1.0,
                CELL - 1.0,
                colour(ratio),
                cell.disaggregated,
                cell.goodput,
                cell.colocated
            );
            label(out, (x + CELL / 2.0, y + CELL / 2.0 + 6.0), "middle", &ratio_text(ratio));
        }
    }
}

fn ratio_text(ratio: Option<f64>) -> String {
    match ratio {
        None => "none".to_owned(),
        Some(ratio) if ratio.is_infinite() => "only".to_owned(),
        Some(ratio) => format!("{ratio:.2}"),
    }
}

/// White to the colour of whoever is ahead.
fn colour(ratio: Option<f64>) -> String {
    let Some(ratio) = ratio else { return NEITHER.to_owned() };
    if (1.0 / AHEAD..=AHEAD).contains(&ratio) {
        return LEVEL.to_owned();
    }
    let (colour, ahead) = if ratio > 1.0 { (COLOURS[0], ratio) } else { (COLOURS[1], 1.0 / ratio) };
    // The darkest is still light enough for black text.
    let part = 0.15 + 0.5 * ((ahead.min(FULL) - 1.0) / (FULL - 1.0));
    let mixed = |full: f64| (255.0 - (255.0 - full) * part).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mixed(colour.0), mixed(colour.1), mixed(colour.2))
}

#[cfg(test)]
mod tests {
    use super::super::MapCell;
    use super::*;

    #[test]
    fn cells_are_coloured_by_who_is_ahead_and_missing_ones_left_out() {
        let slos = vec!["ttft=1s,tpot=50ms".parse().unwrap()];
        let axes =
            MapAxes { workers: vec![8], slos, reuse: vec![0.0], text: vec![400], images: vec![1, 2, 4, 8] };
        let made = axes.places().into_iter().take(3).zip([(2.0, 1.0), (1.0, 1.0), (0.0, 0.0)]);
        let cells = made.map(|(place, (goodput, colocated))| MapCell {
            place,
            disaggregated: "4e4pd".into(),
            goodput,
            colocated,
        });
        let text = svg("m<1>", &axes, &Map { cells: cells.collect() });
        assert_eq!(text.matches("<title>").count(), 3);
        assert!(text.contains(">2.00<") && text.contains(">1.00<") && text.contains(">none<"), "{text}");
        assert!(text.contains("m&lt;1>") && text.contains("TPOT 50ms") && text.contains(LEVEL));
        assert!(colour(Some(0.5)) != colour(Some(2.0)) && colour(Some(2.0)) == colour(Some(9.0)));
    }
}
