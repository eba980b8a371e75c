//! EndpointSlices, the fields used here, and the addresses of ready pods.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::Ipv6Addr;

/// The slices of a service, by name.
#[derive(Debug, Default)]
pub(super) struct Slices(BTreeMap<String, Slice>);

/// Change of one slice.
#[derive(Debug)]
pub(super) enum Change {
    Updated(Slice),
    Removed(Slice),
}

/// `discovery.k8s.io/v1` EndpointSlice.
#[derive(Debug, Deserialize)]
pub(super) struct Slice {
    pub(super) metadata: Metadata,
    // The API server writes `null` for an empty list.
    #[serde(default)]
    endpoints: Option<Vec<Pod>>,
    #[serde(default)]
    ports: Option<Vec<Port>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) resource_version: String,
    #[serde(rename = "continue")]
    pub(super) next_page: String,
}

#[derive(Debug, Deserialize)]
struct Pod {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

impl Conditions {
    /// The API's defaults for missing conditions: ready, serving as ready, not terminating.
    fn takes_work(&self) -> bool {
        let ready = self.ready.unwrap_or(true);
        ready && self.serving.unwrap_or(ready) && !self.terminating.unwrap_or(false)
    }
}

#[derive(Debug, Deserialize)]
struct Port {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    port: Option<u16>,
}

impl FromIterator<Slice> for Slices {
    fn from_iter<I: IntoIterator<Item = Slice>>(slices: I) -> Self {
        Self(slices.into_iter().map(|s| (s.metadata.name.clone(), s)).collect())
    }
}

impl Slices {
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Updated(slice) => self.0.insert(slice.metadata.name.clone(), slice),
            Change::Removed(slice) => self.0.remove(&slice.metadata.name),
        };
    }

    /// `host:port` of every pod that is ready and serving and does not terminate.
    pub(super) fn addresses(&self, port: Option<&str>) -> impl Iterator<Item = String> {
        self.0.values().flat_map(move |slice| slice.addresses(port))
    }
}

impl Slice {
    fn addresses(&self, wanted: Option<&str>) -> impl Iterator<Item = String> {
        let mut ports = self.ports.iter().flatten();
        let port = ports.find(|p| wanted.is_none() || p.name.as_deref() == wanted).and_then(|p| p.port);
        let pods = self.endpoints.iter().flatten().filter(|pod| pod.conditions.takes_work());
        let hosts = pods.flat_map(|pod| &pod.addresses);
        hosts.filter_map(move |host| Some(with_port(host, port?)))
    }
}

fn with_port(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(ip) => format!("[{ip}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_ready_pods_have_addresses() {
        for (conditions, takes_work) in [
            (json!({}), true),
            (json!({"ready": true, "serving": true, "terminating": false}), true),
            (json!({"ready": null}), true),
            (json!({"ready": false}), false),
            (json!({"ready": true, "serving": false}), false),
            (json!({"ready": false, "serving": true, "terminating": true}), false),
            (json!({"ready": true, "terminating": true}), false),
        ] {
            let slice = json!({
                "metadata": {"name": "s"},
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": conditions}],
                "ports": [{"name": "grpc", "port": 7}],
            });
            let slices = Slices::from_iter([serde_json::from_value::<Slice>(slice).unwrap()]);
            assert_eq!(slices.addresses(None).count() == 1, takes_work, "{conditions}");
        }
    }

    #[test]
    fn the_port_is_found_by_name_and_ipv6_has_brackets() {
        let slice = json!({
            "metadata": {"name": "s"},
            "endpoints": [{"addresses": ["fd00::1"]}],
            "ports": [{"name": "grpc", "port": 7}, {"name": "admin", "port": 8}],
        });
        let slices = Slices::from_iter([serde_json::from_value::<Slice>(slice).unwrap()]);
        for (port, expect) in [
            (None, Some("[fd00::1]:7")),
            (Some("grpc"), Some("[fd00::1]:7")),
            (Some("admin"), Some("[fd00::1]:8")),
            (Some("other"), None),
        ] {
            assert_eq!(slices.addresses(port).next().as_deref(), expect, "{port:?}");
        }
        // A server writes `null` for an empty list.
        let empty = json!({"metadata": {"name": "s"}, "endpoints": null, "ports": null});
        let slices = Slices::from_iter([serde_json::from_value::<Slice>(empty).unwrap()]);
        assert_eq!(slices.addresses(None).count(), 0);
    }
}
