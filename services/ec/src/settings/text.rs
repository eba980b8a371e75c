//! Text helpers that settings of several stores share.

use crate::error::EcError;

/// Largest size in a setting, in MiB: one TiB.
const MAX_MIB: u64 = 1 << 20;

/// True if a text is exactly `host:port`, without other parts of a URL.
pub(crate) fn is_authority(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
        let named = !host.is_empty() && !host.contains([':', '[', ']']);
        (bracketed || named) && text.chars().all(allowed) && port.parse::<u16>().is_ok()
    })
}

/// Splits `?mib=N` off a setting: the rest, and N in bytes.
pub(crate) fn split_mib(text: &str) -> Result<(&str, Option<u64>), EcError> {
    let Some((rest, query)) = text.split_once('?') else { return Ok((text, None)) };
    let mib = query.strip_prefix("mib=").and_then(|n| n.parse::<u64>().ok());
    match mib.filter(|n| (1..=MAX_MIB).contains(n)) {
        Some(mib) => Ok((rest, Some(mib << 20))),
        None => Err(EcError::Config {
            setting: text.to_owned(),
            reason: format!("after `?` comes {query:?}, allowed is `mib=N` with 1 to {MAX_MIB}"),
        }),
    }
}

/// A URL for logs: user and password are replaced by `***`, the query is removed.
pub(crate) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    // The last `@` of everything: a password may hold unescaped `/`, `?` and `@`, and none of it may show.
    let (user, place) = match rest.rsplit_once('@') {
        Some((_, place)) => ("***@", place),
        None => ("", rest),
    };
    let place = place.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{user}{place}")
}
