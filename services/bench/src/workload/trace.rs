//! A trace from a file: CSV with the columns `timestamp,text_tokens,output_tokens,items`.
//!
//! - `timestamp`: seconds from any origin, never decreasing;
//! - `text_tokens`, `output_tokens`: integers, the second at least 1;
//! - `items`: empty, or parts with spaces between them: `640x480` is an image, `2.5s` an audio clip; `640x480#7` is
//!   content 7 of that shape, the same bytes in every row that says so. Without a number it is new each time.
//!
//! Lines that begin with `#`, and empty ones, are skipped. The trace is stretched to the rate that is asked for, with
//! its gaps in proportion, and begins again, with other contents, when it is over.

use super::draw::{audio_clip, side};
use super::lines;
use crate::arrivals::{Arrivals, at};
use crate::offered::{ItemShape, Offered, OfferedItem, TextBlocks};
use crate::seed::mix;
use crate::text::TextError;
use std::sync::Arc;

const HEADER: &str = "timestamp,text_tokens,output_tokens,items";
/// The longest prompt or answer of a row, in tokens.
pub(super) const MAX_TOKENS: u32 = 1 << 20;

/// A file's rows.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    rows: Arc<[TraceRow]>,
    /// Time from its first row to the first row of its repetition, in seconds.
    length_s: f64,
}

/// A request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TraceRow {
    pub(super) at_s: f64,
    pub(super) text_tokens: u32,
    pub(super) output_tokens: u32,
    /// Shapes, and the numbers of contents that other rows have too.
    pub(super) items: Vec<(ItemShape, Option<u64>)>,
    pub(super) blocks: Option<TextBlocks>,
}

impl Trace {
    pub(super) fn read(file: &str) -> Result<Self, TextError> {
        lines::read(file, Self::parse)
    }

    fn parse(input: impl std::io::BufRead) -> Result<Self, String> {
        let mut before_s = f64::NEG_INFINITY;
        let rows = lines::rows(input, Some(HEADER), |line| {
            let row = row(line, before_s)?;
            before_s = row.at_s;
            Ok(row)
        })?;
        Self::of(rows)
    }

    /// A trace of rows in the order of their times.
    ///
    /// # Errors
    /// Fewer than two rows at different times.
    pub(super) fn of(mut rows: Vec<TraceRow>) -> Result<Self, String> {
        let (first, last) = match (rows.first(), rows.last()) {
            (Some(first), Some(last)) if last.at_s > first.at_s => (first.at_s, last.at_s),
            _ => return Err("has fewer than two rows at different times".to_owned()),
        };
        // One mean gap after the last row the first one comes again.
        let length_s = (last - first) * rows.len() as f64 / (rows.len() - 1) as f64;
        rows.iter_mut().for_each(|row| row.at_s -= first);
        Ok(Self { rows: rows.into(), length_s })
    }

    /// The rows at `rate` a second in the mean; arrivals other than its own keep the rows and replace their times.
    pub(super) fn requests(
        &self,
        rate: f64,
        arrivals: Arrivals,
        seed: u64,
    ) -> impl Iterator<Item = Offered> + Send + use<> {
        let Self { rows, length_s } = self.clone();
        let stretch = rows.len() as f64 / length_s / rate;
        let mut times = (arrivals != Arrivals::Own).then(|| arrivals.times(rate, seed, 0));
        (0u64..).map(move |k| {
            let lap = k / rows.len() as u64;
            let i = (k % rows.len() as u64) as usize;
            let own = (rows[i].at_s + lap as f64 * length_s) * stretch;
            let t = times.as_mut().and_then(Iterator::next).unwrap_or(own);
            rows[i].offered(t, mix(seed) ^ mix(lap), k)
        })
    }
}

impl TraceRow {
    fn offered(&self, t: f64, salt: u64, row: u64) -> Offered {
        let items = self.items.iter().enumerate().map(|(i, (shape, known))| {
            let content = known.map_or_else(|| mix(mix(row) ^ (i as u64 + 1)), |known| known);
            OfferedItem { content: mix(salt ^ mix(content)), shape: *shape }
        });
        Offered {
            index: 0,
            at: at(t),
            text_tokens: self.text_tokens,
            output_tokens: self.output_tokens,
            items: items.collect(),
            session: None,
            blocks: self.blocks.as_ref().map(|blocks| TextBlocks {
                tokens: blocks.tokens,
                ids: blocks.ids.iter().map(|id| mix(salt ^ mix(*id))).collect(),
            }),
            slo: None,
        }
    }
}

