//! Tools and reasoning over both APIs: what a PD worker is asked, and what is made of its text.

use crate::fakes::{GenerateStep, delta, model, summary, text};
use crate::support::{Cluster, client};
use serde_json::{Value, json};
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;

const PATH: &str = "/v1/chat/completions";

/// Models by the syntax of their calls: `hermes` thinks too, `plain` has a template without tools, `old` none.
async fn cluster() -> Cluster {
    let format = |tool_syntax: v1::ToolSyntax, thinks| {
        let reads_tools = tool_syntax != v1::ToolSyntax::Unspecified;
        Some(v1::ChatFormat {
            reads_tools,
            tool_syntax: tool_syntax.into(),
            reasoning: if thinks { v1::ReasoningSyntax::ThinkTags.into() } else { 0 },
            ..v1::ChatFormat::default()
        })
    };
    let named = |name: &str, chat| v1::WorkerModel { chat, ..model(name, Modality::Image, 1) };
    let models = vec![
        named("hermes", format(v1::ToolSyntax::Hermes, true)),
        named("plain", format(v1::ToolSyntax::Unspecified, false)),
        named("old", None),
    ];
    Cluster::serving(models, |_| {}).await
}

fn ask(fields: Value) -> Value {
    let tool = json!({"type": "function", "function": {
        "name": "weather", "description": "of a city",
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}},
    }});
    let mut body =
        json!({"model": "hermes", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// An answer in these pieces.
fn answer(pieces: &[&str]) -> GenerateStep {
    let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..v1::Delta::default() };
    let pieces = pieces.iter().map(|piece| text(piece));
    GenerateStep::Send(pieces.chain([delta(end), summary(v1::Summary::default())]).collect())
}

const CALLING: [&str; 6] = [
    "<think>the weather",
    "?</think>Let me look.\n<tool",
    "_call>\n{\"name\": \"weather\", \"argu",
    "ments\": {\"a\"",
    ": 1}}\n</tool_call>\n<tool_call>{\"name\": \"weather\", \"arguments\": {}}",
    "</tool_call>",
];

#[tokio::test]
async fn calls_and_reasoning_are_apart_from_the_text() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING)]);
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({}))).await;
    assert_eq!(status, 200, "{body}");
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "Let me look.\n");
    assert_eq!(
        (&message["reasoning_content"], &message["reasoning"]),
        (&json!("the weather?"), &json!("the weather?"))
    );
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["type"], "function");
    assert_eq!(calls[0]["function"], json!({"name": "weather", "arguments": "{\"a\": 1}"}));
    assert_eq!(calls[1]["function"]["arguments"], "{}");
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let request = cluster.pd.requests().remove(0);
    let Some(v1::prompt::Kind::Chat(chat)) = request.prompt.unwrap().kind else { panic!() };
    assert_eq!(chat.tools[0].name, "weather");
    let parameters = r#"{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}}}"#;
    assert_eq!(chat.tools[0].parameters.as_deref(), Some(parameters));
    assert_eq!(request.sampling.unwrap().constraint, None);
}

