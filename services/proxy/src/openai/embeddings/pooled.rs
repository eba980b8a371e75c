//! Pooling: one vector of an encoder output, or its rows as they are.

use super::body::Encoding;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use triptych_core::{EncoderOutput, Failure, FailureClass};

/// Most values of a response that has every row. About 12 bytes each.
const MAX_VALUES: usize = 2 << 20;

/// A vector, as it is sent.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Embedding {
    Floats(Vec<f32>),
    Base64(String),
}

impl Embedding {
    pub(super) fn of(vector: Vec<f32>, encoding: Encoding) -> Self {
        match encoding {
            Encoding::Floats => Self::Floats(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Self::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

/// Mean of all rows, `[hidden]`; of length 1 if it is normalised. Sums are in f64, in the order of the rows.
///
/// # Errors
/// Unprocessable, if a row has a value that is not finite.
pub(super) fn mean(output: &EncoderOutput, is_normalised: bool) -> Result<Vec<f32>, Failure> {
    let item = output.item();
    let mut sums = vec![0.0_f64; item.hidden as usize];
    for row in 0..item.n_tokens as usize {
        for (sum, value) in sums.iter_mut().zip(finite_row(output, row)?) {
            *sum += f64::from(value);
        }
    }
    let n_rows = f64::from(item.n_tokens.max(1));
    sums.iter_mut().for_each(|sum| *sum /= n_rows);
    let length = sums.iter().map(|value| value * value).sum::<f64>().sqrt();
    let scale = if is_normalised && length > 0.0 { length.recip() } else { 1.0 };
    Ok(sums.into_iter().map(|value| (value * scale) as f32).collect())
}

/// Every row, `[n_tokens][hidden]`; their values count towards the limit of a response.
///
/// # Errors
/// Too large, past the limit; Unprocessable, if a row has a value that is not finite.
pub(super) fn all_rows(output: &EncoderOutput, n_values: &mut usize) -> Result<Vec<Vec<f32>>, Failure> {
    let item = output.item();
    *n_values = n_values.saturating_add((item.n_tokens as usize).saturating_mul(item.hidden as usize));
    if *n_values > MAX_VALUES {
        let message = format!("the response has {n_values} values or more, the limit is {MAX_VALUES}");
        return Err(Failure::new(FailureClass::TooLarge, message).with_param("input"));
    }
    (0..item.n_tokens as usize).map(|row| finite_row(output, row)).collect()
}

fn finite_row(output: &EncoderOutput, row: usize) -> Result<Vec<f32>, Failure> {
    let missing = || Failure::internal(format!("an encoder output without row {row}"));
    let values = output.rows_f32(row, 1).ok_or_else(missing)?;
    if values.iter().all(|value| value.is_finite()) {
        return Ok(values);
    }
    let message = "the encoder made values that are not finite for this input";
    Err(Failure::new(FailureClass::Unprocessable, message).with_param("input"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, Modality};

    fn output(n_tokens: u32, rows: &[f32]) -> EncoderOutput {
        let item = EncodedItem {
            key: ContentKey::from_bytes([1; 32]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            modality: Modality::Text,
            n_tokens,
            hidden: rows.len() as u32 / n_tokens,
            dtype: DType::F32,
            extent: Extent::Tokens,
            checksum: [0; 32],
        };
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        EncoderOutput::seal(item, Arc::from(bytes)).unwrap()
    }

    #[test]
    fn a_mean_is_over_rows_and_of_length_one_if_it_is_normalised() {
        let two = output(2, &[1.0, 6.0, 5.0, 2.0]);
        assert_eq!(mean(&two, false).unwrap(), [3.0, 4.0]);
        assert_eq!(mean(&two, true).unwrap(), [0.6, 0.8]);
        assert_eq!(mean(&output(1, &[0.0, 0.0]), true).unwrap(), [0.0, 0.0], "nothing has no direction");
        assert_eq!(mean(&output(1, &[f32::NAN]), true).unwrap_err().class, FailureClass::Unprocessable);
    }

    #[test]
    fn rows_count_towards_the_limit_of_a_response() {
        let two = output(2, &[1.0, 6.0, 5.0, 2.0]);
        let mut n_values = 0;
        assert_eq!(all_rows(&two, &mut n_values).unwrap(), [[1.0, 6.0], [5.0, 2.0]]);
        assert_eq!(n_values, 4);
        n_values = MAX_VALUES - 3;
        assert_eq!(all_rows(&two, &mut n_values).unwrap_err().class, FailureClass::TooLarge);
    }

    #[test]
    fn base64_is_of_little_endian_floats() {
        let Embedding::Base64(text) = Embedding::of(vec![1.0, -2.0], Encoding::Base64) else { panic!() };
        assert_eq!(STANDARD.decode(text).unwrap(), [0, 0, 128, 63, 0, 0, 0, 192]);
    }
}
