//! Items and encoder outputs, the data that moves between the stages.

mod quantized;

use self::quantized::SCALE_BYTES;
use crate::{ContentKey, DType, Fingerprint, Modality};
use half::{bf16, f16};
use std::sync::Arc;
use thiserror::Error;

/// Position of a window in its audio clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowSpan {
    /// Start of the window, in milliseconds from the start of the clip.
    pub start_ms: u32,
    /// End of the audio in it, in milliseconds from the start of the clip; padding follows. It lies past the start of
    /// the next window where two windows overlap.
    pub end_ms: u32,
}

/// A span of time, or a time from the start of an item. Equal and hashed by its bits: it says what an output was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seconds(u64);

impl Seconds {
    /// So many seconds; `None` unless finite and not negative.
    pub fn new(seconds: f64) -> Option<Self> {
        (seconds.is_finite() && seconds >= 0.0).then_some(Self(seconds.to_bits()))
    }

    /// The number of seconds.
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// Size of an item in its own units, from which a PD worker derives the positions of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// An image as a grid of *patches* before merging: `n_tokens = t·h·w / merge²`.
    Grid {
        /// Temporal patches; 1 for a still image.
        t: u32,
        /// Patches down.
        h: u32,
        /// Patches across.
        w: u32,
    },
    /// An audio clip as windows of equal size: `n_tokens = n_windows · tokens per window`.
    Windows {
        /// Windows, at least one.
        n_windows: u32,
        /// Length of the clip in milliseconds, before padding.
        duration_ms: u64,
        /// Position of each window, `[n_windows]`; empty: contiguous windows, each as long as the model's.
        spans: Arc<[WindowSpan]>,
    },
    /// Encoder text.
    Tokens,
    /// A video as a grid of patches before merging, as [`Self::Grid`], with the times of its sampled frames.
    Video {
        /// Temporal patches.
        t: u32,
        /// Patches down.
        h: u32,
        /// Patches across.
        w: u32,
        /// Time from one temporal patch to the next, on average.
        interval: Seconds,
        /// Time of each temporal patch: the mean of those of its first and its last frame, `[t]`.
        times: Arc<[Seconds]>,
    },
}

impl Extent {
    /// An audio clip as contiguous windows.
    pub fn windows(n_windows: u32, duration_ms: u64) -> Self {
        Self::Windows { n_windows, duration_ms, spans: Arc::default() }
    }
}

/// Metadata of an encoder output: enough to admit, position and verify its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedItem {
    /// Identity of the output.
    pub key: ContentKey,
    /// The encoder that made it.
    pub fingerprint: Fingerprint,
    /// Kind of the item.
    pub modality: Modality,
    /// Number of rows.
    pub n_tokens: u32,
    /// Width of a row.
    pub hidden: u32,
    /// Element type of the rows.
    pub dtype: DType,
    /// Size in the item's own units.
    pub extent: Extent,
    /// BLAKE3 of the row bytes.
    pub checksum: [u8; 32],
}

impl EncodedItem {
    /// True for an announced output: its rows are still being computed, so the checksum is zero.
    pub fn is_pending(&self) -> bool {
        self.checksum == [0; 32]
    }

    /// Bytes of the rows, scales included. `None` if the product overflows, which a corrupt header can cause.
    pub fn payload_len(&self) -> Option<usize> {
        let row = (self.hidden as usize).checked_mul(self.dtype.size())?;
        (self.n_tokens as usize).checked_mul(row)?.checked_add(self.scales_len()?)
    }

    /// Bytes of the scales that come before the rows; zero for a type without.
    pub fn scales_len(&self) -> Option<usize> {
        let scale = if self.dtype.is_scaled() { SCALE_BYTES } else { 0 };
        (self.n_tokens as usize).checked_mul(scale)
    }
}

/// An encoder output in memory: rows `[n_tokens, hidden]`, row-major, little-endian. For a scaled type the scales
/// `[n_tokens]` come before them, in f32.
///
/// Cheap to clone; the rows are shared.
#[derive(Clone, Debug)]
pub struct EncoderOutput {
    item: EncodedItem,
    rows: Arc<[u8]>,
}

/// Rows that do not match their metadata.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OutputError {
    /// Wrong number of bytes for the shape.
    #[error("rows have {actual} bytes, {expected:?} expected from the shape")]
    Length {
        /// From the shape; `None` when it overflows.
        expected: Option<usize>,
        /// Bytes given.
        actual: usize,
    },
    /// The checksum differs.
    #[error("checksum of the rows differs from the header")]
    Checksum,
}

impl EncoderOutput {
    /// Wraps freshly computed rows and fills in the checksum. Hashes all rows, so an async caller runs it on a blocking
    /// thread.
    ///
    /// # Errors
    /// [`OutputError::Length`] if `rows` is not `n_tokens · hidden` elements.
    pub fn seal(mut item: EncodedItem, rows: Arc<[u8]>) -> Result<Self, OutputError> {
        Self::check_len(&item, &rows)?;
        item.checksum = *blake3::hash(&rows).as_bytes();
        Ok(Self { item, rows })
    }

