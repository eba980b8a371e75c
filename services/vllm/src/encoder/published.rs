//! Outputs that a vLLM server publishes under the proxy's keys, as the store has them.

use crate::server::VllmServer;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use triptych_core::{EncodedItem, Failure, FailureClass};

/// Time in which an output is in the store after vLLM's answer: its connector writes behind.
pub(super) const WRITE_BEHIND: Duration = Duration::from_secs(10);
/// The first pause between two looks, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

impl VllmServer {
    /// Takes an object of another encoder or shape out of the way: the connector publishes where there is none.
    pub(super) async fn make_room(&self, wanted: &EncodedItem) {
        let is_there =
            self.head(wanted).await.is_ok_and(|head| head.is_some_and(|head| !is_of(&head, wanted)));
        if is_there && let Err(error) = self.store.quarantine(&wanted.key).await {
            tracing::warn!(%error, key = %wanted.key, "object of another encoder");
        }
    }

    /// The description of an output that the server was asked for.
    ///
    /// # Errors
    /// Unavailable if it does not come in time, Mismatch if it is another encoder's.
    pub(super) async fn published(
        &self,
        wanted: &EncodedItem,
        within: Duration,
    ) -> Result<EncodedItem, Failure> {
        let (until, mut pause) = (Instant::now() + within, PAUSES.0);
        loop {
            let found = self.head(wanted).await;
            match found {
                Ok(Some(head)) if is_of(&head, wanted) => return Ok(head),
                Ok(Some(head)) => {
                    let detail = format!("asked {wanted:?}, the store has {head:?}");
                    let failure =
                        Failure::new(FailureClass::Mismatch, "this vLLM server is not that encoder");
                    return Err(failure.with_detail(detail));
                }
                found if Instant::now() >= until => {
                    let why = found.err().map_or_else(
                        || "is its store the proxy's, and `accept_proxy_keys` set?".to_owned(),
                        |error| error.to_string(),
                    );
                    tracing::error!(server = %self.address.url, key = %wanted.key, why, "vLLM encoder published nothing");
                    let failure =
                        Failure::unavailable("a vLLM encoder answered without publishing its output");
                    return Err(failure.with_detail(why));
                }
                _ => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    async fn head(&self, wanted: &EncodedItem) -> Result<Option<EncodedItem>, triptych_ec::EcError> {
        let heads = self.store.heads(std::slice::from_ref(&wanted.key)).await?;
        Ok(heads.into_iter().next().flatten())
    }
}

fn is_of(head: &EncodedItem, wanted: &EncodedItem) -> bool {
    (head.key, head.fingerprint, head.modality) == (wanted.key, wanted.fingerprint, wanted.modality)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::HttpClient;
    use triptych_core::limits::Limits;
    use triptych_core::{ContentKey, DType, Extent, Fingerprint, Modality};
    use triptych_ec::settings::MemorySetting;
    use triptych_ec::{EcSetting, open};

    #[tokio::test]
    async fn an_output_that_never_comes_ends_the_job_in_its_time() {
        let store = open(&EcSetting::Memory(MemorySetting::default()), &Limits::default()).await.unwrap();
        let http = HttpClient::new(None).unwrap();
        let server = VllmServer::new("vllm+http://gpu:1".parse().unwrap(), http, store);
        let wanted = EncodedItem {
            key: ContentKey::from_bytes([1; 32]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            modality: Modality::Image,
            n_tokens: 1,
            hidden: 1,
            dtype: DType::F32,
            extent: Extent::Grid { t: 1, h: 1, w: 1 },
            checksum: [0; 32],
        };
        let failure = server.published(&wanted, Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(failure.class, FailureClass::Unavailable);
        assert!(failure.message.contains("without publishing"), "{failure}");
    }
}
