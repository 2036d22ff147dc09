//! The cipher suites of both roles, and the source of their random numbers.

use std::sync::Arc;

use rustls::crypto::{
    CryptoProvider, aws_lc_rs,
    aws_lc_rs::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256},
};

/// Returns the cryptography of all handshakes.
pub(super) fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // rustls prefers AES-256 with SHA-384. AES-128 makes packets cheaper, and SHA-256 handshakes. All implementations have this suite (RFC
    // 8446 §9.1).
    provider.cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    // AWS-LC takes its first entropy from the CPU's jitter, which lasts 50 ms and more, so this is done before any
    // handshake. Callers that need more than one byte of it find out whether it works.
    _ = provider.secure_random.fill(&mut [0]);
    Arc::new(provider)
}