    /// Wraps rows that were received, if they match their metadata. Hashes all rows, as [`Self::seal`] does.
    ///
    /// # Errors
    /// [`OutputError`] if length or checksum differ.
    pub fn verify(item: EncodedItem, rows: Arc<[u8]>) -> Result<Self, OutputError> {
        Self::check_len(&item, &rows)?;
        if *blake3::hash(&rows).as_bytes() != item.checksum {
            return Err(OutputError::Checksum);
        }
        Ok(Self { item, rows })
    }

    fn check_len(item: &EncodedItem, rows: &[u8]) -> Result<(), OutputError> {
        let expected = item.payload_len();
        if expected == Some(rows.len()) {
            Ok(())
        } else {
            Err(OutputError::Length { expected, actual: rows.len() })
        }
    }

    /// The metadata.
    pub fn item(&self) -> &EncodedItem {
        &self.item
    }

    /// The raw rows.
    pub fn rows(&self) -> &Arc<[u8]> {
        &self.rows
    }

    /// Rows `first .. first + n` as they are stored. `None` past the end.
    pub fn encoded_rows(&self, first: usize, n: usize) -> Option<EncodedRows<'_>> {
        EncodedRows::new(self.item.dtype, self.item.hidden as usize, &self.rows)?.slice(first, n)
    }

    /// Rows `first .. first + n` as f32, `[n, hidden]`. `None` past the end.
    pub fn rows_f32(&self, first: usize, n: usize) -> Option<Vec<f32>> {
        Some(self.encoded_rows(first, n)?.to_f32())
    }
}

/// Rows of an encoder output as they are stored: `[n_rows, hidden]`, row-major, little-endian, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct EncodedRows<'a> {
    dtype: DType,
    hidden: usize,
    n_rows: usize,
    /// A scale for each row, in f32; empty for a type without. As many bytes as `n_rows` says, as `data` has.
    scales: &'a [u8],
    data: &'a [u8],
}

impl<'a> EncodedRows<'a> {
    /// The rows in `bytes`, which [`EncoderOutput::rows`] describes. `None` unless they are whole rows.
    pub fn new(dtype: DType, hidden: usize, bytes: &'a [u8]) -> Option<Self> {
        let scale = if dtype.is_scaled() { SCALE_BYTES } else { 0 };
        let row = hidden.checked_mul(dtype.size())?.checked_add(scale)?;
        let n_rows = bytes.len().checked_div(row)?;
        if n_rows * row != bytes.len() {
            return None;
        }
        let (scales, data) = bytes.split_at_checked(n_rows * scale)?;
        Some(Self { dtype, hidden, n_rows, scales, data })
    }

    /// Rows `first .. first + n`. `None` past the end.
    pub fn slice(self, first: usize, n: usize) -> Option<Self> {
        let end = first.checked_add(n).filter(|end| *end <= self.n_rows)?;
        let scale = if self.dtype.is_scaled() { SCALE_BYTES } else { 0 };
        let row = self.hidden * self.dtype.size();
        Some(Self {
            n_rows: n,
            scales: self.scales.get(first * scale..end * scale)?,
            data: self.data.get(first * row..end * row)?,
            ..self
        })
    }

    /// Element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Width of a row.
    pub fn hidden(self) -> usize {
        self.hidden
    }

    /// Number of rows.
    pub fn n_rows(self) -> usize {
        self.n_rows
    }

    /// The scales, `[n_rows]` in f32, little-endian; empty for a type without.
    pub fn scales(self) -> &'a [u8] {
        self.scales
    }

    /// The elements, `[n_rows, hidden]`, little-endian.
    pub fn data(self) -> &'a [u8] {
        self.data
    }

    /// Widens rows from `first` on to f32, as many as `out` has room for.
    pub fn widen(self, first: usize, out: &mut [f32]) {
        let row = (self.hidden * self.dtype.size()).max(1);
        let rows = self.data.chunks_exact(row).skip(first);
        let scales = self.scales.as_chunks::<SCALE_BYTES>().0.iter().skip(first);
        let rows = rows.zip(scales.map(Some).chain(std::iter::repeat(None)));
        for (out, (bytes, scale)) in out.chunks_exact_mut(self.hidden.max(1)).zip(rows) {
            match scale {
                None => widen_elements(bytes, self.dtype, out),
                Some(scale) => quantized::widen(bytes, f32::from_le_bytes(*scale), self.dtype, out),
            }
        }
    }

    /// All rows as f32, `[n_rows, hidden]`.
    pub fn to_f32(self) -> Vec<f32> {
        let mut out = vec![0.0; self.n_rows * self.hidden];
        self.widen(0, &mut out);
        out
    }
}

/// Widens little-endian elements; those of a scaled type without their scale.
fn widen_elements(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*b);
            }
        }
        DType::Bf16 => {
            for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*b).to_f32();
            }
        }
        DType::F16 => {
            for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*b).to_f32();
            }
        }
        DType::I8 | DType::F8 => {
            for (value, b) in out.iter_mut().zip(bytes) {
                *value = quantized::value(*b, dtype);
            }
        }
    }
}

