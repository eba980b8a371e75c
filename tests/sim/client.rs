//! Clients: they ask, and they know the right answer.

use crate::ledger::Ledger;
use crate::net::{address, channel};
use crate::plan::{Kind, N_PROXIES, Plan, Trouble};
use crate::truth::{self, MODEL};
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

/// What a request is given to end.
const TIME: Duration = Duration::from_secs(15);
/// And how much later the end may reach the client.
const LATE: Duration = Duration::from_secs(2);
/// The workers are found before this.
const START: Duration = Duration::from_millis(400);

/// One request and the text that is right.
struct Asked {
    name: String,
    message: v1::GenerateRequest,
    expected: String,
}

/// The bytes of an image; the first says how many rows it has.
fn image(number: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; 40];
    bytes[0] = 4 + 8 * number as u8;
    bytes
}

fn asked(rng: &mut impl Rng, name: String, plan: &Plan) -> Asked {
    let prompt = format!("prompt {}", rng.random_range(0..100));
    let n_items = rng.random_range(0..=2);
    let images: Vec<_> = (0..n_items).map(|_| image(rng.random_range(0..plan.n_images))).collect();
    let n_tokens = rng.random_range(2..=12_u32);
    // Rows depend on the bytes alone, so any key gives the same digest.
    let rows = |bytes: &Vec<u8>| truth::digest(truth::encode(ContentKey::from_bytes([0; 32]), bytes).rows());
    let digests: Vec<_> = images.iter().map(rows).collect();
    let expected = (0..n_tokens as usize).map(|i| truth::text(truth::token(&prompt, &digests, i))).collect();
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
    Asked { name, message, expected }
}

/// Asks its requests, one after the other with pauses, and writes down how each ended.
pub async fn run(number: usize, seed: u64, plan: Plan, ledger: Ledger) -> turmoil::Result {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(number as u64));
    sleep(START).await;
    let mut running = Vec::new();
    for i in 0..plan.n_requests {
        let asked = asked(&mut rng, format!("client-{number}/{i}"), &plan);
        let proxy = address(&format!("proxy-{}", rng.random_range(0..N_PROXIES)));
        let mood = Mood::of(&plan);
        running.push(tokio::spawn(one(asked, proxy, ledger.clone(), mood)));
        sleep(Duration::from_millis(rng.random_range(0..600))).await;
    }
    for task in running {
        task.await?;
    }
    Ok(())
}

/// What may go wrong for a client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    /// Nothing at all.
    Calm,
    /// A request may fail, in the cluster's own words.
    Typed,
    /// A proxy may go away with its connections.
    Broken,
}

impl Mood {
    fn of(plan: &Plan) -> Self {
        let breaks = |t: &Trouble| matches!(&t.kind, Kind::Crash(host) if host.starts_with("proxy"));
        match plan.troubles.as_slice() {
            [] => Self::Calm,
            troubles if troubles.iter().any(breaks) => Self::Broken,
            _ => Self::Typed,
        }
    }

    /// Whether a failure is one that may be.
    fn allows(self, status: &Status) -> bool {
        let class = status.metadata().get(CLASS_KEY).and_then(|v| v.to_str().ok());
        match (self, class) {
            (Self::Calm, _) => false,
            (Self::Typed, None) => false,
            (Self::Broken, None) => true,
            (_, Some(class)) => class != FailureClass::Internal.as_str(),
        }
    }
}

async fn one(asked: Asked, proxy: String, ledger: Ledger, mood: Mood) {
    let Asked { name, message, expected } = asked;
    ledger.tell(&format!("{name} asks {proxy}"));
    ledger.note(|books| books.open += 1);
    let ended = timeout_at(Instant::now() + TIME + LATE, answer(message, &proxy)).await;
    ledger.note(|books| books.open -= 1);
    match ended {
        Err(_) => ledger.violation(format!("{name} did not end")),
        Ok(Ok(text)) if text == expected => {
            ledger.tell(&format!("{name} answered"));
            ledger.note(|books| books.answered += 1);
        }
        Ok(Ok(text)) => ledger.violation(format!("{name} was told {text:?}, right is {expected:?}")),
        Ok(Err(status)) => {
            let code = format!("{:?}", status.code());
            ledger.tell(&format!("{name} refused: {code} {}", status.message()));
            if !mood.allows(&status) {
                ledger.violation(format!("{name} failed without a cause: {code} {}", status.message()));
            }
            ledger.note(|books| *books.refused.entry(code).or_default() += 1);
        }
    }
}

/// The text of an answer that is whole.
async fn answer(message: v1::GenerateRequest, proxy: &str) -> Result<String, Status> {
    let channel = channel(proxy).map_err(|e| Status::unavailable(e.to_string()))?;
    let mut request = tonic::Request::new(message);
    request.set_timeout(TIME);
    let mut pieces = TriptychClient::new(channel).generate(request).await?.into_inner();
    let (mut text, mut ended) = (String::new(), false);
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
