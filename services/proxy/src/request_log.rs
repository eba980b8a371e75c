//! The request log: one line for each request that ends, with ids, counts and times, and nothing that a client wrote.
//!
//! The lines have the tracing target [`REQUEST_TARGET`] and level INFO. The tenant is a hash, the same as in content keys'
//! secrets; a request that was refused before a model was chosen for it has ids and outcome only.

use crate::request::{Api, Request};
use parking_lot::Mutex;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;
use triptych_core::{Failure, Modality, ModelName, RequestId, TenantId, WorkerId};
use triptych_proto::convert::finish_name;
use triptych_proto::v1;
use triptych_runtime::status::http_status_of;
use triptych_runtime::trace_context::REQUEST_TARGET;

/// Digits of a tenant's hash in the log.
const TENANT_DIGITS: usize = 16;

/// The requests that are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RequestLog {
    /// Every request.
    All,
    /// Those that failed, were refused or were cancelled.
    Errors,
    /// Errors, and this share of the others, chosen by id; from 0 to 1.
    Share(f64),
    /// None.
    #[default]
    Off,
}

/// A text that names no [`RequestLog`].
#[derive(Debug, Error)]
#[error("allowed are all, errors, off, and a share from 0 to 1, as in 0.01")]
pub struct NotARequestLog;

impl FromStr for RequestLog {
    type Err = NotARequestLog;

    fn from_str(text: &str) -> Result<Self, NotARequestLog> {
        match text {
            "all" => Ok(Self::All),
            "errors" => Ok(Self::Errors),
            "off" => Ok(Self::Off),
            share => {
                let share = share.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
                share.map(Self::Share).ok_or(NotARequestLog)
            }
        }
    }
}

impl fmt::Display for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Errors => f.write_str("errors"),
            Self::Share(share) => share.fmt(f),
            Self::Off => f.write_str("off"),
        }
    }
}

/// Facts about a request, noted while it runs.
#[derive(Debug, Default)]
pub struct RequestRecord(Mutex<Noted>);

#[derive(Clone, Debug, Default)]
struct Noted {
    /// The PD worker that was asked last.
    pd: Option<WorkerId>,
    n_retries: u32,
    first_token: Option<Duration>,
    n_tokens: usize,
    /// Finish reasons of the choices, each once.
    finished: Vec<&'static str>,
}

impl RequestRecord {
    /// Notes the PD worker that a request is sent to.
    pub fn sent_to(&self, worker: &WorkerId) {
        self.0.lock().pd = Some(worker.clone());
    }

    /// Notes that the request is sent again.
    pub fn retried(&self) {
        self.0.lock().n_retries += 1;
    }

    /// Notes a piece of the answer, `elapsed` after the arrival.
    pub fn wrote(&self, delta: &v1::Delta, elapsed: Duration) {
        let mut noted = self.0.lock();
        noted.first_token.get_or_insert(elapsed);
        noted.n_tokens += delta.token_ids.len();
        let finished = finish_name(delta.finish_reason);
        if let Some(reason) = finished.filter(|reason| !noted.finished.contains(reason)) {
            noted.finished.push(reason);
        }
    }

    /// Progress so far.
    pub fn progress(&self) -> Progress {
        let noted = self.0.lock();
        Progress {
            pd: noted.pd.clone(),
            n_retries: noted.n_retries,
            first_token: noted.first_token,
            n_tokens: noted.n_tokens,
        }
    }

    /// Finish reasons of the choices, each once.
    pub fn finish_reasons(&self) -> Vec<&'static str> {
        self.0.lock().finished.clone()
    }

    /// Tokens that were written.
    pub fn n_tokens(&self) -> usize {
        self.0.lock().n_tokens
    }
}

/// Progress of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The PD worker that was asked last.
    pub pd: Option<WorkerId>,
    /// Number of times that it was sent again.
    pub n_retries: u32,
    /// Time from its arrival to its first token.
    pub first_token: Option<Duration>,
    /// Tokens that were written.
    pub n_tokens: usize,
}

/// A request that was worked on and has ended.
pub struct EndedRequest<'a> {
    /// The request.
    pub request: &'a Request,
    /// The model that answered.
    pub model: &'a ModelName,
    /// Secret of its tenant.
    pub tenant_secret: Vec<u8>,
    /// Facts that were noted.
    pub record: &'a RequestRecord,
    /// Its end.
    pub outcome: Result<&'a v1::Summary, &'a Failure>,
    /// Time since its arrival.
    pub elapsed: Duration,
}

impl RequestLog {
    /// True if anything is logged.
    pub fn is_on(self) -> bool {
        self != Self::Off
    }

