//! Scripted sources, a failing resolver and a counting registry.

use super::announce;
use super::dns::{Dns, Resolve};
use super::fixed::Fixed;
use super::*;
use crate::drain::{Drain, DrainTimes};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

fn addresses(present: &EndpointSet) -> Vec<String> {
    present.iter().map(|e| format!("{}@{}", e.role, e.address)).collect()
}

#[tokio::test]
async fn sources_are_merged_and_equal_addresses_deduplicated() {
    let list = |role, addresses: &[&str]| -> Box<dyn Source> {
        Box::new(Fixed::new(role, addresses.iter().map(|a| (*a).to_owned()).collect()))
    };
    let discovery = Discovery::start(vec![
        list(Role::Encoder, &["a:1", "b:1"]),
        list(Role::Encoder, &["b:1"]),
        list(Role::Pd, &["b:1"]),
    ]);
    let mut present = discovery.present();
    let all = present.wait_for(|p| p.len() == 3).await.unwrap().clone();
    assert_eq!(addresses(&all), ["encoder@a:1", "encoder@b:1", "pd@b:1"]);
}

/// A resolver that answers from a list, then fails.
fn scripted(answers: Vec<io::Result<Vec<SocketAddr>>>) -> Resolve {
    let answers = Mutex::new(VecDeque::from(answers));
    Box::new(move || {
        let next = answers.lock().pop_front();
        Box::pin(async move { next.unwrap_or_else(|| Err(io::Error::other("no resolver"))) })
    })
}

#[tokio::test(start_paused = true)]
async fn a_name_is_resolved_periodically_and_keeps_its_addresses_while_the_resolver_fails() {
    let at = |addresses: &[&str]| Ok(addresses.iter().map(|a| a.parse().unwrap()).collect());
    let answers = vec![
        Err(io::Error::other("not yet")),
        at(&["10.0.0.1:7", "[fd00::1]:7"]),
        Err(io::Error::other("gone for a moment")),
        at(&[]),
        at(&["10.0.0.2:7"]),
    ];
    let dns = Dns::with_resolver(Role::Pd, "pds:7", scripted(answers));
    let discovery = Discovery::start(vec![Box::new(dns)]);
    let mut present = discovery.present();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        present.changed().await.unwrap();
        seen.push(addresses(&present.borrow_and_update()));
    }
    assert_eq!(seen, [vec!["pd@10.0.0.1:7", "pd@[fd00::1]:7"], vec!["pd@10.0.0.2:7"]]);
    // A resolver that keeps failing changes nothing.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!present.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn addresses_of_a_name_may_be_those_of_vllm_servers() {
    let resolver = scripted(vec![Ok(vec!["10.0.0.1:7".parse().unwrap(), "[fd00::1]:7".parse().unwrap()])]);
    let dns =
        Dns::with_resolver(Role::Pd, "pds:7", resolver).with_affixes("vllm+http://", "?items=none".into());
    let discovery = Discovery::start(vec![Box::new(dns)]);
    let mut present = discovery.present();
    present.changed().await.unwrap();
    let seen = addresses(&present.borrow_and_update());
    assert_eq!(seen, ["pd@vllm+http://10.0.0.1:7?items=none", "pd@vllm+http://[fd00::1]:7?items=none"]);
}

#[derive(Default)]
struct Counting(Mutex<Vec<&'static str>>);

impl Registry for Counting {
    fn describe(&self) -> String {
        "a test".into()
    }

    fn announce<'a>(&'a self, _: &'a Announcement, _: Duration) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        self.0.lock().push("announced");
        Box::pin(async { Ok(()) })
    }

    fn withdraw<'a>(&'a self, _: &'a Announcement) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        self.0.lock().push("withdrawn");
        Box::pin(async { Ok(()) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_is_announced_while_ready_and_withdrawn_first_in_a_drain() {
    let (registry, drain) = (Arc::new(Counting::default()), Drain::new());
    let endpoint = Endpoint { role: Role::Encoder, address: "a:1".into() };
    let who = Announcement { endpoint, worker: WorkerId::new("encoder-0") };
    announce::keep(Arc::clone(&registry) as Arc<dyn Registry>, who, &drain);
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(registry.0.lock().is_empty(), "not before it is ready");
    drain.set_ready();
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(*registry.0.lock(), ["announced"; 3]);
    drain.begin();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(registry.0.lock().last(), Some(&"withdrawn"));
    drain.finish(DrainTimes::default()).await;
    assert_eq!(registry.0.lock().len(), 4);
}
