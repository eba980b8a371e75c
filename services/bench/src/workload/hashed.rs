//! Published traces with hashes of prompt blocks: JSON lines, each a request; blocks of one number are the same tokens, so a
//! prefix cache finds here what it would have found there.
//!
//! - Bailian (`bailian`): a Qwen service of Alibaba, blocks of 16 tokens, times in seconds, chats with their parents and a type:
//!   <https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon/blob/03a51e31087dcb16445b5ae002cadf7aa4637bc3/README.md>,
//!   of <https://arxiv.org/abs/2506.02634>. Requests of type `image` have one image where a size is set, the same one in all
//!   turns of a chat; the file tells neither number nor size.
//! - Mooncake (`mooncake`): Kimi's service, blocks of 512 tokens, times in milliseconds:
//!   <https://github.com/kvcache-ai/Mooncake/blob/40ea55f809cfd8dad8a738d6b5c1c26d9e06a7cd/FAST25-release/README.md>,
//!   of <https://arxiv.org/abs/2407.00079>. Text alone.

use super::draw::{Shapes, sizes};
use super::lines;
use super::trace::{MAX_TOKENS, Trace, TraceRow};
use crate::offered::{ItemShape, TextBlocks};
use crate::seed::{Purpose, rng};
use crate::text::{Settings, TextError};
use serde::Deserialize;
use std::collections::HashMap;
use std::num::NonZeroU32;

/// Most block hashes of a file: 512 MiB in memory.
const MAX_IDS: usize = 1 << 26;
/// Type of requests that bring an image.
const IMAGE: &str = "image";

/// Source of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Alibaba's.
    Bailian,
    /// Moonshot's.
    Mooncake,
}

/// Fields of a line, those of both sources.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    chat_id: Option<i64>,
    /// -1: the chat begins here.
    parent_chat_id: Option<i64>,
}

/// Progress of reading.
struct Reader {
    source: Source,
    /// Shape of an image; `None`: images are text.
    image: Option<ItemShape>,
    image_tokens: u32,
    /// First chat of each.
    roots: HashMap<i64, i64>,
    n_ids: usize,
}

/// Reads `file`, and of Bailian's `size` and `image-tokens`.
pub(super) fn read(source: Source, settings: &mut Settings) -> Result<Trace, TextError> {
    let file = settings.required("file", "is the path of the trace")?;
    let mut reader = Reader { source, image: None, image_tokens: 0, roots: HashMap::new(), n_ids: 0 };
    if source == Source::Bailian {
        if let Some(size) = settings.take("size") {
            let shapes = Shapes::Buckets(sizes("size", &size)?);
            reader.image = shapes.draw(&mut rng(0, Purpose::Requests, 0), |_| false);
        }
        reader.image_tokens = settings.number("image-tokens", 0, (0, MAX_TOKENS))?;
    }
    lines::read(&file, |input| reader.parse(input))
}

impl Source {
    /// Tokens of a block.
    const fn block_tokens(self) -> NonZeroU32 {
        match self {
            Self::Bailian => NonZeroU32::MIN.saturating_add(15),
            Self::Mooncake => NonZeroU32::MIN.saturating_add(511),
        }
    }

    /// Seconds of a unit of time.
    const fn unit_s(self) -> f64 {
        match self {
            Self::Bailian => 1.0,
            Self::Mooncake => 1e-3,
        }
    }
}

impl Reader {
    fn parse(&mut self, input: impl std::io::BufRead) -> Result<Trace, String> {
        let mut rows = lines::rows(input, None, |line| self.row(line))?;
        rows.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        Trace::of(rows)
    }

    fn row(&mut self, line: &str) -> Result<TraceRow, String> {
        let line: Line = serde_json::from_str(line).map_err(|e| {
            let text = e.to_string();
            let what = text.split(" at line ").next().unwrap_or_default();
            format!("{what} at column {}", e.column())
        })?;
        let at_s = line.timestamp * self.source.unit_s();
        if !at_s.is_finite() {
            return Err(format!("timestamp {} is out of range", line.timestamp));
        }
        let tokens = |name: &str, n: u64| {
            let n = u32::try_from(n).ok().filter(|n| *n <= MAX_TOKENS);
            n.ok_or_else(|| format!("{name} is more than {MAX_TOKENS}"))
        };
        let input = tokens("input_length", line.input_length)?;
        let output_tokens = tokens("output_length", line.output_length)?.max(1);
        self.n_ids += line.hash_ids.len();
        if self.n_ids > MAX_IDS {
            return Err(format!("the file has more than {MAX_IDS} hash_ids up to here"));
        }
        let content = self.root(&line);
        let image = self.image.filter(|_| line.kind.as_deref() == Some(IMAGE));
        let of_image = if image.is_some() { self.image_tokens } else { 0 };
        let blocks = TextBlocks { tokens: self.source.block_tokens(), ids: line.hash_ids.into() };
        Ok(TraceRow {
            at_s,
            text_tokens: input.saturating_sub(of_image).max(u32::from(image.is_none())),
            output_tokens,
            items: image.map(|shape| (shape, content)).into_iter().collect(),
            blocks: Some(blocks),
        })
    }

