//! Roles of workers that hold encoder and decoder: the division for the load, when to change to it, and which workers that is.
//!
//! What a worker has when its role changes ends there; no process starts or ends. The decision is pure; the orders go through the
//! proxies' admin API. A proxy that was started anew knows no roles, and a worker may have left: what was decided is kept up at
//! each observation, whatever the controller says of changes.

use super::controller::{Controller, Decision, Replicas, Rules};
use super::flexible::{FlexibleWorker, ProxyView};
use super::proxies::{Proxies, SeenProxy};
use std::collections::BTreeSet;
use std::time::Instant;
use triptych_proxy::ElasticRole;

/// Treatment of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleChanges {
    /// They are only reported.
    Reported,
    /// Proxies are told.
    Applied,
}

/// Decision about the roles at one observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolePlan {
    /// Flexible workers.
    pub flexible: usize,
    /// Those that were left to encodes.
    pub from: usize,
    /// Those that shall be.
    pub to: usize,
    /// Workers that shall be left to encodes.
    pub encoders: BTreeSet<String>,
    /// Reason.
    pub why: String,
}

/// State between observations.
#[derive(Clone, Debug)]
pub struct RoleWatch {
    controller: Controller,
    changes: RoleChanges,
    /// Flexible workers that shall be left to encodes; `None`: nothing was decided yet.
    target: Option<usize>,
    /// Those that were.
    chosen: BTreeSet<String>,
}

impl RoleWatch {
    /// A watch that has decided nothing. Of the rules the minimum and maximum of replicas do not count.
    pub fn new(rules: Rules, changes: RoleChanges) -> Self {
        let none = Replicas::new(0, 0);
        let all = Replicas::new(usize::MAX, usize::MAX);
        let controller = Controller::new(Rules { least: none, most: all, ..rules });
        Self { controller, changes, target: None, chosen: BTreeSet::new() }
    }

    /// The workers as all proxies together have them, with what was decided.
    pub fn merged(&self, proxies: &[SeenProxy]) -> ProxyView {
        let mut views = proxies.iter().map(|proxy| &proxy.view);
        let mut merged = views.next().cloned().unwrap_or_default();
        for view in views {
            for (id, worker) in &view.flexible {
                let known = merged.flexible.entry(id.clone()).or_insert(*worker);
                known.is_up |= worker.is_up;
                if worker.assigned == ElasticRole::Encoder {
                    known.assigned = ElasticRole::Encoder;
                }
            }
        }
        for id in &self.chosen {
            if let Some(worker) = merged.flexible.get_mut(id) {
                worker.assigned = ElasticRole::Encoder;
            }
        }
        merged
    }

    /// Decides about the flexible workers that the load needs for encodes; `None`: the load says nothing.
    pub fn decide(&mut self, now: Instant, view: &ProxyView, needed: Option<usize>) -> RolePlan {
        let (flexible, from) = (view.n_up(), view.n_encoding());
        let replicas = |encoders| Replicas::new(encoders, 0);
        let decision = needed.map(|n| self.controller.observe(now, replicas(from), replicas(n)));
        let (encoders, to, why) = match decision {
            Some(Decision::Change { to, .. }) => {
                let to = to.encoders.total().min(view.most_encoding());
                let why = format!("the load needs {} of them for encodes", needed.unwrap_or(to));
                if self.changes == RoleChanges::Applied {
                    self.target = Some(to);
                }
                (view.encoders_for(to), to, why)
            }
            Some(Decision::Keep { why }) => self.kept(view, why),
            None => self.kept(view, "no load to divide".to_owned()),
        };
        RolePlan { flexible, from, to, encoders, why }
    }

    /// The division of before: workers that left are replaced, those that are away keep their roles.
    fn kept(&self, view: &ProxyView, why: String) -> (BTreeSet<String>, usize, String) {
        let is_encoder = |worker: &FlexibleWorker| worker.assigned == ElasticRole::Encoder;
        let assigned = view.flexible.iter().filter(|(_, worker)| is_encoder(worker));
        let assigned: BTreeSet<String> = assigned.map(|(id, _)| id.clone()).collect();
        let from = view.n_encoding();
        match self.target {
            Some(target) if assigned.len() < target => {
                let to = (from + target - assigned.len()).min(view.most_encoding());
                (view.encoders_for(to), to, "a worker that encoded has left".to_owned())
            }
            _ => (assigned, from, why),
        }
    }

