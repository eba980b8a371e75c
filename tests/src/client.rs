//! A gRPC client of the cluster.

use tonic::Status;
use tonic::transport::Channel;
use triptych_proto::v1;
use triptych_proto::v1::triptych_client::TriptychClient;

/// A complete answer.
#[derive(Debug, Default)]
pub struct Answer {
    pub text: String,
    pub request_id: String,
    pub segments: Vec<v1::Segment>,
    pub summary: v1::Summary,
}

/// Connects to a proxy.
pub async fn connect(address: &str) -> TriptychClient<Channel> {
    let channel = tonic::transport::Endpoint::from_shared(address.to_owned()).expect("an address");
    TriptychClient::new(channel.connect().await.expect("the proxy listens"))
        .max_decoding_message_size(64 << 20)
}

/// Sends a request and reads the stream to its end.
pub async fn generate(
    client: &mut TriptychClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Answer, Status> {
    use v1::generate_response::Kind;
    let mut stream = client.generate(request).await?.into_inner();
    let mut answer = Answer::default();
    while let Some(message) = stream.message().await? {
        match message.kind {
            Some(Kind::Accepted(a)) => answer.request_id = a.request_id,
            Some(Kind::Delta(d)) => {
                answer.text.push_str(&d.text);
                answer.segments.extend(d.segments);
            }
            Some(Kind::Summary(s)) => answer.summary = s,
            None => {}
        }
    }
    Ok(answer)
}

/// A greedy question about images.
pub fn about_images(question: &str, images: Vec<Vec<u8>>) -> v1::GenerateRequest {
    use v1::{item, part, prompt};
    let n = u32::try_from(images.len()).expect("few");
    let part = |kind| v1::Part { kind: Some(kind) };
    let mut parts: Vec<v1::Part> = (0..n).map(|i| part(part::Kind::Item(i))).collect();
    parts.push(part(part::Kind::Text(question.to_owned())));
    let message = v1::Message { role: v1::Role::User.into(), parts };
    let image = |data: Vec<u8>| v1::Item {
        modality: v1::Modality::Image.into(),
        source: Some(item::Source::Data(data.into())),
        options: None,
    };
    v1::GenerateRequest {
        prompt: Some(v1::Prompt {
            kind: Some(prompt::Kind::Chat(prompt::Chat { messages: vec![message], ..Default::default() })),
        }),
        items: images.into_iter().map(image).collect(),
        sampling: Some(v1::Sampling { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    }
}

/// A greedy request about a text, for the encoder of a model that has one for text.
pub fn about_text(text: &str) -> v1::GenerateRequest {
    let text = v1::TextOrTokens { kind: Some(v1::text_or_tokens::Kind::Text(text.to_owned())) };
    v1::GenerateRequest {
        prompt: Some(v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(text)) }),
        sampling: Some(v1::Sampling { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    }
}

/// A transcription request.
pub fn about_audio(audio: Vec<u8>, task: v1::SpeechTask) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(v1::Prompt { kind: Some(v1::prompt::Kind::Speech(task)) }),
        items: vec![v1::Item {
            modality: v1::Modality::Audio.into(),
            source: Some(v1::item::Source::Data(audio.into())),
            options: None,
        }],
        sampling: Some(v1::Sampling { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    }
}
