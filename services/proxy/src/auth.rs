//! Who asks: a bearer token becomes a tenant, and a tenant has an account with quotas.
//!
//! A token is an API key ([`keys`]) or a JWT ([`jwt`]). With either configured, a request without a valid one is
//! refused before its body is read. With neither, the tenant is what the request says it is
//! (`x-triptych-tenant`, or `tenant` over gRPC): then whoever authenticates clients stands in front. Tokens reach no
//! log, no metric and no error text.

pub mod account;
pub mod jwt;
pub mod keys;
mod rate;

pub use account::{Account, Accounts, Place, Quota};
pub use jwt::JwtConfig;

use arc_swap::ArcSwap;
use http::{HeaderMap, header};
use jwt::Verifier;
use keys::KeyTable;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use triptych_core::{Failure, FailureClass, ModelName};
use triptych_runtime::Drain;
use triptych_runtime::reload::WatchedFiles;

/// Longest token that is looked at.
const MAX_TOKEN_BYTES: usize = 8 << 10;
/// Longest name of a tenant in bytes.
pub const MAX_TENANT_BYTES: usize = 256;
/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The header that names the tenant where clients are authenticated in front.
pub const TENANT_HEADER: &str = "x-triptych-tenant";

/// How clients are known, and what each tenant may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthConfig {
    /// A file of keys and tenants, in the form of [`keys`].
    pub keys: Option<PathBuf>,
    /// Tokens of an identity provider.
    pub jwt: Option<JwtConfig>,
    /// For tenants whose own quota nothing says. Default: no limits.
    pub quota: Quota,
}

/// A file that clients are known by cannot be used.
#[derive(Debug, Error)]
pub enum AuthError {
    /// It cannot be read.
    #[error("{} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It can be read, and is not what it should be.
    #[error("{}{}: {reason}", path.display(), line.map(|n| format!(", line {n}")).unwrap_or_default())]
    Content {
        /// The file.
        path: PathBuf,
        /// Where, from 1.
        line: Option<usize>,
        /// What was found and what is allowed. Never a key.
        reason: String,
    },
}

/// Who a request is from.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The tenant; empty: the one that all share.
    pub tenant: String,
    /// What it may have.
    pub account: Arc<Account>,
    /// Its place there, given back with the last clone.
    place: Option<Arc<Place>>,
    /// The models that its key is for; `None`: all.
    models: Option<Arc<BTreeSet<String>>>,
}

impl Caller {
    /// A tenant that may use every model.
    pub fn new(tenant: String, account: Arc<Account>) -> Self {
        Self { tenant, account, place: None, models: None }
    }

    /// Takes a place in the tenant's account.
    ///
    /// # Errors
    /// Overloaded, with the quota and a pause.
    pub fn enter(self) -> Result<Self, Failure> {
        let place = Some(Arc::new(self.account.enter()?));
        Ok(Self { place, ..self })
    }

    /// Counts bytes that the request holds until its end.
    ///
    /// # Errors
    /// Overloaded, if its tenant holds too many.
    pub fn hold_bytes(&self, n: usize) -> Result<(), Failure> {
        self.place.as_ref().map_or(Ok(()), |place| place.hold_bytes(n))
    }

    /// Whether its key is for the model.
    pub fn may_use(&self, model: &ModelName) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model.as_str()))
    }

    /// Refuses a model that its key is not for, in the words for one that is not there.
    ///
    /// # Errors
    /// NotFound.
    pub fn check_model(&self, model: &ModelName) -> Result<(), Failure> {
        if self.may_use(model) {
            return Ok(());
        }
        let text = format!("model {model:?} is not served, or not for this key");
        Err(Failure::new(FailureClass::NotFound, text).with_param("model"))
    }
}

/// What knows clients. Cheap to clone.
#[derive(Clone)]
pub struct Auth(Arc<Parts>);

struct Parts {
    keys: Option<(PathBuf, ArcSwap<KeyTable>)>,
    jwt: Option<(JwtConfig, ArcSwap<Verifier>)>,
    quota: Quota,
    accounts: Accounts,
}

impl Auth {
    /// Reads the files, and reads them again when they change, until the process stops. A file that is wrong then
    /// leaves everything as it was, and the log says so.
    ///
    /// # Errors
    /// [`AuthError`] for a file that cannot be used.
    pub fn start(config: AuthConfig, drain: &Drain) -> Result<Self, AuthError> {
        let paths = config.keys.iter().chain(config.jwt.iter().map(|jwt| &jwt.keys));
        let files = WatchedFiles::new(paths.cloned().collect());
        let keys =
            config.keys.map(|path| KeyTable::read(&path).map(|table| (path, ArcSwap::from_pointee(table))));
        let jwt = config.jwt.map(|jwt| Verifier::read(&jwt).map(|v| (jwt, ArcSwap::from_pointee(v))));
        let (keys, jwt) = (keys.transpose()?, jwt.transpose()?);
        let auth = Self(Arc::new(Parts { keys, jwt, quota: config.quota, accounts: Accounts::default() }));
        if auth.is_required() {
            let (reader, stopping) = (auth.clone(), drain.clone());
            drain.tasks().spawn(async move {
                tokio::select! {
                    () = files.on_change(LOOK_EVERY, || reader.read_again()) => {}
                    () = stopping.stopping() => {}
                }
            });
        }
        Ok(auth)
    }

