//! `triptych plan --watch`: looks at a proxy's metrics now and then, and says, or sets, how many workers there should be.
//!
//! A line for each look. What a look could not find out (the proxy does not answer, nothing was asked) changes nothing.

use super::apply::{ApplyTo, Pools, Target, Template};
use super::{QuestionArgs, blocking, print};
use crate::error::{CliError, chain};
use clap::Args;
use reqwest::Url;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use triptych_plan::online::{Controller, Decision, Fitted, Load, Reading, Replicas, Rules, needed};
use triptych_plan::planner::Budget;

/// For one answer of the proxy.
const PATIENCE: Duration = Duration::from_secs(10);

/// Flags of `--watch`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Beside a running cluster")]
pub struct WatchArgs {
    /// The proxy's metrics, as in http://127.0.0.1:8080/metrics: say now and then how many workers there should be. Of a
    /// name with several addresses each is a proxy, and what they count is added up
    #[arg(long, value_name = "URL")]
    pub watch: Option<String>,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub interval_s: u64,
    /// Looks before it ends; 0: it does not
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub looks: u64,
    /// Encoder workers that there are; Kubernetes is asked
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub encoders: usize,
    /// PD workers that there are; Kubernetes is asked
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pds: usize,
    /// Plan for a rate above the one that was seen: 1.25 leaves a fifth of each worker for what comes
    #[arg(long, value_name = "X", default_value_t = 1.25, value_parser = at_least_one)]
    pub headroom: f64,
    /// A change of a pool by less than so many percent is not worth it
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=1000))]
    pub worth: u32,
    /// Looks in a row that have to ask for a change
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub for_looks: u32,
    /// Workers by which a pool changes at most at once
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub max_step: usize,
    /// Seconds after a change in which nothing changes
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub cooldown_s: u64,
    /// Workers of each kind, at least
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub min: usize,
    /// Workers of each kind, at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max: usize,
    /// Set the replicas: kubernetes:NAMESPACE, from a pod whose account may get and patch deployments/scale
    #[arg(long, value_name = "TARGET", requires = "watch", conflicts_with = "apply_command")]
    pub apply: Option<ApplyTo>,
    /// Set the replicas by a command, as in './scale.sh {pool} {replicas}'
    #[arg(long, value_name = "COMMAND", requires = "watch")]
    pub apply_command: Option<Template>,
    /// Deployment of the encoder workers, and what {pool} is for them
    #[arg(long, value_name = "NAME", default_value = "encoder")]
    pub encoder_deployment: String,
    /// Deployment of the PD workers, and what {pool} is for them
    #[arg(long, value_name = "NAME", default_value = "pd")]
    pub pd_deployment: String,
}

fn at_least_one(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|x: &f64| (1.0..=10.0).contains(x));
    read.ok_or_else(|| "allowed are numbers from 1 to 10".to_owned())
}

impl WatchArgs {
    fn rules(&self) -> Result<Rules, CliError> {
        if self.min > self.max || self.max == 0 {
            return Err(CliError::Setting(format!(
                "--min {} and --max {}: the least is not above the most, and the most is 1 or more",
                self.min, self.max
            )));
        }
        let each = |n| Replicas { encoders: n, pds: n };
        Ok(Rules {
            worth: f64::from(self.worth) / 1e2,
            looks: self.for_looks,
            max_step: self.max_step.max(1),
            cooldown: Duration::from_secs(self.cooldown_s),
            least: each(self.min),
            most: each(self.max),
        })
    }

    fn target(&self) -> Result<Target, CliError> {
        let pools = Pools { encoders: self.encoder_deployment.clone(), pds: self.pd_deployment.clone() };
        match (&self.apply, &self.apply_command) {
            (Some(to), _) => Target::kubernetes(to, pools),
            (None, Some(template)) => Ok(Target::Command(template.clone(), pools)),
            (None, None) => Ok(Target::Nowhere),
        }
    }
}

/// Looks until it is stopped.
///
/// # Errors
/// [`CliError::Setting`] for what is wrong from the start. Trouble later is told and waited out.
pub async fn run(args: &WatchArgs, question: &QuestionArgs, json: bool) -> Result<(), CliError> {
    let rules = args.rules()?;
    let target = args.target()?;
    let url = args.watch.clone().unwrap_or_default();
    let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build();
    let client = client.map_err(|e| CliError::setting("--watch", &e))?;
    let mut watch = Watch {
        question: question.clone(),
        headroom: args.headroom,
        most: rules.most,
        controller: Controller::new(rules),
        current: Replicas { encoders: args.encoders, pds: args.pds },
        last: None,
        target,
        json,
    };
    // Curves and texts that cannot be used are told before anything is watched.
    question.read()?;
    let mut ticks = tokio::time::interval(Duration::from_secs(args.interval_s));
    let mut n = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
        match fetch(&client, &url).await {
            Ok(reading) => watch.look(reading, Instant::now()).await?,
            Err(why) => watch.say(&format!("{url}: {why}"), &json!({"trouble": why}))?,
        }
        n += 1;
        if n == args.looks {
            return Ok(());
        }
    }
}

