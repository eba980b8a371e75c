//! Values of quantized weights from their codes: the published formulas.
//!
//! Plain functions over slices whose sizes were checked before. They know no names and no files.

use crate::quantization::CODES_PER_WORD;

/// Place in a word of each of eight neighbouring outputs in AWQ, whose kernels take even ones first
/// (<https://github.com/casper-hansen/AutoAWQ/blob/v0.2.9/awq/utils/packing_utils.py>).
const AWQ_PLACES: [usize; CODES_PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Scales and zeros of a weight `[n_out, n_in]`.
#[derive(Debug)]
pub(super) struct Groups {
    /// `[n_out, n_groups]`.
    pub scales: Vec<f32>,
    /// `[n_out, n_groups]`.
    pub zeros: Vec<f32>,
    /// Group of each input, `[n_in]`, each below `n_groups`.
    pub of_input: Vec<usize>,
}

/// Values `(code - zero) * scale` as little-endian f32, `[n_out, n_in]`, row-major.
pub(super) fn affine(groups: &Groups, n_out: usize, codes: &Codes<'_>) -> Vec<u8> {
    let n_groups = groups.scales.len().checked_div(n_out).unwrap_or_default();
    let n_in = groups.of_input.len();
    let mut values = vec![0; n_out * n_in * size_of::<f32>()];
    // Of as many outputs as share a word in AWQ.
    let mut block = vec![0; CODES_PER_WORD * n_in];
    for (output, values) in values.chunks_mut((n_in * size_of::<f32>()).max(1)).enumerate() {
        let place = output % CODES_PER_WORD;
        if place == 0 {
            codes.fill(output, n_out - output, &mut block);
        }
        let scales = &groups.scales[output * n_groups..][..n_groups];
        let zeros = &groups.zeros[output * n_groups..][..n_groups];
        let row = &block[place * n_in..][..n_in];
        for ((value, code), group) in values.as_chunks_mut().0.iter_mut().zip(row).zip(&groups.of_input) {
            *value = ((f32::from(*code) - zeros[*group]) * scales[*group]).to_le_bytes();
        }
    }
    values
}

/// Multiplies `values: [n_out, n_in]` by the scales of their blocks of `[outputs, inputs]`; `scales`: row-major.
pub(super) fn scale_blocks(values: &mut [f32], n_in: usize, scales: &[f32], block: [usize; 2]) {
    let [n_outputs, n_inputs] = block.map(|n| n.max(1));
    let n_columns = n_in.div_ceil(n_inputs);
    for (output, row) in values.chunks_mut(n_in.max(1)).enumerate() {
        let scales = scales.chunks(n_columns.max(1)).nth(output / n_outputs).unwrap_or_default();
        for (part, scale) in row.chunks_mut(n_inputs).zip(scales) {
            part.iter_mut().for_each(|value| *value *= scale);
        }
    }
}

/// Words of a stored tensor of 32-bit integers, which hold codes of four bits, the first in the lowest bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a> {
    words: &'a [[u8; 4]],
    n_columns: usize,
}

impl<'a> Words<'a> {
    /// The words of `[n_rows, n_columns]`.
    pub(super) fn new(bytes: &'a [u8], n_columns: usize) -> Self {
        Self { words: bytes.as_chunks().0, n_columns }
    }

    /// The codes of a word.
    fn codes(self, row: usize, column: usize) -> [u8; CODES_PER_WORD] {
        let word = u32::from_le_bytes(self.words[row * self.n_columns + column]);
        std::array::from_fn(|place| (word >> (4 * place) & 0xf) as u8)
    }

    /// The code at `row`, `column` where words hold neighbouring columns.
    pub(super) fn along_row(self, row: usize, column: usize) -> u8 {
        self.codes(row, column / CODES_PER_WORD)[column % CODES_PER_WORD]
    }

    /// The code at `row`, `column` where words hold neighbouring rows.
    pub(super) fn down_column(self, row: usize, column: usize) -> u8 {
        self.codes(row / CODES_PER_WORD, column)[row % CODES_PER_WORD]
    }

    /// The code at `row`, `column` where words hold neighbouring columns in AWQ's order.
    pub(super) fn interleaved(self, row: usize, column: usize) -> u8 {
        self.codes(row, column / CODES_PER_WORD)[AWQ_PLACES[column % CODES_PER_WORD]]
    }
}

/// Codes of a weight `[n_out, n_in]`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Codes<'a> {
    /// `[n_out, n_in / 8]`: a word holds neighbouring inputs.
    Packed(Words<'a>),
    /// `[n_in / 8, n_out]`: a word holds neighbouring inputs.
    Gptq(Words<'a>),
    /// `[n_in, n_out / 8]`: a word holds neighbouring outputs, in AWQ's order.
    Awq(Words<'a>),
}

impl Codes<'_> {
    /// Fills in the codes of eight outputs from `first` on, or of the `n_left` that there are: `block: [8, n_in]`.
    fn fill(&self, first: usize, n_left: usize, block: &mut [u8]) {
        let n_in = block.len() / CODES_PER_WORD;
        for place in 0..n_left.min(CODES_PER_WORD) {
            let row = &mut block[place * n_in..][..n_in];
            match self {
                Self::Packed(words) => {
                    for (column, codes) in row.chunks_mut(CODES_PER_WORD).enumerate() {
                        codes.copy_from_slice(&words.codes(first + place, column)[..codes.len()]);
                    }
                }
                Self::Gptq(words) => {
                    for (word_row, codes) in row.chunks_mut(CODES_PER_WORD).enumerate() {
                        codes.copy_from_slice(&words.codes(word_row, first + place)[..codes.len()]);
                    }
                }
                Self::Awq(_) => {}
            }
        }
        if let Self::Awq(words) = self {
            for input in 0..n_in {
                let word = words.codes(input, first / CODES_PER_WORD);
                for (place, of_output) in AWQ_PLACES.into_iter().enumerate() {
                    block[place * n_in + input] = word[of_output];
                }
            }
        }
    }
}
