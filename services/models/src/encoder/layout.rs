//! Attention sequences, row order and row positions of a run of units.
//!
//! The order of patches and windows is that of transformers' `Qwen2_5_VisionTransformerPretrainedModel`
//! (<https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py>,
//! `rot_pos_emb` and `get_window_index`).

use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{InputLayer, StagedPositions};
use crate::spec::{EncoderSpec, Positions, StemSpec};
use triptych_kernels::ops::{Indices, Mask, MaskBounds, Sequences, StageBuilder, WeightedRows};
use triptych_kernels::{Backend, KernelError};

mod grid;
mod padding;

use grid::GridRows;
pub(super) use padding::{Room, SeqRoom};

/// Layout of the rows of a run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RowLayout {
    /// Offsets of whole sequences (a frame of an image, an audio window), `[n_seqs + 1]`.
    pub whole: Vec<u32>,
    /// Offsets of the windows of an image, `[n_windows + 1]`; the same as `whole` without windows.
    pub windows: Vec<u32>,
    /// Position of each row in its unit as (temporal, height, width), in the order of the layers, `[n_rows]`.
    pub positions: Vec<[u32; 3]>,
    /// Reordering of the rows by windows; `None` without windows.
    pub order: Option<WindowOrder>,
    /// Rows of a learned grid of positions, in the order of the layers; `None` without one.
    pub grid_rows: Option<GridRows>,
    /// Rows after its own that each row attends to, `[n_rows]`, and to all before it; `None`: every row to all of its sequence.
    pub ahead: Option<Vec<u32>>,
}

/// A reordering of rows that makes each window contiguous.
#[derive(Debug, Default, PartialEq)]
pub(super) struct WindowOrder {
    /// Row `i` of the layers is row `stem_rows[i]` of the stem.
    pub stem_rows: Vec<u32>,
    /// Output row `i` is row `output_rows[i]` of the projector.
    pub output_rows: Vec<u32>,
}

/// A layout in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedLayout {
    /// Whole sequences.
    pub whole: Sequences,
    /// Windows.
    pub windows: Sequences,
    /// Positions in the order of the layers.
    pub positions: StagedPositions,
    /// Rows of the stem and of the projector, as [`WindowOrder`] has them.
    pub order: Option<[Indices; 2]>,
    /// Rows of a learned grid of positions.
    pub grid_rows: Option<WeightedRows>,
    /// Rows of the keys; `None`: all, in their order.
    pub key_rows: Option<Indices>,
    /// The keys that a row may attend to.
    pub mask: Mask,
}

impl RowLayout {
    /// Adds the layout to a step, with positions as `input` reads them.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the step has no room for it.
    pub fn stage<B: Backend>(
        &self,
        builder: &mut StageBuilder,
        input: &InputLayer<B>,
    ) -> Result<StagedLayout, ModelError> {
        self.stage_with(builder, input, [None; 2])
    }

    /// The same with padding that fills a captured forward.
    ///
    /// # Errors
    /// As [`Self::stage`], and if there is no room for the layout.
    pub fn stage_in<B: Backend>(
        self,
        builder: &mut StageBuilder,
        input: &InputLayer<B>,
        room: Room,
    ) -> Result<StagedLayout, ModelError> {
        let seqs = [room.whole, room.windows].map(|seqs| Some((seqs, room.n_rows)));
        self.with_padding(room).stage_with(builder, input, seqs)
    }

    fn stage_with<B: Backend>(
        &self,
        builder: &mut StageBuilder,
        input: &InputLayer<B>,
        rooms: [Option<(SeqRoom, usize)>; 2],
    ) -> Result<StagedLayout, ModelError> {
        let whole = stage_seqs(builder, &self.whole, rooms[0])?;
        let (mut windows, mut order) = (whole, None);
        if let Some(WindowOrder { stem_rows, output_rows }) = &self.order {
            windows = stage_seqs(builder, &self.windows, rooms[1])?;
            order = Some([builder.indices(stem_rows)?, builder.indices(output_rows)?]);
        }
        let rows = self.positions.iter().map(|[.., x]| *x);
        let positions = input.stage(builder, rows, &self.positions)?;
        let grid_rows = self.grid_rows.as_ref().map(|rows| rows.stage(builder)).transpose()?;
        let mask = match &self.ahead {
            None => Mask::Full,
            Some(ahead) => Mask::causal(MaskBounds { window: None, ahead: Some(builder.indices(ahead)?) }),
        };
        Ok(StagedLayout { whole, windows, positions, order, grid_rows, key_rows: None, mask })
    }