/// Widens little-endian elements to f32; those of a scaled type without their scale. A trailing partial element is
/// dropped.
pub fn to_f32(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.size()];
    widen_elements(bytes, dtype, &mut out);
    out
}

/// Narrows rows of `hidden` values to `dtype`, as [`EncoderOutput`] holds them.
pub fn rows_from_f32(values: &[f32], hidden: usize, dtype: DType) -> Arc<[u8]> {
    match dtype {
        DType::F32 => le_bytes(values, |v| v.to_le_bytes()),
        DType::Bf16 => le_bytes(values, |v| bf16::from_f32(v).to_le_bytes()),
        DType::F16 => le_bytes(values, |v| f16::from_f32(v).to_le_bytes()),
        DType::I8 | DType::F8 => quantized::narrow(values, hidden, dtype).into(),
    }
}

/// The bytes of each value, one after another: into room that is there, so that the loop becomes vectors.
fn le_bytes<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N]) -> Arc<[u8]> {
    let mut rows = vec![0; N * values.len()];
    for (to, value) in rows.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *to = bytes(*value);
    }
    rows.into()
}

/// Narrows f32 elements to `dtype`, little-endian; for a scaled type they are one row.
pub fn from_f32(values: &[f32], dtype: DType) -> Arc<[u8]> {
    rows_from_f32(values, values.len(), dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(n_tokens: u32, hidden: u32, dtype: DType) -> EncodedItem {
        EncodedItem {
            key: ContentKey::from_bytes([1; 32]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            modality: Modality::Image,
            n_tokens,
            hidden,
            dtype,
            extent: Extent::Tokens,
            checksum: [0; 32],
        }
    }

    #[test]
    fn sealed_rows_verify_and_a_flipped_bit_does_not() {
        let sealed = EncoderOutput::seal(item(2, 3, DType::F32), from_f32(&[1.0; 6], DType::F32)).unwrap();
        assert!(EncoderOutput::verify(sealed.item().clone(), sealed.rows().clone()).is_ok());
        let mut torn = sealed.rows().to_vec();
        torn[5] ^= 1;
        assert_eq!(
            EncoderOutput::verify(sealed.item().clone(), torn.into()).unwrap_err(),
            OutputError::Checksum
        );
    }

    #[test]
    fn a_shape_that_overflows_is_an_error() {
        let huge = item(u32::MAX, u32::MAX, DType::F32);
        assert!(matches!(EncoderOutput::seal(huge, Arc::from([])), Err(OutputError::Length { .. })));
    }

    #[test]
    fn scaled_rows_are_read_with_their_own_scale() {
        let values = [1.0, -2.0, 0.5, 0.0, 100.0, -400.0, 0.0, 0.0, 0.0];
        for dtype in [DType::I8, DType::F8] {
            let rows = rows_from_f32(&values, 3, dtype);
            let out = EncoderOutput::seal(item(3, 3, dtype), rows).unwrap();
            assert_eq!(out.rows().len(), 3 * (3 + 4));
            for (row, expected) in values.chunks(3).enumerate() {
                let largest = expected.iter().fold(0.0, |m: f32, v| m.max(v.abs()));
                for (got, want) in out.rows_f32(row, 1).unwrap().iter().zip(expected) {
                    assert!((got - want).abs() <= largest / 16.0, "{dtype}: {got} for {want}");
                }
            }
            assert_eq!(out.rows_f32(1, 3), None);
            assert_eq!(out.rows_f32(0, 3).unwrap().len(), 9);
            let mut middle = [0.0; 6];
            out.encoded_rows(0, 3).unwrap().widen(1, &mut middle);
            assert_eq!(middle[..3], out.rows_f32(1, 1).unwrap());
            assert_eq!(out.encoded_rows(1, 1).unwrap().scales().len(), 4);
        }
    }

    #[test]
    fn bytes_that_are_no_whole_rows_are_none() {
        for (dtype, hidden, n_bytes, n_rows) in [
            (DType::F32, 3, 24, Some(2)),
            (DType::F32, 3, 23, None),
            (DType::Bf16, 3, 0, Some(0)),
            (DType::I8, 3, 14, Some(2)),
            (DType::I8, 3, 12, None),
            (DType::F16, 0, 4, None),
            (DType::F32, usize::MAX, 4, None),
        ] {
            let rows = EncodedRows::new(dtype, hidden, &[0; 24][..n_bytes]).map(EncodedRows::n_rows);
            assert_eq!(rows, n_rows, "{dtype} {hidden} {n_bytes}");
        }
    }

    #[test]
    fn rows_convert_per_dtype() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let out =
                EncoderOutput::seal(item(2, 2, dtype), from_f32(&[1.0, -2.0, 0.5, 4.0], dtype)).unwrap();
            assert_eq!(out.rows_f32(1, 1).unwrap(), [0.5, 4.0]);
            assert_eq!(out.rows_f32(2, 1), None);
        }
    }
}
