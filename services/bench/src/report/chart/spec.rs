//! Contents of charts.

use super::scale::Scale;

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Quantity and unit.
    pub label: String,
    /// Scale of the values.
    pub scale: Scale,
}

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub enum Chart {
    /// Lines.
    Lines(LineChart),
    /// Bars.
    Bars(BarChart),
}

/// Lines over an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct LineChart {
    /// Title.
    pub title: String,
    /// Width.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// The lines; colour and mark depend on [`Series::place`].
    pub series: Vec<Series>,
    /// Limits of `y`.
    pub limits: Vec<Limit>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Index of colour and mark; lines with the same index differ by their stroke.
    pub place: usize,
    /// Stroke of the line.
    pub stroke: Stroke,
    /// `x` and `y`, from left to right. What is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// Lowest and highest `y` of the same points, of an interval or of several seeds; empty: not shown.
    pub bands: Vec<(f64, f64)>,
}

/// Stroke of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// Solid, with marks at its points.
    Marked,
    /// Dashed, with marks.
    Dashed,
    /// Without marks, as of many points.
    Plain,
}

/// A limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// Its shape.
    pub label: String,
    /// Value of the limit.
    pub at: f64,
}

/// Stacked bars, in groups.
#[derive(Clone, Debug, PartialEq)]
pub struct BarChart {
    /// Title.
    pub title: String,
    /// Quantity of the groups.
    pub x_label: String,
    /// Vertical axis.
    pub y: Axis,
    /// Names of the stacked parts, from below.
    pub parts: Vec<String>,
    /// The groups from left to right: a name, and its bars.
    pub groups: Vec<(String, Vec<Bar>)>,
    /// Limits of the sums.
    pub limits: Vec<Limit>,
}

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Name of the bar.
    pub name: String,
    /// Values of the parts.
    pub values: Vec<f64>,
}
