//! Workers of a cluster as its proxies' admin APIs have them, and the roles of those that hold encoder and decoder.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use triptych_proxy::{ElasticRole, Roles};

/// Most workers of an answer.
const MAX_WORKERS: usize = 4096;

/// Answer of `GET /admin/workers`, as far as roles depend on it.
#[derive(Clone, Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    roles: String,
    workers: Vec<Listed>,
}

#[derive(Clone, Debug, Deserialize)]
struct Listed {
    id: String,
    role: String,
    health: String,
    #[serde(default)]
    drained: bool,
    #[serde(default)]
    encodes: bool,
    assigned_role: Option<String>,
}

/// Workers as one proxy has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyView {
    /// Division of encodes by the proxy, where nobody gives roles.
    pub roles: Roles,
    /// Encoder workers that can be given work.
    pub encoders: usize,
    /// PD workers without encoders that can be given work.
    pub pds: usize,
    /// PD workers with encoders that no operator drains or keeps to requests.
    pub flexible: BTreeMap<String, FlexibleWorker>,
}

/// A worker that holds encoder and decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlexibleWorker {
    /// Role that it was given.
    pub assigned: ElasticRole,
    /// True if it can be given work.
    pub is_up: bool,
}

impl ProxyView {
    /// Parses an answer.
    ///
    /// # Errors
    /// A text that is no list of workers, or of too many.
    pub fn read(text: &str) -> Result<Self, String> {
        let answer: Answer = serde_json::from_str(text).map_err(|e| format!("no list of workers: {e}"))?;
        if answer.workers.len() > MAX_WORKERS {
            return Err(format!("{} workers, {MAX_WORKERS} are read", answer.workers.len()));
        }
        let mut view = Self { roles: answer.roles.parse().unwrap_or_default(), ..Self::default() };
        for worker in answer.workers {
            let is_up = matches!(worker.health.as_str(), "ready" | "probing") && !worker.drained;
            let assigned = worker.assigned_role.as_deref().and_then(|role| role.parse().ok());
            match (worker.role.as_str(), worker.encodes, assigned) {
                ("pd", true, Some(assigned)) if assigned != ElasticRole::Pd => {
                    if !worker.drained {
                        view.flexible.insert(worker.id, FlexibleWorker { assigned, is_up });
                    }
                }
                ("pd", _, _) => view.pds += usize::from(is_up),
                (_, _, _) => view.encoders += usize::from(is_up),
            }
        }
        Ok(view)
    }

    /// Flexible workers that can be given work.
    pub fn n_up(&self) -> usize {
        self.flexible.values().filter(|worker| worker.is_up).count()
    }

    /// Those of them that are left to encodes.
    pub fn n_encoding(&self) -> usize {
        let encodes = |worker: &&FlexibleWorker| worker.is_up && worker.assigned == ElasticRole::Encoder;
        self.flexible.values().filter(encodes).count()
    }

    /// Most of them that can be left to encodes: somebody has to answer.
    pub fn most_encoding(&self) -> usize {
        if self.pds > 0 { self.n_up() } else { self.n_up().saturating_sub(1) }
    }

    /// Workers to leave to encodes so that there are this many that can be given work: those that are already, then the last in
    /// order, as the proxy's own division has it. One that is away keeps its role: it may be back.
    pub fn encoders_for(&self, n_encoding: usize) -> BTreeSet<String> {
        let (mut kept, mut away, mut free) = (Vec::new(), Vec::new(), Vec::new());
        for (id, worker) in &self.flexible {
            match (worker.assigned, worker.is_up) {
                (ElasticRole::Encoder, true) => kept.push(id),
                (ElasticRole::Encoder, false) => away.push(id),
                (_, true) => free.push(id),
                (_, false) => {}
            }
        }
        let n = n_encoding.min(self.most_encoding());
        let chosen = kept.into_iter().rev().chain(free.into_iter().rev()).take(n);
        // Without encoders at all nobody is left to them who comes back.
        let away = away.into_iter().filter(|_| n > 0);
        chosen.chain(away).cloned().collect()
    }

