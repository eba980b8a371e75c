//! Every conversion reads back what it wrote, and no message, whatever its numbers, reaches a panic.

use proptest::prelude::*;
use prost::Message as _;
use std::sync::Arc;
use triptych_core::prompt::{
    CallReference, Chat, ChatEnding, LongForm, Message, MessagePart, Prompt, Role, SpeechFallback,
    SpeechKind, SpeechResume, SpeechTask, TextOrTokens, Tool, ToolCall, ToolChoice,
};
use triptych_core::sampling::{BeamParams, Constraint, EarlyStopping, SamplingParams};
use triptych_core::{
    ContentKey, DType, EncodedItem, Extent, Fingerprint, ItemIdx, Modality, Seconds, WindowSpan,
};
use triptych_proto::convert::{WireError, sampling_from_wire, sampling_to_wire};
use triptych_proto::v1;

fn text_or_tokens() -> impl Strategy<Value = TextOrTokens> {
    prop_oneof![
        any::<String>().prop_map(TextOrTokens::Text),
        prop::collection::vec(any::<u32>(), 0..9).prop_map(TextOrTokens::Tokens),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let part = prop_oneof![
        any::<String>().prop_map(MessagePart::Text),
        any::<u32>().prop_map(|i| MessagePart::Item(ItemIdx(i))),
        any::<String>().prop_map(MessagePart::Reasoning),
        any::<[String; 3]>().prop_map(|[id, name, arguments]| MessagePart::ToolCall(ToolCall {
            id,
            name,
            arguments
        })),
        any::<[String; 2]>().prop_map(|[id, name]| MessagePart::ResultOf(CallReference { id, name })),
    ];
    let role = prop_oneof![Just(Role::System), Just(Role::User), Just(Role::Assistant), Just(Role::Tool)];
    (role, prop::collection::vec(part, 0..4)).prop_map(|(role, parts)| Message { role, parts })
}

fn chat() -> impl Strategy<Value = Chat> {
    let tool = (any::<String>(), any::<[Option<String>; 2]>(), any::<bool>()).prop_map(
        |(name, [description, parameters], is_strict)| Tool { name, description, parameters, is_strict },
    );
    let choice = prop_oneof![
        Just(ToolChoice::Auto),
        Just(ToolChoice::None),
        Just(ToolChoice::Required),
        any::<String>().prop_map(ToolChoice::Named)
    ];
    let ending = prop_oneof![
        Just(ChatEnding::GenerationPrompt),
        Just(ChatEnding::LastMessage),
        Just(ChatEnding::OpenMessage)
    ];
    let messages = prop::collection::vec(message(), 0..4);
    let tools = prop::collection::vec(tool, 0..3);
    (messages, tools, choice, ending, any::<[bool; 2]>(), any::<[Option<String>; 3]>()).prop_map(
        |(messages, tools, tool_choice, ending, flags, [documents, template_kwargs, template])| Chat {
            messages,
            tools,
            tool_choice,
            has_single_call: flags[0],
            hides_reasoning: flags[1],
            ending,
            documents,
            template_kwargs,
            template,
        },
    )
}

fn speech() -> impl Strategy<Value = SpeechTask> {
    let maybe_text = || prop::option::of(nonempty_text_or_tokens());
    let resume = prop::option::of((any::<u32>(), prop::collection::vec(any::<u32>(), 0..3), any::<bool>()));
    let threshold = || prop::option::of((1u16..90).prop_map(|n| f32::from(n) / 10.0));
    let fallback = (
        prop::collection::vec((0u16..20).prop_map(|n| f32::from(n) / 10.0), 1..4),
        threshold(),
        threshold(),
        threshold(),
    );
    let flags = any::<[bool; 5]>();
    (any::<Option<String>>(), maybe_text(), maybe_text(), flags, prop::option::of(fallback), resume).prop_map(
        |(language, prompt, prefix, flags, fallback, resume)| SpeechTask {
            kind: if flags[0] { SpeechKind::Translate } else { SpeechKind::Transcribe },
            language,
            prompt,
            prefix,
            timestamps: flags[1],
            word_timestamps: flags[2],
            long_form: if flags[3] { LongForm::Sequential } else { LongForm::Parallel },
            condition_on_previous: flags[4],
            fallback: fallback.map(|(temperatures, compression_ratio, logprob, no_speech)| SpeechFallback {
                temperatures,
                compression_ratio,
                logprob,
                no_speech,
            }),
            resume: resume.map(|(start_ms, previous, conditioned)| SpeechResume {
                start_ms,
                previous,
                conditioned,
            }),
        },
    )
}

/// Text or nonempty tokens: an empty list is the same as absent on the wire.
fn nonempty_text_or_tokens() -> impl Strategy<Value = TextOrTokens> {
    prop_oneof![
        any::<String>().prop_map(TextOrTokens::Text),
        prop::collection::vec(any::<u32>(), 1..4).prop_map(TextOrTokens::Tokens),
    ]
}

fn prompt() -> impl Strategy<Value = Prompt> {
    prop_oneof![
        chat().prop_map(Prompt::Chat),
        text_or_tokens().prop_map(Prompt::Singleton),
        (prop::option::of(text_or_tokens()), text_or_tokens())
            .prop_map(|(encoder, decoder)| Prompt::Explicit { encoder, decoder }),
        speech().prop_map(Prompt::Speech),
    ]
}

fn encoded_item() -> impl Strategy<Value = EncodedItem> {
    let dtype =
        prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16), Just(DType::I8), Just(DType::F8)];
    let modality = prop_oneof![
        Just(Modality::Image),
        Just(Modality::Audio),
        Just(Modality::Text),
        Just(Modality::Video)
    ];
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
    (any::<[[u8; 32]; 3]>(), modality, 1..9u32, 1..9u32, dtype, extent).prop_map(
        |([key, fp, checksum], modality, n_tokens, hidden, dtype, extent)| EncodedItem {
            key: ContentKey::from_bytes(key),
            fingerprint: Fingerprint::from_bytes(fp),
            modality,
            n_tokens,
            hidden,
            dtype,
            extent,
            checksum,
        },
    )
}

