//! Workers register in a real Redis, in every form; it is killed and comes back empty, and the fleet stays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;
use triptych_core::WorkerId;
use triptych_ec::store::redis::{RedisLink, RedisTuning};
use triptych_ec::testing::{RedisCluster, RedisSentinel, RedisServer};
use triptych_runtime::Drain;
use triptych_runtime::discovery::announce;
use triptych_runtime::discovery::redis::{About, KEY, RedisRegistry};
use triptych_runtime::discovery::{Announcement, Discovery, Endpoint, EndpointSet, Registry, Role};

/// Generous: no test waits this long unless something hangs.
const LIMIT: Duration = Duration::from_secs(60);
const LASTS: Duration = Duration::from_secs(600);

fn registry(url: &str) -> RedisRegistry {
    let setting = url.parse().unwrap();
    let link = RedisLink::new(&setting, &RedisTuning::default()).unwrap();
    RedisRegistry::new(link.into_query(), setting.to_string())
}

fn worker(role: Role, address: &str) -> Announcement {
    let endpoint = Endpoint { role, address: address.to_owned() };
    Announcement { endpoint, worker: WorkerId::new("a-worker") }
}

fn watch(url: &str) -> (Discovery, watch::Receiver<EndpointSet>) {
    let discovery = Discovery::start(vec![Box::new(registry(url))]);
    let present = discovery.present();
    (discovery, present)
}

async fn until(present: &mut watch::Receiver<EndpointSet>, addresses: &[&str]) {
    let expect: BTreeSet<_> = addresses.iter().copied().collect();
    let is_so = |p: &EndpointSet| p.iter().map(|e| e.address.as_str()).collect::<BTreeSet<_>>() == expect;
    let became = timeout(LIMIT, present.wait_for(is_so)).await.map(|seen| seen.is_ok());
    assert_eq!(became, Ok(true), "expected {expect:?}, have {:?}", present.borrow());
}

fn by_hand(server: &RedisServer, command: &[&str]) -> redis::Value {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd(command[0]).arg(&command[1..]).query(&mut connection).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_and_go_in_every_form_of_redis() {
    let (server, sentinel, cluster) = (
        RedisServer::start(),
        RedisSentinel::start().without_failover(),
        RedisCluster::start().without_failover(),
    );
    for url in [server.url(), sentinel.url(), cluster.url()] {
        let registry = registry(&url);
        let (_discovery, mut present) = watch(&url);
        let (encoder, pd) = (worker(Role::Encoder, "10.0.0.1:7"), worker(Role::Pd, "[fd00::1]:7"));
        registry.announce(&encoder, LASTS).await.unwrap();
        registry.announce(&pd, LASTS).await.unwrap();
        until(&mut present, &["10.0.0.1:7", "[fd00::1]:7"]).await;
        assert!(present.borrow().contains(&encoder.endpoint) && present.borrow().contains(&pd.endpoint));
        registry.withdraw(&encoder).await.unwrap();
        registry.withdraw(&encoder).await.unwrap();
        until(&mut present, &["[fd00::1]:7"]).await;
        registry.announce(&encoder, Duration::from_millis(1)).await.unwrap();
        registry.announce(&pd, Duration::from_millis(1)).await.unwrap();
        until(&mut present, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_description_is_stored_and_malformed_fields_are_ignored() {
    let server = RedisServer::start();
    let about = About { models: vec![("whisper".into(), "abc".into())], capacity: Some(8) };
    let registry = registry(&server.url()).with_about(about);
    registry.announce(&worker(Role::Encoder, "h:1"), LASTS).await.unwrap();
    let redis::Value::BulkString(entry) = by_hand(&server, &["HGET", KEY, "encoder@h:1"]) else { panic!() };
    let entry = String::from_utf8(entry).unwrap();
    assert!(
        entry.contains(r#""models":[["whisper","abc"]],"capacity":8"#) && entry.contains("a-worker"),
        "{entry}"
    );
    for nonsense in ["pd@h", "queen@h:1", "\u{0}", "pd@http://x:1"] {
        by_hand(&server, &["HSET", KEY, nonsense, "99999999999999 {}"]);
    }
    by_hand(&server, &["HSET", KEY, "pd@never:1", "for ever"]);
    let (_discovery, mut present) = watch(&server.url());
    until(&mut present, &["h:1"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_empty_redis_keeps_the_workers() {
    let mut server = RedisServer::start();
    let drain = Drain::new();
    let kept = worker(Role::Pd, "kept:1");
    announce::keep(Arc::new(registry(&server.url())), kept.clone(), &drain);
    drain.set_ready();
    registry(&server.url()).announce(&worker(Role::Pd, "gone:1"), LASTS).await.unwrap();
    let (_discovery, mut present) = watch(&server.url());
    until(&mut present, &["gone:1", "kept:1"]).await;
    server.kill();
    server.restart();
    assert!(present.borrow().contains(&kept.endpoint));
    // The one that did not announce itself again goes, and until then, and after it, the other one is there.
    let always = present.wait_for(|p| p.len() == 1 || !p.contains(&kept.endpoint));
    let left = timeout(LIMIT, always).await.expect("who does not come back goes").unwrap().clone();
    assert_eq!(left.iter().collect::<Vec<_>>(), [&kept.endpoint]);
    let again = by_hand(&server, &["HEXISTS", KEY, "pd@kept:1"]);
    assert_eq!(again, redis::Value::Int(1), "it announced itself again");
}