#[tokio::test]
async fn a_stream_has_the_name_of_a_call_first_and_then_its_arguments_in_pieces() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING)]);
    let body = ask(json!({"stream": true}));
    let response = client().post(cluster.proxy.url(PATH)).json(&body).send().await.unwrap();
    let events = response.text().await.unwrap();
    let events = events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|e| *e != "[DONE]");
    let choices: Vec<Value> =
        events.map(|e| serde_json::from_str::<Value>(e).unwrap()["choices"][0].clone()).collect();
    let joined = |field: &str| -> String {
        choices.iter().filter_map(|choice| choice["delta"][field].as_str()).collect()
    };
    assert_eq!((&*joined("content"), &*joined("reasoning_content")), ("Let me look.\n", "the weather?"));
    let calls: Vec<&Value> =
        choices.iter().filter_map(|c| c["delta"]["tool_calls"].as_array()).flatten().collect();
    let heads: Vec<_> = calls.iter().filter(|call| call.get("id").is_some()).collect();
    assert_eq!(heads.iter().map(|call| &call["index"]).collect::<Vec<_>>(), [&json!(0), &json!(1)]);
    assert!(heads.iter().all(|call| call["function"]["name"] == "weather" && call["type"] == "function"));
    let arguments = |index: u32| -> String {
        let of = calls.iter().filter(|call| call["index"] == index);
        of.filter_map(|call| call["function"]["arguments"].as_str()).collect()
    };
    assert_eq!([arguments(0), arguments(1)], ["{\"a\": 1}", "{}"]);
    assert!(calls.len() >= 3, "arguments come in pieces: {calls:?}");
    assert_eq!(choices.last().unwrap()["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_stream_ends_behind_a_call_that_comes_whole() {
    let cluster = cluster().await;
    let whole = v1::Delta {
        text: "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>".into(),
        token_ids: vec![1],
        finish_reason: v1::FinishReason::Stop.into(),
        ..v1::Delta::default()
    };
    cluster.pd.script([GenerateStep::Send(vec![delta(whole), summary(v1::Summary::default())])]);
    let body = ask(json!({"stream": true, "messages": [{"role": "user", "content": "hi"}]}));
    let response = client().post(cluster.proxy.url(PATH)).json(&body).send().await.unwrap();
    let events = response.text().await.unwrap();
    let events = events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|e| *e != "[DONE]");
    let choices: Vec<Value> =
        events.map(|e| serde_json::from_str::<Value>(e).unwrap()["choices"][0].clone()).collect();
    let [.., call, end] = choices.as_slice() else { panic!("{choices:?}") };
    assert_eq!(call["delta"]["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!((&call["finish_reason"], &end["finish_reason"]), (&Value::Null, &json!("tool_calls")));
    assert_eq!(end["delta"], json!({}));
}

#[tokio::test]
async fn a_call_that_must_be_made_is_held_to_a_grammar() {
    let cluster = cluster().await;
    let one = json!({"type": "function", "function": {"name": "weather"}});
    for (model, choice) in [("hermes", json!("required")), ("plain", one), ("old", json!("required"))] {
        let call = match model {
            "hermes" => "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"a\": 3}}\n</tool_call>",
            _ => "{\"name\": \"weather\", \"parameters\": {\"a\": 3}}",
        };
        cluster.pd.script([answer(&[call])]);
        let body = ask(json!({"model": model, "tool_choice": choice}));
        let (status, body) = cluster.proxy.post(PATH, &body).await;
        assert_eq!(status, 200, "{body}");
        let message = &body["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null);
        assert_eq!(
            message["tool_calls"][0]["function"],
            json!({"name": "weather", "arguments": "{\"a\": 3}"})
        );
        let sampling = cluster.pd.requests().pop().unwrap().sampling.unwrap();
        let Some(v1::constraint::Kind::Grammar(grammar)) = sampling.constraint.unwrap().kind else {
            panic!()
        };
        assert!(grammar.contains("%json") && grammar.contains("weather"), "{grammar}");
        assert_eq!(grammar.contains("<tool_call>"), model == "hermes");
    }
}

#[tokio::test]
async fn a_strict_tool_holds_the_calls_that_a_model_chooses_to_make() {
    let cluster = cluster().await;
    let tool = json!([{"type": "function", "function": {"name": "weather", "strict": true}}]);
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({"tools": tool}))).await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &json!("hello world")));
    let sampling = cluster.pd.requests().pop().unwrap().sampling.unwrap();
    let Some(v1::constraint::Kind::Grammar(grammar)) = sampling.constraint.unwrap().kind else { panic!() };
    assert!(grammar.starts_with("start: segment* REST\n"), "{grammar}");
    let fields = json!({"tools": tool, "structured_outputs": {"regex": "a+"}});
    let (status, body) = cluster.proxy.post(PATH, &ask(fields)).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("tools")));
}

#[tokio::test]
async fn beside_tools_an_answer_in_json_is_that_or_a_call() {
    let cluster = cluster().await;
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let asked = async |fields: Value, text: &str| {
        cluster.pd.script([answer(&[text])]);
        let (status, body) = cluster.proxy.post(PATH, &ask(fields)).await;
        assert_eq!(status, 200, "{body}");
        let sampling = cluster.pd.requests().pop().unwrap().sampling.unwrap();
        (body["choices"][0]["message"].clone(), sampling.constraint.unwrap().kind.unwrap())
    };
    let (message, kind) = asked(json!({"response_format": format}), "{\"n\": 1}").await;
    assert_eq!((&message["content"], message.get("tool_calls")), (&json!("{\"n\": 1}"), None));
    let v1::constraint::Kind::Grammar(grammar) = kind else { panic!() };
    assert!(
        grammar.starts_with("start: calls | answer\n") && grammar.contains(&schema.to_string()),
        "{grammar}"
    );
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"a\": 3}}\n</tool_call>";
    let (message, _) = asked(json!({"response_format": format}), call).await;
    assert_eq!(
        (&message["content"], &message["tool_calls"][0]["function"]["name"]),
        (&Value::Null, &json!("weather"))
    );
    // An answer that must be a call has no text to be in JSON.
    let (_, kind) = asked(json!({"response_format": format, "tool_choice": "required"}), call).await;
    let v1::constraint::Kind::Grammar(grammar) = kind else { panic!() };
    assert!(!grammar.contains("answer"), "{grammar}");
    let (_, kind) = asked(json!({"response_format": format, "tool_choice": "none"}), "{}").await;
    assert_eq!(kind, v1::constraint::Kind::JsonSchema(schema.to_string()));
}