/// What all proxies behind the URL's name counted, added up. One that does not answer spoils the look: without it the sum
/// would seem to fall.
async fn fetch(client: &reqwest::Client, url: &str) -> Result<Reading, String> {
    let mut metrics = String::new();
    for url in each(url).await? {
        let answer = async { client.get(url).send().await?.error_for_status()?.text().await };
        metrics.push_str(&answer.await.map_err(|e| chain(&e))?);
        metrics.push('\n');
    }
    Reading::of(&metrics).map_err(|e| e.to_string())
}

/// The URL with each address of its name: a headless service has one for each proxy. A name of this machine has several
/// for one listener, and a certificate is for the name, so these are asked once.
async fn each(url: &str) -> Result<Vec<Url>, String> {
    let url = Url::parse(url).map_err(|e| e.to_string())?;
    let (Some(name), "http") = (url.domain().map(str::to_owned), url.scheme()) else { return Ok(vec![url]) };
    let port = url.port_or_known_default().unwrap_or(80);
    let found = timeout(PATIENCE, tokio::net::lookup_host((name.as_str(), port))).await;
    let found = found.map_err(|_| format!("{name} was not looked up in {} s", PATIENCE.as_secs()))?;
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

struct Watch {
    question: QuestionArgs,
    headroom: f64,
    most: Replicas,
    controller: Controller,
    current: Replicas,
    last: Option<(Reading, Instant)>,
    target: Target,
    json: bool,
}

impl Watch {
    async fn look(&mut self, reading: Reading, now: Instant) -> Result<(), CliError> {
        match self.target.current().await {
            Ok(current) => self.current = current.unwrap_or(self.current),
            Err(e) => return self.say(&e.to_string(), &json!({"trouble": e.to_string()})),
        }
        let before = self.last.replace((reading.clone(), now));
        let Some((before, at)) = before else { return self.say("watching", &json!({"watching": true})) };
        let Some(load) = reading.since(&before, now.saturating_duration_since(at)) else {
            return self.say("nothing was asked", &json!({"rate": 0}));
        };
        let (needs, kept) = self.needs(&load).await?;
        let Some(needs) = needs else {
            let most = format!(
                "not even {} encoders and {} PD workers are enough",
                self.most.encoders, self.most.pds
            );
            return self.decided(&load, kept, (self.most, &most), now).await;
        };
        self.decided(&load, kept, (needs, ""), now).await
    }

    /// Replicas for what was seen; and the part of requests that kept the promises.
    async fn needs(&self, load: &Load) -> Result<(Option<Replicas>, f64), CliError> {
        let (question, load, most) = (self.question.clone(), load.clone(), self.most);
        let rate = load.rate * self.headroom;
        let current = self.current;
        blocking(move || {
            let asked = question.read()?;
            let kept = load.attainment(&asked.slo);
            let curves = asked.curves.first().map(Arc::clone);
            let fitted = curves.as_ref().and_then(|curves| Fitted::of(&load, curves));
            // A proxy that tells no sizes leaves what there is.
            let Some(fitted) = fitted else { return Ok((Some(current), kept)) };
            let question = asked.question(Budget::Workers(most.encoders + most.pds), &fitted);
            let needs = needed(&question, rate, most).map_err(|e| CliError::failed("cannot plan", &e))?;
            Ok((needs, kept))
        })
        .await
    }

    async fn decided(
        &mut self,
        load: &Load,
        kept: f64,
        (needs, more): (Replicas, &str),
        now: Instant,
    ) -> Result<(), CliError> {
        let from = self.current;
        let (to, why) = match self.controller.look(now, from, needs) {
            Decision::Keep { why } => (from, why),
            Decision::Change { to, why } => (to, why),
        };
        let mut trouble = more.to_owned();
        if to != from {
            match self.target.set(from, to).await {
                Ok(()) => self.current = to,
                Err(e) => trouble = e.to_string(),
            }
        }
        let seen = format!(
            "{:.2} requests/s, {:.1} % in time, {:.0} % of items reused",
            load.rate,
            kept * 1e2,
            load.reused * 1e2
        );
        let change = match to == from {
            true => format!("keep {} encoders and {} PD workers", from.encoders, from.pds),
            false => format!(
                "{} -> {} encoders, {} -> {} PD workers",
                from.encoders, to.encoders, from.pds, to.pds
            ),
        };
        let both = |r: Replicas| json!({"encoders": r.encoders, "pds": r.pds});
        let fields = json!({
            "rate": load.rate, "attainment": kept, "reused": load.reused, "failed": load.failed,
            "current": both(from), "needed": both(needs), "recommended": both(to), "changes": to != from,
            "why": why, "trouble": trouble,
        });
        let rest = if trouble.is_empty() { String::new() } else { format!("; {trouble}") };
        self.say(&format!("{change}: {why}; {seen}{rest}"), &fields)
    }

    fn say(&self, text: &str, fields: &serde_json::Value) -> Result<(), CliError> {
        if self.json { print(&format!("{fields}\n")) } else { print(&format!("{text}\n")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_of_this_machine_and_addresses_are_asked_once() {
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
