//! Drawings: lines over an axis with a unit, and stacked bars. Each says what it shows, has both axes named, a legend, and
//! the limits that what is shown is held against.

mod draw;
mod scale;

pub use draw::STYLE;
pub use scale::Scale;

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// What is along it, with its unit.
    pub label: String,
    /// How.
    pub scale: Scale,
}

/// A drawing.
#[derive(Clone, Debug, PartialEq)]
pub enum Chart {
    /// Lines.
    Lines(Lines),
    /// Bars.
    Bars(Bars),
}

/// Lines over an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// What is shown.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// The lines; a line's colour and mark are its place's.
    pub series: Vec<Series>,
    /// What `y` is held against.
    pub limits: Vec<Limit>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend; the same colour as others of the name's place.
    pub name: String,
    /// Which colour and mark; lines of one place differ by their stroke.
    pub place: usize,
    /// How it is drawn.
    pub stroke: Stroke,
    /// `x` and `y`, from left to right. What is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// Lowest and highest `y` of the same points, of an interval or of several seeds; empty: not shown.
    pub bands: Vec<(f64, f64)>,
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// With marks at its points.
    Marked,
    /// Dashed, with marks.
    Dashed,
    /// Without marks, as of many points.
    Plain,
}

/// A limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// What it is.
    pub label: String,
    /// Where.
    pub at: f64,
}

/// Stacked bars, in groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// What the groups are.
    pub x_label: String,
    /// Upwards.
    pub y: Axis,
    /// What the bars are made of, from below.
    pub parts: Vec<String>,
    /// The groups from left to right: a name, and its bars.
    pub groups: Vec<(String, Vec<Bar>)>,
    /// What the sums are held against.
    pub limits: Vec<Limit>,
}

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// What it is of.
    pub name: String,
    /// As many as there are parts.
    pub values: Vec<f64>,
}

impl Chart {
    /// As SVG, to stand in a page with [`STYLE`].
    pub fn svg(&self) -> String {
        match self {
            Self::Lines(lines) => draw::lines(lines),
            Self::Bars(bars) => draw::bars(bars),
        }
    }
}
