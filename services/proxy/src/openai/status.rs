//! The status page at `/`: one static document that reads the same endpoints as everybody else. It has nothing from
//! elsewhere, so it works without a network, and it is allowed to reach this origin only.

use axum::http::header;
use axum::response::{Html, IntoResponse};

const PAGE: &str = include_str!("status.html");
/// No source but the document itself, no requests but to this origin, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub(super) async fn page() -> impl IntoResponse {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Html(PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_nothing_from_elsewhere_and_sets_no_markup() {
        for forbidden in
            ["http://", "https://", " src=", "<link", "@import", "innerHTML", "document.write", "eval("]
        {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
    }
}
