//! Encoders and decoders against what the reference implementation says of small random models.
//!
//! `tests/golden/README.md` says what the files hold. Every case runs on every back end. A missing file is a
//! failure. The tests drive `Encoder` and `Decoder` themselves, with a block table of their own.

#[path = "golden_models/audio_chat.rs"]
mod audio_chat;
#[path = "golden_models/case.rs"]
mod case;
#[path = "golden_models/cogagent.rs"]
mod cogagent;
#[path = "golden_models/decode_graphs.rs"]
mod decode_graphs;
#[path = "golden_models/graphs.rs"]
mod graphs;
#[path = "golden_models/greedy.rs"]
mod greedy;
#[path = "golden_models/lora.rs"]
mod lora;
#[path = "golden_models/lora_encoders.rs"]
mod lora_encoders;
#[path = "golden_models/mllama.rs"]
mod mllama;
#[path = "golden_models/moonshine.rs"]
mod moonshine;
#[path = "golden_models/pipeline.rs"]
mod pipeline;
#[path = "golden_models/qwen_vl.rs"]
mod qwen_vl;
#[path = "support/real_widths.rs"]
mod drawn;
#[path = "support/golden.rs"]
mod golden;
#[path = "support/planes.rs"]
mod planes;
#[path = "golden_models/real_widths.rs"]
mod real_widths;
#[path = "golden_models/text.rs"]
mod text;
#[path = "golden_models/text_decoders.rs"]
mod text_decoders;
#[path = "golden_models/towers.rs"]
mod towers;
#[path = "golden_models/video.rs"]
mod video;
#[path = "golden_models/vision.rs"]
mod vision;
#[path = "golden_models/whisper.rs"]
mod whisper;
#[path = "golden_models/whisper_long.rs"]
mod whisper_long;
#[path = "golden_models/wide_input.rs"]
mod wide_input;
