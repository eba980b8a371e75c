//! Clients: they send requests, and check the answers.

use crate::fault_plan::{Fault, FaultKind, FaultPlan, N_PROXIES};
use crate::net::{address, channel};
use crate::recorder::Recorder;
use crate::reference::{self, MODEL};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Status;
use triptych_core::{ContentKey, FailureClass, Modality};
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind as Piece;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::status::CLASS_KEY;

/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(15);
/// Margin after which the end must have reached the client.
const MARGIN: Duration = Duration::from_secs(2);
/// Pause before the first request, in which the proxies discover the workers.
const WARM_UP: Duration = Duration::from_millis(400);

/// A request and its expected answer.
struct ClientRequest {
    name: String,
    message: v1::GenerateRequest,
    expected: String,
}

/// The bytes of an image; the first is its number of rows.
fn image(number: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; 40];
    bytes[0] = 4 + 8 * number as u8;
    bytes
}

fn asked(rng: &mut impl Rng, name: String, plan: &FaultPlan) -> ClientRequest {
    let prompt = format!("prompt {}", rng.random_range(0..100));
    let n_items = rng.random_range(0..=2);
    let images: Vec<_> = (0..n_items).map(|_| image(rng.random_range(0..plan.n_images))).collect();
    let n_tokens = rng.random_range(2..=12_u32);
    // Rows depend on the bytes alone, so any key gives the same digest.
    let rows =
        |bytes: &Vec<u8>| reference::digest(reference::encode(ContentKey::from_bytes([0; 32]), bytes).rows());
    let digests: Vec<_> = images.iter().map(rows).collect();
    let expected =
        (0..n_tokens as usize).map(|i| reference::text(reference::token(&prompt, &digests, i))).collect();
    let item = |data: &Vec<u8>| v1::Item {
        modality: v1::Modality::from(Modality::Image).into(),
        source: Some(v1::item::Source::Data(data.clone().into())),
        options: None,
    };
    let text = v1::TextOrTokens { kind: Some(v1::text_or_tokens::Kind::Text(prompt)) };
    let message = v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(text)) }),
        items: images.iter().map(item).collect(),
        sampling: Some(v1::Sampling { max_tokens: Some(n_tokens), ..Default::default() }),
        ..Default::default()
    };
    ClientRequest { name, message, expected }
}

/// Sends its requests with pauses in between, and records how each ended.
pub async fn run(number: usize, seed: u64, plan: FaultPlan, recorder: Recorder) -> turmoil::Result {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(number as u64));
    sleep(WARM_UP).await;
    let mut running = Vec::new();
    for i in 0..plan.n_requests {
        let asked = asked(&mut rng, format!("client-{number}/{i}"), &plan);
        let proxy = address(&format!("proxy-{}", rng.random_range(0..N_PROXIES)));
        let allowed = AllowedFailures::of(&plan);
        running.push(tokio::spawn(one(asked, proxy, recorder.clone(), allowed)));
        sleep(Duration::from_millis(rng.random_range(0..600))).await;
    }
    for task in running {
        task.await?;
    }
    Ok(())
}

/// Failures that a client may see under the plan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AllowedFailures {
    /// None.
    None,
    /// Typed errors of the cluster.
    Typed,
    /// Typed errors and broken connections: a proxy may crash.
    Transport,
}

impl AllowedFailures {
    fn of(plan: &FaultPlan) -> Self {
        let breaks = |t: &Fault| matches!(&t.kind, FaultKind::Crash(host) if host.starts_with("proxy"));
        match plan.faults.as_slice() {
            [] => Self::None,
            faults if faults.iter().any(breaks) => Self::Transport,
            _ => Self::Typed,
        }
    }

    /// True if the failure may occur.
    fn allows(self, status: &Status) -> bool {
        let class = status.metadata().get(CLASS_KEY).and_then(|v| v.to_str().ok());
        match (self, class) {
            (Self::None, _) => false,
            (Self::Typed, None) => false,
            (Self::Transport, None) => true,
            (_, Some(class)) => class != FailureClass::Internal.as_str(),
        }
    }
}

async fn one(asked: ClientRequest, proxy: String, recorder: Recorder, allowed: AllowedFailures) {
    let ClientRequest { name, message, expected } = asked;
    recorder.log(&format!("{name} asks {proxy}"));
    recorder.update(|record| record.open += 1);
    let ended = timeout_at(Instant::now() + DEADLINE + MARGIN, answer(message, &proxy)).await;
    recorder.update(|record| record.open -= 1);
    match ended {
        Err(_) => recorder.violation(format!("{name} did not end")),
        Ok(Ok(text)) if text == expected => {
            recorder.log(&format!("{name} answered"));
            recorder.update(|record| record.answered += 1);
        }
        Ok(Ok(text)) => recorder.violation(format!("{name} received {text:?}, expected is {expected:?}")),
        Ok(Err(status)) => {
            let code = format!("{:?}", status.code());
            recorder.log(&format!("{name} refused: {code} {}", status.message()));
            if !allowed.allows(&status) {
                recorder.violation(format!("{name} failed without a cause: {code} {}", status.message()));
            }
            recorder.update(|record| *record.refused.entry(code).or_default() += 1);
        }
    }
}

/// The text of a complete answer.
async fn answer(message: v1::GenerateRequest, proxy: &str) -> Result<String, Status> {
    let channel = channel(proxy).map_err(|e| Status::unavailable(e.to_string()))?;
    let mut request = tonic::Request::new(message);
    request.set_timeout(DEADLINE);
    let mut pieces = TriptychClient::new(channel).generate(request).await?.into_inner();
    let mut text = String::new();
    let mut ended = false;
    while let Some(piece) = pieces.message().await? {
        match piece.kind {
            Some(Piece::Delta(delta)) if !ended => text.push_str(&delta.text),
            Some(Piece::Summary(_)) if !ended => ended = true,
            Some(Piece::Accepted(_)) if !ended => {}
            _ => return Ok(format!("{text}<a piece after the end>")),
        }
    }
    if ended { Ok(text) } else { Ok(format!("{text}<no end>")) }
}
