//! When a request has to have ended: what its caller allows, in gRPC's own header, and never past our limit
//! (<https://github.com/grpc/grpc/blob/v1.66.0/doc/PROTOCOL-HTTP2.md>, "Timeout").

use std::time::{Duration, Instant};
use tonic::metadata::MetadataMap;

/// The deadline of a request that arrived at `now`.
pub fn deadline(metadata: &MetadataMap, now: Instant, limit: Duration) -> Instant {
    let time = timeout_of(metadata).map_or(limit, |asked| asked.min(limit));
    // A limit that the clock cannot hold is as good as a year.
    now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600))
}

/// The time a caller gives a request.
fn timeout_of(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n.checked_mul(3600)?),
        "M" => Duration::from_secs(n.checked_mul(60)?),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_are_read_in_every_unit_and_garbage_is_none() {
        let cases = [
            ("1S", Some(Duration::from_secs(1))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("2H", Some(Duration::from_secs(7200))),
            ("", None),
            ("S", None),
            ("5x", None),
            ("99999999999999999999S", None),
        ];
        for (text, expect) in cases {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(timeout_of(&metadata), expect, "{text}");
        }
    }
}
