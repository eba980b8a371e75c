//! Watches the metrics of a cluster's proxies, and reports or sets the number of workers.
//!
//! Each observation is one line. An observation that fails (the proxy does not answer, no request ended) changes nothing.

use super::apply::ReplicaTarget;
use super::controller::{Controller, Decision, Replicas, Rules};
use super::fitted::Fitted;
use super::load::{Load, Reading};
use super::needed::needed;
use crate::planner::Budget;
use crate::planner::inputs::PlanInputs;
use reqwest::Url;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use triptych_bench::error::{MeasureError, chain};

/// Limit for one answer of a proxy, and for a name lookup.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of a watch.
#[derive(Clone)]
pub struct WatchSettings {
    /// URL of the proxy's metrics. If its name has several addresses, each is a proxy, and their counters are added.
    pub url: String,
    /// Pause between two observations.
    pub interval: Duration,
    /// Number of observations; `None`: no limit.
    pub n_observations: Option<u64>,
    /// Factor on the observed rate that is planned for.
    pub headroom: f64,
    /// Replicas at the start, if the target does not report them.
    pub replicas: Replicas,
    /// Names of the towers whose encoders have pools of their own; none: one pool has all encoders.
    pub towers: Vec<String>,
    /// Rules of the controller.
    pub rules: Rules,
}

/// Reads the inputs of the plan, once for each observation: curves may be replaced while the watch runs.
pub type ReadInputs = Arc<dyn Fn() -> Result<PlanInputs, MeasureError> + Send + Sync>;

/// Prints an observation: a line for people, and the same as fields.
pub type Report<'a> = &'a dyn Fn(&str, &Value) -> Result<(), MeasureError>;

/// Observes until the limit or Ctrl-C.
///
/// # Errors
/// [`MeasureError`] for settings that cannot work, and of `report`. Later trouble is reported, and the watch goes on.
pub async fn watch(
    settings: WatchSettings,
    inputs: ReadInputs,
    target: ReplicaTarget,
    report: Report<'_>,
) -> Result<(), MeasureError> {
    // Inputs that cannot be used are an error before the first observation.
    inputs()?;
    let client = reqwest::Client::builder().no_proxy().timeout(FETCH_TIMEOUT).build();
    let client = client.map_err(|e| MeasureError::setting("--watch", &e))?;
    let WatchSettings { url, interval, n_observations, headroom, replicas, towers, rules } = settings;
    let mut watch = Watch {
        inputs,
        headroom,
        most: rules.most,
        controller: Controller::new(rules),
        current: replicas,
        towers,
        last: None,
        target,
        report,
    };
    let mut ticks = tokio::time::interval(interval);
    let mut n = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
        match fetch(&client, &url).await {
            Ok(reading) => watch.observe(reading, Instant::now()).await?,
            Err(why) => report(&format!("{url}: {why}"), &json!({"trouble": why}))?,
        }
        n += 1;
        if Some(n) == n_observations {
            return Ok(());
        }
    }
}

/// Added counters of all proxies behind the URL's name. All must answer: without one of them the sum would seem to fall.
async fn fetch(client: &reqwest::Client, url: &str) -> Result<Reading, String> {
    let mut metrics = String::new();
    for url in each(url).await? {
        let answer = async { client.get(url).send().await?.error_for_status()?.text().await };
        metrics.push_str(&answer.await.map_err(|e| chain(&e))?);
        metrics.push('\n');
    }
    Reading::of(&metrics).map_err(|e| e.to_string())
}

/// The URL with each address of its name: a headless service has one for each proxy. Loopback names and HTTPS are requested
/// once: the former have several addresses for one listener, and a certificate is for the name.
async fn each(url: &str) -> Result<Vec<Url>, String> {
    let url = Url::parse(url).map_err(|e| e.to_string())?;
    let (Some(name), "http") = (url.domain().map(str::to_owned), url.scheme()) else { return Ok(vec![url]) };
    let port = url.port_or_known_default().unwrap_or(80);
    let found = timeout(FETCH_TIMEOUT, tokio::net::lookup_host((name.as_str(), port))).await;
    let found = found.map_err(|_| format!("{name} was not looked up in {} s", FETCH_TIMEOUT.as_secs()))?;
    let addresses: BTreeSet<IpAddr> = found.map_err(|e| e.to_string())?.map(|at| at.ip()).collect();
    if addresses.iter().all(IpAddr::is_loopback) {
        return Ok(vec![url]);
    }
    let with = |ip: IpAddr| {
        let mut url = url.clone();
        url.set_ip_host(ip).ok().map(|()| url)
    };
    Ok(addresses.into_iter().filter_map(with).collect())
}

struct Watch<'a> {
    inputs: ReadInputs,
    headroom: f64,
    most: Replicas,
    controller: Controller,
    current: Replicas,
    towers: Vec<String>,
    last: Option<(Reading, Instant)>,
    target: ReplicaTarget,
    report: Report<'a>,
}

/// Needed replicas, and the share of observed requests that met the SLO.
struct Needs {
    /// `None`: not even the largest cluster is enough.
    replicas: Option<Replicas>,
    attainment: f64,
}

