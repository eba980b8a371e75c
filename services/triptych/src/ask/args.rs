//! Flags of `triptych ask`.

use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use triptych_bench::text::{TextError, duration};

/// Flags of `ask`.
#[derive(Args, Debug)]
pub struct AskArgs {
    /// The question
    pub text: Option<String>,
    /// Image file: PNG, JPEG, WebP, GIF or BMP; repeat for several
    #[arg(long = "image", value_name = "FILE")]
    pub images: Vec<PathBuf>,
    /// Video file: MP4 with H.264 or motion JPEG, animated GIF or WebP; repeat for several
    #[arg(long = "video", value_name = "FILE")]
    pub videos: Vec<PathBuf>,
    /// Audio file: WAV, FLAC, MP3, Ogg Vorbis or AAC; without a question it is transcribed
    #[arg(long, value_name = "FILE")]
    pub audio: Option<PathBuf>,
    /// Translate the speech into English
    #[arg(long, requires = "audio", conflicts_with = "text")]
    pub translate: bool,
    /// Language of the speech, as in `en`. Default: the model finds it
    #[arg(long, value_name = "CODE", requires = "audio", conflicts_with = "text")]
    pub language: Option<String>,
    /// Model name. Default: the one that reads the items
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// gRPC address of the cluster
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// API key or token of the client, if the cluster requires one
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Most tokens of the answer
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Sampling temperature, from 0, which always takes the most probable token, to 2
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Seed of sampling: the same number gives the same answer
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Longest time for the whole answer, as in 500ms, 30s or 2m; then it is an error, with exit status 124. Default: as long
    /// as the cluster takes
    #[arg(long, value_name = "DURATION", value_parser = time)]
    pub timeout: Option<Duration>,
    /// Print one JSON object at the end, with the answer and where the time went
    #[arg(long)]
    pub json: bool,
}

fn time(text: &str) -> Result<Duration, TextError> {
    duration("timeout", text)
}
