//! Workloads whose requests are drawn each by itself: so many tokens, so many items of such shapes.
//!
//! `random-mm` is vLLM's (`vllm bench serve --dataset-name random-mm`, `vllm/benchmarks/datasets`): lengths and counts
//! are uniform around their base, an item's shape comes from weighted buckets, a modality at its limit leaves the
//! draw. `epd-short` and `epd-long` are those of vLLM's encoder disaggregation blog
//! (<https://blog.vllm.ai/2025/12/15/vllm-epd.html>).

use super::content::{Content, Contents};
use super::draw::{Length, Shapes, around, buckets, sizes};
use crate::arrivals::{Times, at};
use crate::offered::{ItemShape, Offered, OfferedItem};
use crate::seed::{BenchRng, Purpose, rng, unit};
use crate::text::{Settings, TextError, bad};
use rand::RngExt;

/// The most items of one request.
const MAX_ITEMS: u32 = 256;

/// Distribution of requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) text: Length,
    pub(super) output: Length,
    /// The share of requests that have items.
    pub(super) with_items: f64,
    /// Fewest and most items of one that has.
    pub(super) n_items: (u32, u32),
    /// Most images and most audio clips of one request.
    pub(super) limits: (u32, u32),
    pub(super) shapes: Shapes,
    pub(super) content: Content,
}

impl Spec {
    /// The workload of that name, if there is one.
    pub(super) fn read(name: &str, settings: &mut Settings) -> Result<Option<Self>, TextError> {
        let pool = Content::Pool { n: 100, s: 1.0 };
        Ok(Some(match name {
            "text" => Self {
                with_items: 0.0,
                ..Self::images(settings, Preset { text: 1024, output: 128, images: (0, 0) }, Content::Fresh)?
            },
            "random-mm" => Self::random_mm(settings)?,
            "epd-short" => {
                Self::images(settings, Preset { text: 400, output: 150, images: (1, 4) }, Content::Fresh)?
            }
            "epd-long" => {
                Self::images(settings, Preset { text: 2000, output: 150, images: (1, 4) }, Content::Fresh)?
            }
            "reuse" => Self::images(settings, Preset { text: 400, output: 150, images: (1, 1) }, pool)?,
            "mixed" => {
                let with_items = settings.number("with", 0.5, (0.0, 1.0))?;
                let preset = Preset { text: 400, output: 150, images: (1, 4) };
                Self { with_items, ..Self::images(settings, preset, Content::Fresh)? }
            }
            "audio" => Self::audio(settings)?,
            _ => return Ok(None),
        }))
    }

    fn images(settings: &mut Settings, preset: Preset, content: Content) -> Result<Self, TextError> {
        let range = settings.number("range", 0.0, (0.0, 1.0))?;
        let shapes = match settings.take("size") {
            Some(text) => sizes("size", &text)?,
            None => sizes("size", "640x640")?,
        };
        Ok(Self {
            text: Length::read(settings, "text", preset.text, range)?,
            output: Length::read(settings, "output", preset.output, range)?,
            with_items: 1.0,
            n_items: span(settings, "images", preset.images)?,
            limits: (MAX_ITEMS, MAX_ITEMS),
            shapes: Shapes::Buckets(shapes),
            content: Content::read(settings, content)?,
        })
    }

    fn random_mm(settings: &mut Settings) -> Result<Self, TextError> {
        let range = settings.number("range", 0.0, (0.0, 1.0))?;
        let items = settings.number("items", 1, (0, MAX_ITEMS))?;
        let items_range = settings.number("items-range", 0.0, (0.0, 1.0))?;
        let limits = (
            settings.number("limit-images", 255, (0, MAX_ITEMS))?,
            settings.number("limit-audio", 1, (0, MAX_ITEMS))?,
        );
        let (low, high) = around(f64::from(items), items_range);
        let high = high.min(limits.0 + limits.1);
        if low > high {
            let allowed = format!("is at most the limits' sum, {}", limits.0 + limits.1);
            return Err(bad("items", &items.to_string(), &allowed));
        }
        let shapes = settings.take("buckets").unwrap_or_else(|| "256x256x1@0.5+720x1280x1@0.5".to_owned());
        Ok(Self {
            text: Length::read(settings, "input", 1024, range)?,
            output: Length::read(settings, "output", 128, range)?,
            with_items: 1.0,
            n_items: (low, high),
            limits,
            shapes: Shapes::Buckets(buckets("buckets", &shapes)?),
            content: Content::read(settings, Content::Fresh)?,
        })
    }

