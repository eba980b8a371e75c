//! Watches the metrics of a cluster's proxies, and reports or sets the number of workers, and the roles of those that hold
//! encoder and decoder.
//!
//! Each observation is one line for each of the two. An observation that fails (the proxy does not answer, no request ended) changes nothing.

use super::apply::ReplicaTarget;
use super::controller::{Controller, Decision, Replicas, Rules};
use super::division::{Division, Workers, divide};
use super::fitted::Fitted;
use super::load::{Load, Reading};
use super::needed::needed;
use super::proxies::{Proxies, SeenProxy};
use super::roles::{RoleChanges, RolePlan, RoleWatch};
use crate::planner::Budget;
use crate::planner::inputs::PlanInputs;
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_bench::error::MeasureError;

/// Settings of a watch.
#[derive(Clone)]
pub struct WatchSettings {
    /// URL of the proxy's metrics. If its name has several addresses, each is a proxy, and their counters are added.
    pub url: String,
    /// Word of the proxies' admin API; `None`: it asks for none.
    pub token: Option<String>,
    /// Treatment of roles.
    pub roles: RoleChanges,
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
    /// Most workers of each kind that are planned with.
    pub most: Replicas,
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
    let WatchSettings {
        url,
        token,
        roles,
        interval,
        n_observations,
        headroom,
        replicas,
        towers,
        most,
        rules,
    } = settings;
    let mut watch = Watch {
        proxies: Proxies::new(url.clone(), token)?,
        inputs,
        headroom,
        most,
        roles: RoleWatch::new(rules, roles),
        controller: Controller::new(rules),
        current: replicas,
        towers,
        last: None,
        target,
        report,
    };
    let mut ticks = tokio::time::interval(interval);
    // One future for all observations: a Ctrl-C in the middle of one counts too.
    let mut stop = pin!(tokio::signal::ctrl_c());
    let mut n = 0;
    loop {
        tokio::select! {
            biased;
            _ = &mut stop => return Ok(()),
            _ = ticks.tick() => {}
        }
        match watch.proxies.reading().await {
            Ok(reading) => watch.observe(reading, Instant::now()).await?,
            Err(why) => report(&format!("{url}: {why}"), &json!({"trouble": why}))?,
        }
        n += 1;
        if Some(n) == n_observations {
            return Ok(());
        }
    }
}

struct Watch<'a> {
    proxies: Proxies,
    inputs: ReadInputs,
    headroom: f64,
    most: Replicas,
    roles: RoleWatch,
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

/// Needed division of the present workers; `None`: the load has no sizes.
struct DivisionNeeds {
    division: Option<Division>,
    attainment: f64,
}

impl Watch<'_> {
    async fn observe(&mut self, reading: Reading, now: Instant) -> Result<(), MeasureError> {
        match self.target.current().await {
            Ok(current) => self.current = current.unwrap_or(self.current),
            Err(e) => return (self.report)(&e.to_string(), &json!({"trouble": e.to_string()})),
        }
        let before = self.last.replace((reading.clone(), now));
        let load = before
            .as_ref()
            .and_then(|(before, at)| reading.since(before, now.saturating_duration_since(*at)));
        // Where the admin API is off, or of an earlier version, nothing is known of roles.
        let seen = self.proxies.workers().await.unwrap_or_default();
        let view = self.roles.merged(&seen);
        let workers = Workers::from(&view);
        if workers.are_divisible() {
            let needs = match &load {
                Some(load) => Some(self.division(load, workers).await?),
                None => None,
            };
            let needed = needs.as_ref().and_then(|needs| needs.division.map(|division| division.encoding));
            let plan = self.roles.decide(now, &view, needed);
            self.apply_roles(load.as_ref().zip(needs.as_ref()), &plan, &seen).await?;
            if !self.target.sets_replicas() {
                return Ok(());
            }
        }
        let Some(load) = load else {
            return match before {
                None => (self.report)("watching", &json!({"watching": true})),
                Some(_) => (self.report)("no request ended", &json!({"rate": 0})),
            };
        };
        let needs = self.needs(&load).await?;
        self.apply(&load, needs, now).await
    }

    /// The division of the present workers for the observed load.
    async fn division(&self, load: &Load, workers: Workers) -> Result<DivisionNeeds, MeasureError> {
        let read_inputs = Arc::clone(&self.inputs);
        let (load, headroom) = (load.clone(), self.headroom);
        let planned = tokio::task::spawn_blocking(move || {
            let inputs = read_inputs()?;
            let attainment = load.attainment(&inputs.slo);
            let curves = inputs.curves.first().map(Arc::clone);
            let fitted = curves.as_ref().and_then(|curves| Fitted::of(&load, curves));
            let Some(fitted) = fitted else { return Ok(DivisionNeeds { division: None, attainment }) };
            let all = workers.encoders + workers.pds + workers.flexible;
            let question = inputs.question(Budget::Workers(all), &fitted);
            let division = divide(&question, load.rate * headroom, &workers)
                .map_err(|e| MeasureError::failed("cannot plan", &e))?;
            Ok(DivisionNeeds { division: Some(division), attainment })
        });
        planned.await.map_err(|e| MeasureError::failed("planning ended early", &e))?
    }

    /// Has the proxies give the roles, and reports.
    async fn apply_roles(
        &mut self,
        load: Option<(&Load, &DivisionNeeds)>,
        plan: &RolePlan,
        seen: &[SeenProxy],
    ) -> Result<(), MeasureError> {
        let trouble = self.roles.apply(plan, &self.proxies, seen).await;
        let RolePlan { flexible, from, to, encoders, why } = plan;
        let change = match from == to {
            true => format!("keep {from} of {flexible} workers with both for encodes"),
            false => format!("{from} -> {to} of {flexible} workers with both for encodes"),
        };
        let told = load.map_or_else(String::new, |(load, needs)| {
            let (rate, met) = (load.rate, needs.attainment * 1e2);
            format!("; {rate:.2} requests/s, {met:.1} % meet the SLO")
        });
        let division = load.and_then(|(_, needs)| needs.division);
        let fields = json!({
            "roles": {
                "flexible": flexible, "current": from, "needed": division.map(|d| d.encoding), "recommended": to,
                "encoders": encoders, "attainment": division.map(|d| d.attainment),
                "present_attainment": division.map(|d| d.present),
            },
            "rate": load.map_or(0.0, |(load, _)| load.rate), "changes": from != to, "why": why, "trouble": trouble,
            "attainment": load.map(|(_, needs)| needs.attainment),
        });
        let rest = if trouble.is_empty() { String::new() } else { format!("; {trouble}") };
        (self.report)(&format!("{change}: {why}{told}{rest}"), &fields)
    }

    /// Replicas for the observed load, and its SLO attainment.
    async fn needs(&self, load: &Load) -> Result<Needs, MeasureError> {
        let read_inputs = Arc::clone(&self.inputs);
        let load = load.clone();
        let most = self.most;
        let pools = self.target.pools();
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
            Ok(Needs { replicas: replicas.map(|replicas| pools.of(replicas)), attainment })
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
        let needs = replicas.unwrap_or_else(|| self.target.pools().of(self.most));
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
}
