//! Cases that are measured through an API: as those of our workers, where the server has room for them.

use super::info::ServerInfo;
use crate::profile::settings::Extent;

/// Output tokens of a stream while all streams of its case decode.
const WINDOW: u32 = 24;
/// Prompt tokens that a server reads in a step, at the least: while the prompts of others are read, a stream goes on.
const CHUNK: u32 = 512;
/// Tokens that a template may add to a prompt.
const TEMPLATE: u32 = 64;

/// Streams that decode together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodeCase {
    /// Streams.
    pub(super) n: u32,
    /// Prompt tokens of each.
    pub(super) prompt: u32,
    /// Output tokens of each.
    pub(super) output: u32,
}

/// Images of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageCase {
    /// Width and height in pixels.
    pub(super) side: u32,
    /// Number of images.
    pub(super) n: u32,
}

/// Sizes of the cases.
struct Sizes {
    prefills: &'static [u32],
    streams: &'static [u32],
    prompts: &'static [u32],
    sides: &'static [u32],
    /// Images of requests with more than one.
    several: &'static [u32],
}

const QUICK: Sizes = Sizes {
    prefills: &[16, 64, 256],
    streams: &[1, 4],
    prompts: &[32, 128],
    sides: &[112, 224],
    several: &[],
};
const FULL: Sizes = Sizes {
    prefills: &[16, 64, 128, 256, 512, 1024, 2048, 4096],
    streams: &[1, 2, 4, 8, 16, 32, 64],
    prompts: &[64, 512, 2048],
    sides: &[112, 224, 336, 448, 640, 896, 1280],
    several: &[2, 4],
};

/// All cases, each list in ascending order.
#[derive(Clone, Debug)]
pub(super) struct Cases {
    /// Prompt tokens.
    pub(super) prefills: Vec<u32>,
    /// Streams.
    pub(super) decodes: Vec<DecodeCase>,
    /// Images.
    pub(super) images: Vec<ImageCase>,
}

impl Cases {
    /// Cases that the server has room for.
    pub(super) fn new(extent: Extent, info: &ServerInfo) -> Self {
        let Sizes { prefills, streams, prompts, sides, several } = match extent {
            Extent::Quick => QUICK,
            Extent::Full => FULL,
        };
        let longest = info.max_context.map_or(u32::MAX, |n| u32::try_from(n).unwrap_or(u32::MAX));
        let longest = longest.saturating_sub(TEMPLATE);
        let room = info.kv_tokens.map_or(u64::MAX, |n| n as u64);
        let decode = |n: u32, prompt: u32| DecodeCase { n, prompt, output: WINDOW + n * prompt / CHUNK };
        let fits = |case: &DecodeCase| {
            let each = case.prompt + case.output;
            each <= longest && u64::from(case.n) * u64::from(each + TEMPLATE) <= room
        };
        let all = streams.iter().flat_map(|n| prompts.iter().map(move |prompt| decode(*n, *prompt)));
        let one = sides.iter().map(|&side| ImageCase { side, n: 1 });
        let some = several.iter().flat_map(|&n| [224, 448].map(|side| ImageCase { side, n }));
        Self {
            prefills: prefills.iter().copied().filter(|n| *n < longest).collect(),
            decodes: all.filter(fits).collect(),
            images: one.chain(some).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_fit_the_context_and_the_cache() {
        let all = Cases::new(Extent::Full, &ServerInfo::default());
        assert_eq!((all.prefills.len(), all.decodes.len()), (8, 21));
        let info = ServerInfo { max_context: Some(1024), kv_tokens: Some(4096), ..ServerInfo::default() };
        let some = Cases::new(Extent::Full, &info);
        assert_eq!(some.prefills.last(), Some(&512));
        assert!(some.decodes.iter().all(|c| c.prompt < 1024 && c.n * (c.prompt + c.output) <= 4096));
        assert!(some.decodes.iter().any(|c| c.n == 16) && some.decodes.iter().all(|c| c.n < 64));
    }
}
