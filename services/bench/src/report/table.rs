//! Tables, in both forms.

use super::escape::escape;
use std::fmt::Write as _;

/// A table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Caption.
    pub caption: String,
    /// Names of the columns. The first one is of rows.
    pub columns: Vec<String>,
    /// The rows, each as long as `columns`.
    pub rows: Vec<Vec<Cell>>,
}

/// A table cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// It.
    pub text: String,
    /// Marks the best cell of its row.
    pub is_best: bool,
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, is_best: false }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Cell {
    /// The cell, marked as the best of its row.
    pub fn best(self) -> Self {
        Self { is_best: true, ..self }
    }
}

impl Table {
    pub(super) fn html(&self, out: &mut String) {
        // Writing to a String cannot fail.
        let _ =
            write!(out, "<div class=\"wide\"><table><caption>{}</caption><thead><tr>", escape(&self.caption));
        for column in &self.columns {
            let _ = write!(out, "<th scope=\"col\">{}</th>", escape(column));
        }
        out.push_str("</tr></thead><tbody>\n");
        for row in &self.rows {
            out.push_str("<tr>");
            for (i, cell) in row.iter().enumerate() {
                let text = escape(&cell.text);
                let _ = match (i, cell.is_best) {
                    (0, _) => write!(out, "<th scope=\"row\">{text}</th>"),
                    (_, true) => write!(out, "<td><b>{text}</b></td>"),
                    (_, false) => write!(out, "<td>{text}</td>"),
                };
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody></table></div>\n");
    }

    pub(super) fn markdown(&self, out: &mut String) {
        let plain = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        if !self.caption.is_empty() {
            let _ = writeln!(out, "{}\n", plain(&self.caption));
        }
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        out.push_str(&line(self.columns.iter().map(|c| plain(c)).collect()));
        let rules = (0..self.columns.len()).map(|i| if i == 0 { "---" } else { "---:" }.to_owned());
        out.push_str(&line(rules.collect()));
        for row in &self.rows {
            let cell = |cell: &Cell| match cell.is_best {
                true => format!("**{}**", plain(&cell.text)),
                false => plain(&cell.text),
            };
            out.push_str(&line(row.iter().map(cell).collect()));
        }
        out.push('\n');
    }
}
