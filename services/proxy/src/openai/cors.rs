//! Cross-origin requests (CORS): web pages of allowed origins may call the API from a browser.
//!
//! The rules of the protocol (preflights, `Vary`, which headers are exposed) are tower-http's.

use axum::http::{HeaderName, HeaderValue, Method, header};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Time for which a browser may keep the answer to a preflight.
const MAX_AGE: Duration = Duration::from_secs(600);

/// An origin whose pages may call the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedOrigin {
    /// Every origin: `*`.
    Any,
    /// One: scheme, host and port, as a browser sends it.
    One(HeaderValue),
}

/// A text that is no origin.
#[derive(Debug, Error)]
#[error(
    "an origin is `*`, or scheme and host as in https://app.example.com or http://localhost:3000, without a path"
)]
pub struct NotAnOrigin;

impl FromStr for AllowedOrigin {
    type Err = NotAnOrigin;

    fn from_str(text: &str) -> Result<Self, NotAnOrigin> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let host = ["https://", "http://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        let is_host = |host: &str| !host.is_empty() && !host.contains(|c: char| "/?#*@ ".contains(c));
        match host.filter(|host| is_host(host)) {
            // Browsers write hosts in lower case.
            Some(_) => {
                HeaderValue::from_str(&text.to_ascii_lowercase()).map(Self::One).map_err(|_| NotAnOrigin)
            }
            None => Err(NotAnOrigin),
        }
    }
}

impl fmt::Display for AllowedOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::One(origin) => f.write_str(origin.to_str().unwrap_or_default()),
        }
    }
}

/// The layer for these origins; `None` without any: then browsers keep pages of other origins out.
pub(super) fn layer(origins: &[AllowedOrigin]) -> Option<CorsLayer> {
    let one = |origin: &AllowedOrigin| match origin {
        AllowedOrigin::Any => None,
        AllowedOrigin::One(origin) => Some(origin.clone()),
    };
    let origin = match origins.iter().map(one).collect::<Option<Vec<_>>>() {
        Some(listed) if listed.is_empty() => return None,
        Some(listed) => AllowOrigin::list(listed),
        None => AllowOrigin::any(),
    };
    Some(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([HeaderName::from_static("x-request-id"), header::RETRY_AFTER])
            .max_age(MAX_AGE),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_checked_and_read_back() {
        for (text, shown) in [
            ("*", "*"),
            ("https://App.Example.com", "https://app.example.com"),
            ("http://localhost:3000", "http://localhost:3000"),
        ] {
            assert_eq!(text.parse::<AllowedOrigin>().unwrap().to_string(), shown);
        }
        for text in
            ["", "example.com", "https://", "https://a/", "https://*.a", "ftp://a", "https://a b", "null"]
        {
            assert!(text.parse::<AllowedOrigin>().is_err(), "{text}");
        }
        assert!(layer(&[]).is_none() && layer(&[AllowedOrigin::Any]).is_some());
    }
}
