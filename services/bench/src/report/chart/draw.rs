//! SVG of the charts. Text is laid out by its number of letters: fonts are the reader's.

use super::scale::{AxisRange, number};
use super::spec::{Axis, Bar, BarChart, Limit, LineChart, Series, Stroke};
use crate::report::escape::escape;
use std::fmt::Write as _;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
/// Room for the names of limits that are short.
const RIGHT: f64 = 42.0;
/// Longer names stand in the drawing.
const SHORT_NAME: usize = 6;
const BOTTOM: f64 = 50.0;
/// Width of a letter in legends and ticks.
const LETTER: f64 = 6.2;
const LINE: f64 = 19.0;
/// Height of the title.
const TITLE: f64 = 24.0;
const N_COLOURS: usize = 7;

/// Colours and strokes of all charts.
pub const STYLE: &str = "
.chart text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink,#1c2024)}
.chart .title{font-size:14px;font-weight:600}.chart .tick{fill:var(--soft,#60676f);font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--rule,#d8dce1);stroke-width:1}.chart .axis{stroke:var(--soft,#60676f);stroke-width:1}
.chart .limit{stroke:var(--ink,#1c2024);stroke-width:1.2;stroke-dasharray:2 4}
.chart .note{paint-order:stroke;stroke:var(--ground,#fff);stroke-width:4px;stroke-linejoin:round}
.chart .line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.chart .dashed{stroke-dasharray:6 4}
.chart .band{fill:var(--c);opacity:.14}.chart .mark{fill:var(--c);stroke:var(--ground,#fff);stroke-width:1}
.chart .bar{fill:var(--c);stroke:var(--ground,#fff);stroke-width:.7}
.c0{--c:#0072b2}.c1{--c:#d55e00}.c2{--c:#009e73}.c3{--c:#cc79a7}.c4{--c:#e69f00}.c5{--c:#56b4e9}.c6{--c:#8c8c8c}
@media(prefers-color-scheme:dark){.c0{--c:#4aa3df}.c1{--c:#f07b2e}.c2{--c:#2fc197}}
";

/// A chart under construction.
struct Canvas {
    out: String,
    top: f64,
}

impl Canvas {
    /// The title, and a legend in as many lines as it needs.
    fn new(title: &str, legend: &[(String, usize, Option<Stroke>)]) -> Self {
        let mut canvas = Self { out: String::new(), top: TITLE };
        let _ = write!(canvas.out, "<text class=\"title\" x=\"0\" y=\"15\">{}</text>", escape(title));
        let mut x = 0.0;
        for (name, place, stroke) in legend {
            let width = 30.0 + LETTER * name.chars().count() as f64;
            if x > 0.0 && x + width > WIDTH {
                (x, canvas.top) = (0.0, canvas.top + LINE);
            }
            canvas.key(x, *place, *stroke);
            let _ = write!(
                canvas.out,
                "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 24.0,
                canvas.top + 13.0,
                escape(name)
            );
            x += width + 12.0;
        }
        canvas.top += LINE + 10.0;
        canvas
    }

    /// Key of a series in the legend.
    fn key(&mut self, x: f64, place: usize, stroke: Option<Stroke>) {
        let colour = place % N_COLOURS;
        let y = self.top + 9.0;
        match stroke {
            None => {
                let _ = write!(
                    self.out,
                    "<rect class=\"bar c{colour}\" x=\"{:.1}\" y=\"{:.1}\" width=\"14\" height=\"12\"/>",
                    x + 4.0,
                    y - 6.0
                );
            }
            Some(stroke) => {
                let class = if stroke == Stroke::Dashed { "line dashed" } else { "line" };
                let _ = write!(self.out, "<path class=\"{class} c{colour}\" d=\"M{x:.1} {y:.1}h20\"/>");
                if stroke != Stroke::Plain {
                    self.mark(x + 10.0, y, place);
                }
            }
        }
    }

    fn mark(&mut self, x: f64, y: f64, place: usize) {
        let colour = place % N_COLOURS;
        let _ = match place % 4 {
            0 => write!(self.out, "<circle class=\"mark c{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>"),
            1 => write!(
                self.out,
                "<rect class=\"mark c{colour}\" x=\"{:.1}\" y=\"{:.1}\" width=\"7.4\" height=\"7.4\"/>",
                x - 3.7,
                y - 3.7
            ),
            2 => write!(
                self.out,
                "<path class=\"mark c{colour}\" d=\"M{x:.1} {:.1}l4.8 8.4h-9.6z\"/>",
                y - 5.2
            ),
            _ => write!(
                self.out,
                "<path class=\"mark c{colour}\" d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\"/>",
                y - 5.0
            ),
        };
    }

    fn x_at(place: f64) -> f64 {
        LEFT + place * (WIDTH - LEFT - RIGHT)
    }

    fn y_at(&self, place: f64) -> f64 {
        HEIGHT - BOTTOM - place * (HEIGHT - BOTTOM - self.top)
    }

    /// The grid, ticks and name of the vertical axis, and the horizontal one's name.
    fn axes(&mut self, y: &AxisRange, y_label: &str, x_label: &str) {
        for tick in &y.ticks {
            let at = self.y_at(y.place(*tick).unwrap_or(0.0));
            let _ = write!(
                self.out,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                at + 4.0,
                number(*tick)
            );
        }
        let middle = (self.top + HEIGHT - BOTTOM) / 2.0;
        let _ = write!(
            self.out,
            "<path class=\"axis\" d=\"M{LEFT} {:.1}H{:.1}\"/>\
             <text transform=\"translate(14 {middle:.1})rotate(-90)\" text-anchor=\"middle\">{}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            WIDTH - RIGHT,
            escape(y_label),
            Self::x_at(0.5),
            HEIGHT - 8.0,
            escape(x_label)
        );
    }

    fn limits(&mut self, y: &AxisRange, limits: &[Limit]) {
        for limit in limits {
            let Some(place) = y.place(limit.at).filter(|place| (0.0..=1.0).contains(place)) else { continue };
            let at = self.y_at(place);
            let (x, y) = match limit.label.chars().count() <= SHORT_NAME {
                true => (WIDTH - RIGHT + 5.0, at + 4.0),
                false if at - self.top < 16.0 => (LEFT + 6.0, at + 14.0),
                false => (LEFT + 6.0, at - 5.0),
            };
            let _ = write!(
                self.out,
                "<path class=\"limit\" d=\"M{LEFT} {at:.1}H{:.1}\"/><text class=\"note\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
                WIDTH - RIGHT,
                escape(&limit.label)
            );
        }
    }

    fn end(self, title: &str) -> String {
        format!(
            "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">{}</svg>",
            escape(title),
            self.out
        )
    }
}

fn span(axis: &Axis, values: impl Iterator<Item = f64>) -> AxisRange {
    AxisRange::new(axis.scale, values)
}

pub(super) fn lines(lines: &LineChart) -> String {
    let mut named: Vec<(String, usize, Option<Stroke>)> = Vec::new();
    for series in &lines.series {
        if !named.iter().any(|(name, ..)| *name == series.name) {
            named.push((series.name.clone(), series.place, Some(series.stroke)));
        }
    }
    let mut canvas = Canvas::new(&lines.title, &named);
    let x = span(&lines.x, lines.series.iter().flat_map(|s| s.points.iter().map(|(x, _)| *x)));
    let values = lines.series.iter().flat_map(|s| s.points.iter().map(|(_, y)| *y));
    let y = span(&lines.y, values.chain(lines.limits.iter().map(|limit| limit.at)));
    canvas.axes(&y, &lines.y.label, &lines.x.label);
    for tick in &x.ticks {
        let at = Canvas::x_at(x.place(*tick).unwrap_or(0.0));
        let _ = write!(
            canvas.out,
            "<path class=\"axis\" d=\"M{at:.1} {:.1}v5\"/><text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 19.0,
            number(*tick)
        );
    }
    lines.series.iter().for_each(|one| series(&mut canvas, one, (&x, &y)));
    canvas.limits(&y, &lines.limits);
    canvas.end(&lines.title)
}

fn series(canvas: &mut Canvas, series: &Series, (x, y): (&AxisRange, &AxisRange)) {
    let colour = series.place % N_COLOURS;
    let at = |px: f64, py: f64| {
        let px = x.place(px)?;
        let py = y.place(py)?;
        Some((Canvas::x_at(px), canvas.y_at(py.clamp(0.0, 1.0))))
    };
    let places: Vec<(f64, f64)> = series.points.iter().filter_map(|(px, py)| at(*px, *py)).collect();
    let bands = series.points.iter().zip(&series.bands);
    let bands: Vec<_> =
        bands.filter_map(|((px, _), (low, high))| Some((at(*px, *low)?, at(*px, *high)?))).collect();
    let path = |places: &mut dyn Iterator<Item = (f64, f64)>| {
        places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect::<Vec<_>>().join("L")
    };
    if bands.len() > 1 {
        let mut around = bands.iter().map(|(low, _)| *low).chain(bands.iter().rev().map(|(_, high)| *high));
        let _ = write!(canvas.out, "<path class=\"band c{colour}\" d=\"M{}z\"/>", path(&mut around));
    }
    if places.len() > 1 {
        let class = if series.stroke == Stroke::Dashed { "line dashed" } else { "line" };
        let _ = write!(
            canvas.out,
            "<path class=\"{class} c{colour}\" d=\"M{}\"/>",
            path(&mut places.iter().copied())
        );
    }
    if series.stroke != Stroke::Plain {
        for (px, py) in places {
            canvas.mark(px, py, series.place);
        }
    }
}

pub(super) fn bars(bars: &BarChart) -> String {
    let legend: Vec<_> = bars.parts.iter().enumerate().map(|(i, name)| (name.clone(), i, None)).collect();
    let mut canvas = Canvas::new(&bars.title, &legend);
    let sums = bars.groups.iter().flat_map(|(_, bars)| bars.iter().map(Bar::sum));
    let y = span(&bars.y, sums.chain(bars.limits.iter().map(|limit| limit.at)));
    canvas.axes(&y, &bars.y.label, &bars.x_label);
    let names_fit = bars.groups.iter().all(|(_, bars)| bars.len() > 1);
    let width = 1.0 / bars.groups.len().max(1) as f64;
    for (i, (name, group)) in bars.groups.iter().enumerate() {
        let middle = (i as f64 + 0.5) * width;
        let _ = write!(
            canvas.out,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            Canvas::x_at(middle),
            HEIGHT - BOTTOM + 19.0,
            escape(name)
        );
        let own = width * 0.82 / group.len().max(1) as f64;
        for (j, bar) in group.iter().enumerate() {
            let left = i as f64 * width + width * 0.09 + j as f64 * own;
            stack(&mut canvas, bar, &y, (left, own * 0.9));
            if names_fit {
                let at = Canvas::x_at(left + own * 0.45);
                let top = canvas.y_at(y.place(bar.sum()).unwrap_or(0.0));
                let short = own * (WIDTH - LEFT - RIGHT) < LETTER * bar.name.chars().count() as f64;
                let turn = if short { "rotate(-90)" } else { "" };
                let anchor = if short { "start" } else { "middle" };
                let dx = if short { 4.0 } else { 0.0 };
                let _ = write!(
                    canvas.out,
                    "<text class=\"tick note\" transform=\"translate({:.1} {:.1}){turn}\" text-anchor=\"{anchor}\">{}</text>",
                    at + dx,
                    top - 5.0,
                    escape(&bar.name)
                );
            }
        }
    }
    canvas.limits(&y, &bars.limits);
    canvas.end(&bars.title)
}

fn stack(canvas: &mut Canvas, bar: &Bar, y: &AxisRange, (left, width): (f64, f64)) {
    let x = Canvas::x_at(left);
    let wide = Canvas::x_at(left + width) - Canvas::x_at(left);
    let mut below = 0.0;
    for (part, value) in bar.values.iter().enumerate() {
        let value = if value.is_finite() { value.max(0.0) } else { 0.0 };
        let from = y.place(below);
        let to = y.place(below + value);
        below += value;
        if let (Some(from), Some(to)) = (from, to) {
            let bottom = canvas.y_at(from.min(1.0));
            let top = canvas.y_at(to.min(1.0));
            let _ = write!(
                canvas.out,
                "<rect class=\"bar c{}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"{:.1}\"/>",
                part % N_COLOURS,
                (bottom - top).max(0.0)
            );
        }
    }
}

impl Bar {
    fn sum(&self) -> f64 {
        self.values.iter().filter(|v| v.is_finite() && **v > 0.0).sum()
    }
}
