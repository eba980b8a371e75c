//! Draws of lengths, counts and shapes.

use crate::offered::ItemShape;
use crate::seed::{BenchRng, unit};
use crate::text::{Settings, TextError, bad};
use rand::RngExt;
use rand_distr::{Distribution, Exp1, LogNormal};

/// The longest prompt or answer that a workload asks for, in tokens.
const MAX_TOKENS: u32 = 1 << 20;
/// Largest width and height of an image, in pixels.
const MAX_SIDE: u32 = 16_384;
/// The longest audio clip, in seconds.
const MAX_SECONDS: f64 = 3_600.0;

/// Distribution of a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Length {
    /// Uniform over integers from ⌊mean·(1 − range)⌋ to ⌈mean·(1 + range)⌉, as vLLM's `--random-range-ratio`.
    Uniform { mean: u32, range: f64 },
    /// Log-normal with a mean and a coefficient of variation.
    LogNormal { mean: u32, cv: f64 },
    /// Exponential.
    Exponential { mean: u32 },
}

impl Length {
    /// Reads `key=mean`; the range is a setting of its own.
    pub(super) fn read(
        settings: &mut Settings,
        key: &'static str,
        mean: u32,
        range: f64,
    ) -> Result<Self, TextError> {
        Ok(Self::Uniform { mean: settings.number(key, mean, (0, MAX_TOKENS))?, range })
    }

    /// A number of at least `least`.
    pub(super) fn draw(&self, rng: &mut BenchRng, least: u32) -> u32 {
        let n = match *self {
            Self::Uniform { mean, range } => {
                let (low, high) = around(f64::from(mean), range);
                rng.random_range(low..=high)
            }
            Self::LogNormal { mean, cv } => whole(f64::from(mean) * log_normal(cv).sample(rng)),
            Self::Exponential { mean } => {
                let one: f64 = Exp1.sample(rng);
                whole(f64::from(mean) * one)
            }
        };
        n.clamp(least, MAX_TOKENS)
    }
}

/// ⌊mean·(1 − range)⌋ to ⌈mean·(1 + range)⌉.
pub(super) fn around(mean: f64, range: f64) -> (u32, u32) {
    // A hair less and more, so that 10·(1 + 0.1) is 11 and not 12.
    (whole((mean * (1.0 - range) + 1e-9).floor()), whole((mean * (1.0 + range) - 1e-9).ceil()))
}

/// Mean 1, and this coefficient of variation.
pub(super) fn log_normal(cv: f64) -> LogNormal<f64> {
    let sigma = (1.0 + cv * cv).ln().sqrt();
    LogNormal::new(-sigma * sigma / 2.0, sigma).expect("the sigma of a finite CV is finite")
}

/// The nearest integer, within bounds.
pub(super) fn whole(x: f64) -> u32 {
    // A float that is too large or no number saturates, and is cut.
    (x.round().max(0.0) as u32).min(MAX_TOKENS)
}

/// Shape of an item.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Shapes {
    /// One of these, by weight.
    Buckets(Vec<(ItemShape, f64)>),
    /// Audio clips of a log-normal length, drawn again if it is above the longest.
    Clips { mean_s: f64, cv: f64, max_s: f64 },
}

impl Shapes {
    /// One of them; of a bucket, none of a modality that is full.
    pub(super) fn draw(&self, rng: &mut BenchRng, full: impl Fn(&ItemShape) -> bool) -> Option<ItemShape> {
        match self {
            Self::Buckets(buckets) => {
                let open = || buckets.iter().filter(|(shape, _)| !full(shape));
                let total: f64 = open().map(|(_, w)| w).sum();
                let mut left = unit(rng) * total;
                let drawn = open().find(|(_, w)| {
                    left -= w;
                    left < 0.0
                });
                // Rounding may leave a hair over after the last one.
                drawn.or_else(|| open().next_back()).map(|(shape, _)| *shape)
            }
            Self::Clips { mean_s, cv, max_s } => {
                let clips = log_normal(*cv);
                let drawn = (0..64).map(|_| mean_s * clips.sample(rng)).find(|s| s <= max_s);
                let seconds = drawn.unwrap_or(*max_s).max(0.1);
                Some(ItemShape::Audio { millis: (seconds * 1e3) as u32 }).filter(|s| !full(s))
            }
        }
    }
}

/// Reads `640x640` or `320x240@0.7+640x480@0.3`: width, height, weight.
pub(super) fn sizes(key: &str, text: &str) -> Result<Vec<(ItemShape, f64)>, TextError> {
    let wrong = || {
        let allowed = format!("is WIDTHxHEIGHT up to {MAX_SIDE}, several as 320x240@0.7+640x480@0.3");
        bad(key, text, &allowed)
    };
    let sizes = text.split('+').map(|part| {
        let (size, weight) = weighted(part).ok_or_else(wrong)?;
        let (width, height) = size.split_once('x').ok_or_else(wrong)?;
        Ok((image(side(width).ok_or_else(wrong)?, side(height).ok_or_else(wrong)?), weight))
    });
    positive(sizes.collect::<Result<_, _>>()?).ok_or_else(wrong)
}

/// Reads vLLM's buckets, `256x256x1@0.5+720x1280x1@0.5`: height, width, frames, weight; height 0 is an audio clip of
/// `width` seconds.
pub(super) fn buckets(key: &str, text: &str) -> Result<Vec<(ItemShape, f64)>, TextError> {
    let wrong = || {
        let allowed = "is HEIGHTxWIDTHx1@WEIGHT, several joined by +; 0xSECONDSx1 is an audio clip; videos are not supported";
        bad(key, text, allowed)
    };
    let buckets = text.split('+').map(|part| {
        let (bucket, weight) = weighted(part).ok_or_else(wrong)?;
        let numbers: Vec<&str> = bucket.split('x').collect();
        let [height, width, "1"] = numbers[..] else { return Err(wrong()) };
        let shape = match height {
            "0" => audio_clip(width.parse().map_err(|_| wrong())?).ok_or_else(wrong)?,
            _ => image(side(width).ok_or_else(wrong)?, side(height).ok_or_else(wrong)?),
        };
        Ok((shape, weight))
    });
    positive(buckets.collect::<Result<_, _>>()?).ok_or_else(wrong)
}

/// An audio clip of some seconds.
pub(super) fn audio_clip(seconds: f64) -> Option<ItemShape> {
    let allowed = (0.1..=MAX_SECONDS).contains(&seconds);
    allowed.then(|| ItemShape::Audio { millis: (seconds * 1e3).round() as u32 })
}

/// A number of pixels.
pub(super) fn side(text: &str) -> Option<u32> {
    text.trim().parse().ok().filter(|n| (1..=MAX_SIDE).contains(n))
}

fn image(width: u32, height: u32) -> ItemShape {
    ItemShape::Image { width, height }
}

/// `WHAT@WEIGHT`; the weight is 1 if it is not there.
fn weighted(text: &str) -> Option<(&str, f64)> {
    let (what, weight) = text.split_once('@').unwrap_or((text, "1"));
    let weight = weight.trim().parse().ok().filter(|w: &f64| w.is_finite() && *w >= 0.0)?;
    Some((what.trim(), weight))
}

/// The buckets with a positive weight, if there are any.
fn positive(mut all: Vec<(ItemShape, f64)>) -> Option<Vec<(ItemShape, f64)>> {
    all.retain(|(_, weight)| *weight > 0.0);
    (!all.is_empty()).then_some(all)
}
