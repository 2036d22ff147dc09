//! The keys of clients, their holders, and what each may use. [`spending`] counts the tokens of a month.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use config::gateway::Key;
use masque::h3::RequestHead;
use openai::{OpenAiError, TokenUsage};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use self::spending::Spending;

pub mod spending;

/// The keys of a gateway. If there are none, clients need no key.
#[derive(Debug)]
pub struct Tenants {
    by_hash: Vec<([u8; 32], Arc<Tenant>)>,
    spending: Arc<Spending>,
    now_ns: fn() -> u64,
}

/// The holder of a key.
#[derive(Debug)]
pub struct Tenant {
    /// The name of the key.
    pub name: Arc<str>,
    /// Its share of its class, relative to the weights of other waiting tenants.
    pub weight: u16,
    expires: Option<SystemTime>,
    most_in_flight: u32,
    tokens_per_minute: Option<u32>,
    /// Tokens that it may use in a month.
    monthly_tokens: Option<u64>,
    usage: Arc<Usage>,
}

/// The current use of a key, including its use of gateways that a reload has replaced.
#[derive(Debug, Default)]
struct Usage {
    in_flight: AtomicU32,
    /// Tokens that requests in flight have used so far, if their tokens are limited.
    passed: AtomicU64,
    /// `None` before the first request takes tokens.
    tokens: Mutex<Option<Budget>>,
}

/// A token bucket of tokens: it refills evenly, by the amount allowed per minute, and may be overdrawn for a while.
#[derive(Debug)]
struct Budget {
    /// Below 0 if requests used more than expected.
    left: f64,
    at_ns: u64,
    /// Tokens that requests in flight took in advance.
    reserved: u64,
}

/// A request of a tenant, which counts as in flight until it is dropped.
#[derive(Debug)]
pub struct TenantRequest {
    tenant: Arc<Tenant>,
    spending: Arc<Spending>,
    now_ns: fn() -> u64,
    /// Tokens that were taken from the budget in advance.
    reserved: AtomicU64,
    /// Tokens that were used, as far as known.
    used: AtomicU64,
}

const MINUTE_NS: f64 = 60e9;

/// Returns the SHA-256 of the key in a request's `authorization` field (RFC 6750 §2.1). The time to compare hashes reveals nothing about a
/// key.
#[must_use]
pub fn key_digest(head: &RequestHead) -> Option<[u8; 32]> {
    let (scheme, key) = head.field("authorization")?.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| Sha256::digest(key.trim_ascii()).into())
}

impl Budget {
    fn unused(per_minute: u32, at_ns: u64) -> Self {
        Self { left: f64::from(per_minute), at_ns, reserved: 0 }
    }

    fn refill(&mut self, per_minute: u32, now_ns: u64) {
        let back = now_ns.saturating_sub(self.at_ns) as f64 / MINUTE_NS * f64::from(per_minute);
        (self.left, self.at_ns) = ((self.left + back).min(f64::from(per_minute)), now_ns);
    }

    /// Takes the tokens that a request is expected to use. If these are more than a minute's, the budget must be full. `passed` are
    /// the tokens that requests in flight have used so far.
    ///
    /// # Errors
    /// There are too few, for a time that follows from the used tokens alone: a request may reserve hours of them, use few, and return the
    /// rest at any moment.
    fn take(&mut self, tokens: u64, passed: u64, per_minute: u32, now_ns: u64) -> Result<(), OpenAiError> {
        self.refill(per_minute, now_ns);
        let needed = (tokens as f64).min(f64::from(per_minute));
        if needed > self.left {
            let missing = needed - self.settled((self.reserved, passed), per_minute);
            return Err(match (missing * 60.0 / f64::from(per_minute)).ceil() as u32 {
                0 => OpenAiError::TokensReserved,
                retry_after_s => OpenAiError::TooManyTokens { retry_after_s },
            });
        }
        self.left -= tokens as f64;
        self.reserved = self.reserved.saturating_add(tokens);
        Ok(())
    }

    /// Returns the tokens that are left if used tokens replace the reserved ones.
    fn settled(&self, (reserved, used): (u64, u64), per_minute: u32) -> f64 {
        (self.left + reserved as f64 - used as f64).min(f64::from(per_minute))
    }