    /// Tells the proxies what is not so yet. Returns trouble; empty: there was none.
    pub async fn apply(&mut self, plan: &RolePlan, proxies: &Proxies, seen: &[SeenProxy]) -> String {
        if self.changes == RoleChanges::Reported {
            return String::new();
        }
        let mut trouble = Vec::new();
        for proxy in seen {
            for (worker, role) in proxy.view.orders(&plan.encoders) {
                if let Err(e) = proxies.assign(proxy, &worker, role).await {
                    trouble.push(e);
                }
            }
        }
        self.chosen.clone_from(&plan.encoders);
        trouble.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn rules() -> Rules {
        Rules {
            min_change: 0.1,
            observations: 3,
            max_step: 1,
            cooldown: Duration::from_secs(300),
            least: Replicas::new(1, 1),
            most: Replicas::new(64, 64),
        }
    }

    /// Four workers with both, of which these encode; those of `away` do not answer.
    fn cluster(encoding: &[&str], away: &[&str]) -> ProxyView {
        let worker = |id: &&str| {
            let assigned = if encoding.contains(id) { ElasticRole::Encoder } else { ElasticRole::Both };
            ((*id).to_owned(), FlexibleWorker { assigned, is_up: !away.contains(id) })
        };
        let flexible = ["a", "b", "c", "d"].iter().map(worker).collect();
        ProxyView { flexible, ..ProxyView::default() }
    }

    fn ids(plan: &RolePlan) -> Vec<&str> {
        plan.encoders.iter().map(String::as_str).collect()
    }

    #[test]
    fn a_flip_waits_for_observations_that_agree_then_for_the_cooldown() {
        let (mut watch, start) = (RoleWatch::new(rules(), RoleChanges::Applied), Instant::now());
        let mut encoding: Vec<String> = Vec::new();
        let mut found = Vec::new();
        for minute in 0..9 {
            let now = start + Duration::from_secs(60) * minute;
            let present: Vec<&str> = encoding.iter().map(String::as_str).collect();
            let plan = watch.decide(now, &cluster(&present, &[]), Some(2));
            found.push(plan.to);
            encoding = plan.encoders.into_iter().collect();
        }
        assert_eq!(found, [0, 0, 1, 1, 1, 1, 1, 2, 2], "one at a time, the second after five minutes");
        assert_eq!(encoding, ["c", "d"]);
    }

    #[test]
    fn a_load_that_fluctuates_flips_nothing() {
        let (mut watch, now) = (RoleWatch::new(rules(), RoleChanges::Applied), Instant::now());
        for needed in [1, 0, 1, 0, 1, 0, 1, 0] {
            assert_eq!(watch.decide(now, &cluster(&[], &[]), Some(needed)).to, 0);
        }
    }

    #[test]
    fn what_was_decided_is_kept_up_where_proxies_forget_it_or_workers_leave() {
        let rules = Rules { observations: 1, ..rules() };
        let (mut watch, now) = (RoleWatch::new(rules, RoleChanges::Applied), Instant::now());
        let first = watch.decide(now, &cluster(&[], &[]), Some(1));
        assert_eq!((ids(&first), first.to), (vec!["d"], 1));
        watch.chosen = first.encoders;
        // A proxy that was started anew knows nothing of it: the worker is told so again, in the cooldown too.
        let seen = [SeenProxy::of(cluster(&[], &[]))];
        let view = watch.merged(&seen);
        let kept = watch.decide(now, &view, Some(1));
        assert_eq!(ids(&kept), ["d"]);
        assert_eq!(seen[0].view.orders(&kept.encoders), [("d".to_owned(), ElasticRole::Encoder)]);
        // One that is away may be back; one that left is replaced at once.
        assert_eq!(ids(&watch.decide(now, &cluster(&["d"], &["d"]), Some(0))), ["d"]);
        let mut without = cluster(&[], &[]);
        without.flexible.remove("d");
        let replaced = watch.decide(now, &without, None);
        assert_eq!((ids(&replaced), replaced.why.as_str()), (vec!["c"], "a worker that encoded has left"));
    }

    #[test]
    fn a_watch_that_only_reports_keeps_nothing_up() {
        let rules = Rules { observations: 1, ..rules() };
        let (mut watch, now) = (RoleWatch::new(rules, RoleChanges::Reported), Instant::now());
        assert_eq!(watch.decide(now, &cluster(&[], &[]), Some(1)).to, 1);
        assert!(watch.decide(now, &cluster(&[], &[]), None).encoders.is_empty());
    }

    #[test]
    fn a_worker_encodes_if_any_proxy_says_so() {
        let watch = RoleWatch::new(rules(), RoleChanges::Applied);
        let merged =
            watch.merged(&[SeenProxy::of(cluster(&[], &["a"])), SeenProxy::of(cluster(&["b"], &[]))]);
        assert_eq!((merged.n_encoding(), merged.n_up()), (1, 4));
    }
}
