//! The parties that pay for a request.

use std::sync::Arc;

use quic::class::Class;
use tenants::TenantRequest;

/// The parties that pay for the tokens.
pub(super) struct Payer<'a> {
    pub(super) user: Option<&'a Arc<str>>,
    pub(super) class: &'a Class,
    pub(super) tenant: Option<&'a TenantRequest>,
}

impl Payer<'_> {
    /// Notes tokens that the engine has used, before it reports its total.
    pub(super) fn pass(&self, tokens: u64) {
        if let Some(tenant) = self.tenant {
            tenant.pass(tokens);
        }
    }
}
