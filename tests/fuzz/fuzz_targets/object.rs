//! Bytes as an EC object: whatever a store gives back. Refused, or exactly what was written.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use triptych_core::item::rows_from_f32;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_ec::object::{MacKeys, decode, decode_signed, encode, parse_head, probe};

/// A small valid object, so that the fuzzer starts from one: the bytes change it.
fn valid(choice: u8) -> Bytes {
    let dtype = [DType::F32, DType::Bf16, DType::F16, DType::I8, DType::F8][usize::from(choice) % 5];
    let item = EncodedItem {
        key: ContentKey::from_bytes([1; 32]),
        fingerprint: Fingerprint::from_bytes([2; 32]),
        modality: Modality::Audio,
        n_tokens: 2,
        hidden: 3,
        dtype,
        extent: Extent::windows(1, 30_000),
        checksum: [0; 32],
    };
    let rows = rows_from_f32(&[1.0, -2.0, 0.5, 0.0, 3.0, 4.0], 3, dtype);
    encode(&EncoderOutput::seal(item, rows).expect("six values"))
}

fn check(object: Bytes) {
    let (key, limits) =
        (ContentKey::from_bytes([1; 32]), Limits { max_object_bytes: 1 << 20, ..Limits::default() });
    let _ = parse_head(&object);
    let _ = probe(&object, object.len(), &key, &limits);
    let keys = MacKeys::new(vec![[7; 32]]);
    assert!(decode_signed(object.clone(), &key, &limits, &keys).is_err(), "nobody signed it");
    if let Ok(output) = decode(object.clone(), &key, &limits) {
        assert_eq!(output.item().key, key);
        let n = output.item().n_tokens as usize;
        assert!(output.rows_f32(0, n).is_some());
        assert!(object == encode(&output) || object.windows(5).any(|w| w == b"\"mac\""), "one spelling");
    }
}

fuzz_target!(|data: &[u8]| {
    check(Bytes::copy_from_slice(data));
    // The rest: where to change a valid object, and to what.
    if let Some((choice, changes)) = data.split_first() {
        let mut object = valid(*choice).to_vec();
        for change in changes.chunks_exact(3) {
            let place = usize::from(u16::from_le_bytes([change[0], change[1]])) % object.len();
            object[place] = change[2];
        }
        check(object.into());
    }
});