    /// Orders that give exactly these workers the role of an encoder, releases first: at no moment nobody answers.
    pub fn orders(&self, encoders: &BTreeSet<String>) -> Vec<(String, ElasticRole)> {
        let is = |role: ElasticRole| move |(_, worker): &(&String, &FlexibleWorker)| worker.assigned == role;
        let released = self.flexible.iter().filter(is(ElasticRole::Encoder));
        let released = released.filter(|(id, _)| !encoders.contains(*id));
        let given = self.flexible.iter().filter(is(ElasticRole::Both));
        let given = given.filter(|(id, _)| encoders.contains(*id));
        let released = released.map(|(id, _)| (id.clone(), ElasticRole::Both));
        released.chain(given.map(|(id, _)| (id.clone(), ElasticRole::Encoder))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// PD workers with encoders, each by its assigned role and health.
    fn view(workers: &[(&str, &str)]) -> ProxyView {
        let listed = |(i, (assigned, health)): (usize, &(&str, &str))| {
            json!({"id": format!("pd@w{i}"), "role": "pd", "health": health, "drained": false, "encodes": true,
                   "elastic_role": "both", "assigned_role": assigned, "models": ["m"]})
        };
        let workers: Vec<_> = workers.iter().enumerate().map(listed).collect();
        ProxyView::read(&json!({"roles": "auto", "workers": workers}).to_string()).unwrap()
    }

    fn ids(found: &BTreeSet<String>) -> Vec<&str> {
        found.iter().map(String::as_str).collect()
    }

    #[test]
    fn workers_are_counted_by_what_they_hold_and_operators_orders_are_left_alone() {
        let text = json!({"roles": "fixed", "workers": [
            {"id": "encoder@e", "role": "encoder", "health": "ready", "drained": false, "encodes": true},
            {"id": "encoder@f", "role": "encoder", "health": "down", "drained": false, "encodes": true},
            {"id": "pd@a", "role": "pd", "health": "ready", "drained": false, "encodes": false},
            {"id": "pd@b", "role": "pd", "health": "ready", "encodes": true, "assigned_role": "pd"},
            {"id": "pd@c", "role": "pd", "health": "draining", "drained": true, "encodes": true, "assigned_role": "both"},
            {"id": "pd@d", "role": "pd", "health": "ready", "encodes": true, "assigned_role": "encoder"},
        ]});
        let view = ProxyView::read(&text.to_string()).unwrap();
        assert_eq!((view.roles, view.encoders, view.pds), (Roles::Fixed, 1, 2));
        assert_eq!(view.flexible.keys().collect::<Vec<_>>(), ["pd@d"]);
        assert_eq!((view.n_up(), view.n_encoding(), view.most_encoding()), (1, 1, 1));
        // A proxy of an earlier version tells no assigned roles.
        let old = json!({"workers": [{"id": "pd@a", "role": "pd", "health": "ready", "encodes": true}]});
        assert!(ProxyView::read(&old.to_string()).unwrap().flexible.is_empty());
        assert!(ProxyView::read("<html>").unwrap_err().starts_with("no list of workers"));
    }

    #[test]
    fn those_that_encode_stay_and_the_last_in_order_follow() {
        let (both, encoder) = (("both", "ready"), ("encoder", "ready"));
        assert_eq!(ids(&view(&[both, both, both]).encoders_for(1)), ["pd@w2"]);
        assert_eq!(ids(&view(&[encoder, both, both]).encoders_for(2)), ["pd@w0", "pd@w2"]);
        assert_eq!(ids(&view(&[encoder, both, encoder]).encoders_for(1)), ["pd@w2"]);
        assert_eq!(ids(&view(&[both, both]).encoders_for(9)), ["pd@w1"], "somebody answers");
        assert!(view(&[both]).encoders_for(1).is_empty());
        // One that is away is replaced, and keeps its role.
        let away = view(&[both, both, ("encoder", "down")]);
        assert_eq!((away.n_encoding(), ids(&away.encoders_for(1))), (0, vec!["pd@w1", "pd@w2"]));
        assert!(away.encoders_for(0).is_empty());
    }

    #[test]
    fn releases_come_before_new_encoders() {
        let view = view(&[("encoder", "ready"), ("both", "ready"), ("both", "ready")]);
        let to = BTreeSet::from(["pd@w2".to_owned()]);
        let expect = [("pd@w0".to_owned(), ElasticRole::Both), ("pd@w2".to_owned(), ElasticRole::Encoder)];
        assert_eq!(view.orders(&to), expect);
        assert_eq!(view.orders(&BTreeSet::from(["pd@w0".to_owned()])), []);
    }
}
