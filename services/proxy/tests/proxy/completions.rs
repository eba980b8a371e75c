//! `POST /v1/completions`: every form of prompt, one or several, whole and streamed.

use crate::fakes::{GenerateStep, delta, model, prompted, summary, text};
use crate::support::{Cluster, ask, client};
use serde_json::{Value, json};
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_proto::v1::prompt::Kind;
use triptych_proto::v1::text_or_tokens::Kind as Text;

const PATH: &str = "/v1/completions";

/// A model whose encoder reads text, and one that reads images.
async fn cluster() -> Cluster {
    Cluster::serving(vec![model("t2t", Modality::Text, 1), model("vl", Modality::Image, 2)], |_| {}).await
}

fn words(text: &str) -> Text {
    Text::Text(text.into())
}

fn ids(ids: &[u32]) -> Text {
    Text::Tokens(v1::TokenIds { ids: ids.to_vec() })
}

/// The decoder's prompt of a request, however it was laid out.
fn decoder(request: &v1::PdGenerateRequest) -> Text {
    match request.prompt.clone().unwrap().kind.unwrap() {
        Kind::Singleton(prompt) => prompt.kind.unwrap(),
        Kind::Explicit(pair) => {
            assert!(pair.encoder.is_none(), "text for the encoder travels as an item");
            pair.decoder.unwrap().kind.unwrap()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn every_form_of_prompt_reaches_encoder_or_decoder() {
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]);
    let le = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    // The body, what the encoder is sent, and what the decoder reads.
    let cases: Vec<(Value, Vec<Vec<u8>>, Text)> = vec![
        (json!({"model": "t2t", "prompt": "hi"}), vec![b"hi".to_vec()], ids(&[])),
        (json!({"model": "t2t", "prompt": [7, 300]}), vec![le(&[7, 300])], ids(&[])),
        (json!({"model": "t2t", "encoder_prompt": "en"}), vec![b"en".to_vec()], ids(&[])),
        (json!({"model": "t2t", "encoder_prompt": "e", "prompt": "d"}), vec![b"e".to_vec()], words("d")),
        (json!({"model": "t2t", "encoder_prompt": [5], "prompt": [1, 2]}), vec![le(&[5])], ids(&[1, 2])),
        (json!({"model": "vl", "prompt": "hi"}), vec![], words("hi")),
        (json!({"model": "vl", "items": image, "prompt": "what"}), vec![b"hello".to_vec()], words("what")),
        (json!({"model": "vl", "items": image}), vec![b"hello".to_vec()], ids(&[])),
    ];
    for (body, encoded, decoded) in cases {
        let cluster = cluster().await;
        let (status, answer) = cluster.proxy.post(PATH, &body).await;
        assert_eq!(status, 200, "{body}: {answer}");
        assert_eq!(cluster.encoder.jobs(), encoded, "{body}");
        assert_eq!(decoder(&cluster.pd.requests()[0]), decoded, "{body}");
    }
}

#[tokio::test]
async fn grpc_has_the_same_forms() {
    let side = |kind: Text| Some(v1::TextOrTokens { kind: Some(kind) });
    let pair = |encoder, decoder| Kind::Explicit(v1::prompt::Explicit { encoder, decoder });
    let le = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let text_item = v1::Item {
        modality: v1::Modality::Text.into(),
        source: Some(v1::item::Source::Tokens(v1::TokenIds { ids: vec![9] })),
        options: None,
    };
    let single = |kind| Kind::Singleton(v1::TextOrTokens { kind: Some(kind) });
    // The prompt, the items, what the encoder is sent, what the decoder reads, and what the answer says of the encoder.
    let cases = [
        (single(words("hi")), vec![], b"hi".to_vec(), ids(&[]), side(words("hi"))),
        (single(ids(&[7])), vec![], le(&[7]), ids(&[]), side(ids(&[7]))),
        (pair(side(words("e")), side(ids(&[1]))), vec![], b"e".to_vec(), ids(&[1]), side(words("e"))),
        (pair(side(ids(&[5])), side(words("d"))), vec![], le(&[5]), words("d"), side(ids(&[5]))),
        (pair(None, side(words("d"))), vec![text_item], le(&[9]), words("d"), None),
    ];
    for (prompt, items, encoded, decoded, reported) in cases {
        let cluster = cluster().await;
        let prompt = Some(v1::Prompt { kind: Some(prompt) });
        let request = v1::GenerateRequest { model: "t2t".into(), prompt, items, ..Default::default() };
        let answer = ask(&cluster.proxy, request).await.unwrap();
        assert_eq!(cluster.encoder.jobs(), [encoded]);
        assert_eq!(decoder(&cluster.pd.requests()[0]), decoded);
        assert_eq!(answer.summary.encoder_prompt, reported);
    }
}

#[tokio::test]
async fn text_goes_to_an_encoder_that_reads_it_with_an_item_and_is_in_the_key() {
    let models = vec![prompted("florence", Modality::Image, 1), model("vl", Modality::Image, 2)];
    let cluster = Cluster::serving(models, |_| {}).await;
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}});
    let ask = |fields: Value| {
        let mut body = json!({"model": "florence", "items": [image]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let bodies =
        [json!({"prompt": "<OD>"}), json!({"encoder_prompt": "<CAPTION>", "prompt": [1]}), json!({})];
    for body in bodies {
        let (status, answer) = cluster.proxy.post(PATH, &ask(body)).await;
        assert_eq!(status, 200, "{answer}");
    }
    let chat = json!([{"role": "user", "content": [image, {"type": "text", "text": "<OCR>"}]}]);
    let (status, _) =
        cluster.proxy.post("/v1/chat/completions", &json!({"model": "florence", "messages": chat})).await;
    assert_eq!(status, 200);
    let prompts = ["<OD>", "<CAPTION>", "", "<OCR>"].map(|p| Some(p.to_owned()).filter(|p| !p.is_empty()));
    assert_eq!(cluster.encoder.prompts(), prompts, "the same image, encoded for each text");
    let decoded: Vec<_> = cluster.pd.requests().iter().map(decoder).collect();
    assert_eq!(decoded, [ids(&[]), ids(&[1]), ids(&[]), ids(&[])]);
    let refused = [
        (ask(json!({"prompt": [5]})), "prompt", "not token ids"),
        (json!({"model": "vl", "items": [image], "encoder_prompt": "x"}), "prompt.explicit.encoder", "both"),
    ];
    for (body, param, expect) in refused {
        let (status, answer) = cluster.proxy.post(PATH, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{answer}");
    }
}

#[tokio::test]
async fn text_and_its_token_ids_are_different_items() {
    let cluster = cluster().await;
    // The ids 0x6968, as bytes, begin with "hi".
    for body in [json!({"model": "t2t", "prompt": "hi\0\0"}), json!({"model": "t2t", "prompt": [0x6968]})] {
        assert_eq!(cluster.proxy.post(PATH, &body).await.0, 200);
    }
    assert_eq!(cluster.encoder.jobs(), [b"hi\0\0".to_vec(), b"hi\0\0".to_vec()], "each was encoded");
}

#[tokio::test]
async fn several_prompts_are_answered_in_order_and_their_usage_is_summed() {
    let cluster = cluster().await;
    let body = json!({"model": "t2t", "prompt": ["a", "b", "c"]});
    let (status, answer) = cluster.proxy.post(PATH, &body).await;
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(choices.iter().all(|c| c["text"] == "hello world" && c["finish_reason"] == "stop"));
    let prompts: Vec<_> = choices.iter().map(|c| c["encoder_prompt"].clone()).collect();
    assert_eq!(prompts, ["a", "b", "c"]);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["total_tokens"]),
        (&json!(21), &json!(27))
    );
    assert_eq!(answer["object"], "text_completion");
}

fn logprob(token_id: u32, text: &str, bytes: &[u8], logprob: f32) -> v1::TokenLogprob {
    v1::TokenLogprob { token_id, text: text.into(), bytes: bytes.to_vec().into(), logprob }
}

#[tokio::test]
async fn tokens_that_are_no_whole_text_or_share_one_are_told_apart() {
    let cluster = cluster().await;
    let part = || logprob(5, "\u{FFFD}", b"\xE2\x80", -0.5);
    let end = || logprob(6, "\u{FFFD}!", b"\x94!", -0.25);
    let top = vec![
        part(),
        logprob(7, "a", b"a", -1.0),
        logprob(8, "\u{FFFD}", b"\xE2", -2.0),
        logprob(9, "a", b"a", -3.0),
        logprob(10, " \u{FFFD}", b" \xF0\x9F", -4.0),
        logprob(11, "a", b"a", -5.0),
    ];
    let chosen = |chosen, top| v1::ChosenToken { chosen: Some(chosen), top };
    let logprobs = vec![chosen(part(), top), chosen(end(), vec![])];
    let piece =
        delta(v1::Delta { text: "—!".into(), token_ids: vec![5, 6], logprobs, ..v1::Delta::default() });
    cluster.pd.script([GenerateStep::Send(vec![piece, summary(v1::Summary::default())])]);
    let body = json!({"model": "t2t", "prompt": [3, 1], "logprobs": 6});
    let (_, answer) = cluster.proxy.post(PATH, &body).await;
    let expect = json!({
        "tokens": ["bytes:\\xe2\\x80", "bytes:\\x94!"], "token_logprobs": [-0.5, -0.25],
        "text_offset": [0, 1],
        "top_logprobs": [{
            "bytes:\\xe2\\x80": -0.5, "a": -1.0, "bytes:\\xe2": -2.0, "token_id:9": -3.0,
            "bytes: \\xf0\\x9f": -4.0, "token_id:11": -5.0,
        }, {}],
    });
    assert_eq!(answer["choices"][0]["logprobs"], expect);
}

#[tokio::test]
async fn a_source_language_goes_to_the_encoder_of_the_text_and_is_in_its_key() {
    let cluster = cluster().await;
    let chat = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        (PATH, json!({"model": "t2t", "prompt": "hi"})),
        (PATH, json!({"model": "t2t", "prompt": "hi", "src_lang": "de_DE"})),
        (PATH, json!({"model": "t2t", "encoder_prompt": "hi", "prompt": [1], "src_lang": "fr_XX"})),
        ("/v1/chat/completions", json!({"model": "t2t", "messages": chat, "src_lang": "fr_XX"})),
        ("/v1/chat/completions", json!({"model": "t2t", "messages": chat, "src_lang": "ro_RO"})),
        (PATH, json!({"model": "t2t", "prompt": "hi", "src_lang": null})),
    ] {
        let (status, answer) = cluster.proxy.post(path, &body).await;
        assert_eq!(status, 200, "{answer}");
    }
    let single = Kind::Singleton(v1::TextOrTokens { kind: Some(words("hi")) });
    let request = |src_lang: &str| v1::GenerateRequest {
        model: "t2t".into(),
        prompt: Some(v1::Prompt { kind: Some(single.clone()) }),
        src_lang: Some(src_lang.into()),
        ..Default::default()
    };
    ask(&cluster.proxy, request("cs_CZ")).await.unwrap();
    ask(&cluster.proxy, request("de_DE")).await.unwrap();
    let encoded = [None, Some("de_DE"), Some("fr_XX"), Some("ro_RO"), Some("cs_CZ")];
    assert_eq!(
        cluster.encoder.src_langs(),
        encoded.map(|code| code.map(str::to_owned)),
        "one encode for each"
    );
    let refused = json!({"model": "vl", "prompt": "hi", "src_lang": "de_DE"});
    let (status, answer) = cluster.proxy.post(PATH, &refused).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("src_lang")), "{answer}");
}