fn row(line: &str, before_s: f64) -> Result<TraceRow, String> {
    let columns: Vec<&str> = line.split(',').map(str::trim).collect();
    let [timestamp, text, output, items] = columns[..] else {
        return Err(format!("has {} columns, not 4", columns.len()));
    };
    let at_s: f64 = timestamp
        .parse()
        .ok()
        .filter(|t: &f64| t.is_finite())
        .ok_or_else(|| format!("timestamp {timestamp:?} is no number of seconds"))?;
    if at_s < before_s {
        return Err(format!("timestamp {at_s} is before {before_s} of the row before"));
    }
    let tokens = |name: &str, text: &str, least: u32| {
        let n = text.parse().ok().filter(|n| (least..=MAX_TOKENS).contains(n));
        n.ok_or_else(|| format!("{name} {text:?} is no integer from {least} to {MAX_TOKENS}"))
    };
    let text_tokens = tokens("text_tokens", text, 0)?;
    let output_tokens = tokens("output_tokens", output, 1)?;
    let items = items.split_whitespace().map(item).collect::<Result<Vec<_>, _>>()?;
    if text_tokens == 0 && items.is_empty() {
        return Err("has neither text nor items".to_owned());
    }
    Ok(TraceRow { at_s, text_tokens, output_tokens, items, blocks: None })
}

fn item(text: &str) -> Result<(ItemShape, Option<u64>), String> {
    let wrong = || format!("item {text:?} is none of 640x480, 640x480#7, 2.5s, 2.5s#7");
    let (shape, content) = match text.split_once('#') {
        Some((shape, content)) => (shape, Some(content.parse().map_err(|_| wrong())?)),
        None => (text, None),
    };
    let shape = match (shape.strip_suffix('s'), shape.split_once('x')) {
        (Some(seconds), _) => seconds.parse().ok().and_then(audio_clip),
        (_, Some((width, height))) => {
            side(width).zip(side(height)).map(|(width, height)| ItemShape::Image { width, height })
        }
        _ => None,
    };
    Ok((shape.ok_or_else(wrong)?, content))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rows: &str) -> Result<Trace, String> {
        Trace::parse(format!("# from somewhere\n{HEADER}\n{rows}").as_bytes())
    }

    #[test]
    fn rows_become_requests_at_the_rate_that_is_asked_for() {
        let trace = parse("10,5,7,\n10.5,0,9,640x480#3 2.5s\n13,1,1,640x480#3\n").expect("three good rows");
        let all: Vec<_> = trace.requests(2.0, Arrivals::Own, 1).take(6000).collect();
        assert!((all[5999].at.as_secs_f64() / 3000.0 - 1.0).abs() < 0.001, "{:?}", all[5999].at);
        assert_eq!((all[0].at.as_secs_f64(), all[0].text_tokens, all[0].output_tokens), (0.0, 5, 7));
        assert_eq!(all[1].items[0], all[2].items[0], "one content, named in two rows");
        assert_ne!(all[1].items[0], all[4].items[0], "the second time around is not the first again");
        assert_eq!(all[1].items[1].shape, ItemShape::Audio { millis: 2500 });
        // Gaps keep their proportions: 0.5 s to 2.5 s.
        let gap = |i: usize| (all[i + 1].at - all[i].at).as_secs_f64();
        assert!((gap(1) / gap(0) - 5.0).abs() < 1e-6);
    }

    #[test]
    fn every_bad_row_is_named_by_its_line() {
        let check = |row: &str, expect: &str| {
            let found = parse(&format!("0,1,1,\n{row}\n1,1,1,\n")).expect_err(row);
            assert!(found.contains("line 4: ") && found.contains(expect), "{row}: {found}");
        };
        check("x,1,1,", "timestamp \"x\"");
        check("-1,1,1,", "is before 0");
        check("0,1,1", "has 3 columns");
        check("0,-1,1,", "text_tokens \"-1\"");
        check("0,1,0,", "output_tokens \"0\"");
        check("0,0,1,", "neither text nor items");
        check("0,1,1,640x0", "item \"640x0\"");
        check("0,1,1,9999999x9999999", "item");
        check("0,1,1,NaNs", "item");
        check("0,1,1,5x5#x", "item");
        let two = parse("0,1,1,\nbad\n1,1,1,\nworse\n").expect_err("two bad rows");
        assert!(two.contains("line 4") && two.contains("line 6"), "{two}");
    }

    #[test]
    fn a_file_without_header_or_rows_is_refused() {
        for text in
            ["", "a,b\n", HEADER, &format!("{HEADER}\n1,1,1,\n"), &format!("{HEADER}\n1,1,1,\n1,1,1,\n")]
        {
            assert!(Trace::parse(text.as_bytes()).is_err(), "{text:?}");
        }
    }
}
