//! Results as a page for people: self-contained HTML with drawings, and Markdown with the same tables.
//!
//! A [`Report`] is what stands on the page; the drawings are SVG of our own making, so that they take their colours from
//! the page, light or dark, and need neither fonts nor scripts from elsewhere.

pub mod chart;
mod page;
mod sweeps;
mod table;

pub use chart::{Axis, Bar, Bars, Chart, Limit, Lines, Scale, Series, Stroke};
pub use table::{Cell, Table};

/// A page.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Its heading.
    pub title: String,
    /// A sentence or two under it.
    pub lead: String,
    /// What somebody must know who believes it, such as that it was shorter than the rule.
    pub warnings: Vec<String>,
    /// Host, commit, flags: names and values.
    pub facts: Vec<(String, String)>,
    /// What stands under it, in order.
    pub sections: Vec<Section>,
}

/// A part of a page.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its heading.
    pub heading: String,
    /// What is seen in it, and how to read it.
    pub text: String,
    /// Tables, before the drawings.
    pub tables: Vec<Table>,
    /// Drawings.
    pub charts: Vec<Chart>,
}

impl Report {
    /// As one file of HTML.
    pub fn to_html(&self) -> String {
        page::html(self)
    }

    /// As Markdown: everything but the drawings.
    pub fn to_markdown(&self) -> String {
        page::markdown(self)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use sweeps::tests as tests_support;
