//! Resumption: a stream whose PD worker dies continues on another one, without a change for its reader.

use crate::fakes::{GenerateStep, Pd, delta, summary, text};
use crate::support::{Cluster, IMAGE, Proxy, ask, eventually, memory, models, question};
use serde_json::json;
use tonic::{Code, Status};
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_runtime::status::to_status;

fn unavailable() -> Status {
    to_status(&Failure::unavailable("not now"))
}

fn piece(choice: u32, token: u32, text: &str) -> v1::PdGenerateResponse {
    delta(v1::Delta { choice, token_ids: vec![token], text: text.into(), ..v1::Delta::default() })
}

fn end(choice: u32) -> v1::PdGenerateResponse {
    let finish_reason = v1::FinishReason::Stop.into();
    delta(v1::Delta { choice, finish_reason, ..v1::Delta::default() })
}

fn done() -> v1::PdGenerateResponse {
    let usage = v1::Usage { prompt_tokens: 7, completion_tokens: 5, ..v1::Usage::default() };
    summary(v1::Summary { usage: Some(usage), ..v1::Summary::default() })
}

#[tokio::test]
async fn another_worker_resumes_after_the_text_that_the_reader_has() {
    let store = memory().await;
    let one = Pd::new(models());
    let two = Pd::new(models());
    let encoder = crate::fakes::Encoder::new(models(), std::sync::Arc::clone(&store));
    let mut p1 = one.serve();
    let mut p2 = two.serve();
    let p3 = encoder.serve();
    let proxy = Proxy::start(&[p3.address], &[p1.address, p2.address], store, |_| {}).await;
    proxy.ready().await;
    let first = || GenerateStep::SendThenHold(vec![piece(0, 5, "h\u{e9}"), piece(0, 6, "")]);
    let rest = || GenerateStep::Send(vec![piece(0, 7, "llo"), end(0), done()]);
    for pd in [&one, &two] {
        pd.script([first(), rest()]);
    }
    let mut stream = proxy.client().generate(question(&[IMAGE])).await.unwrap().into_inner();
    let mut received = String::new();
    let mut n_tokens = 0;
    loop {
        match stream.message().await.unwrap().expect("a summary ends it").kind.unwrap() {
            Kind::Accepted(_) => {}
            Kind::Delta(delta) => {
                received += &delta.text;
                n_tokens += delta.token_ids.len();
                if n_tokens == 2 {
                    // The worker that has it dies; its script for a second request is the other one's.
                    let (process, other) =
                        if one.requests().is_empty() { (&mut p2, &one) } else { (&mut p1, &two) };
                    process.kill();
                    other.skip(1);
                }
            }
            Kind::Summary(summary) => {
                assert_eq!(summary.usage.unwrap().completion_tokens, 5);
                break;
            }
        }
    }
    assert_eq!((received.as_str(), n_tokens), ("h\u{e9}llo", 3));
    assert_eq!((one.requests().len(), two.requests().len(), encoder.jobs().len()), (1, 1, 1));
    let all = [one.requests(), two.requests()].concat();
    let resumed = all.iter().find(|r| !r.resume.is_empty()).expect("the second request resumes");
    let expected =
        v1::ResumedChoice { choice: 0, token_ids: vec![5, 6], text_len: 3, ..v1::ResumedChoice::default() };
    assert_eq!(resumed.resume, [expected]);
    assert_eq!(all[0].request_id, all[1].request_id, "the default seed is derived from it");
    let (_, metrics) = proxy.get("/metrics").await;
    assert!(metrics.contains("triptych_resumed_streams_total{model=\"vl\"} 1"), "{metrics}");
}

