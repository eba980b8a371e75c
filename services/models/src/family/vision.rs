//! `vision-encoder-decoder`: an image encoder and a text decoder with cross-attention, each of several kinds.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vision_encoder_decoder/modeling_vision_encoder_decoder.py>.
//! TrOCR has an encoder of [`vit`] and the decoder of its own, Donut one of [`swin`] and that of mBART
//! ([`decoder`]), ViT-GPT2 that of [`gpt2`]; BERT's and RoBERTa's are those of [`bert`]. [`joined`] puts the two together.

mod decoder;
mod gpt2;
mod swin;
mod vit;

use super::{Config, bert, joined, towers};
use crate::error::ModelError;
use crate::spec::ModelSpec;

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let encoder_config = config.section("encoder", "encoder.")?;
    let decoder_config = config.section("decoder", "decoder.")?;
    let encoder = match encoder_config.text("model_type")? {
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
            let expected =
                "vit, deit, beit, dinov2, dinov2_with_registers, clip_vision_model, swin, swinv2, donut-swin";
            return Err(encoder_config.unsupported("model_type", other, expected));
        }
    };
    let decoder = match decoder_config.text("model_type")? {
        "trocr" => decoder::trocr(&decoder_config)?,
        "mbart" => decoder::mbart(&decoder_config)?,
        "gpt2" => gpt2::decoder(&decoder_config)?,
        "bert" => bert::decoder(&decoder_config, bert::BertKind::Bert)?,
        "roberta" => bert::decoder(&decoder_config, bert::BertKind::Roberta)?,
        other => {
            let expected = "trocr, mbart, gpt2, bert, roberta";
            return Err(decoder_config.unsupported("model_type", other, expected));
        }
    };
    joined::spec(encoder, decoder, &decoder_config)
}
