//! Name of a Kubernetes service and port.

use std::fmt;

/// A service and one of its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The port's name; `None`: the first port.
    pub port: Option<String>,
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k8s:{}/{}", self.namespace, self.name)?;
        self.port.as_ref().map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}
