//! Bytes as audio: refused, or samples that are numbers, no more of them than the limit allows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_models::speech::audio;

fuzz_target!(
    init: {
        // A decoder that panics is a corrupt item, and that is caught: the fuzzer's own hook would end the process.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |data: &[u8]| {
        let limits = Limits { max_audio: Duration::from_secs(5), ..Limits::default() };
        let decoded = std::panic::catch_unwind(|| audio::decode(data, 16_000, &limits));
        if let Ok(Ok(samples)) = decoded {
            assert!(!samples.is_empty() && samples.len() <= 16_000 * 6);
        }
    }
);
