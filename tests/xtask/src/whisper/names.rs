//! Hugging Face's names for CTranslate2's tensors, and the seams along which fused ones are cut again.
//!
//! CTranslate2 stacks the projections that read the same input: rows `[q; k; v]` of self-attention in `linear_0`,
//! rows `[k; v]` of cross-attention in `linear_1`. Everything else is stored as it was: convolutions
//! `[out, in, kernel]`, positions `[position, width]`, no scale folded into anything.

use super::config::Shape;
use super::ct2::{Dtype, Stored};
use anyhow::{Result, ensure};

/// A tensor to write and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Name in the Hugging Face directory.
    pub hugging_face: String,
    /// Name in the CTranslate2 file.
    stored: String,
    /// Index and count of equal pieces along the first dimension; `(0, 1)`: all of it.
    piece: (usize, usize),
}

/// A tensor as it is written.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// f16, row-major.
    pub data: &'a [u8],
}

impl Name {
    /// Keys have no bias in Whisper. The fused tensor has zeros in its place, which nobody would read.
    pub fn is_left_out(&self) -> bool {
        self.hugging_face.ends_with("k_proj.bias")
    }
}

/// Every tensor of the model, and those that are left out because they are zero.
pub fn all(shape: &Shape) -> Vec<Name> {
    let mut names = vec![
        whole("model.decoder.embed_tokens.weight", "decoder/embeddings/weight"),
        whole("model.decoder.embed_positions.weight", "decoder/position_encodings/encodings"),
        whole("model.encoder.embed_positions.weight", "encoder/position_encodings/encodings"),
    ];
    for conv in ["conv1", "conv2"] {
        for part in ["weight", "bias"] {
            names.push(whole(&format!("model.encoder.{conv}.{part}"), &format!("encoder/{conv}/{part}")));
        }
    }
    for (side, n_layers) in [("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)] {
        norm(&mut names, &format!("model.{side}.layer_norm"), &format!("{side}/layer_norm"));
        for i in 0..n_layers {
            let (ours, theirs) = (format!("model.{side}.layers.{i}"), format!("{side}/layer_{i}"));
            layer(&mut names, &ours, &theirs);
            if side == "decoder" {
                cross_attention(&mut names, &ours, &theirs);
            }
        }
    }
    names
}

fn layer(names: &mut Vec<Name>, ours: &str, theirs: &str) {
    norm(names, &format!("{ours}.self_attn_layer_norm"), &format!("{theirs}/self_attention/layer_norm"));
    let fused = format!("{theirs}/self_attention/linear_0");
    for (i, projection) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
        linear(names, &format!("{ours}.self_attn.{projection}"), &fused, (i, 3));
    }
    linear(
        names,
        &format!("{ours}.self_attn.out_proj"),
        &format!("{theirs}/self_attention/linear_1"),
        (0, 1),
    );
    norm(names, &format!("{ours}.final_layer_norm"), &format!("{theirs}/ffn/layer_norm"));
    linear(names, &format!("{ours}.fc1"), &format!("{theirs}/ffn/linear_0"), (0, 1));
    linear(names, &format!("{ours}.fc2"), &format!("{theirs}/ffn/linear_1"), (0, 1));
}

fn cross_attention(names: &mut Vec<Name>, ours: &str, theirs: &str) {
    norm(names, &format!("{ours}.encoder_attn_layer_norm"), &format!("{theirs}/attention/layer_norm"));
    linear(names, &format!("{ours}.encoder_attn.q_proj"), &format!("{theirs}/attention/linear_0"), (0, 1));
    let fused = format!("{theirs}/attention/linear_1");
    for (i, projection) in ["k_proj", "v_proj"].into_iter().enumerate() {
        linear(names, &format!("{ours}.encoder_attn.{projection}"), &fused, (i, 2));
    }
    linear(names, &format!("{ours}.encoder_attn.out_proj"), &format!("{theirs}/attention/linear_2"), (0, 1));
}

fn linear(names: &mut Vec<Name>, ours: &str, theirs: &str, piece: (usize, usize)) {
    for part in ["weight", "bias"] {
        names.push(Name {
            hugging_face: format!("{ours}.{part}"),
            stored: format!("{theirs}/{part}"),
            piece,
        });
    }
}

fn norm(names: &mut Vec<Name>, ours: &str, theirs: &str) {
    names.push(whole(&format!("{ours}.weight"), &format!("{theirs}/gamma")));
    names.push(whole(&format!("{ours}.bias"), &format!("{theirs}/beta")));
}

fn whole(ours: &str, theirs: &str) -> Name {
    Name { hugging_face: ours.to_owned(), stored: theirs.to_owned(), piece: (0, 1) }
}

/// The tensor, cut out of the one it was fused into.
///
/// # Errors
/// If it is missing, is not f16, or does not divide.
pub fn find<'a>(stored: &Stored<'a>, name: &Name) -> Result<Piece<'a>> {
    let tensor = stored.get(&name.stored)?;
    ensure!(tensor.dtype == Dtype::F16, "{} is {:?}, expected F16", name.stored, tensor.dtype);
    let (i, n) = name.piece;
    let mut shape = tensor.shape.clone();
    let rows = shape.first().copied().unwrap_or(0);
    ensure!(rows > 0 && rows % n == 0, "{} has {rows} rows, which are not {n} equal pieces", name.stored);
    shape[0] = rows / n;
    let len = tensor.data.len() / n;
    Ok(Piece { shape, data: &tensor.data[i * len..(i + 1) * len] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, HashSet};

    /// The names and shapes that `transformers` has for the model.
    const EXPECTED: &str = include_str!("../../../golden/names/whisper-tiny.en.json");

    #[test]
    fn every_tensor_that_hugging_face_has_is_made_once() {
        let expected: BTreeMap<String, Vec<usize>> = serde_json::from_str(EXPECTED).unwrap();
        let mut made = all(&Shape::tiny_en());
        made.retain(|n| !n.is_left_out());
        let names: HashSet<_> = made.iter().map(|n| n.hugging_face.as_str()).collect();
        assert_eq!(names.len(), made.len());
        for name in expected.keys().filter(|n| n.as_str() != "proj_out.weight") {
            assert!(names.contains(name.as_str()), "{name} is not made");
        }
        for name in names {
            assert!(expected.contains_key(name), "{name} is not Hugging Face's");
        }
    }
}
