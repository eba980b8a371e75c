//! Square windows of a grid: row indices of a grid that is padded, shifted, partitioned and put back.

use crate::error::ModelError;
use triptych_kernels::ops::{Indices, Sequences, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// A grid of rows, row by row, partitioned into square windows. It is padded down and to the right until windows fill
/// it, and rolled by `shift` to the top left before it is partitioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowPartition {
    /// Rows down and across.
    pub grid: [usize; 2],
    /// Rows on a side of a window.
    pub side: usize,
    /// Rows that the grid is rolled by, down and across.
    pub shift: usize,
}

/// A partition in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedWindows {
    /// The rows of all windows.
    pub cut: Cut,
    /// The windows as sequences.
    pub seqs: Sequences,
    /// Index among the windows' rows of each row of the grid.
    pub back: Indices,
    /// Seams of each window, `[n_windows]`.
    pub seams: Indices,
}

/// Rows of a grid in another order, some of them padding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    /// These rows of the grid.
    Gathered(Indices),
    /// As many rows, zeros but for those of the grid at these places.
    Padded { n_rows: usize, places: Indices },
}

impl WindowPartition {
    /// Adds the partition to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for it.
    pub fn stage(self, builder: &mut StageBuilder) -> Result<StagedWindows, KernelError> {
        let sources = self.sources();
        let back = builder.indices(&reverse(&sources, self.grid[0] * self.grid[1]))?;
        Ok(StagedWindows {
            cut: Cut::new(builder, &sources, back)?,
            seqs: builder.self_sequences(&self.offsets())?,
            back,
            seams: builder.indices(&self.seams())?,
        })
    }

    /// Windows down and across.
    pub fn counts(self) -> [usize; 2] {
        self.grid.map(|n| n.div_ceil(self.side))
    }

    /// Rows of a window.
    pub fn area(self) -> usize {
        self.side * self.side
    }

    /// Offsets of the windows in their rows, `[n_windows + 1]`.
    pub fn offsets(self) -> Vec<u32> {
        let [down, across] = self.counts();
        (0..=down * across).map(|i| (i * self.area()) as u32).collect()
    }

    /// Grid row of each window row, window by window, `[n_windows · area]`; `None` for padding.
    pub fn sources(self) -> Vec<Option<u32>> {
        let [down, across] = self.counts();
        let padded = [down * self.side, across * self.side];
        let mut sources = Vec::with_capacity(padded[0] * padded[1]);
        for (top, left) in (0..down).flat_map(|y| (0..across).map(move |x| (y * self.side, x * self.side))) {
            for (y, x) in (0..self.side).flat_map(|y| (0..self.side).map(move |x| (top + y, left + x))) {
                let y = (y + self.shift) % padded[0];
                let x = (x + self.shift) % padded[1];
                let inside = y < self.grid[0] && x < self.grid[1];
                sources.push(inside.then_some((y * self.grid[1] + x) as u32));
            }
        }
        sources
    }

    /// Seams of each window, 0 to 3, `[n_windows]`: 2 if the roll brings both ends of the grid together down, plus 1 if
    /// it does across.
    pub fn seams(self) -> Vec<u32> {
        let [down, across] = self.counts();
        let seam = |y: usize, x: usize| u32::from(y + 1 == down) * 2 + u32::from(x + 1 == across);
        (0..down * across).map(|i| if self.shift == 0 { 0 } else { seam(i / across, i % across) }).collect()
    }
}

/// Index among `sources` of each of the `n` rows of a grid, `[n]`.
pub(super) fn reverse(sources: &[Option<u32>], n: usize) -> Vec<u32> {
    let mut places = vec![0; n];
    for (i, source) in sources.iter().enumerate() {
        if let Some(row) = source {
            places[*row as usize] = i as u32;
        }
    }
    places
}

impl Cut {
    /// Adds the rows of a grid, `None` for padding, to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        builder: &mut StageBuilder,
        sources: &[Option<u32>],
        n_grid: usize,
    ) -> Result<Self, KernelError> {
        let places = builder.indices(&reverse(sources, n_grid))?;
        Self::new(builder, sources, places)
    }

    fn new(
        builder: &mut StageBuilder,
        sources: &[Option<u32>],
        places: Indices,
    ) -> Result<Self, KernelError> {
        Ok(match sources.iter().copied().collect::<Option<Vec<u32>>>() {
            Some(rows) => Self::Gathered(builder.indices(&rows)?),
            None => Self::Padded { n_rows: sources.len(), places },
        })
    }

    /// The rows of `x: [n_grid, width]`, zeros for padding: `[n_rows, width]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a row that is not there.
    pub fn apply<B: Backend>(
        self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Gathered(rows) => Ok(backend.gather_rows(step, x, rows)?),
            Self::Padded { n_rows, places } => {
                let width = backend.dims(x).1;
                let mut placed = backend.zeros(n_rows, width)?;
                backend.scatter_rows(step, &mut placed, places, x)?;
                Ok(placed)
            }
        }
    }
}

/// Rows of each square of two by two, four after each other: both of the left column, then both of the right; `None`
/// past the grid. `[4 · n_squares]`.
pub(super) fn quads([down, across]: [usize; 2]) -> Vec<Option<u32>> {
    let row = |y: usize, x: usize| (y < down && x < across).then_some((y * across + x) as u32);
    let corners = [(0, 0), (1, 0), (0, 1), (1, 1)];
    let squares = (0..down.div_ceil(2)).flat_map(|y| (0..across.div_ceil(2)).map(move |x| (2 * y, 2 * x)));
    squares.flat_map(|(y, x)| corners.map(|(dy, dx)| row(y + dy, x + dx))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_kernels::reference::ReferenceBackend;

    #[test]
    fn a_rolled_and_padded_grid_is_restored() {
        let backend = ReferenceBackend::new();
        for grid in [[4, 4], [5, 3], [3, 7], [1, 1]] {
            for shift in [0, 1] {
                let windows = WindowPartition { grid, side: 2, shift };
                let n = grid[0] * grid[1];
                let sources = windows.sources();
                assert_eq!(sources.len(), *windows.offsets().last().expect("an end") as usize);
                let mut builder = StageBuilder::new();
                let staged = windows.stage(&mut builder).expect("room");
                let step = backend.stage(builder).expect("a step");
                let values: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
                let x = backend.upload(values.clone(), n, 1).expect("rows");
                let cut = staged.cut.apply(&backend, &step, &x).expect("windows");
                assert_eq!(backend.dims(&cut).0, sources.len());
                let again = backend.gather_rows(&step, &cut, staged.back).expect("a plane");
                assert_eq!(backend.download(&again).expect("values"), values, "{grid:?} {shift}");
            }
        }
    }

    #[test]
    fn a_roll_joins_both_ends_in_the_last_windows() {
        let windows = WindowPartition { grid: [4, 4], side: 2, shift: 1 };
        let sources: Vec<u32> = windows.sources().into_iter().map(|s| s.expect("no padding")).collect();
        assert_eq!(sources, [5, 6, 9, 10, 7, 4, 11, 8, 13, 14, 1, 2, 15, 12, 3, 0]);
        assert_eq!(windows.seams(), [0, 1, 2, 3]);
        assert_eq!(WindowPartition { shift: 0, ..windows }.seams(), [0; 4]);
    }

    #[test]
    fn an_odd_grid_is_merged_with_padding() {
        let expect = [Some(0), Some(3), Some(1), Some(4), Some(2), Some(5), None, None];
        assert_eq!(quads([2, 3]), expect);
        assert_eq!(quads([1, 1]), [Some(0), None, None, None]);
    }
}
