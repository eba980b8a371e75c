//! The real client against a server in this process, over a pipe in memory: with the clock paused, times are exact.

use super::*;
use crate::media::Media;
use crate::prompt::Wording;
use std::pin::Pin;
use tokio_stream::Stream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response};
use triptych_proto::v1::triptych_server::{Triptych, TriptychServer};

/// Answers by the model's name.
struct Fake;

type Answer = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

fn message(kind: Kind) -> Result<v1::GenerateResponse, Status> {
    Ok(v1::GenerateResponse { kind: Some(kind) })
}

fn delta(n: u32) -> Result<v1::GenerateResponse, Status> {
    message(Kind::Delta(v1::Delta { token_ids: (0..n).collect(), ..v1::Delta::default() }))
}

fn summary(n: u32) -> Result<v1::GenerateResponse, Status> {
    message(Kind::Summary(v1::Summary {
        usage: Some(v1::Usage { prompt_tokens: 33, completion_tokens: n, ..v1::Usage::default() }),
        times: Some(v1::StageTimes { encode_us: 5000, ..v1::StageTimes::default() }),
        item_sources: vec![v1::ItemSource::Encoded.into(), v1::ItemSource::Cached.into()],
        ..v1::Summary::default()
    }))
}

#[tonic::async_trait]
impl Triptych for Fake {
    type GenerateStream = Answer;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Answer>, Status> {
        let request = request.into_inner();
        let script: Vec<(u64, Result<v1::GenerateResponse, Status>)> = match request.model.as_str() {
            "full" => return Err(Status::resource_exhausted("no room")),
            "breaks" => vec![(10, delta(1)), (10, Err(Status::unavailable("worker gone")))],
            "silent" => vec![(10, delta(3))],
            "short" => vec![(10, delta(2)), (0, summary(2))],
            _ => vec![(100, delta(1)), (20, delta(2)), (40, delta(1)), (5, summary(4))],
        };
        let stream = futures::stream::unfold(script.into_iter(), |mut script| async move {
            let (pause, message) = script.next()?;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            Some((message, script))
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        Ok(Response::new(v1::ListModelsResponse::default()))
    }

    async fn tokenize(
        &self,
        _: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        Err(Status::unimplemented("no load asks for it"))
    }

    async fn detokenize(
        &self,
        _: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        Err(Status::unimplemented("no load asks for it"))
    }
}

/// A channel to [`Fake`] without a socket.
async fn channel() -> Channel {
    let (client, server) = tokio::io::duplex(1 << 20);
    let incoming = tokio_stream::once(Ok::<_, std::io::Error>(server));
    tokio::spawn(Server::builder().add_service(TriptychServer::new(Fake)).serve_with_incoming(incoming));
    let mut client = Some(hyper_util::rt::TokioIo::new(client));
    let connect = tower::service_fn(move |_| {
        let client = client.take().ok_or_else(|| std::io::Error::other("connected before"));
        async move { client }
    });
    Endpoint::from_static("http://fake").connect_with_connector(connect).await.expect("a pipe")
}

async fn ask(model: &str) -> Reply {
    let target = GrpcTarget::new("fake", vec![channel().await], model.to_owned(), None).expect("no key");
    let content = ContentSource { media: Media::new(1), wording: Wording::DIGITS, seed: 1 };
    let at = Duration::ZERO;
    let offered = Offered {
        index: 0,
        at,
        text_tokens: 5,
        output_tokens: 4,
        items: vec![],
        session: None,
        blocks: None,
        slo: None,
    };
    target.prepare(&offered, &content)(Clock::started()).await
}

#[tokio::test(start_paused = true)]
async fn tokens_have_the_times_of_their_messages() {
    let reply = ask("good").await;
    let millis: Vec<u128> = reply.tokens.iter().map(Duration::as_millis).collect();
    assert_eq!((millis, reply.ended.as_millis()), (vec![100, 120, 120, 160], 165));
    assert_eq!((reply.end, reply.prompt_tokens), (End::Whole, Some(33)));
    assert_eq!(reply.stages.map(|s| s.encode), Some(Duration::from_millis(5)));
    assert_eq!(reply.sources, Some(ItemSources { encoded: 1, shared: 0, cached: 1 }));
}

#[tokio::test(start_paused = true)]
async fn how_a_stream_ends_is_how_its_request_ends() {
    assert_eq!(ask("full").await.end, End::Refused);
    assert_eq!(ask("short").await.end, End::Short);
    assert_eq!(ask("breaks").await.end, End::Failed("Unavailable: worker gone".into()));
    assert_eq!(ask("silent").await.end, End::Failed("the stream ended without a summary".into()));
    assert_eq!(ask("breaks").await.tokens.len(), 1, "what came before is kept");
}

#[test]
fn a_lone_sound_is_written_down_and_everything_else_is_a_chat() {
    let content = ContentSource { media: Media::new(1), wording: Wording::DIGITS, seed: 1 };
    let audio = crate::offered::OfferedItem { content: 1, shape: ItemShape::Audio { millis: 100 } };
    let image = crate::offered::OfferedItem { content: 1, shape: ItemShape::Image { width: 4, height: 4 } };
    let ask = |text_tokens, items: &[crate::offered::OfferedItem]| {
        let at = Duration::ZERO;
        let offered = Offered {
            index: 0,
            at,
            text_tokens,
            output_tokens: 4,
            items: items.to_vec(),
            session: None,
            blocks: None,
            slo: None,
        };
        request("m", &offered, &content)
    };
    let kind = |r: &v1::GenerateRequest| r.prompt.clone().and_then(|p| p.kind).expect("a prompt");
    assert!(matches!(kind(&ask(0, &[audio])), PromptKind::Speech(_)));
    assert!(matches!(kind(&ask(5, &[audio])), PromptKind::Chat(_)));
    let both = ask(7, &[image, image]);
    let PromptKind::Chat(chat) = kind(&both) else { panic!("a chat") };
    assert_eq!((chat.messages[0].parts.len(), both.items.len()), (3, 2));
    assert_eq!(
        both.sampling.map(|s| (s.max_tokens, s.min_tokens, s.ignore_eos)),
        Some((Some(4), Some(4), true))
    );
}
