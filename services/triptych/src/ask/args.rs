//! Flags of `triptych ask`.

use clap::Args;
use std::path::PathBuf;

/// Flags of `ask`.
#[derive(Args, Debug)]
pub struct AskArgs {
    /// The question
    pub text: Option<String>,
    /// Image file: PNG, JPEG, WebP, GIF or BMP; repeat for several
    #[arg(long = "image", value_name = "FILE")]
    pub images: Vec<PathBuf>,
    /// Audio file: WAV, FLAC, MP3, Ogg Vorbis or AAC; without a question it is transcribed
    #[arg(long, value_name = "FILE")]
    pub audio: Option<PathBuf>,
    /// Translate the speech into English
    #[arg(long, requires = "audio", conflicts_with = "text")]
    pub translate: bool,
    /// Language of the speech, as in `en`; left out, the model finds it
    #[arg(long, value_name = "CODE", requires = "audio", conflicts_with = "text")]
    pub language: Option<String>,
    /// Model name; left out, the one that reads the items
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// gRPC address of the cluster
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// API key or token of the client, if the cluster requires one
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Tokens of the answer at most
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// 0 always takes the most probable token, up to 2 takes chances
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Seed of sampling: the same number gives the same answer
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print one JSON object at the end, with the answer and where the time went
    #[arg(long)]
    pub json: bool,
}
