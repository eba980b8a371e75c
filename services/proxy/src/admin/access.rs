//! Access to the admin API: the token, or a caller on this machine.

use super::api::AdminError;
use super::token::AdminToken;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use std::net::{IpAddr, SocketAddr};
use triptych_core::{Failure, FailureClass};

/// Callers that are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Those that send the token.
    Token(AdminToken),
    /// Those on this machine: the port is on its loopback address.
    Loopback,
    /// Nobody: the port is reached from elsewhere and there is no token.
    Nobody,
}

impl Access {
    /// The rule for a port at this address.
    pub fn new(token: Option<AdminToken>, address: SocketAddr) -> Self {
        match token {
            Some(token) => Self::Token(token),
            None if address.ip().is_loopback() => Self::Loopback,
            None => Self::Nobody,
        }
    }

    /// Lets a caller in or refuses it.
    fn allows(self, headers: &HeaderMap) -> Result<(), Failure> {
        match self {
            Self::Token(token) => {
                let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
                let sent = sent.and_then(|text| text.strip_prefix("Bearer ")).map(str::trim);
                match sent {
                    Some(word) if token.is(word) => Ok(()),
                    _ => Err(Failure::new(
                        FailureClass::Unauthenticated,
                        "send the header `Authorization: Bearer TOKEN` with the word of --admin-token-file",
                    )),
                }
            }
            // A web page in a browser of this machine reaches the port too, and must not.
            Self::Loopback if headers.contains_key(header::ORIGIN) || !names_this_machine(headers) => {
                Err(Failure::new(
                    FailureClass::PermissionDenied,
                    "without --admin-token-file the admin API is not for web pages, nor under a name of another host",
                ))
            }
            Self::Loopback => Ok(()),
            Self::Nobody => Err(Failure::new(
                FailureClass::PermissionDenied,
                "the admin API is off: set --admin-token-file, or put --admin on a loopback address",
            )),
        }
    }
}

/// True if the header Host is an address of this machine, and no name that somebody else resolves to one.
fn names_this_machine(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|value| value.to_str().ok()) else { return false };
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name).trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The check before every route.
pub(super) async fn check(
    State(access): State<Access>,
    request: Request,
    next: Next,
) -> Result<Response, AdminError> {
    access.allows(request.headers())?;
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(pairs: &[(header::HeaderName, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn a_port_that_others_reach_needs_the_token() {
        let (here, there) = ("127.0.0.1:1".parse().unwrap(), "0.0.0.0:1".parse().unwrap());
        let token = AdminToken::of("0123456789abcdef");
        assert_eq!(Access::new(None, there), Access::Nobody);
        for access in [Access::new(Some(token), here), Access::new(Some(token), there)] {
            let sent = |value| access.allows(&headers(&[(header::AUTHORIZATION, value)]));
            assert!(sent("Bearer 0123456789abcdef").is_ok());
            for wrong in ["Bearer 0123456789abcdeg", "0123456789abcdef", "Basic 0123456789abcdef"] {
                assert_eq!(sent(wrong).unwrap_err().class, FailureClass::Unauthenticated);
            }
            assert!(access.allows(&HeaderMap::new()).is_err());
        }
    }

    #[test]
    fn a_web_page_does_not_reach_a_port_without_a_token() {
        let allows = |pairs: &[_]| Access::Loopback.allows(&headers(pairs));
        for host in ["127.0.0.1:9090", "localhost", "[::1]:9090", "127.0.0.1"] {
            assert!(allows(&[(header::HOST, host)]).is_ok(), "{host}");
            assert!(allows(&[(header::HOST, host), (header::ORIGIN, "http://127.0.0.1")]).is_err());
        }
        for host in ["evil.example:9090", "10.0.0.1:9090", ""] {
            assert!(allows(&[(header::HOST, host)]).is_err(), "{host}");
        }
        assert!(allows(&[]).is_err());
    }
}