    /// The layout with rows of padding; offsets stay those of the units.
    fn with_padding(mut self, room: Room) -> Self {
        let n_real = self.positions.len();
        self.positions.resize(room.n_rows.max(n_real), [0; 3]);
        if let Some(rows) = &mut self.grid_rows {
            rows.resize(room.n_rows);
        }
        if let Some(ahead) = &mut self.ahead {
            ahead.resize(room.n_rows.max(n_real), 0);
        }
        if let Some(order) = &mut self.order {
            order.stem_rows.extend(n_real as u32..room.n_rows as u32);
            let merged = order.output_rows.len() as u32;
            order.output_rows.extend(merged..(room.n_rows / room.group.max(1)) as u32);
        }
        self
    }

    /// Layout of the units of a run.
    pub fn of(spec: &EncoderSpec, units: &[EncodeUnit<'_>]) -> Self {
        let side = spec.contiguous_side();
        let mut layout = Self { whole: vec![0], windows: vec![0], ..Self::default() };
        let mut stem_order = Vec::new();
        let mut grid_rows = spec.extras.interpolated.map(|grid| GridRows::new(grid.side));
        for unit in units {
            let [n_frames, height, width] = unit.grid;
            // Without windows one window is the whole frame, and the order stays as it is.
            let window = spec.windows.as_ref().map_or(height.max(width), |w| w.side).max(1);
            for frame in 0..n_frames {
                let first_row = layout.positions.len();
                let groups = MergeGroups { across: width / side, down: height / side };
                for (y0, x0) in groups.window_starts(window) {
                    for (y, x) in groups.of_window(y0, x0, window) {
                        let first = first_row + (y * groups.across + x) * side * side;
                        stem_order.extend((first..first + side * side).map(|row| row as u32));
                        layout.positions.extend(square(frame, [y * side, x * side], side));
                    }
                    layout.windows.push(layout.positions.len() as u32);
                }
                if let Some(rows) = &mut grid_rows {
                    rows.extend(&layout.positions[first_row..], [height, width]);
                }
                layout.whole.push(layout.positions.len() as u32);
            }
        }
        layout.grid_rows = grid_rows;
        if let (StemSpec::PrefixedPatches { n_prefix, .. }, Positions::Rotary(_)) =
            (&spec.stem, &spec.positions)
        {
            layout.positions = units.iter().flat_map(|unit| prefixed_positions(unit, *n_prefix)).collect();
        }
        layout.ahead = spec.has_queries().then(|| units.iter().flat_map(rows_ahead).collect());
        if spec.windows.is_some() {
            layout.order = Some(WindowOrder::of(stem_order, side * side));
        } else {
            layout.windows.clone_from(&layout.whole);
        }
        layout
    }
}

/// Rows after its own that each row of a unit attends to: those of the first half to each other, learned queries to none.
fn rows_ahead(unit: &EncodeUnit<'_>) -> impl Iterator<Item = u32> {
    let n_patches = unit.n_rows() as u32 / 2;
    (0..n_patches).rev().chain(std::iter::repeat_n(0, n_patches as usize))
}

/// Adds sequences by their offsets, with those of padding where there is room for so many rows.
fn stage_seqs(
    builder: &mut StageBuilder,
    offsets: &[u32],
    room: Option<(SeqRoom, usize)>,
) -> Result<Sequences, KernelError> {
    let Some((room, n_rows)) = room else { return builder.self_sequences(offsets) };
    let [queries, keys] = room.padded(offsets, n_rows)?;
    builder.bounded_sequences(&queries, &keys, room.max_seqlen)
}

impl WindowOrder {
    fn of(stem_rows: Vec<u32>, group: usize) -> Self {
        let mut output_rows = vec![0; stem_rows.len() / group];
        for (merged, rows) in stem_rows.chunks_exact(group).enumerate() {
            output_rows[rows[0] as usize / group] = merged as u32;
        }
        Self { stem_rows, output_rows }
    }
}

/// The merge groups of a frame.
#[derive(Clone, Copy)]
struct MergeGroups {
    down: usize,
    across: usize,
}

impl MergeGroups {
    fn window_starts(self, window: usize) -> impl Iterator<Item = (usize, usize)> {
        let across = self.across;
        (0..self.down).step_by(window).flat_map(move |y| (0..across).step_by(window).map(move |x| (y, x)))
    }