    /// Corrects the amount taken by a request, once the amount used is known.
    fn settle(&mut self, (reserved, used): (u64, u64), per_minute: u32, now_ns: u64) {
        self.refill(per_minute, now_ns);
        self.left = self.settled((reserved, used), per_minute);
        self.reserved = self.reserved.saturating_sub(reserved);
    }
}

impl Tenants {
    /// Takes over the keys of a configuration; `spending` has the use of the month. A key that is also in `before` keeps its requests in
    /// flight and its remaining tokens. If it had no limit of tokens there, it begins with an unused minute.
    #[must_use]
    pub fn new(keys: &[Key], spending: &Arc<Spending>, now_ns: fn() -> u64, before: Option<&Self>) -> Self {
        let usage = |key: &Key| {
            let known = before.and_then(|before| before.by_hash.iter().find(|(hash, _)| *hash == key.sha256));
            known.map(|(_, tenant)| tenant.usage.clone())
        };
        let tenant = |key: &Key| Tenant {
            name: key.name.as_str().into(),
            weight: key.weight,
            expires: key.expires.map(SystemTime::from),
            most_in_flight: key.max_in_flight.unwrap_or(u32::MAX),
            tokens_per_minute: key.tokens_per_minute,
            monthly_tokens: key.monthly_tokens,
            usage: usage(key).unwrap_or_default(),
        };
        let by_hash = keys.iter().map(|key| (key.sha256, Arc::new(tenant(key)))).collect();
        Self { by_hash, spending: spending.clone(), now_ns }
    }

    /// Returns the tokens that keys have used this month.
    #[must_use]
    pub const fn spending(&self) -> &Arc<Spending> {
        &self.spending
    }

    /// Returns the tenant of a request, by the key in `authorization` (RFC 6750 §2.1); `None` if clients need no keys.
    ///
    /// # Errors
    /// There is no key, or it is unknown or has expired.
    pub fn of(&self, head: &RequestHead, now: SystemTime) -> Result<Option<Arc<Tenant>>, OpenAiError> {
        if self.by_hash.is_empty() {
            return Ok(None);
        }
        let digest = key_digest(head).ok_or(OpenAiError::Key)?;
        let (_, tenant) = self.by_hash.iter().find(|(hash, _)| *hash == digest).ok_or(OpenAiError::Key)?;
        match tenant.expires {
            Some(expires) if expires <= now => Err(OpenAiError::Key),
            _ => Ok(Some(tenant.clone())),
        }
    }

    /// Begins a request of a tenant.
    ///
    /// # Errors
    /// The maximum of requests is in flight, or the tokens of the month are used up. Requests that have begun continue in that
    /// case.
    pub fn begin(&self, tenant: Arc<Tenant>, now: SystemTime) -> Result<TenantRequest, OpenAiError> {
        if let Some(quota) = tenant.monthly_tokens {
            let admitted = self.spending.admit(&tenant.name, quota, now);
            admitted.map_err(|seconds| OpenAiError::MonthUsed {
                retry_after_s: u32::try_from(seconds).unwrap_or(u32::MAX),
            })?;
        }
        let before = tenant.usage.in_flight.fetch_add(1, Relaxed);
        // The request gives its place back when dropped.
        let most = tenant.most_in_flight;
        let spending = self.spending.clone();
        let request = TenantRequest {
            tenant,
            spending,
            now_ns: self.now_ns,
            reserved: AtomicU64::new(0),
            used: AtomicU64::new(0),
        };
        if before >= most { Err(OpenAiError::TooManyRequests) } else { Ok(request) }
    }
}

impl TenantRequest {
    /// Returns the tenant of the request.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Takes the tokens that the request is expected to use, prompt and answer.
    ///
    /// # Errors
    /// Too few of the tenant's tokens for this minute are left.
    pub fn reserve(&self, tokens: u64) -> Result<(), OpenAiError> {
        let Some(per_minute) = self.tenant.tokens_per_minute else { return Ok(()) };
        let (now_ns, Usage { tokens: budget, passed, .. }) = ((self.now_ns)(), &*self.tenant.usage);
        let mut budget = budget.lock();
        let budget = budget.get_or_insert(Budget::unused(per_minute, now_ns));
        budget.take(tokens, passed.load(Relaxed), per_minute, now_ns)?;
        self.reserved.fetch_add(tokens, Relaxed);
        Ok(())
    }

