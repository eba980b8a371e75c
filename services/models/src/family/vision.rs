//! `vision-encoder-decoder`: an image encoder and a text decoder with cross-attention, each of several kinds.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vision_encoder_decoder/modeling_vision_encoder_decoder.py>.
//! TrOCR has an encoder of [`vit`] and the decoder of its own, Donut one of [`swin`] and that of mBART
//! ([`decoder`]), ViT-GPT2 that of [`gpt2`]. Quirk: where the widths differ and the decoder does not say that it reads the encoder's, a
//! linear layer stands between.

mod decoder;
mod gpt2;
mod swin;
mod vit;

use super::{Config, towers};
use crate::error::ModelError;
use crate::spec::{ModelSpec, ProjectedRows, ProjectorNames, ProjectorSpec, RowMerge};
use triptych_kernels::ops::Activation;

/// Between encoder and decoder, where their widths differ.
static PROJECTION: ProjectorNames =
    ProjectorNames { prefixes: Some(&["enc_to_dec_proj."]), norm: "", layers: &[""] };

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let encoder_config = config.section("encoder", "encoder.")?;
    let decoder_config = config.section("decoder", "decoder.")?;
    let mut encoder = match encoder_config.text("model_type")? {
        "vit" => vit::spec(&encoder_config, vit::VitKind::Vit)?,
        "deit" => vit::spec(&encoder_config, vit::VitKind::Deit)?,
        "beit" => vit::spec(&encoder_config, vit::VitKind::Beit)?,
        "dinov2" => vit::spec(&encoder_config, vit::VitKind::Dinov2)?,
        "dinov2_with_registers" => vit::spec(&encoder_config, vit::VitKind::Dinov2WithRegisters)?,
        "clip_vision_model" => towers::clip_encoder(&encoder_config)?,
        "donut-swin" => swin::spec(&encoder_config, swin::SwinKind::Donut)?,
        "swin" => swin::spec(&encoder_config, swin::SwinKind::Swin)?,
        "swinv2" => swin::spec(&encoder_config, swin::SwinKind::Swinv2)?,
        other => {
            let expected = "vit, deit, beit, dinov2, dinov2_with_registers, clip_vision_model, swin, swinv2, donut-swin";
            return Err(encoder_config.unsupported("model_type", other, expected));
        }
    };
    let decoder::TextDecoder { spec: decoder, reads } = match decoder_config.text("model_type")? {
        "trocr" => decoder::trocr(&decoder_config)?,
        "mbart" => decoder::mbart(&decoder_config)?,
        "gpt2" => gpt2::decoder(&decoder_config)?,
        other => return Err(decoder_config.unsupported("model_type", other, "trocr, mbart, gpt2")),
    };
    let from = encoder.output_width();
    let to = decoder.stack.hidden;
    match reads {
        Some(width) if width != from => {
            let expected = format!("{from}, the encoder's width");
            return Err(decoder_config.unsupported("cross_attention_hidden_size", width, expected));
        }
        None if from != to => {
            encoder.projector = Some(ProjectorSpec {
                rows: ProjectedRows::All,
                side: 1,
                merge: RowMerge::Concatenate,
                norm: None,
                widths: vec![to],
                bias: true,
                transposed: false,
                activation: Activation::None,
                names: &PROJECTION,
                merging: None,
                gated: None,
            });
        }
        _ => {}
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}
