//! A vLLM server: its address, the client that reaches it, and the store that its items are read from.

use crate::address::VllmAddress;
use crate::ask::Ask;
use crate::client::HttpClient;
use crate::failure::CallError;
use crate::metrics::{Load, PublishedEncoder};
use crate::models::{Described, read};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::timeout;
use tonic::Status;
use tonic::metadata::MetadataMap;
use triptych_core::{Failure, RequestId};
use triptych_ec::EcStore;
use triptych_proto::v1;
use triptych_runtime::status::to_status;

/// The longest wait for the store after a failure.
const STORE_TIME: Duration = Duration::from_secs(2);
/// Headers of a trace, passed on as they are.
const TRACE: [&str; 2] = ["traceparent", "tracestate"];

/// Text of a server's metrics; `None`: it has none.
type Metrics = Result<Option<String>, CallError>;

/// A vLLM server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct VllmServer {
    pub(crate) address: Arc<VllmAddress>,
    pub(crate) http: HttpClient,
    pub(crate) store: Arc<dyn EcStore>,
    /// Numbers calls: a request that is sent again must not have the id of one that still runs.
    n_calls: Arc<AtomicU64>,
}

impl VllmServer {
    /// The server at an address, whose items are in `store`.
    pub(crate) fn new(address: VllmAddress, http: HttpClient, store: Arc<dyn EcStore>) -> Self {
        Self { address: Arc::new(address), http, store, n_calls: Arc::default() }
    }

    /// Describes it as a worker that prefills and decodes.
    ///
    /// # Errors
    /// [`CallError`] if it does not answer, or says that its engine is dead.
    pub(crate) async fn describe_pd(&self) -> Result<v1::DescribeResponse, CallError> {
        let (health, models, load) = self.probes().await;
        health?;
        // A server may have no metrics; then nobody sees that it was restarted.
        let load = load.ok().flatten().and_then(|text| Load::read(&text));
        self.described((&models?, Described::Pd), load)
    }

    /// Describes it as an encoder.
    ///
    /// # Errors
    /// The same, and if its metrics do not come: they say what it publishes, and nothing else does.
    pub(crate) async fn describe_encoder(&self) -> Result<v1::DescribeResponse, CallError> {
        let (health, models, text) = self.probes().await;
        health?;
        let text = text?.unwrap_or_default();
        let published = PublishedEncoder::read(&text);
        self.described((&models?, Described::Encoder(published)), Load::read(&text))
    }

    async fn probes(&self) -> (Result<Bytes, CallError>, Result<Bytes, CallError>, Metrics) {
        let url = &self.address.url;
        tokio::join!(self.http.get(url, "/health"), self.http.get(url, "/v1/models"), self.metrics())
    }

    fn described(
        &self,
        (models, role): (&[u8], Described),
        load: Option<Load>,
    ) -> Result<v1::DescribeResponse, CallError> {
        let started = load.and_then(|load| load.started);
        Ok(v1::DescribeResponse {
            worker_id: self.address.url.to_string(),
            models: read(models, &self.address, role)?,
            encodes: role == Described::Pd,
            instance: started.map_or_else(Bytes::new, |at| at.to_be_bytes().to_vec().into()),
            ..v1::DescribeResponse::default()
        })
    }

    /// Its load; `None`: it has no metrics of vLLM's.
    ///
    /// # Errors
    /// [`CallError`] if it does not answer.
    pub(crate) async fn load(&self) -> Result<Option<Load>, CallError> {
        Ok(self.metrics().await?.and_then(|text| Load::read(&text)))
    }

    async fn metrics(&self) -> Metrics {
        match self.http.get(&self.address.url, "/metrics").await {
            Ok(body) => Ok(Some(String::from_utf8_lossy(&body).into_owned())),
            Err(CallError::Refused(error)) if error.code < 500 => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Headers of a call for a request.
    ///
    /// # Errors
    /// InvalidArgument for an id that is none.
    pub(crate) fn headers(&self, id: &str, metadata: &MetadataMap) -> Result<HeaderMap, Failure> {
        let id = RequestId::parse(id)
            .ok_or_else(|| Failure::invalid("request_id is none").with_param("request_id"))?;
        let id = format!("{id}-{}", self.n_calls.fetch_add(1, Ordering::Relaxed));
        let mut headers = HeaderMap::new();
        if let Ok(id) = HeaderValue::from_str(&id) {
            headers.insert(HeaderName::from_static("x-request-id"), id);
        }
        for name in TRACE {
            let value = metadata.get(name).and_then(|value| HeaderValue::from_bytes(value.as_bytes()).ok());
            if let Some(value) = value {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
        Ok(headers)
    }

    /// The status of a request that the server failed. It does not say why: an item whose encoder output is gone fails as its own
    /// mistakes do. So the store is asked for those that were read from there, and one that is missing is named.
    pub(crate) async fn explained(&self, error: CallError, ask: &Ask) -> Status {
        let items: Vec<_> = ask.items.iter().enumerate().filter(|(_, item)| item.is_metadata()).collect();
        if !error.is_internal() || items.is_empty() {
            return error.into_status();
        }
        let keys: Vec<_> = items.iter().map(|(_, item)| item.output.key).collect();
        let Ok(Ok(heads)) = timeout(STORE_TIME, self.store.heads(&keys)).await else {
            return error.into_status();
        };
        let missing = items.iter().zip(heads).find(|((_, item), head)| {
            head.as_ref().is_none_or(|head| head.fingerprint != item.output.fingerprint)
        });
        match missing {
            Some(((idx, _), _)) => {
                let failure = Failure::unavailable("the encoder output is not in the store");
                to_status(&failure.with_param(format!("items[{idx}]")).with_detail(error))
            }
            None => error.into_status(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::limits::Limits;
    use triptych_ec::settings::MemorySetting;
    use triptych_ec::{EcSetting, open};

    #[tokio::test]
    async fn a_call_has_the_requests_id_and_its_trace() {
        let store = open(&EcSetting::Memory(MemorySetting::default()), &Limits::default()).await.unwrap();
        let http = HttpClient::new(None).unwrap();
        let server = VllmServer::new("vllm+http://gpu:1".parse().unwrap(), http, store);
        let mut metadata = MetadataMap::new();
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        metadata.insert("traceparent", trace.parse().unwrap());
        metadata.insert("triptych-other", "x".parse().unwrap());
        let id = RequestId::from_bits(7).to_string();
        let (first, second) =
            (server.headers(&id, &metadata).unwrap(), server.headers(&id, &metadata).unwrap());
        assert_eq!((first["traceparent"].to_str().unwrap(), first.len()), (trace, 2));
        assert!(first["x-request-id"].to_str().unwrap().starts_with(&id));
        assert_ne!(
            first["x-request-id"], second["x-request-id"],
            "a second attempt is another request to vLLM"
        );
        assert!(server.headers("x\r\ny", &metadata).is_err());
    }
}
