//! Setting of a bucket store: `s3://BUCKET[/PREFIX][?endpoint=URL&region=R&allow_http=true&tenant=T]`, `gs://…`, `az://…`.
//!
//! Credentials are not part of it: they come from the variables that the service's own tools read.

use crate::error::EcError;
use crate::settings::text::without_password;
use std::fmt;
use std::str::FromStr;

/// Longest bucket name of any of the services.
const MAX_BUCKET: usize = 222;
/// Longest prefix and tenant: a name in a bucket has 1024 bytes, and ours take fewer than 100 of them.
const MAX_PREFIX: usize = 512;
const MAX_TENANT: usize = 64;

/// The service of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BucketService {
    /// Amazon S3 and compatible services.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage; the bucket is a container.
    Azure,
}

impl BucketService {
    const ALL: [Self; 3] = [Self::S3, Self::Google, Self::Azure];

    /// The scheme of the setting.
    pub const fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }

    /// Variables of the environment that hold its credentials.
    pub(super) const fn credentials(self) -> &'static str {
        match self {
            Self::S3 => "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
            Self::Google => "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
            Self::Azure => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

/// Setting of a bucket store. Holds no secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketSetting {
    service: BucketService,
    bucket: String,
    prefix: String,
    tenant: Option<String>,
    endpoint: Option<String>,
    region: Option<String>,
    allow_http: bool,
}

impl BucketSetting {
    /// True if a text has the scheme of a bucket setting, valid or not.
    pub fn is_meant(text: &str) -> bool {
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        BucketService::ALL.into_iter().any(|s| Some(s.scheme()) == scheme)
    }

    /// The service.
    pub fn service(&self) -> BucketService {
        self.service
    }

    /// The bucket, for Azure the container.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Prefix of all names; may be empty.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Tenant whose part of the bucket is used.
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// URL of the server, if it is not the service's default.
    pub fn endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref()
    }

    /// The region of an S3 bucket.
    pub fn region(&self) -> Option<&str> {
        self.region.as_deref()
    }

    /// True if plain HTTP is allowed.
    pub fn allow_http(&self) -> bool {
        self.allow_http
    }

    fn read(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").unwrap_or((text, ""));
        let service = BucketService::ALL
            .into_iter()
            .find(|s| s.scheme() == scheme)
            .ok_or("a bucket is `s3://…`, `gs://…` or `az://…`")?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if place.contains('@') {
            return Err("credentials come from the environment, never from the setting".into());
        }
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_end_matches('/');
        if !is_name(bucket, MAX_BUCKET) {
            let example = format!("`{scheme}://my-bucket/ec`");
            return Err(format!("a bucket has letters, digits, `.`, `-` and `_`, as in {example}"));
        }
        if prefix.len() > MAX_PREFIX
            || !(prefix.is_empty() || prefix.split('/').all(|s| is_name(s, MAX_PREFIX)))
        {
            return Err(format!(
                "a prefix has at most {MAX_PREFIX} letters, digits, `.`, `-` and `_`, with `/` between"
            ));
        }
        let mut setting = Self {
            service,
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            tenant: None,
            endpoint: None,
            region: None,
            allow_http: false,
        };
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            setting.option(pair)?;
        }
        if setting.endpoint().is_some_and(|e| e.starts_with("http://")) && !setting.allow_http {
            return Err("the endpoint has no TLS; say `allow_http=true` if that is meant".into());
        }
        Ok(setting)
    }

    /// Parses one pair of the query. Errors do not quote it: it may be a misplaced secret.
    fn option(&mut self, pair: &str) -> Result<(), String> {
        match pair.split_once('=') {
            Some(("endpoint", url)) if is_endpoint(url) => {
                self.endpoint = Some(url.trim_end_matches('/').to_owned());
            }
            Some(("endpoint", _)) => {
                return Err(
                    "an endpoint is `https://HOST[:PORT]`, or `http://…` with `allow_http=true`".into()
                );
            }
            Some(("region", region)) if self.service == BucketService::S3 && is_name(region, MAX_TENANT) => {
                self.region = Some(region.to_owned());
            }
            Some(("allow_http", "true")) => self.allow_http = true,
            Some(("allow_http", "false")) => self.allow_http = false,
            Some(("tenant", tenant)) if is_name(tenant, MAX_TENANT) => self.tenant = Some(tenant.to_owned()),
            Some(("tenant", _)) => {
                return Err(format!("a tenant has 1 to {MAX_TENANT} letters, digits, `.`, `-` and `_`"));
            }
            _ => {
                let region = if self.service == BucketService::S3 { "`region=R`, " } else { "" };
                return Err(format!(
                    "after `?` are allowed `endpoint=URL`, {region}`allow_http=true`, `tenant=T`, joined by `&`; \
                     credentials come from the environment"
                ));
            }
        }
        Ok(())
    }
}

