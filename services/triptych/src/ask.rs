//! `triptych ask`: one question to a running cluster, over gRPC.
//!
//! The answer goes to stdout as it comes and nothing else does; where the time went goes to stderr.

mod args;
mod items;
mod report;
mod request;

pub use args::AskArgs;

use crate::error::{CliError, chain};
use report::ReceivedAnswer;
use std::io::Write;
use tonic::{Code, Status, Streaming};
use triptych_core::limits::Limits;
use triptych_proto::v1::GenerateResponse;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;
use triptych_runtime::status::PARAM_KEY;

/// A request with the API key, if there is one.
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
    let answer = receive(stream, ReceivedAnswer::new(names), echo).await.map_err(|(answer, status)| {
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
    mut answer: ReceivedAnswer,
    echo: bool,
) -> Result<ReceivedAnswer, (ReceivedAnswer, Status)> {
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
            "no server answers at {address}; `triptych up` starts a cluster, --grpc ADDR names another ({})",
            chain(std::error::Error::source(status).unwrap_or(status)),
        )),
        Code::InvalidArgument | Code::NotFound => CliError::Setting(match param {
            Some(param) => format!("{} ({param})", status.message()),
            None => status.message().to_owned(),
        }),
        code => CliError::Failed(format!("{} ({code:?})", status.message())),
    }
}
