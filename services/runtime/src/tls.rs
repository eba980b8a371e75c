//! TLS has one provider, ring, installed first thing in `main`.

/// Installs the provider. Called again, it does nothing.
pub fn install_provider() {
    // The error only says that a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