    /// Notes tokens that an engine has used for the request, before it reports its total.
    pub fn pass(&self, tokens: u64) {
        self.use_tokens(self.used.load(Relaxed).saturating_add(tokens));
    }

    /// Notes the engine's total of used tokens, in place of an earlier total.
    pub fn bill(&self, usage: TokenUsage) {
        self.use_tokens(usage.prompt_tokens.saturating_add(usage.completion_tokens));
    }

    /// Sets the number of used tokens.
    fn use_tokens(&self, now: u64) {
        let before = self.used.swap(now, Relaxed);
        if self.tenant.tokens_per_minute.is_some() {
            // The sum wraps, and so stays exact.
            self.tenant.usage.passed.fetch_add(now.wrapping_sub(before), Relaxed);
        }
    }
}

impl Drop for TenantRequest {
    fn drop(&mut self) {
        self.tenant.usage.in_flight.fetch_sub(1, Relaxed);
        self.spending.spend(&self.tenant.name, self.used.load(Relaxed), SystemTime::now());
        let (mut budget, used) = (self.tenant.usage.tokens.lock(), self.used.load(Relaxed));
        if let (Some(per_minute), Some(budget)) = (self.tenant.tokens_per_minute, &mut *budget) {
            budget.settle((self.reserved.load(Relaxed), used), per_minute, (self.now_ns)());
        }
        self.use_tokens(0);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use config::moment::Moment;
    use masque::h3::Field;

    use super::*;

    thread_local! { static NOW_NS: Cell<u64> = const { Cell::new(1) }; }

    fn now_ns() -> u64 {
        NOW_NS.get()
    }

    fn pass(seconds: u64) {
        NOW_NS.set(NOW_NS.get() + seconds * 1_000_000_000);
    }

    /// The key "sk-1", without limits.
    fn key() -> Key {
        Key::new("ann", Sha256::digest("sk-1").into())
    }

    fn tenants(max_in_flight: Option<u32>, tokens_per_minute: Option<u32>) -> Tenants {
        after(None, max_in_flight, tokens_per_minute)
    }

    fn after(before: Option<&Tenants>, max_in_flight: Option<u32>, tokens_per_minute: Option<u32>) -> Tenants {
        let key = Key { max_in_flight, tokens_per_minute, expires: Moment::parse("2027-01-31"), ..key() };
        Tenants::new(&[key], &Arc::default(), now_ns, before)
    }

    fn begin(tenants: &Tenants) -> Result<TenantRequest, OpenAiError> {
        tenants.begin(tenants.by_hash[0].1.clone(), SystemTime::now())
    }

    #[test]
    fn a_request_is_of_whom_its_key_says_as_long_as_the_key_lives() {
        let tenants = tenants(None, None);
        let at = |text: &str| SystemTime::from(Moment::parse(text).unwrap());
        let of = |value: Option<&'static str>, now: &str| {
            let fields = value.into_iter().map(|value| Field::new("authorization", value)).collect();
            let head = RequestHead {
                method: "POST".into(),
                scheme: None,
                authority: None,
                path: None,
                protocol: None,
                fields,
            };
            tenants.of(&head, at(now)).map(|tenant| tenant.unwrap().name.to_string())
        };
        for value in ["Bearer sk-1", "bearer  sk-1 "] {
            assert_eq!(of(Some(value), "2027-01-30"), Ok("ann".to_owned()));
            assert_eq!(of(Some(value), "2027-01-31"), Err(OpenAiError::Key));
        }
        for value in ["Bearer sk-2", "Bearer ", "Basic sk-1", "sk-1", "Bearer", ""] {
            assert_eq!(of(Some(value), "2027-01-30"), Err(OpenAiError::Key), "{value}");
        }
        assert_eq!(of(None, "2027-01-30"), Err(OpenAiError::Key));
    }