    fn has(self, id: RequestId, is_error: bool) -> bool {
        match self {
            Self::All => true,
            Self::Errors => is_error,
            // Ids are random bits; 53 of them are a float without rounding.
            Self::Share(share) => is_error || ((id.to_bits() >> 75) as f64) < share * 2f64.powi(53),
            Self::Off => false,
        }
    }

    /// Logs a request that was refused before it was worked on.
    pub fn refused(self, id: RequestId, api: Api, failure: &Failure) {
        if !self.has(id, true) {
            return;
        }
        let (outcome, http_status) = (failure.class.as_str(), api.http_status(Err(failure)));
        let api = api.as_str();
        tracing::info!(target: REQUEST_TARGET, parent: None, request_id = %id, api, outcome, http_status, "request");
    }

    /// Logs a request that was worked on.
    pub fn ended(self, ended: &EndedRequest<'_>) {
        let EndedRequest { request, outcome, .. } = ended;
        if !self.has(request.id, outcome.is_err()) {
            return;
        }
        let noted = ended.record.0.lock().clone();
        let n_items = |modality| request.items.iter().filter(|item| item.modality == modality).count();
        let summary = outcome.ok();
        let usage = summary.and_then(|summary| summary.usage);
        let times = summary.and_then(|summary| summary.times);
        let cached = i32::from(v1::ItemSource::Cached);
        let n_cached = summary.map(|s| s.item_sources.iter().filter(|source| **source == cached).count());
        let tenant = tenant_hash(&ended.tenant_secret);
        tracing::info!(
            target: REQUEST_TARGET,
            parent: None,
            request_id = %request.id,
            api = request.api.as_str(),
            tenant,
            model = %ended.model,
            images = n_items(Modality::Image),
            audio = n_items(Modality::Audio),
            encoder_texts = n_items(Modality::Text),
            videos = n_items(Modality::Video),
            cached_items = n_cached,
            outcome = outcome.map_or_else(|failure| failure.class.as_str(), |_| "ok"),
            http_status = request.api.http_status(outcome.map(|_| ())),
            finish_reason = noted.finished.join(","),
            prompt_tokens = usage.map(|usage| usage.prompt_tokens),
            completion_tokens = usage.map_or(noted.n_tokens as u64, |usage| usage.completion_tokens.into()),
            cached_tokens = usage.map(|usage| usage.cached_tokens),
            pd_worker = noted.pd.as_ref().map(WorkerId::as_str),
            retries = noted.n_retries,
            queue_ms = times.map(|times| ms(times.queue_us)),
            encode_ms = times.map(|times| ms(times.encode_us)),
            load_ms = times.map(|times| ms(times.load_us)),
            prefill_ms = times.map(|times| ms(times.prefill_us)),
            ttft_ms = noted.first_token.map(|after| ms(micros(after))),
            e2e_ms = ms(micros(ended.elapsed)),
            "request"
        );
    }
}

/// A tenant as logs and operators see it.
pub fn tenant_hash(secret: &[u8]) -> String {
    TenantId::of(secret).to_string().chars().take(TENANT_DIGITS).collect()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Milliseconds with one decimal.
fn ms(micros: u64) -> f64 {
    (micros as f64 / 100.0).round() / 10.0
}

impl Api {
    /// HTTP status of an outcome; none over gRPC.
    fn http_status(self, outcome: Result<(), &Failure>) -> Option<u16> {
        match self {
            Self::Http => Some(outcome.map_or_else(|failure| http_status_of(failure).as_u16(), |()| 200)),
            Self::Grpc => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_read_back_what_they_print_and_others_are_refused() {
        for text in ["all", "errors", "off", "0", "0.01", "1"] {
            assert_eq!(text.parse::<RequestLog>().unwrap().to_string(), text);
        }
        for text in ["", "none", "-0.1", "1.5", "NaN", "ALL"] {
            let e = text.parse::<RequestLog>().unwrap_err();
            assert!(e.to_string().contains("errors"), "{text}: {e}");
        }
    }

    #[test]
    fn a_share_is_taken_by_id_and_errors_are_always_in_it() {
        let id = |top: u64| RequestId::from_bits(u128::from(top) << 64);
        let quarter = RequestLog::Share(0.25);
        assert!(quarter.has(id(0), false) && quarter.has(id((1 << 62) - 4096), false));
        assert!(!quarter.has(id(1 << 62), false) && quarter.has(id(u64::MAX), true));
        assert!(!RequestLog::Share(0.0).has(id(0), false) && RequestLog::Share(1.0).has(id(u64::MAX), false));
        assert!(RequestLog::All.has(id(7), false) && !RequestLog::Errors.has(id(7), false));
        assert!(!RequestLog::Off.has(id(7), true));
    }
}