#[tokio::test]
async fn what_a_model_cannot_do_is_refused_by_name() {
    let cluster = cluster().await;
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    for (fields, param, expect) in [
        (json!({"model": "plain"}), "tools", "shows no tools"),
        (json!({"model": "old"}), "tools", "shows no tools"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice", "has no tools"),
        (json!({"tool_choice": {"function": {"name": "x"}}}), "tool_choice", "names \"x\""),
        (
            json!({"tool_choice": "required", "structured_outputs": {"regex": "a+"}}),
            "tool_choice",
            "leave response_format out",
        ),
        (json!({"tools": tool(json!({"name": "a b"}))}), "tools[0].function.name", "allowed are 1 to 64"),
        (
            json!({"tools": tool(json!({"name": "a", "parameters": []}))}),
            "tools[0].function.parameters",
            "an object",
        ),
        (json!({"documents": [{"text": "x"}]}), "documents", "shows none"),
        (
            json!({"model": "old", "tools": null, "chat_template_kwargs": {"a": 1}}),
            "chat_template_kwargs",
            "none",
        ),
        (json!({"chat_template_kwargs": {"tools": 1}}), "chat_template_kwargs", "field of its own"),
        (json!({"continue_final_message": true}), "continue_final_message", "role assistant"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls",
            "expected is JSON",
        ),
    ] {
        let (status, body) = cluster.proxy.post(PATH, &ask(fields.clone())).await;
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{fields}: {body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(expect), "{body}");
    }
}

#[tokio::test]
async fn without_a_choice_of_tools_a_call_is_text_and_reasoning_may_be_left_out() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING), answer(&["hm</think>yes"])]);
    let fields = json!({"tool_choice": "none", "include_reasoning": false});
    let (_, body) = cluster.proxy.post(PATH, &ask(fields)).await;
    let message = &body["choices"][0]["message"];
    assert!(message["content"].as_str().unwrap().starts_with("Let me look.\n<tool_call>"), "{message}");
    assert_eq!((message.get("tool_calls"), message.get("reasoning")), (None, None));
    // Without a `<think>` in prompt or answer, there is no reasoning.
    let (_, body) = cluster.proxy.post(PATH, &ask(json!({"tools": null}))).await;
    assert_eq!(body["choices"][0]["message"]["content"], "hm</think>yes");
    let begun = v1::Delta { text: "hm</think>yes".into(), begins_in_reasoning: true, ..v1::Delta::default() };
    cluster.pd.script([GenerateStep::Send(vec![delta(begun), summary(v1::Summary::default())])]);
    let (_, body) = cluster.proxy.post(PATH, &ask(json!({"tools": null}))).await;
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning"]), (&json!("yes"), &json!("hm")));
}

#[tokio::test]
async fn prompts_become_tokens_and_tokens_text_as_in_vllm() {
    let cluster = cluster().await;
    let post = async |path: &str, body: Value| cluster.proxy.post(path, &body).await;
    let (status, body) = post("/tokenize", json!({"model": "hermes", "prompt": "hi"})).await;
    let expect = json!({"count": 2, "max_model_len": 4096, "tokens": [5, 7], "token_strs": null});
    assert_eq!((status, body), (200, expect));
    let chat = ask(json!({"add_special_tokens": false, "return_token_strs": true}));
    let (_, body) = post("/tokenize", chat).await;
    let expect = json!({"count": 2, "max_model_len": 4096, "tokens": [5, 6], "token_strs": ["h", "i"]});
    assert_eq!(body, expect);
    let (status, body) = post("/detokenize", json!({"model": "plain", "tokens": [7, 8]})).await;
    assert_eq!((status, body), (200, json!({"prompt": "[7, 8]"})));
    let image = json!([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]);
    for (path, body, param) in [
        ("/tokenize", json!({"model": "hermes"}), "prompt"),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": image}]}),
            "messages[0].content[0].image_url",
        ),
        ("/tokenize", json!({"model": "x", "prompt": "hi"}), "model"),
        ("/detokenize", json!({"model": "hermes"}), "tokens"),
    ] {
        let (status, answer) = post(path, body.clone()).await;
        assert!(status >= 400 && answer["error"]["param"] == param, "{body}: {answer}");
    }
}

