//! The gRPC API: `triptych.v1.Triptych`.

pub mod admit;

use crate::admission::{Admission, Permit};
use crate::auth::{Auth, Caller};
use crate::fleet::catalog::Served;
use crate::orchestrate::{Answer, Orchestrator, Piece, TokenOptions};
use crate::request::{Api, Item, Request, Resumption, Source, param_of_item};
use admit::Admitted;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use prost::Message;
use std::sync::Arc;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Response, Status};
use triptych_core::limits::Limits;
use triptych_core::prompt::TextOrTokens;
use triptych_core::{Failure, ItemForm, ItemIdx, Modality, ModelName, RequestId};
use triptych_proto::convert::{self, WireError};
use triptych_proto::v1;
use triptych_proto::v1::triptych_server::{Triptych, TriptychServer};
use triptych_runtime::deadline;
use triptych_runtime::status::to_status;

/// The gRPC API.
#[derive(Clone)]
pub struct GrpcApi {
    /// Runs requests.
    pub orchestrator: Arc<Orchestrator>,
    /// Limits on requests.
    pub limits: Limits,
    /// Bound on requests in flight.
    pub admission: Admission,
    /// Identifies clients.
    pub auth: Auth,
}

impl GrpcApi {
    /// The service, admission included.
    pub fn service(self) -> admit::Admit<TriptychServer<GrpcApi>> {
        let limits = self.limits.clone();
        let check = admit::AdmissionCheck {
            admission: self.admission.clone(),
            auth: self.auth.clone(),
            observer: self.orchestrator.observer.clone(),
            request_log: self.orchestrator.request_log,
            message_timeout: limits.max_request_time,
        };
        let service = TriptychServer::new(self).max_decoding_message_size(limits.max_body_bytes);
        admit::Admit::new(service, check)
    }

    async fn start(&self, request: tonic::Request<v1::GenerateRequest>) -> Result<Answer, Failure> {
        let id = admit::request_id(request.extensions());
        let (request, permit) = self.read(request).await.inspect_err(|failure| self.refused(id, failure))?;
        self.orchestrator.start(request, permit)
    }

    /// A request that was admitted, and its permit.
    async fn read(&self, request: tonic::Request<v1::GenerateRequest>) -> Result<(Request, Permit), Failure> {
        let admitted = request.extensions().get::<Admitted>().cloned();
        let admitted = admitted.ok_or_else(|| Failure::internal("a call that was not admitted"))?;
        let id = admit::request_id(request.extensions());
        let (metadata, _, message) = request.into_parts();
        let Admitted { caller, permit } = self.named(admitted, &message)?;
        caller.account.enter_shared().await?;
        Ok((read(id, message, &metadata, &self.limits, caller)?, permit))
    }

    /// Counts and logs a request that is refused before a model is chosen for it.
    fn refused(&self, id: RequestId, failure: &Failure) {
        self.orchestrator.observer.refused(failure);
        self.orchestrator.request_log.refused(id, Api::Grpc, failure);
    }

    async fn tokens(
        &self,
        request: tonic::Request<v1::TokenizeRequest>,
    ) -> Result<v1::TokenizeResponse, Failure> {
        let id = admit::request_id(request.extensions());
        let v1::TokenizeRequest { without_special_tokens, with_texts, .. } = *request.get_ref();
        let as_question = |asked: v1::TokenizeRequest| v1::GenerateRequest {
            model: asked.model,
            prompt: asked.prompt,
            ..v1::GenerateRequest::default()
        };
        let read = self.read(request.map(as_question)).await.inspect_err(|failure| self.refused(id, failure));
        let (request, _permit) = read?;
        self.orchestrator.tokenize(request, TokenOptions { without_special_tokens, with_texts }).await
    }

    async fn text(
        &self,
        request: tonic::Request<v1::DetokenizeRequest>,
    ) -> Result<v1::DetokenizeResponse, Failure> {
        let id = admit::request_id(request.extensions());
        let mut token_ids = Vec::new();
        let request = request.map(|asked| {
            token_ids = asked.token_ids;
            // A prompt is read with it, so it has one.
            let nothing = v1::text_or_tokens::Kind::Tokens(v1::TokenIds::default());
            let nothing = v1::TextOrTokens { kind: Some(nothing) };
            let prompt = Some(v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(nothing)) });
            v1::GenerateRequest { model: asked.model, prompt, ..v1::GenerateRequest::default() }
        });
        let read = self.read(request).await.inspect_err(|failure| self.refused(id, failure));
        let (request, _permit) = read?;
        let times = (request.arrived, request.deadline);
        self.orchestrator.detokenize(request.model.as_ref(), token_ids, &request.caller, times).await
    }

    /// Resolves the tenant: the key's own, or, without authentication, the one that the message names.
    fn named(&self, admitted: Admitted, message: &v1::GenerateRequest) -> Result<Admitted, Failure> {
        if self.auth.is_required() {
            Auth::check_named(&admitted.caller, &message.tenant)?;
            return Ok(admitted);
        }
        let tenant = match message.tenant.as_str() {
            "" => admitted.caller.tenant,
            named => named.to_owned(),
        };
        let caller = self.auth.trusted(tenant)?.enter()?;
        caller.hold_bytes(message.encoded_len())?;
        Ok(Admitted { caller, ..admitted })
    }
}