#[tokio::test]
async fn answers_carry_tokens_prompts_logprobs_and_counts() {
    let cluster = cluster().await;
    let chosen = |text: &str| v1::ChosenToken {
        chosen: Some(logprob(1, text, text.as_bytes(), -0.5)),
        top: vec![logprob(2, "z", b"z", f32::NEG_INFINITY)],
    };
    let piece = |text: &str, id: u32| {
        let logprobs = vec![chosen(text)];
        delta(v1::Delta { text: text.into(), token_ids: vec![id], logprobs, ..v1::Delta::default() })
    };
    let end = v1::Summary {
        usage: Some(v1::Usage {
            prompt_tokens: 9,
            completion_tokens: 2,
            cached_tokens: 8,
            drafted_tokens: 5,
            accepted_tokens: 3,
        }),
        decoder_prompt: Some(v1::DecoderPrompt { text: "</s>".into(), token_ids: vec![2] }),
        ..v1::Summary::default()
    };
    cluster.pd.script([GenerateStep::Send(vec![piece("né", 4), piece("e", 5), summary(end)])]);
    let body = json!({"model": "t2t", "prompt": [3, 1], "logprobs": 1});
    let (_, answer) = cluster.proxy.post(PATH, &body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!("née"), &json!([4, 5])));
    assert_eq!(choice["encoder_prompt"], json!([3, 1]));
    assert_eq!(choice["decoder_prompt"], json!({"text": "</s>", "token_ids": [2]}));
    let expect = json!({
        "tokens": ["né", "e"], "token_logprobs": [-0.5, -0.5], "text_offset": [0, 2],
        "top_logprobs": [{"z": -9999.0}, {"z": -9999.0}],
    });
    assert_eq!(choice["logprobs"], expect);
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 8);
    let expect = json!({"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2});
    assert_eq!(usage["completion_tokens_details"], expect);
}

#[tokio::test]
async fn a_stream_has_text_then_prompts_then_usage() {
    let cluster = cluster().await;
    let body = json!({
        "model": "t2t", "prompt": ["a", "b"], "stream": true, "stream_options": {"include_usage": true},
    });
    let response = client().post(cluster.proxy.url(PATH)).json(&body).send().await.unwrap();
    let text = response.text().await.unwrap();
    let events: Vec<&str> = text.split("\n\n").filter_map(|e| e.strip_prefix("data: ")).collect();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let of_choice = |index: u64| {
        let choices = events.iter().flat_map(|e| e["choices"].as_array().unwrap());
        choices.filter(|c| c["index"] == index).cloned().collect::<Vec<_>>()
    };
    for (index, prompt) in [(0, "a"), (1, "b")] {
        let pieces = of_choice(index);
        let text: String = pieces.iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(text, "hello world");
        assert_eq!(pieces.last().unwrap()["encoder_prompt"], prompt);
    }
    let (last, before) = events.split_last().unwrap();
    assert_eq!((&last["usage"]["total_tokens"], &last["choices"]), (&json!(18), &json!([])));
    assert!(before.iter().all(|e| e["usage"].is_null()));
}

#[tokio::test]
async fn tenants_and_priorities_are_passed_on() {
    let cluster = cluster().await;
    let ask = async |tenant: Option<&str>| {
        let body = json!({"model": "t2t", "prompt": "hi", "priority": -3});
        let mut request = client().post(cluster.proxy.url(PATH)).json(&body);
        if let Some(tenant) = tenant {
            request = request.header("x-triptych-tenant", tenant);
        }
        assert_eq!(request.send().await.unwrap().status(), 200);
    };
    for tenant in [None, Some("a"), Some("b"), Some("a")] {
        ask(tenant).await;
    }
    let requests = cluster.pd.requests();
    assert!(requests.iter().all(|r| r.priority == -3));
    assert_eq!(requests[1].tenant, requests[3].tenant);
    let distinct: std::collections::HashSet<_> = requests.iter().map(|r| r.tenant.clone()).collect();
    assert_eq!(distinct.len(), 3);
    assert_eq!(cluster.encoder.jobs().len(), 3, "tenants do not share encoder outputs");
}

/// A PD worker has no text of an encoder, except where its logits processors rule out the n-grams of that text.
#[tokio::test]
async fn the_encoders_text_goes_to_a_pd_worker_only_where_it_is_read() {
    let reading = v1::WorkerModel { reads_encoder_prompt: true, ..model("reading", Modality::Text, 3) };
    let cluster = Cluster::serving(vec![model("t2t", Modality::Text, 1), reading], |_| {}).await;
    let cases =
        [("t2t", None, false), ("t2t", Some(3), true), ("reading", None, true), ("reading", Some(0), false)];
    for (model, size, expect) in cases {
        let body = json!({"model": model, "prompt": "hi", "encoder_no_repeat_ngram_size": size});
        assert_eq!(cluster.proxy.post(PATH, &body).await.0, 200);
        let sent = cluster.pd.requests().last().unwrap().encoder_prompt.clone();
        let text = v1::TextOrTokens { kind: Some(v1::text_or_tokens::Kind::Text("hi".into())) };
        assert_eq!(sent, expect.then_some(text), "{model} {size:?}");
    }
}

#[tokio::test]
async fn bad_completion_requests() {
    let cluster = cluster().await;
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}});
    let cases = [
        (json!({}), "prompt", "prompt is missing"),
        (json!({"prompt": {"a": 1}}), "prompt", "a list of token ids"),
        (json!({"prompt": ""}), "prompt", "empty"),
        (json!({"prompt": vec!["x"; 33]}), "prompt", "33 prompts, the limit is 32"),
        (json!({"prompt": ["a", "b"], "items": [image]}), "prompt", "2 prompts, the limit is 1"),
        (json!({"prompt": "a", "items": [{"type": "text", "text": "x"}]}), "items[0].type", "text goes into"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix", "not supported"),
        (json!({"prompt": "a", "best_of": 3}), "best_of", "allowed is n"),
        (json!({"prompt": "a", "logprobs": 99}), "top_logprobs", "0 to 20"),
        (json!({"prompt": "a", "n": 3, "num_beams": 2}), "num_beams", "n to 32"),
        (json!({"prompt": "a", "priority": 101}), "priority", "-100 to 100"),
        (
            json!({"model": "vl", "prompt": "a", "encoder_prompt": "b"}),
            "prompt.explicit.encoder",
            "no text encoder",
        ),
    ];
    for (mut body, param, expect) in cases {
        if body.get("model").is_none() {
            body["model"] = json!("t2t");
        }
        let (status, answer) = cluster.proxy.post(PATH, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(expect), "{body}: {answer}");
    }
    assert!(cluster.encoder.jobs().is_empty() && cluster.pd.requests().is_empty());
    cluster.pd.script([GenerateStep::SendThenFail(vec![text("a")], tonic::Status::internal("x"))]);
    let body = json!({"model": "t2t", "prompt": ["a", "b"]});
    assert_eq!(cluster.proxy.post(PATH, &body).await.0, 500, "one that fails fails all");
}
