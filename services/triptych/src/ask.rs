//! `triptych ask`: one question to a running cluster, over gRPC.
//!
//! The answer goes to stdout as it comes and nothing else does; where the time went goes to stderr, and on a terminal what
//! is waited for meanwhile.

mod args;
mod items;
mod progress;
mod report;
mod request;

pub use args::AskArgs;

use crate::error::{CliError, chain};
use progress::Waiting;
use report::ReceivedAnswer;
use std::io::Write;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};
use triptych_core::limits::Limits;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_proto::v1::{GenerateRequest, GenerateResponse};
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
    let client = TriptychClient::new(channel).max_encoding_message_size(Limits::default().max_body_bytes);
    let mut request = with_key(request, args.api_key.as_deref())?;
    if let Some(limit) = args.timeout {
        // The cluster stops too.
        request.set_timeout(limit);
    }
    let (mut answer, mut waiting) = (ReceivedAnswer::new(names), Waiting::start(&args.grpc, !args.json));
    let receiving = receive(client, request, &mut answer, &mut waiting);
    let ended = match args.timeout {
        Some(limit) => timeout(limit, receiving).await.map_err(|_| limit),
        None => Ok(receiving.await),
    };
    waiting.end();
    let failed = match ended {
        Ok(Ok(())) => None,
        Ok(Err(status)) => Some(match args.timeout {
            // The cluster, or the connection, noticed first.
            Some(limit) if is_deadline(&status) => timed_out(limit, &waiting),
            _ => refused(&status, &args.grpc),
        }),
        Err(limit) => Some(timed_out(limit, &waiting)),
    };
    if let Some(failed) = failed {
        if !args.json && !answer.text.is_empty() {
            print("\n");
        }
        return Err(failed);
    }
    if args.json {
        print(&format!("{}\n", answer.to_json()));
    } else {
        print("\n");
        let _ = writeln!(std::io::stderr(), "{}", answer.to_line());
    }
    Ok(())
}

fn timed_out(limit: Duration, waiting: &Waiting) -> CliError {
    CliError::TimedOut { limit, waited_for: waiting.stage().to_string() }
}

/// True if a status says that the request's own time is over: the cluster's does, and tonic's, which cancels.
fn is_deadline(status: &Status) -> bool {
    matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled)
}

/// Sends the request and takes in the answer, which is printed as it comes where that is wanted.
async fn receive(
    mut client: TriptychClient<Channel>,
    request: tonic::Request<GenerateRequest>,
    answer: &mut ReceivedAnswer,
    waiting: &mut Waiting,
) -> Result<(), Status> {
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(GenerateResponse { kind }) = stream.message().await? {
        match kind {
            Some(Kind::Accepted(accepted)) => {
                waiting.admitted(&accepted.model);
                answer.accept(accepted);
            }
            Some(Kind::Delta(delta)) => {
                waiting.piece();
                if waiting.is_echoed() {
                    print(answer.next_piece(&delta.text));
                }
                answer.add(&delta);
            }
            Some(Kind::Summary(summary)) => answer.end(summary),
            None => {}
        }
    }
    Ok(())
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