    #[test]
    fn so_many_requests_are_in_flight_and_no_more() {
        let tenants = tenants(Some(2), None);
        let requests = [begin(&tenants), begin(&tenants)];
        assert_eq!(begin(&tenants).unwrap_err(), OpenAiError::TooManyRequests);
        assert_eq!(begin(&tenants).unwrap_err(), OpenAiError::TooManyRequests, "a refusal takes no place");
        drop(requests);
        assert!(begin(&tenants).is_ok());
    }

    #[test]
    fn tokens_come_back_within_a_minute_and_what_was_not_used_at_once() {
        let tenants = tenants(None, Some(600));
        let reserve = |tokens| {
            let request = begin(&tenants).unwrap();
            request.reserve(tokens).map(|()| request)
        };
        let refused = |tokens| match reserve(tokens) {
            Err(OpenAiError::TooManyTokens { retry_after_s }) => retry_after_s,
            other => panic!("{other:?}"),
        };
        let first = reserve(500).unwrap();
        assert_eq!(reserve(200).err(), Some(OpenAiError::TokensReserved));
        first.pass(60);
        first.pass(40);
        drop(first);
        // 100 were used, so 500 are left; the engine's own count takes precedence.
        let second = reserve(400).unwrap();
        second.pass(10);
        second.bill(TokenUsage { prompt_tokens: 100, completion_tokens: 1_000 });
        drop(second);
        // 600 are owed.
        assert_eq!(refused(1), 61);
        pass(61);
        assert!(reserve(10).is_ok());
        // A request for more than a minute's tokens is admitted when the budget is full.
        assert_eq!(refused(10_000), 59);
        pass(59);
        let third = reserve(10_000).unwrap();
        assert_eq!(reserve(1).err(), Some(OpenAiError::TokensReserved));
        drop(third);
        assert!(reserve(600).is_ok(), "nothing of it was used");
        pass(1_000_000);
        let all = reserve(600).unwrap();
        all.pass(600);
        assert_eq!(refused(1), 1, "as much as a minute brings, and no more");
        drop(all);
    }

    #[test]
    fn tokens_that_are_only_reserved_make_nobody_wait_for_longer_than_used_ones_do() {
        let tenants = tenants(None, Some(600));
        let reserve = |tokens| {
            let request = begin(&tenants).unwrap();
            request.reserve(tokens).map(|()| request)
        };
        let first = reserve(100_000).unwrap();
        first.pass(20);
        let refusal = reserve(100).unwrap_err();
        assert_eq!((refusal.retry_after_s(), &refusal), (Some(1), &OpenAiError::TokensReserved));
        assert_eq!(reserve(600).unwrap_err(), OpenAiError::TooManyTokens { retry_after_s: 2 }, "20 were used");
        first.bill(TokenUsage { prompt_tokens: 500, completion_tokens: 400 });
        assert_eq!(reserve(100).unwrap_err(), OpenAiError::TooManyTokens { retry_after_s: 40 }, "300 are owed");
        drop(first);
        assert_eq!(reserve(100).unwrap_err(), OpenAiError::TooManyTokens { retry_after_s: 40 });
        pass(40);
        let second = reserve(100).unwrap();
        second.pass(50);
        drop(second);
        assert_eq!(reserve(600).unwrap_err(), OpenAiError::TooManyTokens { retry_after_s: 55 }, "50 are left");
    }

    #[test]
    fn a_key_that_a_reload_keeps_begins_no_new_minute_and_its_requests_still_count() {
        let before = tenants(Some(2), Some(600));
        let request = begin(&before).unwrap();
        request.reserve(500).unwrap();
        let now = after(Some(&before), Some(1), Some(1_200));
        assert_eq!(begin(&now).unwrap_err(), OpenAiError::TooManyRequests);
        drop(before);
        request.pass(500);
        drop(request);
        let next = begin(&now).unwrap();
        assert_eq!(next.reserve(120), Err(OpenAiError::TooManyTokens { retry_after_s: 1 }));
        pass(1);
        next.reserve(120).unwrap();
        drop(next);
        pass(100);
        assert!(begin(&now).unwrap().reserve(1_200).is_ok(), "the new limit holds");
    }
}
