//! Stage times.

use crate::v1;
use std::time::Duration;
use triptych_core::lifetime::StageTimes;

fn us(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

impl From<StageTimes> for v1::StageTimes {
    fn from(t: StageTimes) -> Self {
        Self {
            queue_us: us(t.queue),
            encode_us: us(t.encode),
            publish_us: us(t.publish),
            load_us: us(t.load),
            prefill_us: us(t.prefill),
            first_token_us: us(t.first_token),
            per_token_us: us(t.per_token),
        }
    }
}

impl From<v1::StageTimes> for StageTimes {
    fn from(t: v1::StageTimes) -> Self {
        let d = Duration::from_micros;
        Self {
            queue: d(t.queue_us),
            encode: d(t.encode_us),
            publish: d(t.publish_us),
            load: d(t.load_us),
            prefill: d(t.prefill_us),
            first_token: d(t.first_token_us),
            per_token: d(t.per_token_us),
        }
    }
}
