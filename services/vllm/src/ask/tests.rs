//! Conversations and constraints as vLLM is asked.

use super::*;
use triptych_core::ItemIdx;
use triptych_core::prompt::{CallReference, Chat, ChatEnding, Message, MessagePart, Role, ToolCall};

fn read(request: v1::PdGenerateRequest) -> Result<Ask, Failure> {
    Ask::read(request, &"vllm+http://gpu:1".parse().unwrap())
}

fn asked(chat: Chat) -> v1::PdGenerateRequest {
    let prompt = Some(Prompt::Chat(chat).into());
    v1::PdGenerateRequest { model: "m".into(), prompt, ..Default::default() }
}

fn says(role: Role, parts: Vec<MessagePart>) -> Message {
    Message { role, parts }
}

#[test]
fn a_conversation_keeps_calls_their_results_and_reasoning() {
    let call = ToolCall { id: "c1".into(), name: "look".into(), arguments: "{\"x\":1}".into() };
    let mut chat = Chat::from(vec![
        says(Role::User, vec![MessagePart::Text("a".into()), MessagePart::Text("b".into())]),
        says(Role::Assistant, vec![MessagePart::Reasoning("hm".into()), MessagePart::ToolCall(call)]),
        says(
            Role::Tool,
            vec![
                MessagePart::ResultOf(CallReference { id: "c1".into(), name: String::new() }),
                MessagePart::Text("9".into()),
            ],
        ),
    ]);
    chat.ending = ChatEnding::OpenMessage;
    chat.template_kwargs = Some("{\"enable_thinking\": false}".into());
    let body = read(asked(chat)).unwrap().body;
    let expect = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"x\":1}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]);
    assert_eq!(body["messages"], expect);
    assert_eq!(
        (&body["add_generation_prompt"], &body["continue_final_message"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(body["chat_template_kwargs"], json!({"enable_thinking": false}));
}

#[test]
fn what_is_not_there_or_cannot_be_asked_is_refused_by_name() {
    let image = says(Role::User, vec![MessagePart::Item(ItemIdx(3))]);
    let refused = read(asked(Chat::from(vec![image]))).unwrap_err();
    assert_eq!(refused.param.as_deref(), Some("items[3]"));
    let speech = v1::PdGenerateRequest {
        prompt: Some(Prompt::Speech(Default::default()).into()),
        ..Default::default()
    };
    assert!(read(speech).unwrap_err().message.contains("transcriptions"));
    assert!(read(v1::PdGenerateRequest::default()).is_err());
    let begun = v1::ResumedChoice { text_len: 1, ..Default::default() };
    let resumed = v1::PdGenerateRequest { resume: vec![begun], ..asked(Chat::default()) };
    assert!(read(resumed).unwrap_err().class.is_retryable());
}

#[test]
fn a_tenant_shares_cached_prompts_with_itself_alone() {
    let of = |tenant: Vec<u8>| {
        let request = v1::PdGenerateRequest { tenant: tenant.into(), ..asked(Chat::default()) };
        read(request).unwrap().body.get("cache_salt").cloned()
    };
    assert_eq!((of(Vec::new()), of(vec![0; 32])), (None, None));
    assert!(of(vec![1; 32]).is_some() && of(vec![1; 32]) != of(vec![2; 32]));
}

#[test]
fn a_completion_without_a_length_goes_on_to_the_end_of_the_context() {
    let prompt = Some(Prompt::Singleton(TextOrTokens::Tokens(vec![1, 2])).into());
    let ask = read(v1::PdGenerateRequest { prompt, ..Default::default() }).unwrap();
    assert_eq!((ask.path, &ask.body["prompt"]), ("/v1/completions", &json!([1, 2])));
    assert_eq!(ask.body["max_tokens"], Value::Null, "not vLLM's 16");
    assert_eq!(read(asked(Chat::default())).unwrap().body.get("max_tokens"), None);
}
