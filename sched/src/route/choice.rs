//! Which model and replica were chosen, and why.

/// The answer of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelChoice {
    /// The index of the model.
    pub model: usize,
    /// The replica's index in [`State::replicas`](super::State::replicas).
    pub replica: usize,
    /// When the last token is expected at the client, from now; 0 if the costs of the replica are unknown.
    pub predicted_ns: u64,
    /// Whether that is within all limits of the request.
    pub in_time: bool,
    /// Why this model was chosen.
    pub reason: Reason,
}

/// Why a model was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is the only model that is allowed and available.
    Only,
    /// It is the policy's fixed model.
    Fixed,
    /// It was its turn.
    Turn,
    /// Its replica has the fewest requests.
    LeastLoaded,
    /// It has the largest reward of the models predicted in time with a margin.
    InTime,
    /// No model was good enough: this one is the earliest and in time, or none is in time and it is the cheapest.
    NoneInTime,
    /// Its answer is worth most after subtracting the harm to other requests, and is predicted in time.
    Worth,
    /// It has the largest reward of the models below their thresholds.
    Threshold,
    /// The rate of requests is too high for any model but the cheapest.
    Overload,
    /// It has the largest value according to the policy's network.
    Value,
    /// The policy's choice was predicted late, and this one is predicted in time.
    Guard,
    /// The policy could not decide, so the rule did.
    Fallback(FallbackCause),
    /// It was predicted late, and the request shows whether it still is. No policy of this crate decides so: a caller that has engines may.
    Trial,
}

/// Why a policy could not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallbackCause {
    /// A number was NaN or infinite.
    NotFinite,
    /// The load of a replica is too old.
    Stale,
    /// The policy was made for different models, classes or features.
    Fingerprint,
    /// The policy's model is missing, not allowed or not usable.
    Unavailable,
}

impl FallbackCause {
    /// All causes, in the order in which [`RouterCounters`](super::RouterCounters) counts them.
    pub const ALL: [Self; 4] = [Self::NotFinite, Self::Stale, Self::Fingerprint, Self::Unavailable];

    /// Returns the index in [`FallbackCause::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::NotFinite => 0,
            Self::Stale => 1,
            Self::Fingerprint => 2,
            Self::Unavailable => 3,
        }
    }

    /// Returns a short name for metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotFinite => "not_finite",
            Self::Stale => "stale",
            Self::Fingerprint => "fingerprint",
            Self::Unavailable => "unavailable",
        }
    }
}

impl Reason {
    /// Returns a short name for metrics and logs. All fallbacks have the same; [`FallbackCause::name`] tells them apart.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Fixed => "fixed",
            Self::Turn => "turn",
            Self::LeastLoaded => "least_loaded",
            Self::InTime => "in_time",
            Self::NoneInTime => "none_in_time",
            Self::Worth => "worth",
            Self::Threshold => "threshold",
            Self::Overload => "overload",
            Self::Value => "value",
            Self::Guard => "guard",
            Self::Fallback(_) => "fallback",
            Self::Trial => "trial",
        }
    }
}
