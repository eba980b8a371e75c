//! Tokens of prompts and texts of tokens: one call of a PD worker, which has the model's tokenizer.

use super::chat_format;
use super::work::Orchestrator;
use crate::auth::Caller;
use crate::fleet::catalog::Served;
use crate::fleet::prefix::Prefixes;
use crate::fleet::{Lease, Size};
use crate::request::Request;
use crate::request_machine::failures::out_of_time;
use crate::wire::{CallFailure, outgoing};
use std::collections::BTreeSet;
use std::future::Future;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;
use tonic::{Response, Status};
use triptych_core::{Failure, ModelName};
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

/// Largest message of a PD worker: the tokens of a long text, with the text of each.
const MAX_MESSAGE: usize = 64 << 20;

/// Parts of a tokenization that clients choose.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenOptions {
    /// True without the tokens that the model's post-processor puts around a text.
    pub without_special_tokens: bool,
    /// True to report each token's own text too.
    pub with_texts: bool,
}

impl Orchestrator {
    /// Tokens of a request's prompt.
    ///
    /// # Errors
    /// [`Failure`] if the request is refused, as it would be if it were to be answered; for one with items; if no worker
    /// answers in time.
    pub async fn tokenize(
        &self,
        mut request: Request,
        options: TokenOptions,
    ) -> Result<v1::TokenizeResponse, Failure> {
        request.check(&self.materials.limits)?;
        if let Some(item) = request.items.first() {
            let message = "only text is tokenized: the tokens of an item are known when it is encoded";
            return Err(Failure::invalid(message).with_param(&*item.param));
        }
        self.bounds.check(&request)?;
        let served = self.served(request.model.as_ref(), &request.caller)?;
        chat_format::apply(&mut request, &served)?;
        let TokenOptions { without_special_tokens, with_texts } = options;
        let (model, prompt) = (served.name.to_string(), Some(request.prompt.into()));
        let message = v1::TokenizeRequest { model, prompt, without_special_tokens, with_texts };
        let (arrived, deadline) = (request.arrived, request.deadline);
        let call = async |mut client: Client| client.tokenize(outgoing(message, deadline)).await;
        self.ask(&served, (arrived, deadline), call).await
    }

    /// Text of tokens, for a request that arrived and must be answered at these times.
    ///
    /// # Errors
    /// [`Failure`] for a token that the model does not have; if no worker answers in time.
    pub async fn detokenize(
        &self,
        model: Option<&ModelName>,
        token_ids: Vec<u32>,
        caller: &Caller,
        (arrived, deadline): (Instant, Instant),
    ) -> Result<v1::DetokenizeResponse, Failure> {
        let served = self.served(model, caller)?;
        let message = v1::DetokenizeRequest { model: served.name.to_string(), token_ids };
        let call = async |mut client: Client| client.detokenize(outgoing(message, deadline)).await;
        self.ask(&served, (arrived, deadline), call).await
    }

    /// The model that a caller means.
    fn served(&self, model: Option<&ModelName>, caller: &Caller) -> Result<Served, Failure> {
        let route = self.fleet.catalog().choose(model, &BTreeSet::new())?;
        caller.check_model(&route.served.name)?;
        Ok(route.served)
    }

    /// One call of a PD worker of a model.
    async fn ask<T, F: Future<Output = Result<Response<T>, Status>>>(
        &self,
        served: &Served,
        (arrived, deadline): (Instant, Instant),
        call: impl FnOnce(Client) -> F,
    ) -> Result<T, Failure> {
        let want = served.decoder();
        let size = Size::Request { items: Vec::new(), prompt: Prefixes::default(), holders: Vec::new() };
        let answer = async {
            let lease: Lease = self.fleet.lease(&want, size, &[]).await;
            let client =
                PrefillDecodeWorkerClient::new(lease.channel()).max_decoding_message_size(MAX_MESSAGE);
            call(client).await
        };
        let late = |_| Err(out_of_time(deadline.duration_since(arrived)));
        let answer = timeout_at(deadline, answer).await.map(|answer| {
            answer.map(Response::into_inner).map_err(|status| CallFailure::from(status).failure)
        });
        answer.unwrap_or_else(late)
    }
}

type Client = PrefillDecodeWorkerClient<Channel>;
