//! Bytes as messages: every message that reaches a conversion is refused or converted, and converts back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_core::{EncodedItem, ItemForm};
use triptych_proto::{convert, v1};

fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 6 {
        0 => {
            let Ok(message) = v1::EncodedItem::decode(data) else { return };
            if let Ok(item) = EncodedItem::try_from(message) {
                assert!(item.payload_len().is_some());
                let again = EncodedItem::try_from(v1::EncodedItem::from(&item)).expect("it came from one");
                assert_eq!(again, item);
            }
        }
        1 => {
            let Ok(message) = v1::Prompt::decode(data) else { return };
            if let Ok(prompt) = Prompt::try_from(message) {
                let again = Prompt::try_from(v1::Prompt::from(prompt.clone())).expect("it came from one");
                assert_eq!(again, prompt);
            }
        }
        2 => {
            let Ok(message) = v1::Sampling::decode(data) else { return };
            let _ = convert::sampling_from_wire(message, &SamplingParams::default());
        }
        3 => {
            let Ok(message) = v1::GenerateRequest::decode(data) else { return };
            for item in message.items {
                let _ = convert::modality(item.modality);
                let _ = convert::options(item.options.unwrap_or_default(), ItemForm::Plain);
            }
            let _ = message.prompt.map(Prompt::try_from);
        }
        4 => {
            let Ok(message) = v1::PdGenerateRequest::decode(data) else { return };
            for item in message.items {
                let _ = EncodedItem::try_from(item);
            }
            let _ = message.prompt.map(Prompt::try_from);
        }
        _ => {
            let Ok(message) = v1::EncodeRequest::decode(data) else { return };
            let _ = (
                convert::key(&message.key, "key"),
                convert::fingerprint(&message.fingerprint, "fingerprint"),
            );
            if let Ok(form) = convert::item_form(&message) {
                let _ = convert::options(message.options.unwrap_or_default(), form);
            }
        }
    }
});
