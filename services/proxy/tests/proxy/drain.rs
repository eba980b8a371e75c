//! The end of a proxy: running streams of both APIs finish; those that are cut get an error, and are counted.

use crate::fakes::{Encoder, GenerateStep, Pd, Process, hello};
use crate::support::{Proxy, client, eventually, memory, models, question};
use serde_json::json;
use std::time::Duration;
use tonic::{Code, Streaming};
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proxy::ProxyError;
use triptych_runtime::Drain;
use triptych_runtime::drain::DrainTimes;

/// Streams of each API.
const N: usize = 16;

struct Running {
    pd: Pd,
    proxy: Proxy,
    http: Vec<reqwest::Response>,
    grpc: Vec<Streaming<v1::GenerateResponse>>,
    _workers: [Process; 2],
}

impl Running {
    /// A proxy with `n_http` and `n_grpc` streams, each with its first piece read and held by the PD worker.
    async fn start(n_http: usize, n_grpc: usize, grace: Duration) -> Self {
        let store = memory().await;
        let (encoder, pd) = (Encoder::new(models(), store.clone()), Pd::new(models()));
        let (encoders, pds) = (encoder.serve(), pd.serve());
        let drain = Drain::with_times(DrainTimes { lame_duck: Duration::ZERO, grace });
        let proxy = Proxy::draining(drain, &[encoders.address], &[pds.address], store, |_| {}).await;
        proxy.ready().await;
        pd.script((0..n_http + n_grpc).map(|_| GenerateStep::SendThenHold(vec![hello().remove(0)])));
        let (mut http, mut grpc) = (Vec::new(), Vec::new());
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
        for _ in 0..n_http {
            let url = proxy.url("/v1/chat/completions");
            let mut response = client().post(url).json(&body).send().await.unwrap();
            assert!(response.chunk().await.unwrap().is_some());
            http.push(response);
        }
        for _ in 0..n_grpc {
            let mut stream = proxy.client().generate(question(&[])).await.unwrap().into_inner();
            while !matches!(stream.message().await.unwrap().unwrap().kind, Some(Kind::Delta(_))) {}
            grpc.push(stream);
        }
        Self { pd, proxy, http, grpc, _workers: [encoders, pds] }
    }

    async fn listeners_are_closed(&self) {
        let is_closed = async |address| tokio::net::TcpStream::connect(address).await.is_err();
        eventually("the listeners are closed", async || {
            is_closed(self.proxy.http).await && is_closed(self.proxy.grpc).await
        })
        .await;
    }
}

/// The rest of a stream, as text. A connection that breaks is a failure of the test.
async fn rest(mut response: reqwest::Response) -> String {
    let mut text = String::new();
    while let Some(piece) = response.chunk().await.expect("the stream has an end") {
        text += std::str::from_utf8(&piece).unwrap();
    }
    text
}

#[tokio::test]
async fn streams_of_either_api_end_whole_in_a_drain() {
    for (n_http, n_grpc) in [(N, 0), (0, N), (N, N)] {
        let running = Running::start(n_http, n_grpc, Duration::from_secs(60)).await;
        running.proxy.drain.begin();
        running.listeners_are_closed().await;
        assert!(!running.proxy.running.is_finished(), "{n_http} and {n_grpc} streams run");
        running.pd.release(n_http + n_grpc);
        for response in running.http {
            let text = rest(response).await;
            assert!(text.contains("world") && text.ends_with("data: [DONE]\n\n"), "{text}");
        }
        for mut stream in running.grpc {
            let mut last = None;
            while let Some(message) = stream.message().await.expect("no error") {
                last = message.kind;
            }
            assert!(matches!(last, Some(Kind::Summary(_))), "{last:?}");
        }
        running.proxy.running.await.unwrap().expect("nothing was cut");
    }
}

#[tokio::test]
async fn streams_that_are_cut_end_with_an_error_and_are_counted() {
    let running = Running::start(N, N, Duration::ZERO).await;
    running.proxy.drain.begin();
    for response in running.http {
        let text = rest(response).await;
        let last = text.trim_end().rsplit("\n\n").next().unwrap();
        let event: serde_json::Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(event["error"]["code"], "unavailable", "{text}");
        assert!(!text.contains("[DONE]"), "{text}");
    }
    for mut stream in running.grpc {
        let status = loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("a stream that was cut ended well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("stopping"), "{status}");
    }
    let ended = running.proxy.running.await.unwrap();
    let error = ended.expect_err("the exit says what was cut");
    assert!(matches!(error, ProxyError::Cut { n_cut, .. } if n_cut == 2 * N), "{error}");
    assert!(
        error.to_string().contains("32 requests were cut") && error.to_string().contains("--drain-grace")
    );
}
