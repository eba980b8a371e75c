//! The EC object: what any safetensors reader sees, and what ours refuses.

use bytes::Bytes;
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::sync::Arc;
use triptych_core::item::rows_from_f32;
use triptych_core::limits::Limits;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality, Seconds, WindowSpan,
};
use triptych_ec::conformance::{sample_output, sample_variant};
use triptych_ec::object::{
    MAX_HEAD_BYTES, MacKeys, ObjectError, decode, decode_signed, encode, encode_head, encode_signed,
    head_bytes, object_len, parse_head, probe,
};

use crate::key;

fn outputs() -> impl Strategy<Value = EncoderOutput> {
    let extent = prop_oneof![
        any::<(u32, u32, u32)>().prop_map(|(t, h, w)| Extent::Grid { t, h, w }),
        any::<(u32, u64)>().prop_map(|(n_windows, duration_ms)| Extent::windows(n_windows, duration_ms)),
        (prop::collection::vec(0..9_999u32, 1..9), any::<u64>()).prop_map(|(mut starts, duration_ms)| {
            starts.sort_unstable();
            let span = |start_ms: &u32| WindowSpan { start_ms: *start_ms, end_ms: start_ms + 7 };
            let spans: Arc<[WindowSpan]> = starts.iter().map(span).collect();
            Extent::Windows { n_windows: spans.len() as u32, duration_ms, spans }
        }),
        Just(Extent::Tokens),
        (any::<(u32, u32)>(), prop::collection::vec(0.0..1e6_f64, 1..9)).prop_map(|((h, w), times)| {
            let times: Arc<[Seconds]> = times.into_iter().filter_map(Seconds::new).collect();
            Extent::Video { t: times.len() as u32, h, w, interval: times[0], times }
        }),
    ];
    let kind = (
        prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16), Just(DType::I8), Just(DType::F8)],
        prop_oneof![
            Just(Modality::Image),
            Just(Modality::Audio),
            Just(Modality::Text),
            Just(Modality::Video)
        ],
    );
    (any::<[u8; 32]>(), any::<[u8; 32]>(), kind, extent, 0u32..6, 0u32..6).prop_map(
        |(key, fingerprint, (dtype, modality), extent, n_tokens, hidden)| {
            let item = EncodedItem {
                key: ContentKey::from_bytes(key),
                fingerprint: Fingerprint::from_bytes(fingerprint),
                modality,
                n_tokens,
                hidden,
                dtype,
                extent,
                checksum: [0; 32],
            };
            let rows: Arc<[u8]> = (0..item.payload_len().unwrap()).map(|i| i as u8).collect();
            EncoderOutput::seal(item, rows).unwrap()
        },
    )
}

#[test]
fn any_safetensors_reader_opens_an_object() {
    let output = sample_output(key(1), 96);
    let object = encode(&output);
    let tensors = SafeTensors::deserialize(&object).unwrap();
    assert_eq!(tensors.names(), ["ec_cache"]);
    let rows = tensors.tensor("ec_cache").unwrap();
    assert_eq!(
        (rows.dtype(), rows.shape(), rows.data()),
        (Dtype::F32, [6, 4].as_slice(), &output.rows()[..])
    );
    let (_, head) = SafeTensors::read_metadata(&object).unwrap();
    let metadata = head.metadata().as_ref().unwrap();
    assert_eq!(metadata["key"], key(1).to_string());
    assert_eq!(metadata["extent"], "grid 1 1 6");
    assert_eq!(metadata["modality"], "image");
    assert_eq!(metadata["layout"], "1");
}

#[test]
fn any_safetensors_reader_opens_scaled_rows_beside_their_scales() {
    for (dtype, theirs) in [(DType::I8, Dtype::I8), (DType::F8, Dtype::F8_E4M3)] {
        let item = EncodedItem { dtype, ..sample_output(key(1), 96).item().clone() };
        let values: Vec<f32> = (0..24).map(|i| i as f32 - 9.5).collect();
        let output = EncoderOutput::seal(item, rows_from_f32(&values, 4, dtype)).unwrap();
        let object = encode(&output);
        let tensors = SafeTensors::deserialize(&object).unwrap();
        let (scales, rows) = (tensors.tensor("ec_scale").unwrap(), tensors.tensor("ec_cache").unwrap());
        assert_eq!((scales.dtype(), scales.shape()), (Dtype::F32, [6].as_slice()));
        assert_eq!((rows.dtype(), rows.shape()), (theirs, [6, 4].as_slice()));
        assert_eq!([scales.data(), rows.data()].concat(), output.rows()[..]);
        let read = decode(object, &key(1), &Limits::default()).unwrap();
        let largest_error = values.iter().zip(read.rows_f32(0, 6).unwrap()).map(|(a, b)| (a - b).abs());
        assert!(largest_error.fold(0.0, f32::max) < 0.9);
    }
}