#[tokio::test]
async fn calls_in_tags_have_the_types_of_their_schemas() {
    let format = v1::ChatFormat {
        reads_tools: true,
        tool_syntax: v1::ToolSyntax::Qwen3Coder.into(),
        ..v1::ChatFormat::default()
    };
    let coder = v1::WorkerModel { chat: Some(format), ..model("coder", Modality::Image, 1) };
    let cluster = Cluster::serving(vec![coder], |_| {}).await;
    let call = "I look. <tool_call>\n<function=weather>\n<parameter=a>\n3\n</parameter>\n<parameter=z>\n3\n</parameter>\n\
        </function>\n</tool_call>";
    cluster.pd.script([answer(&[&call[..40], &call[40..]])]);
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({"model": "coder"}))).await;
    assert_eq!(status, 200, "{body}");
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("I look. "))
    );
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(*function, json!({"name": "weather", "arguments": "{\"a\":3,\"z\":\"3\"}"}));
    // A call that must be made is held to JSON, in the syntax that has no marks.
    cluster.pd.script([answer(&["{\"name\": \"weather\", \"parameters\": {\"a\": 3}}"])]);
    let (_, body) =
        cluster.proxy.post(PATH, &ask(json!({"model": "coder", "tool_choice": "required"}))).await;
    assert_eq!(body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\": 3}");
    let sampling = cluster.pd.requests().pop().unwrap().sampling.unwrap();
    let Some(v1::constraint::Kind::Grammar(grammar)) = sampling.constraint.unwrap().kind else { panic!() };
    assert!(grammar.contains("parameters") && !grammar.contains("tool_call"), "{grammar}");
}

#[tokio::test]
async fn grpc_has_tokens_and_their_text() {
    let cluster = cluster().await;
    let mut client = cluster.proxy.client();
    let text = |text: &str| {
        let text = v1::TextOrTokens { kind: Some(v1::text_or_tokens::Kind::Text(text.into())) };
        Some(v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(text)) })
    };
    let asked = |model: &str| v1::TokenizeRequest {
        model: model.into(),
        prompt: text("hi"),
        with_texts: true,
        ..v1::TokenizeRequest::default()
    };
    let found = client.tokenize(asked("hermes")).await.unwrap().into_inner();
    assert_eq!((found.token_ids, found.texts.len(), found.max_context), (vec![5, 7], 2, 4096));
    let plain = v1::TokenizeRequest { without_special_tokens: true, ..asked("hermes") };
    assert_eq!(client.tokenize(plain).await.unwrap().into_inner().token_ids, [5, 6]);
    let refused = client.tokenize(asked("x")).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    let refused = client.tokenize(v1::TokenizeRequest { prompt: None, ..asked("hermes") }).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    let asked = v1::DetokenizeRequest { model: "plain".into(), token_ids: vec![7, 8] };
    assert_eq!(client.detokenize(asked).await.unwrap().into_inner().text, "[7, 8]");
}

#[tokio::test]
async fn grpc_has_tools_and_reasoning_too() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING)]);
    let part = |kind| v1::Part { kind: Some(kind) };
    let messages = vec![v1::Message {
        role: v1::Role::User.into(),
        parts: vec![part(v1::part::Kind::Text("hi".into()))],
    }];
    let tools = vec![v1::Tool { name: "weather".into(), ..v1::Tool::default() }];
    let chat = v1::prompt::Chat { messages, tools, ..v1::prompt::Chat::default() };
    let request = v1::GenerateRequest {
        model: "hermes".into(),
        prompt: Some(v1::Prompt { kind: Some(v1::prompt::Kind::Chat(chat)) }),
        ..v1::GenerateRequest::default()
    };
    let mut stream = cluster.proxy.client().generate(request).await.unwrap().into_inner();
    let (mut text, mut reasoning, mut arguments, mut finish) =
        (String::new(), String::new(), String::new(), 0);
    while let Some(message) = stream.message().await.unwrap() {
        if let Some(Kind::Delta(delta)) = message.kind {
            text += &delta.text;
            reasoning += &delta.reasoning;
            delta.tool_calls.iter().for_each(|call| arguments += &call.arguments);
            finish = delta.finish_reason;
        }
    }
    assert_eq!((&*text, &*reasoning, &*arguments), ("Let me look.\n", "the weather?", "{\"a\": 1}{}"));
    assert_eq!(finish, i32::from(v1::FinishReason::ToolCalls));
}
