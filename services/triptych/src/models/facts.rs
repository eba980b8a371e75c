//! Facts about a model, and their JSON.

use super::measure::Measured;
use serde_json::{Value, json};
use std::path::PathBuf;
use triptych_core::Modality;
use triptych_core::prompt::ToolSyntax;
use triptych_models::model::{BytesByPrecision, Inventory, StageInventory};
use triptych_models::prompt::ChatTemplate;
use triptych_models::{Model, ModelSource};

/// Endpoints of conversations.
const CHAT: [&str; 2] = ["POST /v1/chat/completions", "POST /v1/responses"];

/// Tools in the conversations of a model, by its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSupport {
    /// The template shows none, or there is none.
    NotShown,
    /// Shown; the syntax of calls is not known.
    UnknownSyntax,
    /// Shown, and calls are read in this syntax.
    Read(ToolSyntax),
}

impl ToolSupport {
    fn of(model: &Model) -> Self {
        let format = model.prompts().chat_template().map(ChatTemplate::format).unwrap_or_default();
        match format.tool_syntax {
            _ if !format.reads_tools => Self::NotShown,
            None => Self::UnknownSyntax,
            Some(syntax) => Self::Read(syntax),
        }
    }

    /// A line for the page.
    pub fn line(self) -> String {
        match self {
            Self::NotShown => {
                "not shown by its chat template; a call can be asked for by tool_choice".to_owned()
            }
            Self::UnknownSyntax => {
                "shown; the syntax of calls is not known, and --tool-parser names one".to_owned()
            }
            Self::Read(syntax) => format!("shown, and called as {}", syntax.as_str()),
        }
    }
}

/// Facts about a model.
pub struct Facts {
    /// The name clients use.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// The `model_type` of its configuration.
    pub family: &'static str,
    /// The kinds of items it reads; none of a decoder by itself.
    pub modalities: Vec<Modality>,
    /// Forms of prompts that it takes.
    pub prompts: &'static str,
    /// Endpoints for its requests.
    pub endpoints: Vec<&'static str>,
    /// Tools that its conversations show and call.
    pub tools: ToolSupport,
    /// Tokens the decoder's context holds.
    pub max_context: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// BytesByPrecision.
    pub inventory: Inventory,
    /// Measured memory, if it was requested.
    pub measured: Option<Measured>,
}

impl Facts {
    /// Gathers the facts of a model.
    pub fn new(
        source: &ModelSource,
        model: &Model,
        inventory: Inventory,
        measured: Option<Measured>,
    ) -> Self {
        let modalities = model.modalities().to_vec();
        let reads = |modality| modalities.contains(&modality);
        let mut endpoints = Vec::new();
        if model.prompts().transcribes() {
            endpoints.push("POST /v1/audio/transcriptions");
            if model.tokenizer().token_id("<|translate|>").is_some() {
                endpoints.push("POST /v1/audio/translations");
            }
        }
        // Audio among the tokens has words beside it.
        if reads(Modality::Image) || (reads(Modality::Audio) && inventory.kv.cross_per_row.is_none()) {
            endpoints.extend(CHAT);
        }
        let is_decoder = modalities.is_empty();
        let chats = is_decoder && model.prompts().has_chat_template();
        if chats {
            endpoints.extend(CHAT);
        }
        if reads(Modality::Text) || is_decoder {
            endpoints.push("POST /v1/completions");
        }
        if !is_decoder {
            endpoints.push("POST /v1/embeddings");
        }
        endpoints.push("gRPC triptych.v1.Triptych/Generate");
        let prompts = match inventory.kv.cross_per_row {
            None if chats => "chat messages, or text or tokens",
            None if is_decoder => "text or tokens; it has no chat template",
            None => "chat messages, with items among their words",
            Some(_) if reads(Modality::Text) => {
                "text or tokens for the encoder, for the decoder, or for both"
            }
            Some(_) if model.prompts().has_chat_template() => "chat messages, or text or tokens, with images",
            Some(_) => "an item for the encoder; text or tokens to begin the answer with",
        };
        Self {
            name: model.name().to_string(),
            dir: source.dir.clone(),
            family: model.family(),
            prompts,
            endpoints,
            tools: ToolSupport::of(model),
            max_context: model.max_context(),
            vocab: model.tokenizer().vocab_size(),
            modalities,
            inventory,
            measured,
        }
    }

    /// The facts as JSON; sizes are bytes.
    pub fn json(&self) -> Value {
        let i = &self.inventory;
        let sizes =
            |s: BytesByPrecision| json!({"f32": s.f32, "bf16": s.bf16, "int8": s.int8, "int4": s.int4});
        let stage = |s: &StageInventory| {
            json!({
                "tensors": s.n_tensors, "parameters": s.n_parameters, "stored_bytes": s.stored_bytes,
                "loaded_bytes": sizes(s.loaded),
            })
        };
        let example = i.encoder.as_ref().map(|encoder| {
            let n_rows = encoder.example.n_rows;
            let output = match &encoder.towers[..] {
                [] => encoder.row.times(n_rows),
                towers => towers
                    .iter()
                    .map(|t| t.row.times(t.n_rows))
                    .fold(BytesByPrecision::default(), BytesByPrecision::plus),
            };
            json!({
                "item": encoder.example.item, "rows": n_rows, "output_bytes": sizes(output),
                "activation_bytes": sizes(encoder.activations),
                "cross_kv_bytes": i.kv.cross_per_row.map(|s| sizes(s.times(encoder.example.n_cross_rows))),
            })
        });
        json!({
            "name": self.name, "dir": self.dir.display().to_string(), "family": self.family,
            "architecture": i.architecture, "weights": {
                "format": i.weights.as_str(), "quantization": i.quantization.map(|method| method.to_string()),
            },
            "modalities": self.modalities.iter().map(|m| m.as_str()).collect::<Vec<_>>(),
            "prompts": self.prompts, "endpoints": self.endpoints,
            "tools": self.tools != ToolSupport::NotShown, "tool_parser": match self.tools {
                ToolSupport::Read(syntax) => Some(syntax.as_str()),
                ToolSupport::NotShown | ToolSupport::UnknownSyntax => None,
            },
            "max_context": self.max_context, "vocab": self.vocab,
            "stages": {
                "encoder": i.encoder.as_ref().map(|encoder| stage(&encoder.stage)), "decoder": stage(&i.decoder),
            },
            "towers": i.encoder.iter().flat_map(|encoder| &encoder.towers).map(|tower| json!({
                "name": tower.name, "stage": stage(&tower.stage), "rows": tower.n_rows,
                "output_bytes": sizes(tower.row.times(tower.n_rows)), "activation_bytes": sizes(tower.activations),
            })).collect::<Vec<_>>(),
            "experts": i.experts.map(|e| json!({
                "layers": e.n_layers, "experts": e.n_experts, "experts_per_token": e.top_k,
                "parameters_per_token": e.n_active,
            })),
            "shared_tensors": i.shared, "unused_tensors": i.unused,
            "kv_bytes_per_token": sizes(i.kv.per_token),
            "kv_bytes_per_token_behind_window": i.kv.behind_window.map(|behind| sizes(behind.per_token)),
            "sliding_window": i.kv.behind_window.map(|behind| behind.window),
            "state_bytes_per_sequence": i.state_bytes,
            "cross_kv_bytes_per_row": i.kv.cross_per_row.map(sizes),
            "example": example,
            "measured": self.measured.map(|m| json!({
                "precision": m.precision, "encoder_bytes": m.encoder, "decoder_bytes": m.decoder,
            })),
        })
    }
}
