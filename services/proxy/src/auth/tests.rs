//! Authentication with keys and tokens as clients send them.

use super::*;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderValue;
use jsonwebtoken::{Algorithm, EncodingKey, Header, get_current_timestamp};
use serde_json::{Value, json};
use std::path::Path;

const SECRET: &str = "a secret of more than thirty-two bytes";
const RSA: &[u8] = include_bytes!("tests/rsa.der");

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn bearer(token: &str) -> HeaderMap {
    headers(&[("authorization", &format!("Bearer {token}"))])
}

fn jwt_config(keys: &Path) -> JwtConfig {
    JwtConfig {
        keys: keys.to_owned(),
        issuer: "https://id.example".into(),
        audience: "triptych".into(),
        tenant_claim: "tenant".into(),
        leeway: Duration::from_secs(60),
    }
}

fn claims(change: Value) -> Value {
    let mut claims = json!({
        "iss": "https://id.example", "aud": "triptych", "exp": get_current_timestamp() + 600, "tenant": "acme",
    });
    for (name, value) in change.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

fn sign(algorithm: Algorithm, kid: Option<&str>, key: &EncodingKey, claims: &Value) -> String {
    let header = Header { kid: kid.map(str::to_owned), ..Header::new(algorithm) };
    jsonwebtoken::encode(&header, claims, key).unwrap()
}

/// The tenant that a file with these keys gives to a token.
fn tenant_of(keys: &str, token: &str) -> Result<String, Failure> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jwks");
    std::fs::write(&path, keys).unwrap();
    let config = AuthConfig { jwt: Some(jwt_config(&path)), ..AuthConfig::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let auth = Auth::start(config, 64 << 20, &Drain::new()).unwrap();
    auth.identify(&bearer(token)).map(|caller| caller.tenant)
}

#[test]
fn a_token_is_accepted_only_if_every_claim_is_valid() {
    let key = EncodingKey::from_secret(SECRET.as_bytes());
    let now = get_current_timestamp();
    let cases = [
        (json!({}), Ok("acme")),
        (json!({"exp": now - 30}), Ok("acme")),
        (json!({"aud": ["other", "triptych"]}), Ok("acme")),
        (json!({"exp": now - 120}), Err("has expired")),
        (json!({"nbf": now + 600}), Err("not valid yet")),
        (json!({"aud": "other"}), Err("another audience")),
        (json!({"iss": "https://evil.example"}), Err("another issuer")),
        (json!({"exp": null}), Err("the token")),
        (json!({"tenant": ""}), Err("names no tenant")),
        (json!({"tenant": 7}), Err("names no tenant")),
        (json!({"tenant": "x".repeat(300)}), Err("names no tenant")),
    ];
    for (change, expect) in cases {
        let token = sign(Algorithm::HS256, None, &key, &claims(change.clone()));
        match (tenant_of(SECRET, &token), expect) {
            (Ok(tenant), Ok(expect)) => assert_eq!(tenant, expect),
            (Err(failure), Err(expect)) => {
                assert_eq!(failure.class, FailureClass::Unauthenticated);
                assert!(failure.message.contains(expect), "{change}: {failure}");
                assert!(!failure.message.contains(&token));
            }
            (found, _) => panic!("{change}: {found:?}"),
        }
    }
}

#[test]
fn a_wrong_or_absent_signature_is_refused() {
    let other = EncodingKey::from_secret(b"another secret of more than thirty-two bytes");
    let token = sign(Algorithm::HS256, None, &other, &claims(json!({})));
    assert!(tenant_of(SECRET, &token).unwrap_err().message.contains("not valid"));
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    for unsigned in [
        format!("{}.{}.", part(json!({"alg": "none", "typ": "JWT"})), part(claims(json!({})))),
        format!("{}.{}.x", part(json!({"alg": "HS256"})), part(claims(json!({})))),
        "a.b.c".into(),
        "..".into(),
    ] {
        assert_eq!(
            tenant_of(SECRET, &unsigned).unwrap_err().class,
            FailureClass::Unauthenticated,
            "{unsigned}"
        );
    }
}

/// The public half of [`RSA`], and an EC key of both halves.
fn key_set() -> (String, EncodingKey) {
    let modulus = rsa_modulus(RSA);
    let pair = rcgen::KeyPair::generate().unwrap();
    let point = pair.public_key_raw();
    let x = URL_SAFE_NO_PAD.encode(&point[1..33]);
    let y = URL_SAFE_NO_PAD.encode(&point[33..65]);
    let set = json!({"keys": [
        {"kty": "RSA", "kid": "r", "alg": "RS256", "n": URL_SAFE_NO_PAD.encode(modulus), "e": "AQAB"},
        {"kty": "EC", "kid": "e", "crv": "P-256", "x": x, "y": y},
        {"kty": "OKP", "kid": "unused", "crv": "Ed25519", "x": "AAAA"},
    ]});
    (set.to_string(), EncodingKey::from_ec_der(&pair.serialize_der()))
}

/// The modulus of a PKCS #1 key: after the outer header, the version, and its own header.
fn rsa_modulus(der: &[u8]) -> &[u8] {
    // SEQUENCE 4 bytes, INTEGER version 3 bytes, INTEGER header 4 bytes, a zero that keeps it positive.
    &der[12..12 + 256]
}

#[test]
fn keys_of_a_set_are_found_by_algorithm_and_id() {
    let (set, ec) = key_set();
    let rsa = EncodingKey::from_rsa_der(RSA);
    let good = claims(json!({}));
    for (algorithm, kid, key) in [
        (Algorithm::RS256, Some("r"), &rsa),
        (Algorithm::RS256, None, &rsa),
        (Algorithm::ES256, Some("e"), &ec),
    ] {
        assert_eq!(
            tenant_of(&set, &sign(algorithm, kid, key, &good)).unwrap(),
            "acme",
            "{algorithm:?} {kid:?}"
        );
    }
    let wrong_id = sign(Algorithm::RS256, Some("e"), &rsa, &good);
    assert!(tenant_of(&set, &wrong_id).is_err());
    // The oldest trick: the public key as the secret of HS256.
    let confused = EncodingKey::from_secret(rsa_modulus(RSA));
    assert!(tenant_of(&set, &sign(Algorithm::HS256, Some("r"), &confused, &good)).is_err());
}

#[test]
fn a_key_file_without_a_strong_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("short".to_owned(), "it needs 32 or more"),
        (json!({"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}).to_string(), "it needs 32 or more"),
        (json!({"keys": []}).to_string(), "no key for HS256"),
        ("{\"keys\": 7}".to_owned(), "not a JWK set"),
    ];
    for (text, expect) in cases {
        let path = dir.path().join("keys");
        std::fs::write(&path, text).unwrap();
        let Err(e) = Verifier::read(&jwt_config(&path)) else { panic!("{expect}") };
        assert!(e.to_string().contains(expect), "{e}");
    }
    assert!(Verifier::read(&jwt_config(&dir.path().join("none"))).is_err());
}

struct Keyed {
    _dir: tempfile::TempDir,
    path: PathBuf,
    auth: Auth,
    key: String,
}

fn keyed() -> Keyed {
    let dir = tempfile::tempdir().unwrap();
    let (key, hash) = keys::generate();
    let path = dir.path().join("keys");
    std::fs::write(&path, format!("key {hash} acme models=vl")).unwrap();
    let config = AuthConfig { keys: Some(path.clone()), ..AuthConfig::default() };
    Keyed { _dir: dir, path, auth: Auth::start(config, 64 << 20, &Drain::new()).unwrap(), key }
}

#[tokio::test]
async fn a_request_without_a_valid_key_is_refused() {
    let Keyed { auth, key, .. } = &keyed();
    let caller = auth.identify(&bearer(key)).unwrap();
    assert_eq!(caller.tenant, "acme");
    assert!(caller.may_use(&ModelName::new("vl")) && !caller.may_use(&ModelName::new("asr")));
    let twice = headers(&[("authorization", &format!("Bearer {key}")), ("authorization", "Bearer x")]);
    let long = "k".repeat(10_000);
    let refused = [
        HeaderMap::new(),
        headers(&[("authorization", key)]),
        headers(&[("authorization", &format!("Basic {key}"))]),
        headers(&[("authorization", "Bearer ")]),
        twice,
        bearer("tk_wrong"),
        bearer(&long),
        headers(&[(TENANT_HEADER, "acme")]),
    ];
    for headers in refused {
        let failure = auth.identify(&headers).unwrap_err();
        assert_eq!(failure.class, FailureClass::Unauthenticated, "{headers:?}");
        assert!(!format!("{failure:?}").contains(key.as_str()));
    }
}

#[tokio::test]
async fn a_client_may_name_its_own_tenant_and_no_other() {
    let Keyed { auth, key, .. } = &keyed();
    let named = |tenant| {
        let mut headers = bearer(key);
        headers.insert(TENANT_HEADER, HeaderValue::from_static(tenant));
        auth.identify(&headers)
    };
    assert_eq!(named("acme").unwrap().tenant, "acme");
    assert_eq!(named("other").unwrap_err().class, FailureClass::PermissionDenied);
}

#[tokio::test(start_paused = true)]
async fn keys_are_added_and_revoked_while_the_process_runs() {
    let Keyed { _dir, path, auth, key } = keyed();
    let (second, hash) = keys::generate();
    std::fs::write(&path, format!("key {hash} acme\n")).unwrap();
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert!(auth.identify(&bearer(&second)).is_ok());
    assert!(auth.identify(&bearer(&key)).is_err(), "its line is gone");
    std::fs::write(&path, "nonsense that is no entry\n").unwrap();
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert!(
        auth.identify(&bearer(&second)).is_ok(),
        "a file that cannot be read leaves the keys as they are"
    );
}
