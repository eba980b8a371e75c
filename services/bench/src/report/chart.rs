//! Charts: lines over an axis with a unit, and stacked bars. Each has a title, named axes, a legend, and
//! the limits that what is shown is held against.

mod draw;
mod scale;
pub mod spec;

pub use draw::STYLE;
pub use scale::Scale;
pub use spec::{Axis, Bar, BarChart, Chart, Limit, LineChart, Series, Stroke};

impl Chart {
    /// SVG for a page with [`STYLE`].
    pub fn svg(&self) -> String {
        match self {
            Self::Lines(lines) => draw::lines(lines),
            Self::Bars(bars) => draw::bars(bars),
        }
    }
}
