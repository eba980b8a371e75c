//! `triptych ask`: one question to a running cluster, over gRPC.
//!
//! The answer goes to stdout as it comes and nothing else does; where the time went goes to stderr.

mod items;
mod report;
mod request;

use crate::error::{CliError, chain};
use clap::Args;
use report::Answer;
use std::io::Write;
use std::path::PathBuf;
use tonic::{Code, Status, Streaming};
use triptych_core::limits::Limits;
use triptych_proto::v1::GenerateResponse;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;
use triptych_runtime::status::PARAM_KEY;

/// Flags of `ask`.
#[derive(Args, Debug)]
pub struct AskArgs {
    /// The question
    pub text: Option<String>,
    /// A picture: PNG, JPEG, WebP, GIF or BMP; repeat for several
    #[arg(long = "image", value_name = "FILE")]
    pub images: Vec<PathBuf>,
    /// A sound: WAV, FLAC, MP3, Ogg Vorbis or AAC; without a question it is written down
    #[arg(long, value_name = "FILE")]
    pub audio: Option<PathBuf>,
    /// Write the speech down in English, whatever its language
    #[arg(long, requires = "audio", conflicts_with = "text")]
    pub translate: bool,
    /// Language of the speech, as in `en`; left out, the model finds it
    #[arg(long, value_name = "CODE", requires = "audio", conflicts_with = "text")]
    pub language: Option<String>,
    /// The model; left out, the one that reads what is asked
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Where the cluster answers gRPC
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// Who asks, where the cluster wants to know: an API key or a token
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Tokens of the answer at most
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// 0 always takes the most probable token, up to 2 takes chances
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// The same number gives the same answer again
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print one JSON object at the end, with the answer and where the time went
    #[arg(long)]
    pub json: bool,
}

/// Shows the key, if there is one.
fn with_key<T>(message: T, key: Option<&str>) -> Result<tonic::Request<T>, CliError> {
    let mut request = tonic::Request::new(message);
    if let Some(key) = key {
        let value = format!("Bearer {}", key.trim()).parse();
        // The error would repeat the key.
        let value = value.map_err(|_| CliError::Setting("--api-key is not ASCII text on one line".into()))?;
        request.metadata_mut().insert("authorization", value);
    }
    Ok(request)
}

/// Asks, and prints the answer.
///
/// # Errors
/// [`CliError`] for a file that cannot be read, a cluster that is not there, and what it answers.
pub async fn run(args: AskArgs) -> Result<(), CliError> {
    let items = items::read_all(&args)?;
    let names = items.iter().map(|i| i.name.clone()).collect();
    let request = request::build(&args, items)?;
    let channel = grpc::channel(&args.grpc).map_err(|e| {
        CliError::setting(format!("--grpc {} is no address, as 127.0.0.1:50051 is", args.grpc), &e)
    })?;
    let mut client = TriptychClient::new(channel).max_encoding_message_size(Limits::default().max_body_bytes);
    let request = with_key(request, args.api_key.as_deref())?;
    let stream = client.generate(request).await.map_err(|s| refused(&s, &args.grpc))?.into_inner();
    let echo = !args.json;
    let answer = receive(stream, Answer::new(names), echo).await.map_err(|(answer, status)| {
        if echo && !answer.text.is_empty() {
            print("\n");
        }
        refused(&status, &args.grpc)
    })?;
    if args.json {
        print(&format!("{}\n", answer.to_json()));
    } else {
        print("\n");
        let _ = writeln!(std::io::stderr(), "{}", answer.to_line());
    }
    Ok(())
}

async fn receive(
    mut stream: Streaming<GenerateResponse>,
    mut answer: Answer,
    echo: bool,
) -> Result<Answer, (Answer, Status)> {
    loop {
        match stream.message().await {
            Ok(Some(GenerateResponse { kind: Some(kind) })) => match kind {
                Kind::Accepted(accepted) => answer.accept(accepted),
                Kind::Delta(delta) => {
                    if echo {
                        print(answer.next_piece(&delta.text));
                    }
                    answer.add(&delta);
                }
                Kind::Summary(summary) => answer.end(summary),
            },
            Ok(Some(GenerateResponse { kind: None })) => {}
            Ok(None) => return Ok(answer),
            Err(status) => return Err((answer, status)),
        }
    }
}

/// A reader that went away (`| head`) is no reason to fail.
fn print(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// The status as a sentence that says what to do.
fn refused(status: &Status, address: &str) -> CliError {
    let param = status.metadata().get(PARAM_KEY).and_then(|v| v.to_str().ok());
    match status.code() {
        // A status that the cluster made has no source; the transport's has.
        Code::Unavailable if std::error::Error::source(status).is_some() => CliError::Failed(format!(
            "nobody answers at {address}; `triptych up` starts a cluster, --grpc ADDR names another ({})",
            chain(std::error::Error::source(status).unwrap_or(status)),
        )),
        Code::InvalidArgument | Code::NotFound => CliError::Setting(match param {
            Some(param) => format!("{} ({param})", status.message()),
            None => status.message().to_owned(),
        }),
        code => CliError::Failed(format!("{} ({code:?})", status.message())),
    }
}