#[tokio::test]
async fn every_choice_resumes_at_its_own_position_and_ended_ones_stay_ended() {
    let cluster = Cluster::start().await;
    cluster.pd.script([
        GenerateStep::SendThenFail(vec![piece(1, 1, "b"), end(1), piece(0, 2, "a")], unavailable()),
        GenerateStep::SendThenFail(vec![piece(0, 3, "aa")], unavailable()),
        GenerateStep::Send(vec![end(0), piece(2, 4, "c"), end(2), done()]),
    ]);
    let mut three = question(&[]);
    three.sampling = Some(v1::Sampling { n: Some(3), ..v1::Sampling::default() });
    assert_eq!(ask(&cluster.proxy, three).await.unwrap().text, "baaac");
    let resumes: Vec<_> = cluster.pd.requests().into_iter().map(|request| request.resume).collect();
    let one = |choice, token_ids: &[u32], text_len, ended| v1::ResumedChoice {
        choice,
        token_ids: token_ids.to_vec(),
        text_len,
        ended,
        segments: 0,
    };
    assert_eq!(resumes[0], []);
    assert_eq!(resumes[1], [one(0, &[2], 1, false), one(1, &[1], 1, true)]);
    assert_eq!(resumes[2], [one(0, &[2, 3], 3, false), one(1, &[1], 1, true)]);
}

#[tokio::test]
async fn an_item_that_is_gone_when_a_stream_resumes_is_encoded_again() {
    let cluster = Cluster::start().await;
    let missing = to_status(&Failure::unavailable("gone").with_param("items[0]"));
    cluster.pd.script([
        GenerateStep::SendThenFail(vec![text("hel")], unavailable()),
        GenerateStep::Fail(missing),
        GenerateStep::Send(vec![piece(0, 2, "lo"), end(0), done()]),
    ]);
    assert_eq!(ask(&cluster.proxy, question(&[IMAGE])).await.unwrap().text, "hello");
    assert_eq!(cluster.encoder.jobs().len(), 2);
    assert_eq!(cluster.pd.requests()[2].resume.len(), 1);
}

#[tokio::test]
async fn a_stream_that_no_worker_can_resume_ends_with_a_typed_failure() {
    let cluster = Cluster::start().await;
    cluster.pd.script([GenerateStep::SendThenFail(vec![text("hel")], unavailable())]);
    cluster.pd.script((0..50).map(|_| GenerateStep::Fail(unavailable())));
    let status = ask(&cluster.proxy, question(&[])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("incomplete") && status.metadata().contains_key("retry-after-ms"));
    assert_eq!(cluster.pd.requests().len(), 5);
}

#[tokio::test]
async fn text_after_the_end_of_a_choice_is_an_internal_error() {
    let cluster = Cluster::start().await;
    cluster.pd.script([GenerateStep::Send(vec![text("a"), end(0), text("b"), done()])]);
    assert_eq!(ask(&cluster.proxy, question(&[])).await.unwrap_err().code(), Code::Internal);
}

#[tokio::test]
async fn a_stream_that_waits_for_a_worker_ends_at_its_deadline() {
    let limits = triptych_core::limits::Limits {
        max_request_time: std::time::Duration::from_millis(600),
        ..Default::default()
    };
    let mut cluster = Cluster::with(|config| config.limits = limits).await;
    cluster.pd.script([GenerateStep::SendThenHold(vec![text("hel")])]);
    let pd = cluster.pd.clone();
    let process = &mut cluster.pd_process;
    let dies = async {
        eventually("the request is under way", async || pd.requests().len() == 1).await;
        process.kill();
    };
    let (answer, ()) = futures::join!(ask(&cluster.proxy, question(&[])), dies);
    assert_eq!(answer.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn an_http_stream_resumes_unless_a_header_forbids_it() {
    let cluster = Cluster::start().await;
    let body = json!({"model": "vl", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let url = cluster.proxy.url("/v1/chat/completions");
    let ask = async |never: bool| {
        cluster.pd.script([
            GenerateStep::SendThenFail(vec![piece(0, 1, "hel")], unavailable()),
            GenerateStep::Send(vec![piece(0, 2, "lo"), end(0), done()]),
        ]);
        let mut request = crate::support::client().post(&url).json(&body);
        if never {
            request = request.header("x-triptych-resume", "never");
        }
        request.send().await.unwrap().text().await.unwrap()
    };
    let whole = ask(false).await;
    assert!(
        whole.contains("\"hel\"") && whole.contains("\"lo\"") && whole.ends_with("data: [DONE]\n\n"),
        "{whole}"
    );
    assert_eq!(whole.matches("\"role\":\"assistant\"").count(), 1, "{whole}");
    let broken = ask(true).await;
    assert!(
        broken.contains("\"hel\"") && broken.contains("incomplete") && !broken.contains("[DONE]"),
        "{broken}"
    );
}
