//! Rows of a step by the weights that they go through: those of text, or those of a visual expert.

use crate::decoder::EmbedRows;
use crate::error::ModelError;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The rows of a step that a visual expert reads. Each row is computed by its own weights alone, whatever is beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertRows {
    /// None.
    Nobody,
    /// Every row.
    All,
    /// Some.
    Some {
        /// Those that it does not read.
        text: Indices,
        /// Those that it reads.
        visual: Indices,
    },
}

/// Rows of a sub-layer's input, and of the stream that its result is added to.
pub(super) struct SubLayerRows<'a, T> {
    /// `[n_tokens, width]`.
    pub x: &'a T,
    /// `[n_tokens, hidden]`.
    pub residual: Option<&'a T>,
}

impl ExpertRows {
    /// Adds the rows of a step of `n_tokens`: of each span of encoder rows all but the last.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        builder: &mut StageBuilder,
        embeds: &[EmbedRows<'_>],
        n_tokens: usize,
    ) -> Result<Self, KernelError> {
        let visual = visual_rows(embeds);
        if visual.is_empty() {
            return Ok(Self::Nobody);
        }
        let mut rest = visual.iter().peekable();
        let is_text = |row: &u32| rest.next_if(|next| *next == row).is_none();
        let text: Vec<u32> = (0..n_tokens as u32).filter(is_text).collect();
        match text.is_empty() {
            true => Ok(Self::All),
            false => Ok(Self::Some { text: builder.indices(&text)?, visual: builder.indices(&visual)? }),
        }
    }

    /// Results of `text` and of `visual`, each of its own rows and with their residual: `[n_tokens, out]`.
    ///
    /// # Errors
    /// Those of `text` and `visual`, and of the back end.
    pub fn run<B: Backend>(
        self,
        (backend, step): (&B, &B::Step),
        rows: SubLayerRows<'_, B::Tensor>,
        text: impl Fn(&B::Tensor, Option<&B::Tensor>) -> Result<B::Tensor, ModelError>,
        visual: impl Fn(&B::Tensor, Option<&B::Tensor>) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let SubLayerRows { x, residual } = rows;
        let (text_rows, visual_rows) = match self {
            Self::Nobody => return text(x, residual),
            Self::All => return visual(x, residual),
            Self::Some { text, visual } => (text, visual),
        };
        let of = |rows: Indices| -> Result<_, KernelError> {
            let gather = |from| backend.gather_rows(step, from, rows);
            Ok((gather(x)?, residual.map(gather).transpose()?))
        };
        let (own, stream) = of(text_rows)?;
        let from_text = text(&own, stream.as_ref())?;
        let (own, stream) = of(visual_rows)?;
        let from_images = visual(&own, stream.as_ref())?;
        let mut out = backend.zeros(backend.dims(x).0, backend.dims(&from_text).1)?;
        backend.scatter_rows(step, &mut out, text_rows, &from_text)?;
        backend.scatter_rows(step, &mut out, visual_rows, &from_images)?;
        Ok(out)
    }
}

/// Rows of a step that are an item's, but for the last of a span.
fn visual_rows(embeds: &[EmbedRows<'_>]) -> Vec<u32> {
    let rows = |embed: &EmbedRows<'_>| {
        let end = embed.first_row + embed.rows.n_rows().saturating_sub(usize::from(embed.ends_span));
        embed.first_row as u32..end as u32
    };
    embeds.iter().flat_map(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::{DType, EncodedRows};

    #[test]
    fn the_last_row_of_a_span_is_text_wherever_a_step_ends() {
        let bytes = [0; 4 * 8];
        let rows = |n: usize| EncodedRows::new(DType::F32, 1, &bytes[..4 * n]).expect("whole rows");
        let check = |embeds: &[(usize, usize, bool)], expect: &[u32]| {
            let embeds: Vec<EmbedRows<'_>> = embeds
                .iter()
                .map(|(first_row, n, ends_span)| EmbedRows {
                    first_row: *first_row,
                    rows: rows(*n),
                    ends_span: *ends_span,
                })
                .collect();
            assert_eq!(visual_rows(&embeds), expect);
        };
        check(&[], &[]);
        check(&[(1, 4, true)], &[1, 2, 3]);
        check(&[(0, 2, false), (5, 1, true)], &[0, 1]);
    }
}
