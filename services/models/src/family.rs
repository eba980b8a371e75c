//! Families: a `config.json` to a spec, with the tensor names of each family.
//!
//! A family is data and a function that fills it in; layers are shared. The config has two generations: text
//! settings at the top or under `text_config`, `rope_scaling` or `rope_parameters`; both are read.

use crate::error::ModelError;
use crate::spec::ModelSpec;

mod bart;
mod bert;
mod causal;
mod cogagent;
mod config;
mod deepseek_ocr;
mod experts;
mod fairseq;
mod florence;
mod gemma;
mod glm;
mod idefics;
mod image_keys;
mod internvl;
mod internvl_chat;
mod joined;
mod llava;
mod mllama;
mod moonshine;
mod pixtral;
mod qwen3_5;
mod qwen3_asr;
mod qwen_audio;
mod qwen_vl;
mod stages;
mod step3;
mod t5;
mod towers;
mod vision;
mod voxtral;
mod whisper;

use causal::CausalKind;
#[cfg(test)]
pub(crate) use causal::rotary;
pub use config::Config;

/// Models that share a spec, a prompt layout and a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Whisper, any size.
    Whisper,
    /// Llama 1 to 3, text.
    Llama,
    /// Mistral, text.
    Mistral,
    /// Qwen2 and Qwen2.5, text.
    Qwen2,
    /// Qwen3, dense, text.
    Qwen3,
    /// Mixtral, text.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE, text.
    Qwen2Moe,
    /// Qwen3-MoE, text.
    Qwen3Moe,
    /// Llama 3.2 Vision.
    Mllama,
    /// CogAgent of 18 billion parameters.
    CogAgent,
    /// Moonshine, any size.
    Moonshine,
    /// Qwen2-VL.
    Qwen2Vl,
    /// Qwen2.5-VL.
    Qwen25Vl,
    /// Qwen3.5, dense, text.
    Qwen35Text,
    /// Qwen3.5, dense, with images and videos.
    Qwen35,
    /// Qwen3.5 with experts, with images and videos.
    Qwen35Moe,
    /// Qwen3-VL, dense.
    Qwen3Vl,
    /// Qwen3-VL with experts.
    Qwen3VlMoe,
    /// Qwen2-Audio.
    Qwen2Audio,
    /// Qwen3-ASR.
    Qwen3Asr,
    /// Voxtral.
    Voxtral,
    /// DeepSeek-OCR-2.
    DeepseekOcr2,
    /// Step3.
    Step3,
    /// GLM-OCR.
    GlmOcr,
    /// LLaVA-1.5, and Pixtral, whose configuration is LLaVA's.
    Llava,
    /// LLaVA-NeXT.
    LlavaNext,
    /// LLaVA-OneVision.
    LlavaOneVision,
    /// Mistral Small 3.1 and 3.2.
    Mistral3,
    /// LightOnOCR.
    LightOnOcr,
    /// Idefics3.
    Idefics3,
    /// SmolVLM and SmolVLM2.
    SmolVlm,
    /// InternVL 2.5 to 3.5 in the layout of transformers.
    InternVl,
    /// InternVL 2 to 3.5 in the layout of its authors.
    InternVlChat,
    /// Gemma 3 with images.
    Gemma3,
    /// Gemma 3, text.
    Gemma3Text,
    /// Gemma 2, text.
    Gemma2,
    /// An image encoder with a text decoder: TrOCR, Donut, Nougat, ViT-GPT2.
    VisionEncoderDecoder,
    /// A text encoder with a text decoder, each BERT or RoBERTa.
    EncoderDecoder,
    /// Florence-2.
    Florence2,
    /// BART.
    Bart,
    /// mBART and mBART-50.
    MBart,
    /// M2M100 and NLLB, dense.
    M2M100,
    /// Pegasus.
    Pegasus,
    /// Marian: the OPUS-MT translators.
    Marian,
    /// BlenderBot.
    Blenderbot,
    /// BlenderBot of 90 million parameters, which is built otherwise than the others.
    BlenderbotSmall,
    /// T5 of both versions, Flan-T5 and ByT5.
    T5,
    /// mT5.
    Mt5,
    /// UMT5.
    Umt5,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 49] = [
        Self::Whisper,
        Self::Moonshine,
        Self::Qwen2Vl,
        Self::Qwen25Vl,
        Self::Qwen3Vl,
        Self::Qwen3VlMoe,
        Self::Qwen35,
        Self::Qwen35Moe,
        Self::Qwen2Audio,
        Self::Qwen3Asr,
        Self::Voxtral,
        Self::DeepseekOcr2,
        Self::Step3,
        Self::GlmOcr,
        Self::Llava,
        Self::LlavaNext,
        Self::LlavaOneVision,
        Self::Mistral3,
        Self::LightOnOcr,
        Self::Idefics3,
        Self::SmolVlm,
        Self::InternVl,
        Self::InternVlChat,
        Self::Gemma3,
        Self::Mllama,
        Self::CogAgent,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen35Text,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Gemma2,
        Self::Gemma3Text,
        Self::Bart,
        Self::MBart,
        Self::M2M100,
        Self::Pegasus,
        Self::Marian,
        Self::Blenderbot,
        Self::BlenderbotSmall,
        Self::EncoderDecoder,
        Self::VisionEncoderDecoder,
        Self::Florence2,
        Self::T5,
        Self::Mt5,
        Self::Umt5,
    ];

    /// The `model_type` of its `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Whisper => "whisper",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen35Text => "qwen3_5_text",
            Self::Qwen35 => "qwen3_5",
            Self::Qwen35Moe => "qwen3_5_moe",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mllama => "mllama",
            Self::CogAgent => "cogagent",
            Self::Moonshine => "moonshine",
            Self::Qwen2Vl => "qwen2_vl",
            Self::Qwen25Vl => "qwen2_5_vl",
            Self::Qwen3Vl => "qwen3_vl",
            Self::Qwen3VlMoe => "qwen3_vl_moe",
            Self::Qwen2Audio => "qwen2_audio",
            Self::Qwen3Asr => "qwen3_asr",
            Self::Voxtral => "voxtral",
            Self::DeepseekOcr2 => "deepseek_ocr2",
            Self::Step3 => "step3_vl",
            Self::GlmOcr => "glm_ocr",
            Self::Llava => "llava",
            Self::LlavaNext => "llava_next",
            Self::LlavaOneVision => "llava_onevision",
            Self::Mistral3 => "mistral3",
            Self::LightOnOcr => "lighton_ocr",
            Self::Idefics3 => "idefics3",
            Self::SmolVlm => "smolvlm",
            Self::InternVl => "internvl",
            Self::InternVlChat => "internvl_chat",
            Self::Gemma3 => "gemma3",
            Self::Gemma3Text => "gemma3_text",
            Self::Gemma2 => "gemma2",
            Self::VisionEncoderDecoder => "vision-encoder-decoder",
            Self::EncoderDecoder => "encoder-decoder",
            Self::Florence2 => "florence2",
            Self::Bart => "bart",
            Self::MBart => "mbart",
            Self::M2M100 => "m2m_100",
            Self::Pegasus => "pegasus",
            Self::Marian => "marian",
            Self::Blenderbot => "blenderbot",
            Self::BlenderbotSmall => "blenderbot-small",
            Self::T5 => "t5",
            Self::Mt5 => "mt5",
            Self::Umt5 => "umt5",
        }
    }

    /// The family of a configuration.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the families that are served.
    pub fn of(config: &Config<'_>) -> Result<Self, ModelError> {
        if cogagent::is_named_by(config) {
            return Ok(Self::CogAgent);
        }
        let model_type = config.text("model_type")?;
        Self::ALL.into_iter().find(|f| f.model_type() == model_type).ok_or_else(|| {
            let all: Vec<&str> = Self::ALL.iter().map(|f| f.model_type()).collect();
            config.unsupported("model_type", model_type, all.join(", "))
        })
    }

    /// Tokens that the family's published processor adds to its tokenizer, in that order.
    pub fn processor_tokens(self, config: &Config<'_>) -> Vec<String> {
        match self {
            Self::Florence2 => florence::processor_tokens(config),
            _ => Vec::new(),
        }
    }

    /// The spec of a configuration.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a key that is missing or not supported.
    pub fn spec(self, config: &Config<'_>) -> Result<ModelSpec, ModelError> {
        match self {
            Self::Whisper => whisper::spec(config),
            Self::Llama => causal::text_spec(config, CausalKind::Llama),
            Self::Mistral => causal::text_spec(config, CausalKind::Mistral),
            Self::Qwen2 => causal::text_spec(config, CausalKind::Qwen2),
            Self::Qwen3 => causal::text_spec(config, CausalKind::Qwen3),
            Self::Qwen35Text => qwen3_5::text_spec(config),
            Self::Qwen35 => qwen_vl::spec(config, qwen_vl::QwenVlVersion::ThreeAndHalf),
            Self::Qwen35Moe => qwen_vl::spec(config, qwen_vl::QwenVlVersion::ThreeAndHalfMoe),
            Self::Mixtral => causal::text_spec(config, CausalKind::Mixtral),
            Self::Qwen2Moe => causal::text_spec(config, CausalKind::Qwen2Moe),
            Self::Qwen3Moe => causal::text_spec(config, CausalKind::Qwen3Moe),
            Self::Mllama => mllama::spec(config),
            Self::CogAgent => cogagent::spec(config),
            Self::Moonshine => moonshine::spec(config),
            Self::Qwen2Vl => qwen_vl::spec(config, qwen_vl::QwenVlVersion::Two),
            Self::Qwen25Vl => qwen_vl::spec(config, qwen_vl::QwenVlVersion::TwoAndHalf),
            Self::Qwen3Vl => qwen_vl::spec(config, qwen_vl::QwenVlVersion::Three),
            Self::Qwen3VlMoe => qwen_vl::spec(config, qwen_vl::QwenVlVersion::ThreeMoe),
            Self::Qwen2Audio => qwen_audio::spec(config),
            Self::Qwen3Asr => qwen3_asr::spec(config),
            Self::Voxtral => voxtral::spec(config),
            Self::DeepseekOcr2 => deepseek_ocr::spec(config),
            Self::Step3 => step3::spec(config),
            Self::GlmOcr => glm::spec(config),
            Self::Llava => llava::spec(config, llava::LlavaKind::One),
            Self::LlavaNext => llava::spec(config, llava::LlavaKind::Next),
            Self::LlavaOneVision => llava::spec(config, llava::LlavaKind::OneVision),
            Self::Mistral3 => pixtral::spec(config, pixtral::PixtralKind::Merged),
            Self::LightOnOcr => pixtral::spec(config, pixtral::PixtralKind::LightOn),
            Self::Idefics3 | Self::SmolVlm => idefics::spec(config),
            Self::InternVl => internvl::spec(config),
            Self::InternVlChat => internvl_chat::spec(config),
            Self::Gemma3 => gemma::spec(config),
            Self::Gemma3Text => gemma::text_spec(config, gemma::GemmaVersion::Three),
            Self::Gemma2 => gemma::text_spec(config, gemma::GemmaVersion::Two),
            Self::VisionEncoderDecoder => vision::spec(config),
            Self::EncoderDecoder => bert::spec(config),
            Self::Florence2 => florence::spec(config),
            Self::Bart => bart::spec(config, bart::BART),
            Self::MBart => bart::spec(config, bart::MBART),
            Self::M2M100 => bart::spec(config, bart::M2M100),
            Self::Pegasus => bart::spec(config, bart::PEGASUS),
            Self::Marian => bart::spec(config, bart::MARIAN),
            Self::Blenderbot => bart::spec(config, bart::BLENDERBOT),
            Self::BlenderbotSmall => bart::spec(config, bart::BLENDERBOT_SMALL),
            Self::T5 => t5::spec(config, t5::T5),
            Self::Mt5 => t5::spec(config, t5::MT5),
            Self::Umt5 => t5::spec(config, t5::UMT5),
        }
    }
}