    fn of_window(self, y0: usize, x0: usize, window: usize) -> impl Iterator<Item = (usize, usize)> {
        let x1 = (x0 + window).min(self.across);
        (y0..(y0 + window).min(self.down)).flat_map(move |y| (x0..x1).map(move |x| (y, x)))
    }
}

/// Positions of an image's patches by their place, behind rows at the first one's.
fn prefixed_positions(unit: &EncodeUnit<'_>, n_prefix: usize) -> impl Iterator<Item = [u32; 3]> {
    let [down, across] = unit.patches.map(|n| n as u32);
    let patches = (0..down).flat_map(move |y| (0..across).map(move |x| [0, y, x]));
    std::iter::repeat_n([0; 3], n_prefix).chain(patches)
}

/// Positions of the rows of one merge group.
fn square(frame: usize, [y0, x0]: [usize; 2], side: usize) -> impl Iterator<Item = [u32; 3]> {
    (y0..y0 + side).flat_map(move |y| (x0..x0 + side).map(move |x| [frame as u32, y as u32, x as u32]))
}

#[cfg(test)]
mod tests {
    use super::super::units::UnitValues;
    use super::*;
    use crate::family::{Config, Family};
    use std::path::Path;

    fn golden(case: &str, file: &str) -> serde_json::Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(case).join(file);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_slice(&bytes).expect("a golden file is JSON")
    }

    fn spec(case: &str) -> EncoderSpec {
        let json = golden(case, "model/config.json");
        let config = Config::new("config.json", &json);
        Family::of(&config)
            .and_then(|f| f.spec(&config))
            .expect("a golden configuration")
            .encoder
            .expect("an encoder")
    }

    fn unit(grid: [usize; 3]) -> EncodeUnit<'static> {
        EncodeUnit {
            item: 0,
            adapter: None,
            grid,
            patches: [grid[1], grid[2]],
            values: UnitValues::Floats(&[]),
        }
    }

    #[test]
    fn windows_lie_as_in_the_reference() {
        for case in ["qwen2_5_vl_window112", "qwen2_5_vl_window56", "qwen2_5_vl_untied_nested"] {
            let spec = spec(case);
            let expected = golden(case, "expected.json");
            for (name, image) in expected["images"].as_object().expect("images") {
                let read =
                    |key: &str| -> Vec<u32> { serde_json::from_value(image[key].clone()).expect("integers") };
                let grid = read("grid_thw").iter().map(|n| *n as usize).collect::<Vec<_>>();
                let layout = RowLayout::of(&spec, &[unit([grid[0], grid[1], grid[2]])]);
                let order = layout.order.expect("an order");
                let merged: Vec<u32> = order.stem_rows.iter().step_by(4).map(|row| row / 4).collect();
                assert_eq!(merged, read("window_index"), "{case} {name}");
                assert_eq!(layout.windows, read("cu_window_seqlens"), "{case} {name}");
                let back: Vec<u32> = order.output_rows.iter().map(|i| merged[*i as usize]).collect();
                assert_eq!(back, (0..merged.len() as u32).collect::<Vec<_>>(), "{case} {name}");
            }
        }
    }

    #[test]
    fn frames_and_images_are_sequences_of_their_own() {
        let layout = RowLayout::of(&spec("qwen2_vl_two_images"), &[unit([2, 2, 4]), unit([1, 4, 2])]);
        assert_eq!(layout.whole, [0, 8, 16, 24]);
        assert_eq!(layout.windows, layout.whole);
        assert_eq!(layout.order, None);
        let second_group_of_second_frame = [[1, 0, 2], [1, 0, 3], [1, 1, 2], [1, 1, 3]];
        assert_eq!(layout.positions[12..16], second_group_of_second_frame);
    }
}
