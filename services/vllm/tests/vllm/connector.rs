//! The part of vLLM's EC connector that publishes under the proxy's keys.

use serde_json::{Value, json};
use std::sync::Arc;
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality, Tower};
use triptych_ec::EcStore;
use triptych_ec::object::encode;

/// Patches of every image.
pub const GRID: [u32; 3] = [1, 4, 6];

/// An EC connector of a vLLM encoder.
pub struct Connector {
    pub store: Arc<dyn EcStore>,
    pub tower: Tower,
    /// Fingerprint in its objects, where that is not the announced one.
    pub publishes: Option<Fingerprint>,
}

/// The tower whose weights are of this kind.
pub fn tower(weights: u8) -> Tower {
    let digest = |n| Fingerprint::from_bytes([n; 32]);
    Tower { configuration: digest(1), processor: digest(2), weights: digest(weights) }
}

impl Connector {
    fn fingerprint(&self) -> Fingerprint {
        self.tower.rows_of_vllm(Modality::Image, DType::Bf16)
    }

    /// Its line of the server's metrics.
    pub fn metrics(&self) -> String {
        let Tower { configuration, processor, weights } = self.tower;
        format!(
            "triptych_ec_encoder_info{{engine=\"0\",fingerprint=\"{}\",configuration=\"{configuration}\",\
            processor=\"{processor}\",weights=\"{weights}\"}} 1.0\n",
            self.fingerprint()
        )
    }

    /// Publishes the item of a request; returns the body of the answer.
    pub async fn encode(&self, body: &Value) -> String {
        let uuid = body["messages"][0]["content"][0]["uuid"].as_str().unwrap();
        if let Some(key) = uuid.strip_prefix("triptych-").and_then(ContentKey::from_hex) {
            let item = EncodedItem {
                key,
                fingerprint: self.publishes.unwrap_or_else(|| self.fingerprint()),
                modality: Modality::Image,
                n_tokens: 6,
                hidden: 1,
                dtype: DType::Bf16,
                extent: Extent::Grid { t: GRID[0], h: GRID[1], w: GRID[2] },
                checksum: [0; 32],
            };
            let output = EncoderOutput::seal(item, from_f32(&[1.0; 6], DType::Bf16)).unwrap();
            self.store.put_if_absent(&key, encode(&output)).await.unwrap();
        }
        let choice = json!({"index": 0, "message": {"content": "x"}, "finish_reason": "length"});
        json!({"id": "chatcmpl-1", "choices": [choice]}).to_string()
    }
}
