//! Replicas of a Deployment: its scale, read and set
//! (kubernetes.io, "API Concepts: resource operations", the `scale` subresource of apps/v1).
//!
//! A merge patch of `spec.replicas` alone: whatever else changes the Deployment at the same time is not undone.

use super::api::{ApiServer, TIMEOUT, client};
use crate::discovery::DiscoveryError;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use std::path::PathBuf;

/// Reads and sets the replicas of Deployments of one namespace.
pub struct Scaler {
    client: Client,
    /// URL up to a Deployment's name.
    url: String,
    token: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Scale {
    spec: Spec,
}

#[derive(Deserialize)]
struct Spec {
    /// The server leaves out a zero.
    #[serde(default)]
    replicas: u32,
}

impl Scaler {
    /// A scaler for the Deployments of a namespace.
    ///
    /// # Errors
    /// [`DiscoveryError`] for a malformed name, or unusable certificates.
    pub fn new(server: ApiServer, namespace: &str) -> Result<Self, DiscoveryError> {
        let url = format!("{}/apis/apps/v1/namespaces/{}/deployments", server.url, checked(namespace)?);
        Ok(Self { client: client(&server)?, url, token: server.token })
    }

    /// Replicas that a Deployment is set to.
    ///
    /// # Errors
    /// [`DiscoveryError`] if the server is unreachable or refuses.
    pub async fn replicas(&self, deployment: &str) -> Result<u32, DiscoveryError> {
        let url = self.scale_of(deployment)?;
        self.send(self.client.get(&url), &url).await
    }

    /// Sets the replicas; returns the server's value.
    ///
    /// # Errors
    /// [`DiscoveryError`] if the server is unreachable or refuses.
    pub async fn set(&self, deployment: &str, replicas: u32) -> Result<u32, DiscoveryError> {
        let url = self.scale_of(deployment)?;
        let body = serde_json::json!({"spec": {"replicas": replicas}}).to_string();
        let request = self.client.patch(&url).header(CONTENT_TYPE, "application/merge-patch+json").body(body);
        self.send(request, &url).await
    }

    fn scale_of(&self, deployment: &str) -> Result<String, DiscoveryError> {
        Ok(format!("{}/{}/scale", self.url, checked(deployment)?))
    }

    async fn send(&self, mut request: RequestBuilder, url: &str) -> Result<u32, DiscoveryError> {
        let unreachable = |why: String| DiscoveryError::Unreachable { what: url.to_owned(), why };
        if let Some(file) = &self.token {
            let token = tokio::fs::read_to_string(file).await;
            request = request.bearer_auth(token.map_err(|e| unreachable(format!("token: {e}")))?.trim());
        }
        let answer = async {
            let response = request.send().await.map_err(|e| unreachable(e.to_string()))?;
            match response.status() {
                StatusCode::OK => response.json::<Scale>().await.map_err(|e| unreachable(e.to_string())),
                StatusCode::FORBIDDEN => Err(unreachable(
                    "status 403: the service account needs the verbs get and patch of deployments/scale"
                        .into(),
                )),
                status => Err(unreachable(format!("status {status}"))),
            }
        };
        let scale = tokio::time::timeout(TIMEOUT, answer).await;
        Ok(scale.map_err(|_| unreachable(format!("no answer within {TIMEOUT:?}")))??.spec.replicas)
    }
}

/// Checks a Kubernetes name, so that it cannot change the path.
fn checked(name: &str) -> Result<&str, DiscoveryError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if !name.is_empty() && name.len() <= 253 && name.chars().all(plain) && !name.starts_with('.') {
        return Ok(name);
    }
    Err(DiscoveryError::Name(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::extract::{Path, State};
    use axum::http::HeaderMap;
    use axum::response::IntoResponse;
    use axum::routing::get;
    use axum::{Json, Router};
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use std::sync::Arc;
    use tokio::net::TcpListener;

    /// Replicas, and the requests received.
    type Server = Arc<Mutex<(u32, Vec<String>)>>;

    async fn answer(
        State(server): State<Server>,
        Path(name): Path<String>,
        headers: HeaderMap,
        body: Option<Json<Value>>,
    ) -> axum::response::Response {
        let mut server = server.lock();
        let of = |name: &str| headers.get(name).map_or("", |v| v.to_str().unwrap()).to_owned();
        let asked = format!("{name} {} {}", of("content-type"), of("authorization"));
        server.1.push(asked);
        if name == "forbidden" {
            return axum::http::StatusCode::FORBIDDEN.into_response();
        }
        if let Some(Json(body)) = body {
            server.0 = body["spec"]["replicas"].as_u64().unwrap() as u32;
        }
        Json(json!({"kind": "Scale", "spec": {"replicas": server.0}})).into_response()
    }

    async fn start(server: &Server, token: Option<PathBuf>) -> Scaler {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let path = "/apis/apps/v1/namespaces/prod/deployments/{name}/scale";
        let patched = get(answer).patch(
            |state: State<Server>, path: Path<String>, headers: HeaderMap, body: String| {
                answer(state, path, headers, Some(Json(serde_json::from_str(&body).unwrap())))
            },
        );
        let routes = Router::new().route(path, patched).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Scaler::new(ApiServer { url, ca: None, token }, "prod").unwrap()
    }

    #[tokio::test]
    async fn replicas_are_read_and_patched_with_the_accounts_token() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "s3cret\n").unwrap();
        let server = Server::new(Mutex::new((2, Vec::new())));
        let scaler = start(&server, Some(token)).await;
        assert_eq!(scaler.replicas("encoders").await.unwrap(), 2);
        assert_eq!(scaler.set("encoders", 5).await.unwrap(), 5);
        assert_eq!(scaler.replicas("encoders").await.unwrap(), 5);
        let asked = server.lock().1.clone();
        assert_eq!(asked[1], "encoders application/merge-patch+json Bearer s3cret");
    }

    #[tokio::test]
    async fn a_refusal_names_the_missing_permission_and_a_path_is_no_name() {
        let server = Server::default();
        let scaler = start(&server, None).await;
        let message = scaler.set("forbidden", 1).await.unwrap_err().to_string();
        assert!(message.contains("deployments/scale"), "{message}");
        for bad in ["", "../secrets", "a/b", "A"] {
            assert!(scaler.set(bad, 1).await.unwrap_err().to_string().contains("no name"), "{bad}");
        }
    }
}
