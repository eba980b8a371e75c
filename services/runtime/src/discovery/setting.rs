//! Worker settings: `host:port`, `dns:host:port`, `k8s:namespace/service[:port-name]`, and vLLM servers:
//! `vllm+http://host:port` and `vllm+dns:host:port`, each with options behind `?`, which are read by `services/vllm`.

use super::dns::Dns;
use super::fixed::Fixed;
use super::kubernetes::{Kubernetes, Service};
use super::{DiscoveryError, Role, Source};
use std::str::FromStr;

const ALLOWED: &str = "host:port, dns:host:port (every address of the name), k8s:namespace/service[:port-name], vllm+http://host:port or \
     vllm+dns:host:port";
/// Start of the address of a vLLM server.
const VLLM: &str = "vllm+http://";

/// Location of the workers of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerSetting {
    /// One worker at `host:port`.
    At(String),
    /// A worker at each address of a name, `host:port`.
    Dns(String),
    /// The ready pods of a service.
    Kubernetes(Service),
    /// A vLLM server, by its address.
    Vllm(String),
    /// A vLLM server at each address of a name, `host:port`, with options.
    VllmDns {
        /// The name.
        name: String,
        /// Options of each, with their question mark, or nothing.
        options: String,
    },
}

impl WorkerSetting {
    /// The source for this setting.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] for a Kubernetes service outside of a cluster.
    pub fn into_source(self, role: Role) -> Result<Box<dyn Source>, DiscoveryError> {
        Ok(match self {
            Self::At(address) => Box::new(Fixed::new(role, vec![address])),
            Self::Dns(name) => Box::new(Dns::new(role, &name)),
            Self::Kubernetes(service) => Box::new(Kubernetes::in_cluster(role, service)?),
            Self::Vllm(address) => Box::new(Fixed::new(role, vec![address])),
            Self::VllmDns { name, options } => Box::new(Dns::new(role, &name).with_affixes(VLLM, options)),
        })
    }

    /// An address of a vLLM server as this setting gives it; `None`: the workers are ours.
    pub fn vllm_address(&self) -> Option<String> {
        match self {
            Self::Vllm(address) => Some(address.clone()),
            Self::VllmDns { name, options } => Some(format!("{VLLM}{name}{options}")),
            Self::At(_) | Self::Dns(_) | Self::Kubernetes(_) => None,
        }
    }
}

impl FromStr for WorkerSetting {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        let wrong = || DiscoveryError::Setting { text: text.to_owned(), allowed: ALLOWED };
        if let Some(name) = text.strip_prefix("dns:") {
            return checked_address(name).map(|a| Self::Dns(a.to_owned())).ok_or_else(wrong);
        }
        if let Some(rest) = text.strip_prefix("vllm+dns:") {
            let (name, options) = rest.split_at(rest.find('?').unwrap_or(rest.len()));
            let name = checked_address(name).ok_or_else(wrong)?.to_owned();
            return Ok(Self::VllmDns { name, options: options.to_owned() });
        }
        if text.starts_with("vllm+") {
            return Ok(Self::Vllm(text.to_owned()));
        }
        let Some(service) = text.strip_prefix("k8s:") else {
            return checked_address(text).map(|a| Self::At(a.to_owned())).ok_or_else(wrong);
        };
        let (namespace, rest) = service.split_once('/').ok_or_else(wrong)?;
        let (name, port) = match rest.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (rest, None),
        };
        if ![Some(namespace), Some(name), port].into_iter().flatten().all(is_label) {
            return Err(wrong());
        }
        Ok(Self::Kubernetes(Service {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            port: port.map(str::to_owned),
        }))
    }
}

/// `host:port`, without a scheme.
pub(super) fn checked_address(text: &str) -> Option<&str> {
    let (host, port) = text.rsplit_once(':')?;
    let host_is_plain = !host.contains("://") && !host.contains('/') && !host.contains(char::is_whitespace);
    let is_v6 = host.starts_with('[') && host.ends_with(']');
    let host_is_one = is_v6 || !host.contains(':');
    (!host.is_empty() && host_is_plain && host_is_one && port.parse::<u16>().is_ok()).then_some(text)
}

/// A DNS label or subdomain, as names in Kubernetes are.
fn is_label(text: &str) -> bool {
    let of_label = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    !text.is_empty() && text.len() <= 253 && text.bytes().all(of_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_parse_and_an_error_names_the_allowed_forms() {
        let service = |namespace: &str, name: &str, port: Option<&str>| {
            WorkerSetting::Kubernetes(Service {
                namespace: namespace.into(),
                name: name.into(),
                port: port.map(str::to_owned),
            })
        };
        for (text, expect) in [
            ("10.0.0.2:7001", WorkerSetting::At("10.0.0.2:7001".into())),
            ("[::1]:7001", WorkerSetting::At("[::1]:7001".into())),
            ("encoder.local:1", WorkerSetting::At("encoder.local:1".into())),
            ("dns:encoders:7001", WorkerSetting::Dns("encoders:7001".into())),
            ("k8s:prod/encoders", service("prod", "encoders", None)),
            ("k8s:prod/encoders:grpc", service("prod", "encoders", Some("grpc"))),
            (
                "vllm+http://gpu:8200?items=none",
                WorkerSetting::Vllm("vllm+http://gpu:8200?items=none".into()),
            ),
            (
                "vllm+dns:gpus:8200?items=none",
                WorkerSetting::VllmDns { name: "gpus:8200".into(), options: "?items=none".into() },
            ),
        ] {
            assert_eq!(text.parse::<WorkerSetting>().unwrap(), expect, "{text}");
        }
        for wrong in [
            "",
            "host",
            ":7001",
            "host:",
            "host:99999",
            "http://host:1",
            "::1:7001",
            "dns:host",
            "k8s:encoders",
            "k8s:/encoders",
            "k8s:a/",
            "k8s:A/b",
            "k8s:a/b:",
            "k8s:a/b?c:d",
            "vllm+dns:gpus",
        ] {
            let e = wrong.parse::<WorkerSetting>().unwrap_err().to_string();
            assert!(e.contains("dns:host:port") && e.contains("k8s:"), "{wrong}: {e}");
        }
    }
}
