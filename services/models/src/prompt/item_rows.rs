//! The rows of an item, checked against what is known of it, and their places among tokens.

use super::placeholder::{FrameTimes, LineLayout, PartsLayout, TileLayout};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};

/// Farthest position of a video's last frame from its first: more is no video that a processor makes.
const MAX_FRAME_POSITION: f32 = (1_u32 << 20) as f32;

/// Layout of an item's rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum ItemLayout {
    Rows,
    /// Between two texts.
    Between([&'static str; 2]),
    /// Patches on a side of the square that becomes one row.
    Grid {
        merge_size: u32,
    },
    Tiles(TileLayout),
    Parts(PartsLayout),
    Lines(LineLayout),
}

/// Tokens of videos.
#[derive(Clone, Copy, Debug)]
pub(super) struct VideoTokens {
    /// The token of a row, which also stands for a whole video.
    pub row: u32,
    /// Spelling of it.
    pub row_text: &'static str,
    /// Spellings of the tokens around a video.
    pub around: [&'static str; 2],
    /// Part that times have in positions or text.
    pub times: FrameTimes,
    /// Positions of a second.
    pub tokens_per_second: f32,
}

/// An item whose metadata were checked.
#[derive(Clone, Debug)]
pub(super) struct ItemRows {
    pub item: ItemIdx,
    pub n_tokens: u32,
    pub modality: Modality,
    pub shape: RowShape,
}

/// Arrangement of an item's rows.
#[derive(Clone, Debug)]
pub(super) enum RowShape {
    /// One after another.
    Rows,
    /// By frame, down, across.
    Grid { thw: [u32; 3], frame_step: f32 },
    /// Frames, each at a time in seconds that is written before it; rows of a frame down and across.
    TimedFrames { times: Vec<f64>, grid: [u32; 2] },
    /// Tiles down and across, and the whole image; `[0, 0]`: that alone.
    Tiles([u32; 2]),
    /// Lines, and rows of a line.
    Lines([u32; 2]),
}

/// Rows of an item in the place of one placeholder.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowRun {
    pub item: ItemIdx,
    pub modality: Modality,
    pub first_row: u32,
    pub n_rows: u32,
    pub grid: Option<RowGrid>,
}

/// Rows by frame, down and across, and the positions from one frame to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowGrid {
    pub thw: [u32; 3],
    pub frame_step: f32,
}

impl ItemLayout {
    /// The arrangement of an item of this size; `None` if its rows are not what such an item makes.
    pub fn shape(self, item: &EncodedItem, [t, h, w]: [u32; 3]) -> Option<RowShape> {
        match self {
            Self::Rows | Self::Between(_) => (item.n_tokens > 0).then_some(RowShape::Rows),
            Self::Grid { merge_size } => {
                let thw = merged([t, h, w], merge_size, item)?;
                Some(RowShape::Grid { thw, frame_step: 1.0 })
            }
            Self::Lines(LineLayout { merge_size, .. }) => {
                let grid = merged([t, h, w], merge_size, item).filter(|_| t == 1);
                grid.map(|[_, lines, columns]| RowShape::Lines([lines, columns]))
            }
            Self::Parts(PartsLayout { grid, n_rows: [of_part, whole], .. }) => {
                let [lines, columns] = [h / grid[0].max(1), w / grid[1].max(1)];
                // An image that is cut has more than one part.
                let n = match lines.checked_mul(columns)? {
                    1 => 0,
                    n => n,
                };
                let all = n.checked_mul(of_part)?.checked_add(whole)?;
                let parts = if n == 0 { [0, 0] } else { [lines, columns] };
                (all == item.n_tokens && all > 0).then_some(RowShape::Tiles(parts))
            }
            Self::Tiles(TileLayout { grid, n_rows, .. }) => {
                let tiles = [h / grid[0].max(1), w / grid[1].max(1)];
                let n = tiles[0].checked_mul(tiles[1]);
                let cut = n.filter(|n| *n > 1).and_then(|n| n.checked_add(1)?.checked_mul(n_rows));
                match (n, cut) {
                    (Some(1), _) if item.n_tokens == n_rows => Some(RowShape::Tiles([0, 0])),
                    (_, Some(all)) if all == item.n_tokens => Some(RowShape::Tiles(tiles)),
                    _ => None,
                }
            }
        }
    }
}

