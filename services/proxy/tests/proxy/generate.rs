//! Routing: items go to encoders, hashes to PD workers, and each item is encoded once.

use crate::fakes::{EncodeStep, Encoder, Pd, model};
use crate::support::{Cluster, IMAGE, Proxy, ask, eventually, memory, models, question};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_proto::v1::ItemSource::{Cached, Encoded, Shared};

/// Forwards connections to `target`, and records what clients send.
async fn tap(target: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&recorded);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = TcpStream::connect(target).await.unwrap().into_split();
            let record = Arc::clone(&record);
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut piece = vec![0; 64 << 10];
                while let Ok(n @ 1..) = from_client.read(&mut piece).await {
                    record.lock().unwrap().extend_from_slice(&piece[..n]);
                    to_server.write_all(&piece[..n]).await.unwrap();
                }
            });
        }
    });
    (address, recorded)
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[tokio::test]
async fn item_bytes_go_to_encoders_and_never_to_pd_workers() {
    let store = memory().await;
    let encoder = Encoder::new(models(), Arc::clone(&store));
    let pd = Pd::new(models());
    let encoder_process = encoder.serve();
    let pd_process = pd.serve();
    let (to_encoder, sent_to_encoder) = tap(encoder_process.address).await;
    let (to_pd, sent_to_pd) = tap(pd_process.address).await;
    let proxy = Proxy::start(&[to_encoder], &[to_pd], store, |_| {}).await;
    proxy.ready().await;
    let answer = ask(&proxy, question(&[IMAGE])).await.unwrap();
    assert_eq!(answer.text, "hello world");
    assert!(contains(&sent_to_encoder.lock().unwrap(), IMAGE));
    let sent = sent_to_pd.lock().unwrap();
    assert!(!contains(&sent, &IMAGE[..16]) && !contains(&sent, &IMAGE[IMAGE.len() - 16..]));
    let items = &pd.requests()[0].items;
    assert_eq!((items.len(), items[0].key.len(), items[0].n_tokens), (1, 32, 2));
    assert!(contains(&sent, &items[0].key));
}

#[tokio::test]
async fn a_cached_image_costs_no_encode_and_the_summary_has_its_source() {
    let cluster = Cluster::start().await;
    let first = ask(&cluster.proxy, question(&[IMAGE, b"other", IMAGE])).await.unwrap();
    assert_eq!(first.sources(), [Encoded, Encoded, Shared]);
    let times = first.summary.times.unwrap();
    assert_eq!((times.queue_us, times.encode_us, times.publish_us), (11, 320, 4000));
    assert_eq!((times.load_us, times.prefill_us), (50, 60));
    assert!(times.first_token_us > 0);
    assert_eq!(cluster.encoder.jobs().len(), 2);
    let second = ask(&cluster.proxy, question(&[b"other", IMAGE])).await.unwrap();
    assert_eq!(second.sources(), [Cached, Cached]);
    assert_eq!(second.summary.times.unwrap().encode_us, 0);
    assert_eq!(cluster.encoder.jobs().len(), 2);
    let keys: Vec<Vec<_>> = cluster
        .pd
        .requests()
        .iter()
        .map(|request| request.items.iter().map(|item| item.key.clone()).collect())
        .collect();
    assert_eq!((&keys[0][0], &keys[0][1]), (&keys[1][1], &keys[1][0]));
    assert_eq!(keys[0][0], keys[0][2]);
    let proxy = &cluster.proxy;
    let line = |source: &str| format!("triptych_item_source_total{{source=\"{source}\",modality=\"image\"}}");
    assert_eq!(proxy.metric(&line("encoded")).await, 2.0);
    assert_eq!(proxy.metric(&line("shared")).await, 1.0);
    assert_eq!(proxy.metric(&line("cached")).await, 2.0);
}

