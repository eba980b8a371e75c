//! Results as a page for people: self-contained HTML with charts, and Markdown with the same tables.
//!
//! A [`Report`] is the content of the page; the charts are SVG made here, so that they take their colours from
//! the page, light or dark, and need neither fonts nor scripts from elsewhere.

pub mod chart;
pub mod files;
mod cells;
mod content;
mod escape;
mod names;
mod page;
mod paired_table;
mod sweeps;
mod table;

pub use chart::{Axis, Bar, BarChart, Chart, Limit, LineChart, Scale, Series, Stroke};
pub use content::{Report, Section};
pub use table::{Cell, Table};

impl Report {
    /// One HTML file.
    pub fn to_html(&self) -> String {
        page::html(self)
    }

    /// Markdown without the charts.
    pub fn to_markdown(&self) -> String {
        page::markdown(self)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use sweeps::tests as tests_support;
