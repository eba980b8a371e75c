//! The bound on the memory of a message's lists: what it refuses, and that it accepts what prost accepts.

use proptest::prelude::*;
use prost::Message;
use triptych_proto::bounded::{MAX_LIST_BYTES, MessageError, Shaped, check};
use triptych_proto::v1;

fn refused<T: Shaped>(bytes: &[u8]) -> Option<&'static str> {
    match check(bytes, T::shape()) {
        Ok(()) => None,
        Err(MessageError::TooLarge { field }) => Some(field),
        Err(MessageError::Malformed(why)) => panic!("malformed: {why}"),
    }
}

/// A field of this number with these bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    prost::encoding::encode_varint(bytes.len() as u64, &mut out);
    out.extend_from_slice(bytes);
    out
}

/// Largest number of elements of a list whose elements take `size` bytes.
fn most(size: usize) -> usize {
    MAX_LIST_BYTES / size
}

/// A list of `n` elements of a field, alone in its message.
type List = fn(n: usize) -> Vec<u8>;

#[test]
fn lists_are_bounded_by_what_they_take_in_memory() {
    let text = size_of::<String>();
    let cases: [(&str, List, usize, &str); 7] = [
        ("empty items", |n| field(3, &[]).repeat(n), size_of::<v1::Item>(), "GenerateRequest.items"),
        (
            "empty messages",
            |n| field(2, &field(1, &field(1, &[]).repeat(n))),
            size_of::<v1::Message>(),
            "Chat.messages",
        ),
        (
            "empty parts",
            |n| field(2, &field(1, &field(1, &field(2, &[]).repeat(n)))),
            size_of::<v1::Part>(),
            "Message.parts",
        ),
        ("packed ids of an item", |n| field(3, &field(5, &field(1, &vec![0; n]))), 4, "TokenIds.ids"),
        ("ids one by one", |n| field(3, &field(5, &[8, 1].repeat(n))), 4, "TokenIds.ids"),
        ("empty stops", |n| field(4, &field(7, &[]).repeat(n)), text, "Sampling.stop"),
        ("biases", |n| field(4, &field(15, &[]).repeat(n)), 16, "Sampling.logit_bias"),
    ];
    for (what, list, size, name) in cases {
        // An element of a list of messages may hold a list itself, which counts too.
        assert_eq!(refused::<v1::GenerateRequest>(&list(most(size) / 2)), None, "{what}");
        assert_eq!(refused::<v1::GenerateRequest>(&list(most(size) + 1)), Some(name), "{what}");
        assert_eq!(refused::<v1::GenerateRequest>(&list(10 * most(size))), Some(name), "{what}");
    }
}

#[test]
fn every_service_refuses_too_long_lists() {
    let keys = |number: u8, size: usize| field(number, &[]).repeat(most(size) + 1);
    let bytes = size_of::<bytes::Bytes>();
    assert_eq!(refused::<v1::HeadRequest>(&keys(1, bytes)), Some("HeadRequest.keys"));
    let items = keys(4, size_of::<v1::EncodedItem>());
    assert_eq!(refused::<v1::PdGenerateRequest>(&items), Some("PdGenerateRequest.items"));
    let hints = field(8, &keys(1, size_of::<String>()));
    assert_eq!(refused::<v1::PdGenerateRequest>(&hints), Some("ItemHint.peers"));
    // No list, so nothing grows.
    assert_eq!(refused::<v1::EncodeRequest>(&field(5, &vec![0; 1 << 20])), None);
    // An answer is as long as it is.
    assert_eq!(refused::<v1::HeadResponse>(&keys(1, 8)), None);
}

#[test]
fn a_prompt_of_the_longest_context_passes() {
    let ids = v1::TokenIds { ids: (0..1 << 20).collect() };
    let tokens = v1::TextOrTokens { kind: Some(v1::text_or_tokens::Kind::Tokens(ids)) };
    let prompt = v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(tokens)) };
    let request = v1::GenerateRequest { prompt: Some(prompt), ..Default::default() };
    assert_eq!(refused::<v1::GenerateRequest>(&request.encode_to_vec()), None);
}

fn accepts_what_prost_accepts<T: Message + Shaped + Default>(bytes: &[u8]) {
    if T::decode(bytes).is_ok() {
        assert_eq!(check(bytes, T::shape()), Ok(()), "{bytes:?}");
    }
}

proptest! {
    #[test]
    fn what_prost_accepts_is_accepted(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        accepts_what_prost_accepts::<v1::GenerateRequest>(&bytes);
        accepts_what_prost_accepts::<v1::PdGenerateRequest>(&bytes);
        accepts_what_prost_accepts::<v1::PutFrame>(&bytes);
    }

    /// Small bytes are keys of small fields, lengths, groups and their ends more often than not.
    #[test]
    fn what_prost_accepts_of_small_bytes_is_accepted(bytes in prop::collection::vec(0u8..40, 0..40)) {
        accepts_what_prost_accepts::<v1::GenerateRequest>(&bytes);
        accepts_what_prost_accepts::<v1::WaitRequest>(&bytes);
    }
}
