//! The bound on an encoder's forwards: what each takes is foretold, and taken from a room that the encoders of a worker share.

use crate::room::{ByteRoom, TakenBytes};
use crate::slot::EncoderSlot;
use std::panic::{AssertUnwindSafe, catch_unwind};
use triptych_core::{Failure, FailureClass};
use triptych_models::ModelError;
use triptych_models::preprocess::EncoderInput;

/// Most bytes of activations that a forward over an item has at once.
pub type Forecast = Box<dyn FnMut(&EncoderInput) -> Result<usize, ModelError> + Send>;

/// An encoder, with a forecast of what its forwards take where their room is bounded.
pub struct BoundedEncoder {
    /// The encoder, or the means to load it.
    pub slot: EncoderSlot,
    /// The forecast; `None`: nothing is foretold.
    pub forecast: Option<Forecast>,
}

impl From<EncoderSlot> for BoundedEncoder {
    fn from(slot: EncoderSlot) -> Self {
        Self { slot, forecast: None }
    }
}

/// A forecast, and the room for what it says.
pub struct ForwardBound {
    forecast: Forecast,
    room: ByteRoom,
}

impl ForwardBound {
    /// `None` without one of both.
    pub fn new(forecast: Option<Forecast>, room: Option<ByteRoom>) -> Option<Self> {
        Some(Self { forecast: forecast?, room: room? })
    }

    /// Most bytes that all forwards have.
    pub fn most(&self) -> usize {
        self.room.capacity()
    }

    /// Takes the bytes of a forward, once there is room.
    pub fn take(&self, n_bytes: usize) -> TakenBytes {
        self.room.take_blocking(n_bytes)
    }

    /// Bytes of a forward over an item.
    ///
    /// # Errors
    /// TooLarge for an item that there is never room for; Internal if it cannot be foretold, which is our bug.
    pub fn of_item(&mut self, input: &EncoderInput) -> Result<usize, Failure> {
        let n_bytes = match catch_unwind(AssertUnwindSafe(|| (self.forecast)(input))) {
            Ok(foretold) => foretold.map_err(Failure::internal)?,
            Err(_) => return Err(Failure::internal("the forecast of a forward panicked")),
        };
        let most = self.most();
        if n_bytes <= most {
            return Ok(n_bytes);
        }
        let [needs, has] = [n_bytes, most].map(|bytes| bytes.div_ceil(1 << 20));
        let text =
            format!("an encode of the item takes {needs} MiB of memory, this encoder has room for {has}");
        let detail = "larger items need more --memory-mib, a smaller --precision, or fewer --towers";
        Err(Failure::new(FailureClass::TooLarge, text).with_detail(detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batcher::tests::{Fake, item};
    use crate::batcher::{Batcher, BatcherConfig};
    use crate::meters::EncoderMeters;
    use crate::order::JobOwner;
    use crate::pool::{PoolConfig, PreprocessPool};
    use std::sync::Arc;
    use tokio_util::task::TaskTracker;
    use triptych_core::Modality;
    use triptych_runtime::MetricsRegistry;

    /// Ten bytes of activations for a token.
    fn bounded() -> BoundedEncoder {
        let forecast: Forecast = Box::new(|input| {
            assert_ne!(input.n_tokens, 7, "a fault of ours");
            Ok(input.n_tokens as usize * 10)
        });
        BoundedEncoder { slot: EncoderSlot::Held(Box::new(Fake)), forecast: Some(forecast) }
    }

    #[tokio::test]
    async fn an_item_whose_activations_never_fit_is_refused_and_others_wait_for_room() {
        let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
        let config = PoolConfig { threads: 1, max_jobs: 4, ..PoolConfig::default() };
        let pool = PreprocessPool::new(config, Arc::clone(&meters), TaskTracker::new());
        let permit = pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap();
        let room = ByteRoom::new(100);
        let config = BatcherConfig { room: Some(room.clone()), ..BatcherConfig::default() };
        let batcher = Batcher::spawn("test".into(), bounded(), config, meters);
        let refused = batcher.encode(item(11), &permit).await.unwrap_err();
        assert_eq!(refused.class, FailureClass::TooLarge, "{refused:?}");
        assert!(
            refused.message.contains("takes 1 MiB of memory, this encoder has room for 1"),
            "{refused:?}"
        );
        assert_eq!(batcher.encode(item(7), &permit).await.unwrap_err().class, FailureClass::Internal);
        // Another encoder of the worker has half of the room.
        let held = room.take(50).await;
        let mut waiting = std::pin::pin!(batcher.encode(item(6), &permit));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(held);
        assert_eq!(waiting.await.unwrap().rows.len(), 6);
        assert!(batcher.encode(item(10), &permit).await.is_ok(), "all of the room");
    }
}
