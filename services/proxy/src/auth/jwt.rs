//! Tokens of an identity provider: JWTs (RFC 7519) signed with HS256, RS256 or ES256.
//!
//! The keys are in a file: a JWK set (RFC 7517), or the secret of HS256 as plain text. The key decides the algorithm, never
//! the token, so a public key cannot be passed off as a secret (RFC 8725, section 2.1).

use super::account::MAX_TENANT_BYTES;
use super::error::{AuthError, unauthenticated};
use super::file::read_text;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::time::Duration;
use triptych_core::Failure;

/// Shortest secret of HS256 in bytes: as long as its hash (RFC 7518, section 3.2).
const MIN_SECRET_BYTES: usize = 32;
/// Largest file of keys in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Largest number of keys in a file.
const MAX_KEYS: usize = 64;

/// Requirements for a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtConfig {
    /// The file of keys.
    pub keys: PathBuf,
    /// Required `iss`.
    pub issuer: String,
    /// Required entry of `aud`.
    pub audience: String,
    /// The claim that names the tenant. Default `tenant`.
    pub tenant_claim: String,
    /// Tolerated clock skew. Default 60 s.
    pub leeway: Duration,
}

/// Verifies tokens.
pub struct Verifier {
    keys: Vec<Key>,
    tenant_claim: String,
}

struct Key {
    id: Option<String>,
    key: DecodingKey,
    validation: Validation,
}

/// True for three parts with dots between, which no API key has.
pub fn is_jwt(token: &str) -> bool {
    token.split('.').count() == 3
}

impl Verifier {
    /// Reads the keys.
    ///
    /// # Errors
    /// [`AuthError`] for a file without a key of one of the three algorithms.
    pub fn read(config: &JwtConfig) -> Result<Self, AuthError> {
        let text = read_text(&config.keys, MAX_FILE_BYTES)?;
        let wrong = |reason: String| AuthError::Content { path: config.keys.clone(), line: None, reason };
        Self::parse(text.trim(), config).map_err(wrong)
    }

    fn parse(text: &str, config: &JwtConfig) -> Result<Self, String> {
        let keys = if text.starts_with('{') {
            // The error's text would repeat what is in the file.
            let set: JwkSet = serde_json::from_str(text).map_err(|_| "not a JWK set")?;
            if set.keys.len() > MAX_KEYS {
                return Err(format!("{} keys, the limit is {MAX_KEYS}", set.keys.len()));
            }
            set.keys
                .iter()
                .filter_map(|jwk| Key::of_jwk(jwk, config).transpose())
                .collect::<Result<_, _>>()?
        } else {
            vec![Key::of_secret(None, text.as_bytes(), config)?]
        };
        if keys.is_empty() {
            return Err("no key for HS256, RS256 or ES256".into());
        }
        Ok(Self { keys, tenant_claim: config.tenant_claim.clone() })
    }

    /// The tenant of a valid token.
    ///
    /// # Errors
    /// Unauthenticated, without the token.
    pub fn tenant(&self, token: &str) -> Result<String, Failure> {
        let invalid = || unauthenticated("the token is not valid");
        let header = jsonwebtoken::decode_header(token).map_err(|_| invalid())?;
        let fits = |key: &&Key| {
            key.validation.algorithms.contains(&header.alg)
                && (header.kid.is_none() || key.id.is_none() || key.id == header.kid)
        };
        let mut why = invalid();
        for key in self.keys.iter().filter(fits) {
            match jsonwebtoken::decode::<Map<String, Value>>(token, &key.key, &key.validation) {
                Ok(token) => return self.name(&token.claims),
                Err(e) => why = explain(&e).unwrap_or(why),
            }
        }
        Err(why)
    }

    fn name(&self, claims: &Map<String, Value>) -> Result<String, Failure> {
        match claims.get(&self.tenant_claim).and_then(Value::as_str) {
            Some(tenant) if !tenant.is_empty() && tenant.len() <= MAX_TENANT_BYTES => Ok(tenant.to_owned()),
            _ => Err(unauthenticated("the token names no tenant")),
        }
    }
}

impl Key {
    /// `None` for a key of another algorithm.
    fn of_jwk(jwk: &Jwk, config: &JwtConfig) -> Result<Option<Self>, String> {
        let id = jwk.common.key_id.clone();
        let algorithm = match &jwk.algorithm {
            AlgorithmParameters::OctetKey(_) => Algorithm::HS256,
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(ec) if ec.curve == EllipticCurve::P256 => Algorithm::ES256,
            _ => return Ok(None),
        };
        let named = jwk.common.key_algorithm.map(|named| named.to_string());
        if named.is_some_and(|named| named != format!("{algorithm:?}")) {
            return Ok(None);
        }
        let key = DecodingKey::from_jwk(jwk).map_err(|_| "a key of the set cannot be read")?;
        if algorithm == Algorithm::HS256 {
            check_secret(secret_len(jwk))?;
        }
        Ok(Some(Self { id, key, validation: validation(algorithm, config) }))
    }

    fn of_secret(id: Option<String>, secret: &[u8], config: &JwtConfig) -> Result<Self, String> {
        check_secret(secret.len())?;
        let key = DecodingKey::from_secret(secret);
        Ok(Self { id, key, validation: validation(Algorithm::HS256, config) })
    }
}

/// Bytes of a secret in a JWK, from its base64.
fn secret_len(jwk: &Jwk) -> usize {
    match &jwk.algorithm {
        AlgorithmParameters::OctetKey(octets) => octets.value.len() * 3 / 4,
        _ => 0,
    }
}

fn check_secret(len: usize) -> Result<(), String> {
    if len >= MIN_SECRET_BYTES {
        return Ok(());
    }
    Err(format!("the secret of HS256 has {len} bytes, it needs {MIN_SECRET_BYTES} or more"))
}

fn validation(algorithm: Algorithm, config: &JwtConfig) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.set_issuer(&[&config.issuer]);
    validation.set_audience(&[&config.audience]);
    validation.set_required_spec_claims(&["exp", "iss", "aud"]);
    validation.validate_nbf = true;
    validation.leeway = config.leeway.as_secs();
    validation
}

/// The text for a mistake that the sender can correct; `None` for a forged token.
fn explain(e: &jsonwebtoken::errors::Error) -> Option<Failure> {
    use jsonwebtoken::errors::ErrorKind;
    let text = match e.kind() {
        ErrorKind::ExpiredSignature => "the token has expired",
        ErrorKind::ImmatureSignature => "the token is not valid yet",
        ErrorKind::InvalidAudience => "the token is for another audience",
        ErrorKind::InvalidIssuer => "the token is from another issuer",
        ErrorKind::MissingRequiredClaim(_) => "the token lacks exp, iss or aud",
        _ => return None,
    };
    Some(unauthenticated(text))
}
