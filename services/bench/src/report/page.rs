//! The page around tables and charts.

use super::content::{Report, Section};
use super::escape::escape;
use std::fmt::Write as _;

/// Colours are the reader's: light or dark as the system says. Series have the palette of Okabe and Ito, which people
/// with any colour vision tell apart, on both grounds.
const STYLE: &str = "
:root{color-scheme:light dark;--ground:#fff;--ink:#1c2024;--soft:#60676f;--rule:#d8dce1;--wash:#f4f6f8;--warn:#b54700}
@media(prefers-color-scheme:dark){:root{--ground:#15181b;--ink:#e6e8ea;--soft:#a0a7ae;--rule:#3a4046;--wash:#1e2226;--warn:#ffab66}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:86rem;padding:2rem 1.5rem 4rem;background:var(--ground);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:1.8rem;line-height:1.2;margin:0 0 .4rem}h2{font-size:1.25rem;margin:2.6rem 0 .4rem}
p{max-width:62rem;margin:.4rem 0 1rem}.soft{color:var(--soft)}
.warn{border-left:4px solid var(--warn);background:var(--wash);padding:.6rem .9rem;max-width:62rem}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem}
caption{text-align:left;color:var(--soft);padding-bottom:.35rem}
th,td{padding:.28rem .75rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
thead th{border-bottom:2px solid var(--rule)}th:first-child{text-align:left}tbody th{font-weight:500}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;font-size:.92rem;margin:1rem 0}
dt{color:var(--soft)}dd{margin:0;max-width:62rem;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));gap:1.4rem}
figure{margin:0}svg{width:100%;height:auto;display:block}
@media print{body{max-width:none}figure{break-inside:avoid}}
";

pub(super) fn html(report: &Report) -> String {
    let title = escape(&report.title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title>\n<style>{STYLE}{}</style></head><body>\n<h1>{title}</h1>\n<p>{}</p>\n",
        super::chart::STYLE,
        escape(&report.lead)
    );
    for warning in &report.warnings {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "<p class=\"warn\">{}</p>", escape(warning));
    }
    for section in &report.sections {
        section_html(section, &mut out);
    }
    if !report.facts.is_empty() {
        out.push_str("<h2>How it was measured</h2>\n<dl>");
        for (name, value) in &report.facts {
            let _ = write!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
        }
        out.push_str("</dl>\n");
    }
    out.push_str("</body></html>\n");
    out
}

fn section_html(section: &Section, out: &mut String) {
    let _ = writeln!(out, "<section><h2>{}</h2>", escape(&section.heading));
    if !section.text.is_empty() {
        let _ = writeln!(out, "<p class=\"soft\">{}</p>", escape(&section.text));
    }
    section.tables.iter().for_each(|table| table.html(out));
    if !section.charts.is_empty() {
        out.push_str("<div class=\"charts\">\n");
        for chart in &section.charts {
            let _ = writeln!(out, "<figure>{}</figure>", chart.svg());
        }
        out.push_str("</div>\n");
    }
    out.push_str("</section>\n");
}

pub(super) fn markdown(report: &Report) -> String {
    let mut out = format!("# {}\n\n{}\n\n", report.title, report.lead);
    for warning in &report.warnings {
        let _ = writeln!(out, "> {warning}\n");
    }
    for section in &report.sections {
        let _ = writeln!(out, "## {}\n", section.heading);
        if !section.text.is_empty() {
            let _ = writeln!(out, "{}\n", section.text);
        }
        section.tables.iter().for_each(|table| table.markdown(&mut out));
    }
    if !report.facts.is_empty() {
        out.push_str("## How it was measured\n\n");
        for (name, value) in &report.facts {
            let _ = writeln!(out, "- {name}: {value}");
        }
    }
    out
}
