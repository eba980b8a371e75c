//! Content of a page.

use super::chart::spec::Chart;
use super::table::Table;

/// A page.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Its heading.
    pub title: String,
    /// A sentence or two under it.
    pub lead: String,
    /// Reasons to doubt the result, such as fewer requests than the rule requires.
    pub warnings: Vec<String>,
    /// Host, commit, flags: names and values.
    pub facts: Vec<(String, String)>,
    /// Sections in order.
    pub sections: Vec<Section>,
}

/// A part of a page.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its heading.
    pub heading: String,
    /// Introduction to its tables and charts.
    pub text: String,
    /// Tables, before the charts.
    pub tables: Vec<Table>,
    /// Charts.
    pub charts: Vec<Chart>,
}
