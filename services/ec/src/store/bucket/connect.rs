//! Creates a client of the service from a setting and the environment. Every wait and every retry has a limit.

use super::setting::{BucketService, BucketSetting};
use super::tuning::BucketTuning;
use crate::error::EcError;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3CopyIfNotExists};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Creates a client without I/O.
pub(super) fn connect(
    setting: &BucketSetting,
    environment: &[(String, String)],
    tuning: &BucketTuning,
) -> Result<Arc<dyn ObjectStore>, EcError> {
    // The client refuses to be made without one, even for plain HTTP. An error: there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let connected = match setting.service() {
        BucketService::S3 => s3(setting, environment, tuning),
        BucketService::Google => google(setting, environment, tuning),
        BucketService::Azure => azure(setting, environment, tuning),
    };
    connected.map_err(|e| EcError::Config { setting: setting.to_string(), reason: crate::error::chain(&e) })
}

fn s3(
    setting: &BucketSetting,
    environment: &[(String, String)],
    tuning: &BucketTuning,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = AmazonS3Builder::new();
    for (key, value) in known::<AmazonS3ConfigKey>(environment, "AWS_") {
        builder = builder.with_config(key, value);
    }
    for (key, value) in client(setting, tuning) {
        builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
    }
    if let Some(endpoint) = setting.endpoint() {
        // This one outranks the one of the environment, whichever of its two variables that is in.
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some(region) = setting.region() {
        builder = builder.with_region(region);
    }
    let store = builder
        .with_bucket_name(setting.bucket())
        .with_retry(retry(tuning))
        // Not the crate's other way, an upload in parts that is completed on a condition: some that speak S3 look first
        // and complete then, and of many writers several win.
        .with_copy_if_not_exists(S3CopyIfNotExists::Header("if-none-match".into(), "*".into()))
        .with_disable_bulk_delete(true)
        // TLS holds the bytes on their way, and an object its own checksum; hashing them once more costs as much.
        .with_unsigned_payload(!setting.allow_http())
        .build()?;
    Ok(Arc::new(store))
}

fn google(
    setting: &BucketSetting,
    environment: &[(String, String)],
    tuning: &BucketTuning,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::new();
    for (key, value) in known::<GoogleConfigKey>(environment, "GOOGLE_") {
        builder = builder.with_config(key, value);
    }
    for (key, value) in client(setting, tuning) {
        builder = builder.with_config(GoogleConfigKey::Client(key), value);
    }
    if let Some(endpoint) = setting.endpoint() {
        builder = builder.with_base_url(endpoint);
    }
    Ok(Arc::new(builder.with_bucket_name(setting.bucket()).with_retry(retry(tuning)).build()?))
}

fn azure(
    setting: &BucketSetting,
    environment: &[(String, String)],
    tuning: &BucketTuning,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::new();
    for (key, value) in known::<AzureConfigKey>(environment, "AZURE_") {
        builder = builder.with_config(key, value);
    }
    for (key, value) in client(setting, tuning) {
        builder = builder.with_config(AzureConfigKey::Client(key), value);
    }
    if let Some(endpoint) = setting.endpoint() {
        builder = builder.with_endpoint(endpoint.to_owned());
    }
    Ok(Arc::new(builder.with_container_name(setting.bucket()).with_retry(retry(tuning)).build()?))
}

/// Variables with a prefix that a client knows.
fn known<K: FromStr>(environment: &[(String, String)], prefix: &str) -> Vec<(K, String)> {
    let ours = environment.iter().filter(|(name, _)| name.starts_with(prefix));
    ours.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone()))).collect()
}

fn client(setting: &BucketSetting, tuning: &BucketTuning) -> Vec<(ClientConfigKey, String)> {
    let millis = |time: Duration| format!("{} ms", time.as_millis());
    let mut settings = vec![
        (ClientConfigKey::Timeout, millis(tuning.response_timeout)),
        (ClientConfigKey::ConnectTimeout, millis(tuning.connection_timeout)),
    ];
    if setting.allow_http() {
        settings.push((ClientConfigKey::AllowHttp, "true".to_owned()));
    }
    settings
}

fn retry(tuning: &BucketTuning) -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(50),
        max_backoff: Duration::from_millis(500),
        ..BackoffConfig::default()
    };
    RetryConfig { backoff, max_retries: tuning.retries, retry_timeout: tuning.response_timeout }
}
