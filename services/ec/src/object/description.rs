//! The metadata of an encoder output as text, which checksums and signatures cover.

use std::fmt::Write as _;
use triptych_core::key::LAYOUT_VERSION;
use triptych_core::{EncodedItem, Extent};

/// Everything that an object says of its rows, their checksum included.
pub(super) fn description(item: &EncodedItem) -> String {
    format!(
        "{LAYOUT_VERSION}|{}|{}|{}|{}|{}|{}|{}|{}",
        item.key,
        item.fingerprint,
        item.modality,
        item.n_tokens,
        item.hidden,
        item.dtype,
        write_extent(&item.extent),
        hex(&item.checksum),
    )
}

pub(super) fn write_extent(extent: &Extent) -> String {
    match extent {
        Extent::Grid { t, h, w } => format!("grid {t} {h} {w}"),
        Extent::Windows { n_windows, duration_ms, spans } => {
            let mut text = format!("windows {n_windows} {duration_ms}");
            for span in spans.iter() {
                // Writing to a string cannot fail.
                let _ = write!(text, " {}-{}", span.start_ms, span.end_ms);
            }
            text
        }
        Extent::Tokens => "tokens".into(),
        Extent::Video { t, h, w, interval, times } => {
            let mut text = format!("video {t} {h} {w} {}", interval.get());
            for time in times.iter() {
                let _ = write!(text, " {}", time.get());
            }
            text
        }
    }
}

pub(super) fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*bytes).to_string()
}