proptest! {
    #[test]
    fn prompts_read_back(p in prompt()) {
        let wire = v1::Prompt::from(p.clone());
        let bytes = wire.encode_to_vec();
        let wire = v1::Prompt::decode(bytes.as_slice()).expect("own encoding decodes");
        prop_assert_eq!(Prompt::try_from(wire), Ok(p));
    }

    #[test]
    fn encoded_items_read_back(item in encoded_item()) {
        prop_assert_eq!(EncodedItem::try_from(v1::EncodedItem::from(&item)), Ok(item));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(wire) = v1::PdGenerateRequest::decode(bytes.as_slice()) {
            let _ = wire.prompt.map(Prompt::try_from);
            let _ = wire.items.into_iter().map(EncodedItem::try_from).count();
        }
    }

    #[test]
    fn arbitrary_enum_numbers_are_refused_or_read(n in any::<i32>()) {
        prop_assert_eq!(triptych_proto::convert::modality(n).is_ok(), (1..=3).contains(&n));
        prop_assert_eq!(triptych_proto::convert::finish_reason(n).is_ok(), (0..=2).contains(&n));
    }
}

#[test]
fn open_settings_take_the_models_defaults_and_ranges_are_held() {
    let defaults = &defaults();
    let params = sampling_from_wire(v1::Sampling::default(), defaults).unwrap();
    assert_eq!(&params, defaults, "everything open is the model's");
    let explicit = SamplingParams {
        seed: Some(3),
        logprobs: Some(2),
        beams: None,
        min_tokens: 0,
        logit_bias: vec![(1, -3.0), (9, 0.5)],
        bad_words: vec!["no".into()],
        stop_token_ids: vec![4],
        constraint: Some(Constraint::Choice(vec!["a".into(), "b".into()])),
        echo: true,
        allowed_token_ids: vec![5, 6],
        include_stop: true,
        prompt_logprobs: Some(1),
        ..params
    };
    assert_eq!(sampling_from_wire(sampling_to_wire(explicit.clone()), defaults), Ok(explicit));
    let wrong = v1::Sampling { temperature: Some(3.0), ..Default::default() };
    assert_eq!(sampling_from_wire(wrong, defaults).unwrap_err().param.as_deref(), Some("temperature"));
}

fn defaults() -> SamplingParams {
    SamplingParams {
        temperature: 0.5,
        top_p: 0.9,
        top_k: Some(7),
        min_tokens: 12,
        beams: Some(BeamParams { width: 4, length_penalty: 2.0, early_stopping: EarlyStopping::Immediately }),
        ..SamplingParams::default()
    }
}

#[test]
fn a_models_own_beams_hold_only_for_a_request_that_asks_for_nothing_else() {
    let beams = |width, length_penalty| Some(v1::Beams { width, length_penalty, ..Default::default() });
    let none = v1::Sampling::default();
    let cases = [
        (none.clone(), Some((4, 2.0))),
        (v1::Sampling { temperature: Some(0.0), ..none.clone() }, None),
        (v1::Sampling { seed: Some(1), ..none.clone() }, None),
        (v1::Sampling { n: Some(4), ..none.clone() }, Some((4, 2.0))),
        (v1::Sampling { n: Some(5), ..none.clone() }, None),
        (v1::Sampling { beams: beams(1, None), ..none.clone() }, None),
        (v1::Sampling { beams: beams(6, None), ..none.clone() }, Some((6, 2.0))),
        (v1::Sampling { beams: beams(6, Some(0.5)), temperature: Some(0.0), ..none }, Some((6, 0.5))),
    ];
    for (wire, expect) in cases {
        let found = sampling_from_wire(wire.clone(), &defaults()).unwrap().beams;
        assert_eq!(found.map(|b| (b.width, b.length_penalty)), expect, "{wire:?}");
    }
}

#[test]
fn a_models_least_length_gives_way_to_a_request_for_less() {
    let short = v1::Sampling { max_tokens: Some(5), ..Default::default() };
    assert_eq!(sampling_from_wire(short, &defaults()).unwrap().min_tokens, 5);
    let asked = v1::Sampling { max_tokens: Some(5), min_tokens: Some(6), ..Default::default() };
    let failure = sampling_from_wire(asked, &defaults()).unwrap_err();
    assert_eq!(failure.param.as_deref(), Some("min_tokens"));
}

#[test]
fn a_shape_that_overflows_is_refused() {
    let item = EncodedItem {
        key: ContentKey::from_bytes([0; 32]),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        modality: Modality::Image,
        n_tokens: u32::MAX,
        hidden: u32::MAX,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    };
    let wire = v1::EncodedItem::from(&item);
    assert!(matches!(EncodedItem::try_from(wire), Err(WireError::Value { field: "n_tokens", .. })));
}