    /// The chat with which this one began, and notes it for those that go on from here.
    fn root(&mut self, line: &Line) -> Option<u64> {
        let chat = line.chat_id?;
        let root = match line.parent_chat_id {
            Some(parent) if parent >= 0 => self.roots.get(&parent).copied().unwrap_or(parent),
            _ => chat,
        };
        self.roots.insert(chat, root);
        Some(root.cast_unsigned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Arrivals;
    use crate::offered::Offered;
    use crate::prompt::{Wording, messages};

    fn parse(source: Source, image: Option<ItemShape>, text: &str) -> Result<Trace, String> {
        let image_tokens = if image.is_some() { 100 } else { 0 };
        Reader { source, image, image_tokens, roots: HashMap::new(), n_ids: 0 }.parse(text.as_bytes())
    }

    fn text(offered: &Offered) -> String {
        messages(offered, &Wording::DIGITS, 1).into_iter().map(|message| message.text).collect()
    }

    /// Characters that two texts begin with both.
    fn shared(a: &str, b: &str) -> usize {
        a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn prompts_share_the_blocks_that_the_trace_says_they_share() {
        let rows = "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 5, \"hash_ids\": [46, 47, 48]}\n\
                    {\"timestamp\": 500, \"input_length\": 1030, \"output_length\": 0, \"hash_ids\": [46, 47, 9]}\n\
                    {\"timestamp\": 2000, \"input_length\": 600, \"output_length\": 7, \"hash_ids\": [5]}\n";
        let trace = parse(Source::Mooncake, None, rows).expect("three good rows");
        let all: Vec<_> = trace.requests(1.0, Arrivals::Own, 1).take(4).collect();
        let texts: Vec<String> = all.iter().map(text).collect();
        assert_eq!(texts.iter().map(String::len).collect::<Vec<_>>(), [1100, 1030, 600, 1100]);
        assert_eq!(shared(&texts[0], &texts[1]) / 8, 1024 / 8, "two blocks of 512");
        assert!(shared(&texts[0], &texts[2]) < 8, "none");
        assert!(shared(&texts[0], &texts[3]) < 8, "a second lap is of other texts");
        assert_eq!(all[1].output_tokens, 1, "an answer has a token");
        // Milliseconds: 0.5 s to 1.5 s.
        assert!(((all[2].at - all[1].at).as_secs_f64() / all[1].at.as_secs_f64() - 3.0).abs() < 1e-6);
    }

    #[test]
    fn a_chat_with_an_image_has_the_same_one_in_each_turn() {
        let row = |chat: i64, parent: i64, at: f64, kind: &str| {
            format!(
                "{{\"chat_id\": {chat}, \"parent_chat_id\": {parent}, \"timestamp\": {at}, \"input_length\": 140, \
                 \"output_length\": 3, \"type\": \"{kind}\", \"turn\": 1, \"hash_ids\": [1, 2]}}\n"
            )
        };
        let rows = row(1, -1, 0.0, "image")
            + &row(2, 1, 1.0, "image")
            + &row(3, -1, 2.0, "image")
            + &row(4, -1, 3.0, "text");
        let shape = ItemShape::Image { width: 64, height: 64 };
        let offered = |image| {
            let trace = parse(Source::Bailian, image, &rows).expect("four good rows");
            let all = trace.requests(1.0, Arrivals::Own, 1).zip(0..4);
            all.map(|(offered, index)| Offered { index, ..offered }).collect::<Vec<_>>()
        };
        let all = offered(Some(shape));
        assert_eq!(all.iter().map(|o| o.text_tokens).collect::<Vec<_>>(), [40, 40, 40, 140]);
        assert_eq!(all[0].items, all[1].items);
        assert_ne!(all[0].items, all[2].items);
        assert!(all[3].items.is_empty());
        assert_eq!(shared(&text(&all[0]), &text(&all[1])) / 8, 32 / 8, "two blocks of 16, then each its own");
        assert!(offered(None).iter().all(|o| o.items.is_empty() && o.text_tokens == 140));
    }

    #[test]
    fn bad_lines_are_named() {
        let check = |row: &str, expect: &str| {
            let good = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": []}\n";
            let found = parse(Source::Mooncake, None, &format!("{good}{row}\n")).expect_err(row);
            assert!(found.contains("line 2: ") && found.contains(expect), "{row}: {found}");
        };
        check("{", "EOF");
        check("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5}", "hash_ids");
        check("{\"timestamp\": 0, \"input_length\": -5, \"output_length\": 5, \"hash_ids\": []}", "-5");
        check(
            "{\"timestamp\": 0, \"input_length\": 5000000, \"output_length\": 5, \"hash_ids\": []}",
            "input_length",
        );
        check(
            "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [\"a\"]}",
            "string",
        );
    }
}