impl FromStr for BucketSetting {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Self, EcError> {
        let text = text.trim();
        Self::read(text).map_err(|reason| EcError::Config { setting: without_password(text), reason })
    }
}

impl fmt::Display for BucketSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.service.scheme(), self.bucket)?;
        if !self.prefix.is_empty() {
            write!(f, "/{}", self.prefix)?;
        }
        let options = [
            self.endpoint.as_ref().map(|e| format!("endpoint={e}")),
            self.region.as_ref().map(|r| format!("region={r}")),
            self.allow_http.then(|| "allow_http=true".to_owned()),
            self.tenant.as_ref().map(|t| format!("tenant={t}")),
        ];
        let options: Vec<_> = options.into_iter().flatten().collect();
        if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
    }
}

impl fmt::Debug for BucketSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Letters, digits, and three marks that mean nothing in a URL; not `.` and `..`, which mean something in a path.
fn is_name(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && text.bytes().any(|b| b != b'.')
}

fn is_endpoint(url: &str) -> bool {
    let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    host.is_some_and(|host| {
        !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:[]/".contains(&b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    #[test]
    fn settings_read_as_they_are_written() {
        let cases = [
            "s3://bucket",
            "s3://my.bucket-1/a/b",
            "s3://b_1/p?endpoint=https://minio:9000&region=eu-central-1&tenant=acme",
            "s3://b?endpoint=http://127.0.0.1:9000&allow_http=true",
            "s3://b?endpoint=http://[::1]:9000&allow_http=true",
            "gs://bucket/ec",
            "az://container/ec?tenant=t.1",
        ];
        for text in cases {
            let setting: BucketSetting = text.parse().unwrap();
            assert_eq!(setting.to_string(), text);
            assert_eq!(format!("{setting:?}"), text);
            assert!(BucketSetting::is_meant(text));
        }
        let setting: BucketSetting = "s3://b/p//?allow_http=false&".parse().unwrap();
        assert_eq!((setting.prefix(), setting.allow_http()), ("p", false));
    }

    #[test]
    fn errors_of_settings_name_the_allowed_values_and_no_secret() {
        let cases = [
            ("s3://", "a bucket has letters"),
            ("s3:///p", "a bucket has letters"),
            ("s3://..", "a bucket has letters"),
            ("s3://b/a//b", "a prefix has"),
            ("s3://b/../c", "a prefix has"),
            ("s3://b/a%20b", "a prefix has"),
            ("s3://id:s3cret@b", "credentials come from the environment"),
            ("s3://b?s3cret", "are allowed `endpoint=URL`, `region=R`"),
            ("s3://b?secret_access_key=s3cret", "credentials come from the environment"),
            ("gs://b?region=eu", "are allowed `endpoint=URL`, `allow_http=true`"),
            ("s3://b?allow_http=yes", "`allow_http=true`"),
            ("s3://b?endpoint=minio:9000", "an endpoint is `https://HOST[:PORT]`"),
            ("s3://b?endpoint=https://id:s3cret@minio", "an endpoint is `https://HOST[:PORT]`"),
            ("s3://b?endpoint=http://minio", "no TLS; say `allow_http=true`"),
            ("s3://b?tenant=", "a tenant has 1 to 64"),
            ("s3://b?tenant=a/b", "a tenant has 1 to 64"),
        ];
        for (text, part) in cases {
            let e = chain(&text.parse::<BucketSetting>().unwrap_err());
            assert!(e.contains(part), "{text}: {e}");
            assert!(!e.contains("s3cret"), "{e}");
        }
    }
}
