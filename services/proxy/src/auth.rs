//! Client authentication: a bearer token becomes a tenant, and a tenant has an account with quotas.
//!
//! A token is an API key ([`keys`]) or a JWT ([`jwt`]). With either configured, a request without a valid one is
//! refused before its body is read. With neither, the tenant is the one that the request names
//! (`x-triptych-tenant`, or `tenant` over gRPC): then a gateway in front of the proxy authenticates clients. Tokens
//! reach no log, no metric and no error text.

pub mod account;
mod error;
mod file;
pub mod jwt;
pub mod keys;
mod rate;
mod shared;

pub use account::{Account, Accounts, MAX_TENANT_BYTES, Quota, RequestSlot};
pub use error::AuthError;
pub use jwt::JwtConfig;
pub use shared::SharedQuotas;

use arc_swap::ArcSwap;
use error::unauthenticated;
use http::{HeaderMap, header};
use jwt::Verifier;
use keys::KeyTable;
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::{Failure, FailureClass, ModelName};
use triptych_runtime::Drain;
use triptych_runtime::reload::WatchedFiles;

/// Longest token that is considered, in bytes.
const MAX_TOKEN_BYTES: usize = 8 << 10;
/// Interval between two checks of the files for changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Largest number of tenants whose caches can be reset in the life of a proxy.
const MAX_GENERATIONS: usize = 10_000;
/// Header that names the tenant where a gateway authenticates clients.
pub const TENANT_HEADER: &str = "x-triptych-tenant";

/// Sources of client identities, and the default quota.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthConfig {
    /// A file of keys and tenants, in the form of [`keys`].
    pub keys: Option<PathBuf>,
    /// Tokens of an identity provider.
    pub jwt: Option<JwtConfig>,
    /// Quota of tenants that have none of their own. Default: no limits.
    pub quota: Quota,
}

/// An identified client, for the duration of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The tenant; empty for the shared one.
    pub tenant: String,
    /// Quotas and usage of the tenant.
    pub account: Arc<Account>,
    /// Its slot in the account, released with the last clone.
    slot: Option<Arc<RequestSlot>>,
    /// Models that its key is for; `None`: all.
    models: Option<Arc<BTreeSet<String>>>,
    /// The most urgent priority of its requests; `None`: any.
    priority: Option<i32>,
    /// Generation of the caches that it uses, once they were reset.
    pub generation: Option<Arc<str>>,
}

impl Caller {
    /// A tenant that may use every model.
    pub fn new(tenant: String, account: Arc<Account>) -> Self {
        Self { tenant, account, slot: None, models: None, priority: None, generation: None }
    }

    /// Takes a request slot of the tenant's account.
    ///
    /// # Errors
    /// Overloaded, with the quota and a pause.
    pub fn enter(self) -> Result<Self, Failure> {
        let slot = Some(Arc::new(self.account.enter()?));
        Ok(Self { slot, ..self })
    }

    /// Asks whether the request may have items, which an encoder has to read.
    ///
    /// # Errors
    /// Overloaded, when its tenant has room only for requests without items.
    pub fn with_items(&self) -> Result<(), Failure> {
        self.slot.as_ref().map_or(Ok(()), |slot| slot.with_items())
    }

    /// Counts bytes that the request holds until its end.
    ///
    /// # Errors
    /// Overloaded, if its tenant holds too many.
    pub fn hold_bytes(&self, n: usize) -> Result<(), Failure> {
        self.slot.as_ref().map_or(Ok(()), |slot| slot.hold_bytes(n))
    }

    /// The priority that a request gets which asks for this one: not more urgent than its key allows.
    pub fn priority(&self, asked: i32) -> i32 {
        self.priority.map_or(asked, |ceiling| asked.max(ceiling))
    }

    /// True if its key is for the model.
    pub fn may_use(&self, model: &ModelName) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model.as_str()))
    }

    /// Refuses a model that its key is not for, with the text for a model that is not served.
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

/// Identifies clients. Cheap to clone.
#[derive(Clone)]
pub struct Auth(Arc<AuthState>);

struct AuthState {
    keys: Option<KeyFile>,
    jwt: Option<JwtKeys>,
    quota: ArcSwap<Quota>,
    accounts: Accounts,
    /// Cache generations of tenants whose caches were reset.
    generations: Mutex<HashMap<String, Arc<str>>>,
}

/// The file of API keys, and what it last held.
struct KeyFile {
    path: PathBuf,
    table: ArcSwap<KeyTable>,
}

/// The keys of an identity provider, as they were last read.
struct JwtKeys {
    config: JwtConfig,
    verifier: ArcSwap<Verifier>,
}

impl KeyFile {
    fn open(path: PathBuf) -> Result<Self, AuthError> {
        let table = ArcSwap::from_pointee(KeyTable::read(&path)?);
        Ok(Self { path, table })
    }
}

impl JwtKeys {
    fn open(config: JwtConfig) -> Result<Self, AuthError> {
        let verifier = ArcSwap::from_pointee(Verifier::read(&config)?);
        Ok(Self { config, verifier })
    }
}

