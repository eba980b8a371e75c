//! Deadlines of gRPC calls, from the `grpc-timeout` header
//! (grpc.io, "gRPC over HTTP2": at most 8 digits and a unit).

use std::time::{Duration, Instant};
use tonic::metadata::MetadataMap;
use triptych_core::Failure;

/// Timeout set by the client; `None` without a header.
///
/// # Errors
/// InvalidArgument for a malformed header.
pub fn asked(metadata: &MetadataMap) -> Result<Option<Duration>, Failure> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let time = value.to_str().ok().and_then(parse);
    time.map(Some)
        .ok_or_else(|| Failure::invalid("grpc-timeout is not up to 8 digits and one of H, M, S, m, u, n"))
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

/// Deadline of a call that arrived at `now`: the client's timeout, at most `limit`.
///
/// # Errors
/// As [`asked`].
pub fn deadline(metadata: &MetadataMap, now: Instant, limit: Duration) -> Result<Instant, Failure> {
    let time = asked(metadata)?.map_or(limit, |asked| asked.min(limit));
    // A deadline beyond the clock's range becomes a year.
    Ok(now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_every_unit() {
        let cases = [
            ("2H", Some(Duration::from_secs(7200))),
            ("3M", Some(Duration::from_secs(180))),
            ("4S", Some(Duration::from_secs(4))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("6n", Some(Duration::from_nanos(6))),
            ("", None),
            ("S", None),
            ("5", None),
            ("-5S", None),
            ("123456789S", None),
            ("5s", None),
            ("5é", None),
        ];
        for (text, expect) in cases {
            assert_eq!(parse(text), expect, "{text}");
        }
    }
}
