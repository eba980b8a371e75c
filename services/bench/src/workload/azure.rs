//! Azure's trace of a multimodal service, October 2024: CSV with the columns
//! `TIMESTAMP,NumImages,ContextTokens,GeneratedTokens`, times as `2024-10-15T12:00:00.269Z`.
//!
//! Format: <https://github.com/Azure/AzurePublicDataset/blob/517b239f163af1a15d4f2b6f0ca47c64e8d5d398/AzureLMMInferenceDataset2025.md>,
//! of ModServe (<https://arxiv.org/abs/2502.00937>). It tells neither how large the images are, nor whether the context counts
//! their tokens, nor which of them repeat: sizes and tokens are settings here, and every image is new.

use super::draw::{Shapes, sizes};
use super::lines;
use super::trace::{MAX_TOKENS, Trace, TraceRow};
use crate::seed::{BenchRng, Purpose, rng};
use crate::text::{Settings, TextError};

const HEADER: &str = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens";
/// Most images of a request.
const MAX_IMAGES: u32 = 256;

/// Settings of the reader.
struct Azure {
    shapes: Shapes,
    /// Tokens of the context that are one image's.
    image_tokens: u32,
    rng: BenchRng,
}

/// Reads `file`, `size` and `image-tokens`.
pub(super) fn read(settings: &mut Settings) -> Result<Trace, TextError> {
    let file = settings.required("file", "is the path of the trace")?;
    let size = settings.take("size");
    let mut azure = Azure {
        shapes: Shapes::Buckets(sizes("size", size.as_deref().unwrap_or("640x640"))?),
        image_tokens: settings.number("image-tokens", 0, (0, MAX_TOKENS))?,
        rng: rng(0, Purpose::Requests, 0),
    };
    lines::read(&file, |input| azure.parse(input))
}

impl Azure {
    fn parse(&mut self, input: impl std::io::BufRead) -> Result<Trace, String> {
        let mut rows = lines::rows(input, Some(HEADER), |line| self.row(line))?;
        rows.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        Trace::of(rows)
    }

    fn row(&mut self, line: &str) -> Result<TraceRow, String> {
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        let [timestamp, images, context, generated] = columns[..] else {
            return Err(format!("has {} columns, not 4", columns.len()));
        };
        let at_s = seconds(timestamp)
            .ok_or_else(|| format!("TIMESTAMP {timestamp:?} is none as 2024-10-15T12:00:00.269Z"))?;
        let number = |name: &str, text: &str, most: u32| {
            let n = text.parse().ok().filter(|n: &u32| *n <= most);
            n.ok_or_else(|| format!("{name} {text:?} is no integer up to {most}"))
        };
        let n_images = number("NumImages", images, MAX_IMAGES)?;
        let context = number("ContextTokens", context, MAX_TOKENS)?;
        // Some requests of the published file generated nothing; here each has a first token.
        let output_tokens = number("GeneratedTokens", generated, MAX_TOKENS)?.max(1);
        let of_images = n_images.saturating_mul(self.image_tokens);
        let text_tokens = context.saturating_sub(of_images).max(u32::from(n_images == 0));
        let drawn = (0..n_images).filter_map(|_| self.shapes.draw(&mut self.rng, |_| false));
        let items = drawn.map(|shape| (shape, None)).collect();
        Ok(TraceRow { at_s, text_tokens, output_tokens, items, blocks: None })
    }
}

/// Seconds from 1970 to a time in UTC as the file has them.
fn seconds(text: &str) -> Option<f64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let part = |text: &str, bounds: std::ops::RangeInclusive<i64>| {
        let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|n| is_number && bounds.contains(n))
    };
    let mut date = date.splitn(3, '-');
    let year = part(date.next()?, 1970..=9999)?;
    let month = part(date.next()?, 1..=12)?;
    let day = part(date.next()?, 1..=31)?;
    let mut time = time.splitn(3, ':');
    let hour = part(time.next()?, 0..=23)?;
    let minute = part(time.next()?, 0..=59)?;
    let second: f64 = time.next()?.parse().ok().filter(|s| (0.0..61.0).contains(s))?;
    Some((days(year, month, day) * 86_400 + hour * 3600 + minute * 60) as f64 + second)
}

/// Days from 1970-01-01, in the Gregorian calendar: years begin with March, so that a leap day is their last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    365 * year + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Arrivals;
    use crate::offered::ItemShape;

    fn parse(rows: &str, image_tokens: u32) -> Result<Trace, String> {
        let shapes = Shapes::Buckets(vec![(ItemShape::Image { width: 64, height: 32 }, 1.0)]);
        let mut azure = Azure { shapes, image_tokens, rng: rng(0, Purpose::Requests, 0) };
        azure.parse(format!("{HEADER}\n{rows}").as_bytes())
    }

    #[test]
    fn images_have_the_size_that_is_set_and_their_tokens_are_not_text() {
        // Made up, one row out of order as a merged file may have it.
        let rows = "2024-10-15T12:00:00.500Z,0,770,491\n2024-10-15T12:00:02.5Z,2,949,0\n\
                    2024-10-15T12:00:01.000Z,1,50,3\n";
        let trace = parse(rows, 100).expect("three good rows");
        let all: Vec<_> = trace.requests(1.0, Arrivals::Own, 1).take(3).collect();
        let sizes: Vec<_> = all.iter().map(|o| (o.text_tokens, o.output_tokens, o.items.len())).collect();
        assert_eq!(sizes, [(770, 491, 0), (0, 3, 1), (749, 1, 2)]);
        assert_eq!(all[2].items[0].shape, ItemShape::Image { width: 64, height: 32 });
        assert_ne!(all[2].items[0], all[2].items[1], "each is new");
        // Gaps keep their proportions: 0.5 s to 1.5 s.
        assert!(((all[2].at - all[1].at).as_secs_f64() / all[1].at.as_secs_f64() - 3.0).abs() < 1e-6);
    }

    #[test]
    fn bad_rows_are_named_by_line_and_column() {
        let check = |row: &str, expect: &str| {
            let good = "2024-10-15T12:00:00Z,0,7,4\n2024-10-15T12:00:01Z,0,7,4";
            let found = parse(&format!("{good}\n{row}\n"), 0).expect_err(row);
            assert!(found.contains("line 4: ") && found.contains(expect), "{row}: {found}");
        };
        check("2024-10-15 12:00:00Z,0,7,4", "TIMESTAMP");
        check("2024-13-15T12:00:00Z,0,7,4", "TIMESTAMP");
        check("2024-10-15T12:00:NaNZ,0,7,4", "TIMESTAMP");
        check("2024-10-15T12:00:00Z,-1,7,4", "NumImages \"-1\"");
        check("2024-10-15T12:00:00Z,257,7,4", "NumImages");
        check("2024-10-15T12:00:00Z,1,7", "has 3 columns");
        check("2024-10-15T12:00:00Z,1,x,4", "ContextTokens \"x\"");
        check("2024-10-15T12:00:00Z,1,1,99999999", "GeneratedTokens");
    }

    #[test]
    fn times_are_seconds_of_the_calendar() {
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0.0));
        assert_eq!(seconds("2000-02-29T00:00:01.5Z"), Some(951_782_401.5));
        let leap = seconds("2024-03-01T00:00:00Z").zip(seconds("2024-02-28T23:59:59Z"));
        assert_eq!(leap.map(|(a, b)| a - b), Some(86_401.0), "2024 has a leap day");
    }
}
