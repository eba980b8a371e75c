//! Rates of tenants that two proxies count together in a real Redis, and what holds while it is away.

use crate::support::{Cluster, Proxy, client, eventually, memory};
use futures::future::join_all;
use serde_json::json;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};
use triptych_ec::store::redis::{RedisLink, RedisSetting, RedisTuning};
use triptych_ec::testing::RedisServer;
use triptych_ec::token_bucket::{BucketSize, TokenBuckets};
use triptych_proxy::ProxyConfig;
use triptych_proxy::auth::{AuthConfig, Quota};

/// Requests a second of a tenant.
const RATE: u32 = 10;

fn buckets(redis: &RedisServer) -> TokenBuckets {
    let setting: RedisSetting = redis.url().parse().unwrap();
    TokenBuckets::new(RedisLink::new(&setting, &RedisTuning::default()).unwrap())
}

fn limited(config: &mut ProxyConfig, redis: &RedisServer) {
    let quota = Quota { requests_per_s: NonZeroU32::new(RATE), ..Quota::default() };
    config.auth = AuthConfig { quota, ..AuthConfig::default() };
    config.quota_store = Some(buckets(redis));
}

/// Two proxies before the same workers.
struct TwoProxies {
    cluster: Cluster,
    other: Proxy,
}

impl TwoProxies {
    async fn start(redis: &RedisServer) -> Self {
        let cluster = Cluster::with(|config| limited(config, redis)).await;
        let workers = [&cluster.encoder_process, &cluster.pd_process].map(|process| [process.address]);
        let other =
            Proxy::start(&workers[0], &workers[1], memory().await, |config| limited(config, redis)).await;
        other.ready().await;
        Self { cluster, other }
    }

    fn proxies(&self) -> [&Proxy; 2] {
        [&self.cluster.proxy, &self.other]
    }
}

/// Statuses of `n` requests of a tenant at once.
async fn ask(proxy: &Proxy, tenant: &str, n: usize) -> Vec<u16> {
    let body = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
    let ask = async |_| {
        let request = client().post(proxy.url("/v1/chat/completions")).header("x-triptych-tenant", tenant);
        request.json(&body).send().await.unwrap().status().as_u16()
    };
    join_all((0..n).map(ask)).await
}

fn n_accepted(statuses: &[u16]) -> usize {
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    statuses.iter().filter(|status| **status == 200).count()
}

#[tokio::test]
async fn two_proxies_let_through_what_one_would() {
    let redis = RedisServer::start();
    let two = TwoProxies::start(&redis).await;
    let [a, b] = two.proxies();
    let start = Instant::now();
    let (of_a, of_b) = tokio::join!(ask(a, "acme", 20), ask(b, "acme", 20));
    let n = n_accepted(&of_a) + n_accepted(&of_b);
    let most = RATE as f64 * (1.0 + start.elapsed().as_secs_f64()) + 1.0;
    assert!(n >= RATE as usize && n as f64 <= most, "{n} of at most {most}");
    assert!(n_accepted(&ask(b, "other", 2).await) == 2, "another tenant has its own");
    assert_eq!(a.metric("triptych_quota_store_up{}").await, 1.0);
}

#[tokio::test]
async fn a_store_that_hangs_costs_a_moment_and_each_proxy_counts_alone_until_it_answers() {
    let redis = RedisServer::start();
    let two = TwoProxies::start(&redis).await;
    let [a, b] = two.proxies();
    assert_eq!(ask(a, "acme", 1).await, [200]);
    redis.pause();
    let start = Instant::now();
    assert_eq!(ask(a, "acme", 1).await, [200]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(a.metric("triptych_quota_store_up{}").await, 0.0);
    let statuses = ask(a, "acme", 30).await;
    assert!(n_accepted(&statuses) < 30, "its own buckets hold: {statuses:?}");
    assert!(a.metric("triptych_quotas_counted_alone_total{}").await >= 2.0);
    assert!(n_accepted(&ask(b, "acme", 1).await) == 1, "the other counts alone too");
    redis.resume();
    eventually("it asks again", async || {
        ask(a, "third", 1).await;
        a.metric("triptych_quota_store_up{}").await == 1.0
    })
    .await;
}

#[tokio::test]
async fn a_bucket_refills_at_its_rate_and_the_reported_wait_is_enough() {
    let redis = RedisServer::start();
    let buckets = buckets(&redis);
    let size = BucketSize { per_second: 100, most: 50 };
    assert_eq!(buckets.take("triptych:quota:{t}:x", size, 50).await.unwrap(), None);
    let wait = buckets.take("triptych:quota:{t}:x", size, 20).await.unwrap().expect("it is empty");
    assert!(wait <= Duration::from_millis(200), "{wait:?}");
    tokio::time::sleep(wait + Duration::from_millis(5)).await;
    assert_eq!(buckets.take("triptych:quota:{t}:x", size, 20).await.unwrap(), None);
    let faster = BucketSize { per_second: 10_000, most: 50 };
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(
        buckets.take("triptych:quota:{t}:x", faster, 50).await.unwrap(),
        None,
        "a new rate holds at once"
    );
}
