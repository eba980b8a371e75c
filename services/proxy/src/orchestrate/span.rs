//! The span of a request's inference, by OpenTelemetry's conventions for generative AI: settings, tokens, finish reasons.
//!
//! Neither prompt nor answer is in it, nor texts that a client chose, such as stop texts.

use crate::request::Request;
use crate::request_log::RequestRecord;
use tracing::Span;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, Modality, ModelName};
use triptych_proto::v1;
use triptych_runtime::spans::{failed, rename, set, set_list};

/// Begins the span of a request.
pub(super) fn begin(request: &Request) -> Span {
    let span = tracing::info_span!("request", request_id = %request.id, api = request.api.as_str());
    set(&span, "gen_ai.operation.name", operation(&request.prompt));
    set(&span, "gen_ai.provider.name", "triptych");
    set(&span, "gen_ai.response.id", request.id.to_string());
    let v1::Sampling { max_tokens, temperature, top_p, top_k, seed, .. } = &request.sampling;
    let v1::Sampling { presence_penalty, frequency_penalty, .. } = &request.sampling;
    let counts = [
        ("gen_ai.request.max_tokens", max_tokens.map(i64::from)),
        ("gen_ai.request.top_k", top_k.map(i64::from)),
        ("gen_ai.request.seed", seed.map(|seed| seed as i64)),
        ("gen_ai.request.choice.count", Some(i64::from(request.n_choices())).filter(|n| *n > 1)),
        ("triptych.request.images", n_items(request, Modality::Image)),
        ("triptych.request.audio", n_items(request, Modality::Audio)),
    ];
    counts.into_iter().filter_map(|(name, n)| Some((name, n?))).for_each(|(name, n)| set(&span, name, n));
    let shares = [
        ("gen_ai.request.temperature", *temperature),
        ("gen_ai.request.top_p", *top_p),
        ("gen_ai.request.presence_penalty", Some(*presence_penalty).filter(|x| *x != 0.0)),
        ("gen_ai.request.frequency_penalty", Some(*frequency_penalty).filter(|x| *x != 0.0)),
    ];
    shares
        .into_iter()
        .filter_map(|(name, x)| Some((name, x?)))
        .for_each(|(name, x)| set(&span, name, decimal(x)));
    span
}

/// Notes the model, which is one that is served.
pub(super) fn routed(span: &Span, request: &Request, model: &ModelName) {
    let asked = request.model.as_ref().unwrap_or(model);
    set(span, "gen_ai.request.model", asked.to_string());
    set(span, "gen_ai.response.model", model.to_string());
    rename(span, format!("{} {asked}", operation(&request.prompt)));
}

/// Notes the end of a request.
pub(super) fn end(span: &Span, record: &RequestRecord, outcome: Result<&v1::Summary, &Failure>) {
    let usage = outcome.ok().and_then(|summary| summary.usage);
    let written = i64::try_from(record.n_tokens()).unwrap_or(i64::MAX);
    set(span, "gen_ai.usage.output_tokens", usage.map_or(written, |usage| usage.completion_tokens.into()));
    if let Some(usage) = usage {
        set(span, "gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
        set(span, "gen_ai.usage.cache_read.input_tokens", i64::from(usage.cached_tokens));
    }
    let finished = record.finish_reasons();
    if !finished.is_empty() {
        set_list(span, "gen_ai.response.finish_reasons", &finished);
    }
    if let Err(failure) = outcome {
        failed(span, failure.class);
    }
}

/// The operation; speech has none of its own in the conventions.
const fn operation(prompt: &Prompt) -> &'static str {
    match prompt {
        Prompt::Chat(_) => "chat",
        Prompt::Singleton(_) | Prompt::Explicit { .. } => "text_completion",
        Prompt::Speech(_) => "generate_content",
    }
}

fn n_items(request: &Request, modality: Modality) -> Option<i64> {
    let n = request.items.iter().filter(|item| item.modality == modality).count();
    i64::try_from(n).ok().filter(|n| *n > 0)
}

/// The decimal that a client wrote: 0.7 is 0.7, not 0.699999988.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| x.into())
}