impl Watch<'_> {
    async fn observe(&mut self, reading: Reading, now: Instant) -> Result<(), MeasureError> {
        match self.target.current().await {
            Ok(current) => self.current = current.unwrap_or(self.current),
            Err(e) => return (self.report)(&e.to_string(), &json!({"trouble": e.to_string()})),
        }
        let before = self.last.replace((reading.clone(), now));
        let Some((before, at)) = before else { return (self.report)("watching", &json!({"watching": true})) };
        let Some(load) = reading.since(&before, now.saturating_duration_since(at)) else {
            return (self.report)("no request ended", &json!({"rate": 0}));
        };
        let needs = self.needs(&load).await?;
        self.apply(&load, needs, now).await
    }

    /// Replicas for the observed load, and its SLO attainment.
    async fn needs(&self, load: &Load) -> Result<Needs, MeasureError> {
        let read_inputs = Arc::clone(&self.inputs);
        let load = load.clone();
        let most = self.most;
        let rate = load.rate * self.headroom;
        let current = self.current;
        let planned = tokio::task::spawn_blocking(move || {
            let inputs = read_inputs()?;
            let attainment = load.attainment(&inputs.slo);
            let curves = inputs.curves.first().map(Arc::clone);
            let fitted = curves.as_ref().and_then(|curves| Fitted::of(&load, curves));
            // Without sizes in the metrics the replicas stay as they are.
            let Some(fitted) = fitted else { return Ok(Needs { replicas: Some(current), attainment }) };
            let question = inputs.question(Budget::Workers(most.total()), &fitted);
            let replicas =
                needed(&question, rate, most).map_err(|e| MeasureError::failed("cannot plan", &e))?;
            Ok(Needs { replicas, attainment })
        });
        planned.await.map_err(|e| MeasureError::failed("planning ended early", &e))?
    }

    /// Decides about the needed replicas, sets them, and reports.
    async fn apply(&mut self, load: &Load, needs: Needs, now: Instant) -> Result<(), MeasureError> {
        let from = self.current;
        let Needs { replicas, attainment } = needs;
        let mut trouble = match replicas {
            Some(_) => String::new(),
            None => {
                let Replicas { encoders, pds } = self.most;
                format!("not even {encoders} encoders and {pds} PD workers are enough")
            }
        };
        let needs = replicas.unwrap_or(self.most);
        let (to, why) = match self.controller.observe(now, from, needs) {
            Decision::Keep { why } => (from, why),
            Decision::Change { to, why } => (to, why),
        };
        if to != from {
            match self.target.set(from, to).await {
                Ok(()) => self.current = to,
                Err(e) => trouble = e.to_string(),
            }
        }
        let seen = format!(
            "{:.2} requests/s, {:.1} % meet the SLO, {:.0} % of items reused",
            load.rate,
            attainment * 1e2,
            load.reused * 1e2
        );
        let change = match to == from {
            true => format!("keep {} encoders and {} PD workers", from.encoders, from.pds),
            false => format!(
                "{} -> {} encoders, {} -> {} PD workers",
                from.encoders, to.encoders, from.pds, to.pds
            ),
        };
        let [current, needed, recommended] = [from, needs, to].map(|r| fields_of(r, &self.towers));
        let fields = json!({
            "rate": load.rate, "attainment": attainment, "reused": load.reused, "failed": load.failed,
            "current": current, "needed": needed, "recommended": recommended, "changes": to != from,
            "why": why, "trouble": trouble,
        });
        let rest = if trouble.is_empty() { String::new() } else { format!("; {trouble}") };
        (self.report)(&format!("{change}: {why}; {seen}{rest}"), &fields)
    }
}

/// Replicas as fields: encoders as a number, or as one for each tower.
fn fields_of(replicas: Replicas, towers: &[String]) -> Value {
    let counts = replicas.encoders.counts();
    let by_tower = || towers.iter().zip(counts).map(|(name, n)| (name.clone(), json!(n))).collect();
    let encoders =
        if towers.is_empty() { json!(replicas.encoders.total()) } else { Value::Object(by_tower()) };
    json!({"encoders": encoders, "pds": replicas.pds})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::TowerWorkers;

    #[test]
    fn replicas_of_towers_are_named_and_those_of_one_pool_are_a_number() {
        assert_eq!(fields_of(Replicas::new(3, 1), &[]), json!({"encoders": 3, "pds": 1}));
        let towers = Replicas { encoders: TowerWorkers::new(&[2, 1]), pds: 1 };
        let names = ["low".to_owned(), "high".to_owned()];
        assert_eq!(fields_of(towers, &names), json!({"encoders": {"low": 2, "high": 1}, "pds": 1}));
    }

    #[tokio::test]
    async fn loopback_names_and_addresses_are_requested_once() {
        for url in [
            "http://127.0.0.1:8080/metrics",
            "http://localhost:8080/metrics",
            "https://proxy.example/metrics",
        ] {
            let urls = each(url).await.unwrap();
            assert_eq!(urls.iter().map(Url::as_str).collect::<Vec<_>>(), [url]);
        }
        assert!(each("no url").await.is_err());
    }
}