    fn audio(settings: &mut Settings) -> Result<Self, TextError> {
        let range = settings.number("range", 0.0, (0.0, 1.0))?;
        Ok(Self {
            text: Length::read(settings, "text", 0, range)?,
            output: Length::read(settings, "output", 64, range)?,
            with_items: 1.0,
            n_items: (1, 1),
            limits: (0, 1),
            shapes: Shapes::Clips {
                mean_s: settings.number("seconds", 8.0, (0.1, 3600.0))?,
                cv: settings.number("cv", 0.7, (0.0, 10.0))?,
                max_s: settings.number("max", 30.0, (0.1, 3600.0))?,
            },
            content: Content::read(settings, Content::Fresh)?,
        })
    }

    /// Requests at these times.
    pub(super) fn requests(&self, times: Times, seed: u64) -> impl Iterator<Item = Offered> + Send + use<> {
        let mut draws = Draws::new(self.clone(), rng(seed, Purpose::Requests, 0), self.content.start(seed));
        times.map(move |t| draws.request(t))
    }
}

/// Defaults of a workload with images.
struct Preset {
    text: u32,
    output: u32,
    images: (u32, u32),
}

/// Reads `n` or `a-b`.
pub(super) fn span(
    settings: &mut Settings,
    key: &'static str,
    default: (u32, u32),
) -> Result<(u32, u32), TextError> {
    let Some(text) = settings.take(key) else { return Ok(default) };
    let wrong = || bad(key, &text, &format!("is a number up to {MAX_ITEMS}, or two as 1-4"));
    let (low, high) = text.split_once('-').unwrap_or((&text, &text));
    let number = |t: &str| t.trim().parse().ok().filter(|n| *n <= MAX_ITEMS).ok_or_else(wrong);
    let low = number(low)?;
    let high = number(high)?;
    if low <= high { Ok((low, high)) } else { Err(wrong()) }
}

/// One request after the other.
#[derive(Clone, Debug)]
pub(super) struct Draws {
    spec: Spec,
    rng: BenchRng,
    contents: Contents,
}

impl Draws {
    pub(super) fn new(spec: Spec, rng: BenchRng, contents: Contents) -> Self {
        Self { spec, rng, contents }
    }

    /// The next one, due at `t` seconds.
    pub(super) fn request(&mut self, t: f64) -> Offered {
        let text_tokens = self.spec.text.draw(&mut self.rng, 0);
        let output_tokens = self.spec.output.draw(&mut self.rng, 1);
        let has_items = unit(&mut self.rng) < self.spec.with_items;
        let n = self.rng.random_range(self.spec.n_items.0..=self.spec.n_items.1);
        let items = if has_items { self.items(n) } else { Vec::new() };
        // A prompt of nothing at all is not one.
        let text_tokens = if items.is_empty() { text_tokens.max(1) } else { text_tokens };
        Offered {
            index: 0,
            at: at(t),
            text_tokens,
            output_tokens,
            items,
            session: None,
            blocks: None,
            slo: None,
        }
    }

    /// The state of the generator and of the contents, for the next draws.
    pub(super) fn end(self) -> (BenchRng, Contents) {
        (self.rng, self.contents)
    }

    /// So many items, fewer where the limits are reached.
    fn items(&mut self, n: u32) -> Vec<OfferedItem> {
        let (mut images, mut clips) = self.spec.limits;
        let mut items = Vec::new();
        for _ in 0..n {
            let full = |shape: &ItemShape| match shape {
                ItemShape::Image { .. } => images == 0,
                ItemShape::Audio { .. } => clips == 0,
            };
            let Some(shape) = self.spec.shapes.draw(&mut self.rng, full) else { break };
            let item = self.contents.draw(&mut self.rng, shape);
            match item.shape {
                ItemShape::Image { .. } => images = images.saturating_sub(1),
                ItemShape::Audio { .. } => clips = clips.saturating_sub(1),
            }
            items.push(item);
        }
        items
    }
}
