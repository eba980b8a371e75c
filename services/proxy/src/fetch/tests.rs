//! The fetcher against servers on this machine, reached by an allow-list.

use super::*;
use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::FailureClass;

/// Two loopback addresses: the first is on the allow-list, the second stands for the inside.
const ALLOWED: &str = "127.0.0.2";
const INSIDE: &str = "127.0.0.1";

async fn serve(host: &str, routes: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind((host, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

fn fetcher(max_item_bytes: usize) -> Fetcher {
    let policy = FetchPolicy { allow: vec![ALLOWED.parse().unwrap()], ..FetchPolicy::default() };
    Fetcher::new(policy, Limits { max_item_bytes, ..Limits::default() }).unwrap()
}

async fn fetch(url: String) -> Result<Bytes, Failure> {
    fetcher(1000).fetch(&url, Modality::Image, &ByteBudget::new(1000)).await
}

fn redirect_to(target: String) -> axum::response::Response {
    (StatusCode::FOUND, [(header::LOCATION, target)]).into_response()
}

#[tokio::test]
async fn an_allowed_server_is_fetched_from_and_its_redirects_are_followed() {
    let routes = Router::new()
        .route("/image", get(|| async { ([(header::CONTENT_TYPE, "image/png")], "pixels") }))
        .route("/once", get(|| async { redirect_to("image".into()) }))
        .route("/loop", get(|| async { redirect_to("/loop".into()) }))
        .route("/nowhere", get(|| async { StatusCode::FOUND }))
        .route("/gone", get(|| async { StatusCode::GONE }))
        .route("/html", get(|| async { ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], "<p>") }))
        .route("/file", get(|| async { redirect_to("file:///etc/passwd".into()) }));
    let server = serve(ALLOWED, routes).await;
    let url = |path: &str| format!("http://{server}{path}");
    assert_eq!(fetch(url("/image")).await.unwrap(), "pixels");
    assert_eq!(fetch(url("/once")).await.unwrap(), "pixels");
    let cases = [
        ("/loop", "redirects more than 5 times"),
        ("/nowhere", "redirects to nowhere"),
        ("/gone", "status 410"),
        ("/html", "type \"text/html\", expected is image"),
        ("/file", "scheme is \"file\""),
    ];
    for (path, expect) in cases {
        let failure = fetch(url(path)).await.unwrap_err();
        assert_eq!(failure.class, FailureClass::InvalidArgument);
        assert!(failure.message.contains(expect), "{path}: {failure}");
    }
}

#[tokio::test]
async fn the_inside_is_never_reached_directly_by_name_or_by_redirect() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let secret = Router::new().fallback(move || async move {
        counter.fetch_add(1, Ordering::SeqCst);
        "secret"
    });
    let inside = serve(INSIDE, secret).await.port();
    let notations = [
        format!("http://127.0.0.1:{inside}/"),
        format!("http://2130706433:{inside}/"),
        format!("http://0x7f.1:{inside}/"),
        format!("http://[::ffff:127.0.0.1]:{inside}/"),
        format!("http://localhost:{inside}/"),
    ];
    for target in notations {
        let failure = fetch(target.clone()).await.unwrap_err();
        assert!(failure.message.contains("does not fetch from"), "{target}: {failure}");
        let to = target.clone();
        let routes = Router::new().fallback(move || async move { redirect_to(to) });
        let outside = serve(ALLOWED, routes).await;
        let failure = fetch(format!("http://{outside}/")).await.unwrap_err();
        assert!(failure.message.contains("does not fetch from"), "by redirect to {target}: {failure}");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

/// A name that leads elsewhere each time it is asked for: to what may be reached first, and inside ever after.
#[tokio::test]
async fn a_name_that_changes_its_mind_never_leads_inside() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let secret = Router::new().fallback(move || async move {
        counter.fetch_add(1, Ordering::SeqCst);
        "secret"
    });
    // The same port on both addresses: a connection to the wrong one would be made.
    let inside = serve(INSIDE, secret).await;
    let again = format!("http://rebound.example:{}/again", inside.port());
    let routes = Router::new()
        .route("/image", get(|| async { ([(header::CONTENT_TYPE, "image/png")], "pixels") }))
        .route("/start", get(move || async move { ([(header::CONNECTION, "close")], redirect_to(again)) }));
    let listener = tokio::net::TcpListener::bind((ALLOWED, inside.port())).await.unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let fetch = async |path: &str, answers: &'static [&'static [&'static str]]| {
        let n_lookups = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&n_lookups);
        let lookup: Lookup = Arc::new(move |_| {
            let n = count.fetch_add(1, Ordering::SeqCst);
            let answer = answers[n.min(answers.len() - 1)];
            let addresses = answer.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect();
            Box::pin(async move { Ok(addresses) })
        });
        let policy = FetchPolicy { allow: vec![ALLOWED.parse().unwrap()], ..FetchPolicy::default() };
        let fetcher = Fetcher::resolving(lookup, policy, Limits::default()).unwrap();
        let url = format!("http://rebound.example:{}{path}", inside.port());
        let outcome = fetcher.fetch(&url, Modality::Image, &ByteBudget::new(1000)).await;
        (outcome, n_lookups.load(Ordering::SeqCst))
    };
    // One lookup a connection: what was judged is what is connected to.
    let (outcome, n) = fetch("/image", &[&[ALLOWED], &[INSIDE]]).await;
    assert_eq!((outcome.unwrap(), n), (Bytes::from("pixels"), 1));
    let (outcome, _) = fetch("/start", &[&[ALLOWED], &[INSIDE]]).await;
    assert!(outcome.unwrap_err().message.contains("does not fetch from"));
    const MIXTURES: [&[&[&str]]; 4] =
        [&[&[ALLOWED, INSIDE]], &[&[INSIDE, ALLOWED]], &[&["::ffff:127.0.0.1"]], &[&["0.0.0.0"]]];
    for mixture in MIXTURES {
        let (outcome, _) = fetch("/image", mixture).await;
        assert!(outcome.unwrap_err().message.contains("does not fetch from"), "{mixture:?}");
    }
    let (outcome, _) = fetch("/image", &[&[]]).await;
    assert!(outcome.unwrap_err().message.contains("not known"));
    assert_eq!(asked.load(Ordering::SeqCst), 0, "the inside was asked");
}

#[tokio::test]
async fn size_is_held_by_header_while_streaming_and_together() {
    let endless = || async {
        let pieces = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[0; 64])));
        ([(header::CONTENT_TYPE, "image/png")], Body::from_stream(pieces))
    };
    let routes = Router::new()
        .route("/endless", get(endless))
        .route("/long", get(|| async { vec![0u8; 2000] }))
        .route("/fits", get(|| async { vec![0u8; 600] }));
    let server = serve(ALLOWED, routes).await;
    for path in ["/endless", "/long"] {
        let failure = fetch(format!("http://{server}{path}")).await.unwrap_err();
        assert_eq!(failure.class, FailureClass::TooLarge, "{path}");
        assert!(failure.message.contains("the limit is 1000"), "{failure}");
    }
    let (fetcher, budget) = (fetcher(1000), ByteBudget::new(1000));
    let url = format!("http://{server}/fits");
    assert_eq!(fetcher.fetch(&url, Modality::Image, &budget).await.unwrap().len(), 600);
    let failure = fetcher.fetch(&url, Modality::Image, &budget).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::TooLarge);
}