    fn read_again(&self) {
        let report = |outcome: Result<(), AuthError>, what| match outcome {
            Ok(()) => tracing::info!(what, "read again"),
            Err(e) => tracing::error!(what, error = triptych_ec::error::chain(&e), "stays as it was"),
        };
        if let Some((path, table)) = &self.0.keys {
            report(KeyTable::read(path).map(|new| table.store(Arc::new(new))), "api keys");
        }
        if let Some((config, verifier)) = &self.0.jwt {
            report(Verifier::read(config).map(|new| verifier.store(Arc::new(new))), "jwt keys");
        }
    }

    /// Whether clients must show who they are.
    pub fn is_required(&self) -> bool {
        self.0.keys.is_some() || self.0.jwt.is_some()
    }

    /// Who sent these headers. Where nobody has to show who they are: who the tenant header names.
    ///
    /// # Errors
    /// Unauthenticated without a valid token; PermissionDenied if the tenant header names another tenant than the
    /// token does.
    pub fn identify(&self, headers: &HeaderMap) -> Result<Caller, Failure> {
        let named = tenant_header(headers)?;
        if !self.is_required() {
            return self.trusted(named.unwrap_or_default());
        }
        let caller = self.known(bearer(headers)?)?;
        Self::check_named(&caller, named.as_deref().unwrap_or_default())?;
        Ok(caller)
    }

    /// A tenant that was authenticated in front.
    ///
    /// # Errors
    /// InvalidArgument for a name that is too long; Overloaded if there are too many tenants at once.
    pub fn trusted(&self, tenant: String) -> Result<Caller, Failure> {
        let len = tenant.len();
        if len > MAX_TENANT_BYTES {
            let message = format!("the tenant has {len} bytes, the limit is {MAX_TENANT_BYTES}");
            return Err(Failure::invalid(message).with_param("tenant"));
        }
        self.caller(tenant, None)
    }

    /// A client may repeat its own tenant's name, and no other.
    ///
    /// # Errors
    /// PermissionDenied.
    pub fn check_named(caller: &Caller, named: &str) -> Result<(), Failure> {
        if named.is_empty() || named == caller.tenant {
            return Ok(());
        }
        let text = "the request names another tenant than its key is for; leave the tenant out";
        Err(Failure::new(FailureClass::PermissionDenied, text).with_param("tenant"))
    }

    fn known(&self, token: &str) -> Result<Caller, Failure> {
        if let Some((_, table)) = &self.0.keys
            && let Some((tenant, models)) = table.load().find(token)
        {
            return self.caller(tenant, models);
        }
        match &self.0.jwt {
            Some((_, verifier)) if jwt::looks_like_one(token) => {
                self.caller(verifier.load().tenant(token)?, None)
            }
            _ => Err(unauthenticated("the API key is not valid")),
        }
    }

    fn caller(&self, tenant: String, models: Option<Arc<BTreeSet<String>>>) -> Result<Caller, Failure> {
        let own = self.0.keys.as_ref().and_then(|(_, table)| table.load().quota(&tenant));
        let account = self.0.accounts.of(&tenant, own.unwrap_or(self.0.quota))?;
        Ok(Caller { models, ..Caller::new(tenant, account) })
    }
}

fn unauthenticated(message: &str) -> Failure {
    Failure::new(FailureClass::Unauthenticated, message)
}

fn bearer(headers: &HeaderMap) -> Result<&str, Failure> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (first, second) = (values.next(), values.next());
    let value = match (first, second) {
        (None, _) => return Err(unauthenticated("no API key: send the header `Authorization: Bearer KEY`")),
        (Some(value), None) => value,
        (Some(_), Some(_)) => return Err(unauthenticated("the header Authorization is there twice")),
    };
    let malformed = || unauthenticated("the header Authorization is not `Bearer KEY`");
    let (scheme, token) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(malformed)?;
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() || token.len() > MAX_TOKEN_BYTES {
        return Err(malformed());
    }
    Ok(token)
}

fn tenant_header(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let Some(value) = headers.get(TENANT_HEADER) else { return Ok(None) };
    let text = value.to_str().map(|text| Some(text.trim().to_owned()));
    text.map_err(|_| Failure::invalid(format!("the header {TENANT_HEADER} is not ASCII text")))
}

#[cfg(test)]
mod tests;