#[tokio::test]
async fn two_requests_at_once_share_one_encode() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::Hold, EncodeStep::Hold]);
    let first = ask(&cluster.proxy, question(&[IMAGE]));
    let second = async {
        eventually("the first job is under way", async || cluster.encoder.jobs().len() == 1).await;
        ask(&cluster.proxy, question(&[IMAGE, b"another"])).await
    };
    let release = async {
        // The second request waits for the first one's job by the time its own is sent.
        eventually("both jobs are under way", async || cluster.encoder.jobs().len() == 2).await;
        cluster.encoder.release(2);
    };
    let (first, second, ()) = futures::join!(first, second, release);
    assert_eq!(first.unwrap().sources(), [Encoded]);
    assert_eq!(second.unwrap().sources(), [Shared, Encoded]);
    assert_eq!(cluster.encoder.jobs().len(), 2);
}

#[tokio::test]
async fn a_shared_encode_survives_one_waiter_and_is_cancelled_with_the_last() {
    let cluster = Cluster::start().await;
    let proxy = &cluster.proxy;
    let cancelled = "triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}";
    cluster.encoder.script([EncodeStep::Hold, EncodeStep::Hold, EncodeStep::Hold]);
    let leader = proxy.client().generate(question(&[IMAGE])).await.unwrap();
    eventually("the first job is under way", async || cluster.encoder.jobs().len() == 1).await;
    let second = async { ask(proxy, question(&[IMAGE, b"another"])).await };
    let meanwhile = async {
        eventually("both jobs are under way", async || cluster.encoder.jobs().len() == 2).await;
        drop(leader);
        eventually("the first request is over", async || proxy.metric(cancelled).await == 1.0).await;
        cluster.encoder.release(2);
    };
    let (second, ()) = futures::join!(second, meanwhile);
    assert_eq!(second.unwrap().sources(), [Shared, Encoded]);
    assert_eq!((cluster.encoder.jobs().len(), cluster.encoder.cancelled()), (2, 0));

    let alone = proxy.client().generate(question(&[b"a third"])).await.unwrap();
    eventually("its job is under way", async || cluster.encoder.jobs().len() == 3).await;
    drop(alone);
    eventually("the encoder sees the cancellation", async || cluster.encoder.cancelled() == 1).await;
}

#[tokio::test]
async fn text_goes_directly_to_the_pd_worker_with_every_setting() {
    let cluster = Cluster::start().await;
    let mut request = question(&[]);
    request.model = String::new();
    let sampling = triptych_proto::v1::Sampling { temperature: Some(0.5), n: Some(2), ..Default::default() };
    request.sampling = Some(sampling.clone());
    ask(&cluster.proxy, request.clone()).await.unwrap();
    let seen = cluster.pd.requests().remove(0);
    // Fields that the client leaves unset stay unset: the defaults are the model's.
    assert_eq!((seen.sampling, seen.prompt), (Some(sampling), request.prompt));
    assert_eq!((seen.model.as_str(), seen.items.len(), cluster.encoder.jobs().len()), ("vl", 0, 0));
}

#[tokio::test]
async fn tenants_do_not_share_keys() {
    let a = Cluster::start().await;
    let b = Cluster::with(|config| config.tenant_salt = b"b".to_vec()).await;
    for cluster in [&a, &b] {
        ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
    }
    assert_ne!(a.pd.requests()[0].items[0].key, b.pd.requests()[0].items[0].key);
}

/// A worker of ours is given no item bytes, whatever it says of itself: only a service in this process is.
#[tokio::test]
async fn a_worker_behind_the_network_gets_no_item_bytes_whatever_it_announces() {
    let mut served = model("vl", Modality::Image, 1);
    served.foreign_encoders = Some(v1::worker_model::ForeignEncoders::default());
    let cluster = Cluster::serving(vec![served], |_| {}).await;
    ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
    let request = cluster.pd.requests().pop().unwrap();
    assert_eq!((request.items.len(), request.originals), (1, Vec::new()));
}
