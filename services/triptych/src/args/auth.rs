//! Flags of tenants: who clients are, and what each tenant may have.

use super::discovery::redis_link;
use crate::error::CliError;
use clap::Args;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;
use triptych_ec::token_bucket::TokenBuckets;
use triptych_proxy::auth::{AuthConfig, JwtConfig, Quota};

/// Flags of authentication.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Tenants")]
pub struct AuthArgs {
    /// File of API keys and tenants, one a line: `key HASH TENANT [models=A,B] [priority=N]` (a hash is what `triptych keys new`
    /// prints) and `tenant NAME [requests_per_s=N …]`; read again when it changes. With it, or with --jwt-keys, every
    /// request needs `Authorization: Bearer …`
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_API_KEYS")]
    pub api_keys: Option<PathBuf>,
    /// File of keys that JWTs are checked with: a JWK set (RS256, ES256, HS256), or the secret of HS256 as text; read
    /// again when it changes
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_JWT_KEYS", requires_all = ["jwt_issuer", "jwt_audience"])]
    pub jwt_keys: Option<PathBuf>,
    /// Required `iss` of a JWT
    #[arg(long, value_name = "TEXT", env = "TRIPTYCH_JWT_ISSUER", requires = "jwt_keys")]
    pub jwt_issuer: Option<String>,
    /// Required `aud` of a JWT
    #[arg(long, value_name = "TEXT", env = "TRIPTYCH_JWT_AUDIENCE", requires = "jwt_keys")]
    pub jwt_audience: Option<String>,
    /// The claim of a JWT that names the tenant
    #[arg(long, value_name = "CLAIM", env = "TRIPTYCH_JWT_TENANT_CLAIM", default_value = "tenant")]
    pub jwt_tenant_claim: String,
    /// Allowed clock skew in seconds when a JWT's times are checked
    #[arg(long, value_name = "S", env = "TRIPTYCH_JWT_LEEWAY_S", default_value_t = 60)]
    pub jwt_leeway_s: u64,
    /// A Redis, in any form of `--ec`, in which all proxies count requests and KiB a second of each tenant together. While it does
    /// not answer, each proxy counts alone. Default: each counts alone
    #[arg(long, value_name = "REDIS", env = "TRIPTYCH_QUOTA_STORE", hide_env_values = true)]
    pub quota_store: Option<String>,
    /// Quotas
    #[command(flatten)]
    pub quota: QuotaArgs,
}

/// Default limits of a tenant, for tenants without limits in the file of API keys. 0: no limit.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct QuotaArgs {
    /// Requests a second of each tenant; over it is 429 with the time to wait. 0: no limit
    #[arg(long, value_name = "N", env = "TRIPTYCH_TENANT_REQUESTS_PER_S", default_value_t = 0)]
    pub tenant_requests_per_s: u32,
    /// KiB of images, audio and encoder texts a second of each tenant. 0: no limit
    #[arg(long, value_name = "KIB", env = "TRIPTYCH_TENANT_ITEM_KIB_PER_S", default_value_t = 0)]
    pub tenant_item_kib_per_s: u32,
    /// KiB a second that are in no cache and have to be encoded. 0: no limit
    #[arg(long, value_name = "KIB", env = "TRIPTYCH_TENANT_ENCODE_KIB_PER_S", default_value_t = 0)]
    pub tenant_encode_kib_per_s: u32,
    /// Requests at once of each tenant. 0: no limit
    #[arg(long, value_name = "N", env = "TRIPTYCH_TENANT_IN_FLIGHT", default_value_t = 0)]
    pub tenant_in_flight: u32,
    /// MiB of request bodies and fetched items that each tenant may have in the proxy's memory. 0: no limit
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_TENANT_BODY_MIB", default_value_t = 0)]
    pub tenant_body_mib: u32,
}

impl AuthArgs {
    /// True if clients must authenticate.
    pub fn is_required(&self) -> bool {
        self.api_keys.is_some() || self.jwt_keys.is_some()
    }

    /// The buckets that all proxies take from.
    ///
    /// # Errors
    /// [`CliError::Setting`] for what is no Redis.
    pub fn buckets(&self) -> Result<Option<TokenBuckets>, CliError> {
        let link = |text: &String| redis_link("--quota-store", text).map(TokenBuckets::new);
        self.quota_store.as_ref().map(link).transpose()
    }

    /// Settings of the proxy.
    pub fn config(self) -> AuthConfig {
        let jwt = self.jwt_keys.map(|keys| JwtConfig {
            keys,
            // Required with the keys.
            issuer: self.jwt_issuer.unwrap_or_default(),
            audience: self.jwt_audience.unwrap_or_default(),
            tenant_claim: self.jwt_tenant_claim,
            leeway: Duration::from_secs(self.jwt_leeway_s),
        });
        let quota = Quota {
            requests_per_s: NonZeroU32::new(self.quota.tenant_requests_per_s),
            item_kib_per_s: NonZeroU32::new(self.quota.tenant_item_kib_per_s),
            encode_kib_per_s: NonZeroU32::new(self.quota.tenant_encode_kib_per_s),
            in_flight: NonZeroU32::new(self.quota.tenant_in_flight),
            body_mib: NonZeroU32::new(self.quota.tenant_body_mib),
        };
        AuthConfig { keys: self.api_keys, jwt, quota }
    }
}