impl Auth {
    /// Reads the files, and reads them again when they change, until the process stops. A reload that fails leaves the
    /// last good state in place and is logged. A quota lets a body of `max_body_bytes` through, however low its rate.
    ///
    /// # Errors
    /// [`AuthError`] for a file that cannot be used.
    pub fn start(config: AuthConfig, max_body_bytes: usize, drain: &Drain) -> Result<Self, AuthError> {
        let paths = config.keys.iter().chain(config.jwt.iter().map(|jwt| &jwt.keys));
        let files = WatchedFiles::new(paths.cloned().collect());
        let keys = config.keys.map(KeyFile::open).transpose()?;
        let jwt = config.jwt.map(JwtKeys::open).transpose()?;
        let accounts = Accounts::new(max_body_bytes);
        let (quota, generations) = (ArcSwap::from_pointee(config.quota), Mutex::default());
        let auth = Self(Arc::new(AuthState { keys, jwt, quota, accounts, generations }));
        if auth.is_required() {
            let reloading = auth.clone();
            let stopping = drain.clone();
            drain.tasks().spawn(async move {
                tokio::select! {
                    () = files.on_change(POLL_INTERVAL, || reloading.reload()) => {}
                    () = stopping.stopping() => {}
                }
            });
        }
        Ok(auth)
    }

    /// Has all proxies with these quotas count the rates of tenants together.
    #[must_use]
    pub fn shared(self, quotas: SharedQuotas) -> Self {
        self.0.accounts.share(quotas);
        self
    }

    fn reload(&self) {
        let report = |outcome: Result<(), AuthError>, file| match outcome {
            Ok(()) => tracing::info!(file, "reloaded"),
            Err(e) => tracing::error!(file, error = triptych_ec::error::chain(&e), "reload failed"),
        };
        if let Some(keys) = &self.0.keys {
            report(KeyTable::read(&keys.path).map(|new| keys.table.store(Arc::new(new))), "api keys");
        }
        if let Some(jwt) = &self.0.jwt {
            report(Verifier::read(&jwt.config).map(|new| jwt.verifier.store(Arc::new(new))), "jwt keys");
        }
    }

    /// True if clients must authenticate.
    pub fn is_required(&self) -> bool {
        self.0.keys.is_some() || self.0.jwt.is_some()
    }

    /// The sender of these headers. Without authentication, the tenant header is trusted.
    ///
    /// # Errors
    /// Unauthenticated without a valid token; PermissionDenied if the tenant header names another tenant than the
    /// token does.
    pub fn identify(&self, headers: &HeaderMap) -> Result<Caller, Failure> {
        let named = tenant_header(headers)?;
        if !self.is_required() {
            return self.trusted(named.unwrap_or_default());
        }
        let caller = self.authenticated(bearer(headers)?)?;
        Self::check_named(&caller, named.as_deref().unwrap_or_default())?;
        Ok(caller)
    }

    /// A tenant that a gateway authenticated.
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

    /// Refuses a request that names another tenant than its key's.
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

    fn authenticated(&self, token: &str) -> Result<Caller, Failure> {
        if let Some(keys) = &self.0.keys
            && let Some(grant) = keys.table.load().find(token)
        {
            let caller = self.caller(grant.tenant, grant.models)?;
            return Ok(Caller { priority: grant.priority, ..caller });
        }
        match &self.0.jwt {
            Some(jwt) if jwt::is_jwt(token) => self.caller(jwt.verifier.load().tenant(token)?, None),
            _ => Err(unauthenticated("the API key is not valid")),
        }
    }

    fn caller(&self, tenant: String, models: Option<Arc<BTreeSet<String>>>) -> Result<Caller, Failure> {
        let own = self.0.keys.as_ref().and_then(|keys| keys.table.load().quota(&tenant));
        let account = self.0.accounts.of(&tenant, own.unwrap_or_else(|| self.quota()))?;
        let generation = self.0.generations.lock().get(&tenant).cloned();
        Ok(Caller { models, generation, ..Caller::new(tenant, account) })
    }

    /// Quota of tenants that have none of their own.
    pub fn quota(&self) -> Quota {
        **self.0.quota.load()
    }

    /// Changes it. A tenant's usage under the old one ends with the requests that run.
    pub fn set_quota(&self, quota: Quota) {
        self.0.quota.store(Arc::new(quota));
    }

    /// Makes everything that caches hold of a tenant unfindable: its requests have other keys from now on. Proxies that are
    /// given the same generation have the same keys.
    ///
    /// # Errors
    /// InvalidArgument for a name that is too long; Overloaded for too many tenants.
    pub fn reset_caches(&self, tenant: &str, generation: &str) -> Result<(), Failure> {
        if tenant.len() > MAX_TENANT_BYTES || generation.len() > MAX_TENANT_BYTES || generation.is_empty() {
            let text =
                format!("a tenant has at most {MAX_TENANT_BYTES} bytes, a generation from 1 to as many");
            return Err(Failure::invalid(text));
        }
        let mut generations = self.0.generations.lock();
        if generations.len() >= MAX_GENERATIONS && !generations.contains_key(tenant) {
            let text = format!("caches of {MAX_GENERATIONS} tenants were reset, the limit of a proxy's life");
            return Err(Failure::new(FailureClass::Overloaded, text));
        }
        generations.insert(tenant.to_owned(), generation.into());
        Ok(())
    }
}

fn bearer(headers: &HeaderMap) -> Result<&str, Failure> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Err(unauthenticated("no API key: send the header `Authorization: Bearer KEY`"));
    };
    if values.next().is_some() {
        return Err(unauthenticated("the header Authorization is there twice"));
    }
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