impl VideoTokens {
    /// The arrangement of a video's rows; `None` if they are not what such a video makes.
    pub fn shape(&self, item: &EncodedItem, layout: ItemLayout) -> Option<RowShape> {
        let Extent::Video { t, h, w, interval, times } = &item.extent else { return None };
        let ItemLayout::Grid { merge_size } = layout else { return None };
        let thw = merged([*t, *h, *w], merge_size, item)?;
        let frame_step = match self.times {
            FrameTimes::Counted => 1.0,
            FrameTimes::PerSecond => self.tokens_per_second * interval.get() as f32,
            FrameTimes::Written => {
                let times: Vec<f64> = times.iter().map(|time| time.get()).collect();
                let fits = times.len() == *t as usize;
                return fits.then_some(RowShape::TimedFrames { times, grid: [thw[1], thw[2]] });
            }
        };
        (frame_step * *t as f32 <= MAX_FRAME_POSITION).then_some(RowShape::Grid { thw, frame_step })
    }

    /// Text of frames at these times, between the tokens around each.
    pub fn timed(&self, times: &[f64]) -> String {
        let [before, after] = self.around;
        let frame = |time: &f64| format!("<{time:.1} seconds>{before}{}{after}", self.row_text);
        times.iter().map(frame).collect()
    }
}

impl ItemRows {
    /// Runs of its rows, in the order of its placeholders.
    pub fn runs(&self, layout: ItemLayout) -> Vec<RowRun> {
        let (item, modality) = (self.item, self.modality);
        let run = |first_row, n_rows, grid| RowRun { item, modality, first_row, n_rows, grid };
        match (&self.shape, layout) {
            (RowShape::Tiles(_), ItemLayout::Tiles(TileLayout { n_rows, .. })) => (0..self.n_tokens)
                .step_by(n_rows.max(1) as usize)
                .map(|first_row| run(first_row, n_rows, None))
                .collect(),
            (RowShape::Tiles([lines, columns]), ItemLayout::Parts(PartsLayout { n_rows, .. })) => {
                let [of_part, whole] = n_rows;
                let n = lines * columns;
                let parts = (0..n).map(|part| run(part * of_part, of_part, None));
                parts.chain([run(n * of_part, whole, None)]).collect()
            }
            (RowShape::Lines([lines, n_rows]), _) => {
                (0..*lines).map(|line| run(line * n_rows, *n_rows, None)).collect()
            }
            (RowShape::TimedFrames { times, grid: [down, across] }, _) => {
                let n_rows = down * across;
                let grid = RowGrid { thw: [1, *down, *across], frame_step: 1.0 };
                (0..times.len() as u32).map(|frame| run(frame * n_rows, n_rows, Some(grid))).collect()
            }
            (&RowShape::Grid { thw, frame_step }, _) => {
                vec![run(0, self.n_tokens, Some(RowGrid { thw, frame_step }))]
            }
            _ => vec![run(0, self.n_tokens, None)],
        }
    }
}

/// Rows of a grid of patches whose squares of `side` a side become one row each, as (frames, down, across); `None` if it does not
/// make the item's.
fn merged([t, h, w]: [u32; 3], side: u32, item: &EncodedItem) -> Option<[u32; 3]> {
    let thw = [t, h.checked_div(side)?, w.checked_div(side)?];
    let n = thw.iter().try_fold(1_u32, |n, side| n.checked_mul(*side));
    let whole = h.is_multiple_of(side) && w.is_multiple_of(side);
    (n == Some(item.n_tokens) && item.n_tokens > 0 && whole).then_some(thw)
}
