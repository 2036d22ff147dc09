//! What a network sees of a decision, as numbers of about 1.

use super::request::Model;
use super::survey::Survey;

/// Which numbers a network sees. Their meaning never changes under the same name: a new set is a new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Features {
    /// The state of the paper §4.3: the batch of each replica, the request's class, the rate of requests. Replicas of a
    /// model are sorted by load, so that nothing has to be learned about which is which. This many of each model are seen.
    Batches(usize),
    /// For each model, what is predicted of its best replica, how full that is and how full its replicas are on average; the
    /// class, the rate, the pressure, the budget for each token, how many tokens, the weight.
    Predictions,
}

/// Numbers for each model in [`Features::Predictions`], and numbers beside the classes'.
const BY_MODEL: usize = 4;
const OTHERS: usize = 5;

/// Batches and rates are divided by these, and limits by the 40 ms of the paper §5.1.1.
const BATCH: f64 = 16.0;
const LIMIT_NS: f64 = 40e6;
const TOKENS: f64 = 200.0;

impl Features {
    /// Returns the name for metadata of weights.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Batches(replicas) => format!("batches-{replicas}-v1"),
            Self::Predictions => "predictions-v1".to_owned(),
        }
    }

    /// Returns the set with this [name](Features::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        if name == "predictions-v1" {
            return Some(Self::Predictions);
        }
        let replicas = name.strip_prefix("batches-")?.strip_suffix("-v1")?.parse().ok()?;
        (1..=1024).contains(&replicas).then_some(Self::Batches(replicas))
    }

    /// Returns how many numbers there are for so many models and classes.
    #[must_use]
    pub const fn len(&self, models: usize, classes: usize) -> usize {
        match self {
            Self::Batches(replicas) => models * *replicas + classes + 1,
            Self::Predictions => models * BY_MODEL + classes + OTHERS,
        }
    }

    /// Replaces `input` by the numbers of a decision.
    pub(super) fn fill(&self, survey: &Survey<'_>, classes: usize, input: &mut Vec<f32>) {
        input.clear();
        match self {
            Self::Batches(replicas) => batches(*replicas, survey, input),
            Self::Predictions => predictions(survey, input),
        }
        input.extend((0..classes).map(|class| f32::from(u8::from(class == survey.request.class))));
        // From one request in 4 s, which is 0, to 64 per second, which is 1.
        input.push(((survey.requests_per_sec.max(0.25) * 4.0).log2() / 8.0) as f32);
        if *self == Self::Predictions {
            let limit = (survey.per_token_limit_ns() / LIMIT_NS).min(4.0);
            let tokens = f64::from(survey.request.tokens()) / TOKENS;
            input.extend([capped(survey.pressure()), limit as f32, tokens.ln_1p() as f32]);
            input.push(survey.request.sound_weight());
        }
    }
}

/// Brings what may be infinite to at most 4: later than that is all the same.
fn capped(number: f64) -> f32 {
    number.min(4.0) as f32
}

fn batches(replicas: usize, survey: &Survey<'_>, input: &mut Vec<f32>) {
    for model in 0..survey.models.len() {
        let start = input.len();
        let loads = survey.state.replicas.iter().filter(|replica| replica.model == model && replica.usable);
        input.extend(loads.map(|replica| (f64::from(replica.load.in_flight()) / BATCH) as f32));
        if let Some(loads) = input.get_mut(start..) {
            loads.sort_unstable_by(f32::total_cmp);
        }
        // What is not there is as good as full.
        input.resize(start + replicas, 4.0);
    }
}

fn predictions(survey: &Survey<'_>, input: &mut Vec<f32>) {
    for model in 0..survey.models.len() {
        let Some(candidate) = survey.of(model) else {
            input.extend([4.0; BY_MODEL]);
            continue;
        };
        let loads = survey.state.replicas.iter().filter(|replica| replica.model == model && replica.usable);
        let (count, batches) = loads.fold((0u32, 0.0), |(count, sum), replica| {
            (count.saturating_add(1), sum + f64::from(replica.load.in_flight()) / BATCH)
        });
        input.extend([capped(candidate.tightness), capped(survey.fill(candidate)), candidate.reward]);
        input.push(capped(batches / f64::from(count.max(1))));
    }
}

/// Returns a number that says for which models, classes and features a policy was made: equal only if it fits.
///
/// Models count by [`Model::id`], in their order; rewards do not, since a policy may be kept when they change a little.
#[must_use]
pub fn fingerprint(models: &[Model], classes: usize, features: Features) -> u64 {
    let name = features.name();
    let ids = models.iter().flat_map(|model| model.id.to_le_bytes());
    let counts = [models.len() as u64, classes as u64].into_iter().flat_map(u64::to_le_bytes);
    // FNV-1a, 64 bits (draft-eastlake-fnv §5).
    name.bytes()
        .chain(counts)
        .chain(ids)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