#[test]
fn an_object_of_right_shape_that_someone_else_wrote_is_refused() {
    let limits = Limits::default();
    let (ours, theirs) = (MacKeys::new(vec![[1; 32]]), MacKeys::new(vec![[2; 32]]));
    let after_a_change = MacKeys::new(vec![[3; 32], [1; 32]]);
    let output = sample_output(key(1), 96);
    let signed = encode_signed(&output, &ours);
    let opens = |object: &Bytes, keys: &MacKeys| {
        decode_signed(object.clone(), &key(1), &limits, keys).map(|read| read.item().clone())
    };
    for keys in [&ours, &after_a_change, &MacKeys::default()] {
        assert_eq!(opens(&signed, keys).unwrap(), *output.item());
    }
    assert!(matches!(opens(&signed, &theirs), Err(ObjectError::Forged)));
    assert!(matches!(opens(&encode(&output), &ours), Err(ObjectError::Unsigned)));
    // Rows of the writer's choosing, whose checksum is right: only the MAC tells.
    let poisoned = sample_variant(key(1), 96, 7);
    assert!(matches!(opens(&encode_signed(&poisoned, &theirs), &ours), Err(ObjectError::Forged)));
    let mac_of_the_good_one = encode_signed(&output, &ours);
    let (head, other) = (encode_head(output.item()).len(), encode(&poisoned));
    let spliced = [&mac_of_the_good_one[..mac_of_the_good_one.len() - 96], &other[head..]].concat();
    assert!(matches!(opens(&spliced.into(), &ours), Err(ObjectError::Rows(_))));
}

#[test]
fn mac_keys_are_hex_and_are_never_shown() {
    let text = format!("{}\n{}", "ab".repeat(32), "01".repeat(32));
    let keys: MacKeys = text.parse().unwrap();
    assert_eq!(format!("{keys:?}"), "MacKeys(2)");
    let refused = format!("{} secret", "ab".repeat(32)).parse::<MacKeys>().unwrap_err().to_string();
    assert!(
        refused.contains("MAC key 2") && refused.contains("64 hex digits") && !refused.contains("secret")
    );
}

#[test]
fn lengths_are_held_against_the_limits_before_they_are_believed() {
    let output = sample_output(key(1), 4096);
    let object = encode(&output);
    let small = Limits { max_object_bytes: object.len() - 1, ..Limits::default() };
    assert!(matches!(decode(object.clone(), &key(1), &small), Err(ObjectError::TooLarge { .. })));
    assert!(matches!(
        probe(&object, usize::MAX, &key(1), &Limits::default()),
        Err(ObjectError::TooLarge { .. })
    ));
    let mut huge_head = object.to_vec();
    huge_head[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(parse_head(&huge_head), Err(ObjectError::HeadTooLarge { actual: u64::MAX, .. })));
}

#[test]
fn a_head_that_describes_more_than_a_machine_holds_is_refused() {
    let item =
        EncodedItem { n_tokens: u32::MAX, hidden: u32::MAX, ..sample_output(key(1), 16).item().clone() };
    let head = encode_head(&item);
    assert_eq!(object_len(&item), None);
    assert_eq!(parse_head(&head).unwrap(), item);
    assert!(matches!(
        probe(&head, head.len(), &key(1), &Limits::default()),
        Err(ObjectError::TooLarge { .. })
    ));
}

#[test]
fn an_object_of_another_key_is_refused() {
    let object = encode(&sample_output(key(1), 64));
    assert!(matches!(decode(object, &key(2), &Limits::default()), Err(ObjectError::WrongKey { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_head_is_never_longer_than_its_object(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        prop_assert!(head_bytes(&bytes) <= bytes.len());
    }

    #[test]
    fn outputs_come_back_as_they_were(output in outputs()) {
        let object = encode(&output);
        prop_assert_eq!(Some(object.len()), object_len(output.item()));
        for n in [head_bytes(&object), object.len().min(MAX_HEAD_BYTES)] {
            prop_assert_eq!(&parse_head(&object[..n]).unwrap(), output.item());
        }
        prop_assert_eq!(head_bytes(&object), encode_head(output.item()).len());
        let read = decode(object, &output.item().key, &Limits::default()).unwrap();
        prop_assert_eq!(read.item(), output.item());
        prop_assert_eq!(read.rows(), output.rows());
    }

    #[test]
    fn every_truncation_and_every_extra_byte_is_refused(output in outputs()) {
        let object = encode(&output);
        let (key, limits) = (output.item().key, Limits::default());
        for end in 0..object.len() {
            prop_assert!(decode(object.slice(..end), &key, &limits).is_err(), "cut at {}", end);
        }
        let longer = Bytes::from([&object[..], b" "].concat());
        prop_assert!(decode(longer, &key, &limits).is_err());
    }

    #[test]
    fn any_bytes_behind_a_believable_length_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut object = (bytes.len() as u64).to_le_bytes().to_vec();
        object.extend(&bytes);
        prop_assert!(parse_head(&object).is_err());
        prop_assert!(parse_head(&bytes).is_err());
    }
}

proptest! {
    // Each case tries every bit of an object.
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn every_flipped_bit_is_refused(output in outputs()) {
        let object = encode(&output);
        for bit in 0..object.len() * 8 {
            let mut flipped = object.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let read = decode(flipped.into(), &output.item().key, &Limits::default());
            prop_assert!(read.is_err(), "bit {}", bit);
        }
    }
}