fn read(
    id: RequestId,
    message: v1::GenerateRequest,
    metadata: &MetadataMap,
    limits: &Limits,
    caller: Caller,
) -> Result<Request, Failure> {
    let arrived = Instant::now();
    let time = deadline::asked(metadata)?.map_or(limits.max_request_time, |t| t.min(limits.max_request_time));
    let prompt = message.prompt.ok_or(WireError::Missing { field: "prompt" })?;
    Ok(Request {
        id,
        api: Api::Grpc,
        arrived,
        deadline: arrived + time,
        model: Some(message.model).filter(|m| !m.is_empty()).map(ModelName::new),
        prompt: prompt.try_into()?,
        items: message
            .items
            .into_iter()
            .enumerate()
            .map(|(i, item)| read_item(i, item))
            .collect::<Result<_, _>>()?,
        sampling: message.sampling.unwrap_or_default(),
        caller,
        priority: message.priority,
        encoder_prompt: None,
        src_lang: message.src_lang.filter(|code| !code.is_empty()),
        resumption: resumption(message.resumption)?,
    })
}

fn resumption(value: i32) -> Result<Resumption, WireError> {
    use v1::Resumption as Wire;
    match Wire::try_from(value) {
        Ok(Wire::Unspecified | Wire::GoOn) => Ok(Resumption::GoOn),
        Ok(Wire::Never) => Ok(Resumption::Never),
        Err(_) => Err(WireError::Enum { field: "resumption", value, set: "Resumption" }),
    }
}

fn read_item(i: usize, item: v1::Item) -> Result<Item, Failure> {
    use v1::item::Source as Wire;
    let param = param_of_item(ItemIdx(u32::try_from(i).unwrap_or(u32::MAX)));
    let at_item = |e: WireError| Failure::from(e).with_param(format!("{param}.modality"));
    let modality = convert::modality(item.modality).map_err(at_item)?;
    let source = match item.source {
        Some(Wire::Data(bytes)) => Source::Bytes(bytes),
        Some(Wire::Url(url)) => Source::Url(url),
        Some(Wire::Text(text)) if modality == Modality::Text => Source::Bytes(text.into()),
        Some(Wire::Tokens(ids)) if modality == Modality::Text => {
            return Ok(Item::of_text(TextOrTokens::Tokens(ids.ids), &param));
        }
        Some(Wire::Text(_) | Wire::Tokens(_)) => {
            return Err(
                Failure::invalid(format!("the item is text, its modality is {modality}")).with_param(param)
            );
        }
        None => return Err(Failure::invalid("the item has no data, url, text or tokens").with_param(param)),
    };
    let options = convert::options(item.options.unwrap_or_default(), ItemForm::Plain);
    let options = options.map_err(|e| {
        let field = e.field();
        Failure::from(e).with_param(format!("{param}.options.{field}"))
    })?;
    Ok(Item { modality, source, options, param })
}

#[tonic::async_trait]
impl Triptych for GrpcApi {
    type GenerateStream = BoxStream<'static, Result<v1::GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: tonic::Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let answer = self.start(request).await.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(pieces(answer).boxed()))
    }

    async fn tokenize(
        &self,
        request: tonic::Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        self.tokens(request).await.map(Response::new).map_err(|failure| to_status(&failure))
    }

    async fn detokenize(
        &self,
        request: tonic::Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        self.text(request).await.map(Response::new).map_err(|failure| to_status(&failure))
    }

    async fn list_models(
        &self,
        request: tonic::Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let caller = request.extensions().get::<Caller>();
        let catalog = self.orchestrator.fleet.catalog();
        let may_use = |m: &&Served| caller.is_none_or(|caller| caller.may_use(&m.name));
        let models =
            catalog.models().into_values().filter(may_use).map(|m| v1::list_models_response::Model {
                name: m.name.to_string(),
                modalities: m.modalities().map(|m| v1::Modality::from(*m).into()).collect(),
                max_context: m.max_context,
                family: m.family.clone(),
                created_s: m.created_s,
            });
        Ok(Response::new(v1::ListModelsResponse { models: models.collect() }))
    }
}

/// `Accepted`, then the pieces.
fn pieces(answer: Answer) -> impl futures::Stream<Item = Result<v1::GenerateResponse, Status>> {
    use v1::generate_response::{Accepted, Kind};
    let accepted = Accepted { request_id: answer.request_id.to_string(), model: answer.model.to_string() };
    let rest = stream::unfold(answer, |mut answer| async move {
        let piece = answer.next().await?;
        let kind = piece.map_err(|failure| to_status(&failure)).map(|piece| match piece {
            Piece::Delta(delta) => Kind::Delta(delta),
            Piece::Summary(summary) => Kind::Summary(summary),
        });
        Some((kind, answer))
    });
    let all = stream::once(async { Ok(Kind::Accepted(accepted)) }).chain(rest);
    all.map(|kind| kind.map(|kind| v1::GenerateResponse { kind: Some(kind) }))
}
