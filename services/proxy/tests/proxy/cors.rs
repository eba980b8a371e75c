//! Cross-origin requests of browsers.

use crate::support::{Cluster, client};
use reqwest::{Method, Response};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

async fn cluster(origins: &[&str]) -> Cluster {
    let origins = origins.iter().map(|text| text.parse().unwrap()).collect();
    Cluster::with(|config| config.allowed_origins = origins).await
}

/// The question of a browser before a page may send a request.
async fn preflight(cluster: &Cluster, origin: &str) -> Response {
    let request = client().request(Method::OPTIONS, cluster.proxy.url(CHAT));
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    request.header("access-control-request-headers", "authorization,content-type").send().await.unwrap()
}

async fn post(cluster: &Cluster, origin: &str) -> Response {
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    client().post(cluster.proxy.url(CHAT)).header("origin", origin).json(&body).send().await.unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

const ALLOWED: &str = "access-control-allow-origin";

#[tokio::test]
async fn pages_of_allowed_origins_may_call_the_api() {
    let cluster = cluster(&["https://app.example.com", "http://localhost:3000"]).await;
    for origin in ["https://app.example.com", "http://localhost:3000"] {
        let asked = preflight(&cluster, origin).await;
        assert!(asked.status().is_success());
        assert_eq!(header(&asked, ALLOWED), Some(origin));
        assert_eq!(header(&asked, "access-control-allow-headers"), Some("authorization,content-type"));
        assert!(header(&asked, "access-control-allow-methods").unwrap().contains("POST"));
        let answer = post(&cluster, origin).await;
        assert_eq!((answer.status().as_u16(), header(&answer, ALLOWED)), (200, Some(origin)));
        assert!(header(&answer, "access-control-expose-headers").unwrap().contains("x-request-id"));
        assert!(header(&answer, "vary").unwrap().contains("origin"), "caches tell origins apart");
    }
    let other = preflight(&cluster, "https://evil.example.com").await;
    assert_eq!(header(&other, ALLOWED), None);
    // Errors are for pages to read too.
    let missing = client().get(cluster.proxy.url("/v1/nothing")).header("origin", "http://localhost:3000");
    assert_eq!(header(&missing.send().await.unwrap(), ALLOWED), Some("http://localhost:3000"));
}

#[tokio::test]
async fn a_star_allows_every_origin_and_nothing_allows_none() {
    let open = cluster(&["*"]).await;
    assert_eq!(header(&preflight(&open, "https://a.example").await, ALLOWED), Some("*"));
    assert_eq!(header(&post(&open, "https://a.example").await, ALLOWED), Some("*"));
    let closed = cluster(&[]).await;
    assert_eq!(preflight(&closed, "https://a.example").await.status().as_u16(), 405);
    assert_eq!(header(&post(&closed, "https://a.example").await, ALLOWED), None);
}
