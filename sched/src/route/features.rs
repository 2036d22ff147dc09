//! The inputs that a network receives for a decision, as numbers of about 1.

use super::{request::Model, state::Replica, survey::Survey};
use crate::hash::fnv1a;

/// Which numbers a network receives. Their meaning never changes under the same name: a new set gets a new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Features {
    /// The state of the paper's §4.2: the batch of each replica, the request's class, the rate of requests. Replicas of a
    /// model are sorted by load, so that the network need not learn which is which. This many of each model are included,
    /// the least loaded first.
    Batches(usize),
    /// For each model, the prediction for its best replica, its reward, how full that replica is and how full its replicas
    /// are on average; the class, the rate, the pressure, the budget for each token, how many tokens, the weight.
    Predictions,
}

/// How many numbers [`Features::Predictions`] has for each model, and how many more besides the classes' numbers.
const BY_MODEL: usize = 4;
const OTHERS: usize = 5;

/// Batches and rates are divided by these, and limits by the 40 ms of the paper's §5.1.1.
const BATCH: f64 = 16.0;
const LIMIT_NS: f64 = 40e6;
const TOKENS: f64 = 200.0;

impl Features {
    /// Returns the name for the metadata of weights.
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

    /// Returns how many numbers there are for this many models and classes.
    #[must_use]
    pub const fn len(&self, models: usize, classes: usize) -> usize {
        match self {
            Self::Batches(replicas) => models.saturating_mul(*replicas).saturating_add(classes).saturating_add(1),
            Self::Predictions => models.saturating_mul(BY_MODEL).saturating_add(classes).saturating_add(OTHERS),
        }
    }

    /// Replaces the contents of `input` by the numbers for a decision.
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

/// Limits a number that may be infinite to 4: beyond that, later makes no difference.
fn capped(number: f64) -> f32 {
    number.min(4.0) as f32
}

fn batches(replicas: usize, survey: &Survey<'_>, input: &mut Vec<f32>) {
    for model in 0..survey.models.len() {
        let start = input.len();
        let is_open = |replica: &&Replica| replica.model == model && replica.usable && !replica.load.is_closed();
        let loads = survey.state.replicas.iter().filter(is_open);
        input.extend(loads.map(|replica| (f64::from(replica.load.in_flight()) / BATCH) as f32));
        if let Some(loads) = input.get_mut(start..) {
            loads.sort_unstable_by(f32::total_cmp);
        }
        // A replica that is missing, or refuses requests, counts as full.
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

/// Returns a number that identifies the models, classes and features that a policy was made for: equal only if the policy
/// fits.
///
/// Models count by [`Model::id`], in their order; rewards do not, since a policy may be kept when rewards change a little.
#[must_use]
pub fn fingerprint(models: &[Model], classes: usize, features: Features) -> u64 {
    let name = features.name();
    let ids = models.iter().flat_map(|model| model.id.to_le_bytes());
    let counts = [models.len() as u64, classes as u64].into_iter().flat_map(u64::to_le_bytes);
    fnv1a(name.bytes().chain(counts).chain(ids))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::route::{
        curve::{Cost, Curve},
        request::{ModelSet, RoutedRequest, Slo},
        state::{ClientPath, EngineLoad, State},
        survey::survey,
    };

    fn models(count: u64) -> Vec<Model> {
        (0..count).map(|id| Model { id, rewards: vec![1.0 / (id + 1) as f32] }).collect()
    }

    fn replica(model: usize, running: u32) -> Replica {
        let curve = Curve::new(Cost { gpu_ns: 1e7, gpu_per_sequence_ns: 1e6, ..Cost::default() });
        let load = EngineLoad { running, ..EngineLoad::default() };
        Replica { model, group: 0, usable: true, most_running: 32, load, curve }
    }

    fn fill(features: Features, models: &[Model], replicas: &[Replica], request: &RoutedRequest) -> Vec<f32> {
        let state = State { replicas, admitted: &[], cached: &[], path: ClientPath::default() };
        let mut candidates = Vec::new();
        let survey = survey(&mut candidates, models, request, &state, (4.0, 0));
        let mut input = Vec::new();
        features.fill(&survey, 2, &mut input);
        input
    }

    fn request() -> RoutedRequest {
        RoutedRequest {
            class: 1,
            prompt_tokens: 10,
            expected_tokens: 100,
            max_tokens: 0,
            slo: Slo::within(4_000_000_000),
            weight: 1.0,
            allowed: ModelSet::ALL,
        }
    }

    #[test]
    fn batches_are_sorted_by_model_and_what_is_not_there_is_full() {
        let replicas = [replica(0, 16), replica(0, 8), replica(1, 4)];
        let input = fill(Features::Batches(2), &models(2), &replicas, &request());
        assert_eq!(input, [0.5, 1.0, 0.25, 4.0, 0.0, 1.0, 0.5]);
    }

    #[test]
    fn names_come_back_as_the_same_features() {
        for features in [Features::Predictions, Features::Batches(1), Features::Batches(12)] {
            assert_eq!(Features::from_name(&features.name()), Some(features));
        }
        for wrong in ["", "predictions-v2", "batches-0-v1", "batches--v1", "batches-99999-v1", "batches-4"] {
            assert_eq!(Features::from_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn fingerprints_differ_by_models_their_order_classes_and_features() {
        let mut turned = models(3);
        turned.reverse();
        let all = [
            fingerprint(&models(3), 2, Features::Predictions),
            fingerprint(&models(2), 2, Features::Predictions),
            fingerprint(&turned, 2, Features::Predictions),
            fingerprint(&models(3), 3, Features::Predictions),
            fingerprint(&models(3), 2, Features::Batches(4)),
        ];
        assert!(all.iter().enumerate().all(|(at, one)| !all[..at].contains(one)));
        let mut repriced = models(3);
        repriced[0].rewards = vec![0.1];
        assert_eq!(fingerprint(&repriced, 2, Features::Predictions), all[0]);
    }

    proptest! {
        #[test]
        fn there_are_as_many_numbers_as_promised_and_all_are_finite(
            loads in prop::collection::vec((0..4usize, any::<u32>(), any::<u32>(), any::<f64>(), any::<bool>()), 0..9),
            class in any::<usize>(), budget_ns in any::<u64>(), tokens in any::<u32>(), weight in any::<f32>(),
            count in 1..4u64, seen in 1..4usize,
        ) {
            let replicas: Vec<_> = loads.into_iter().map(|(model, running, waiting, others_utilisation, usable)| {
                let load = EngineLoad { running, waiting, others_utilisation, ..EngineLoad::default() };
                Replica { load, usable, ..replica(model, 0) }
            }).collect();
            let request = RoutedRequest { class, expected_tokens: tokens, slo: Slo::within(budget_ns), weight, ..request() };
            for features in [Features::Predictions, Features::Batches(seen)] {
                let input = fill(features, &models(count), &replicas, &request);
                prop_assert_eq!(input.len(), features.len(count as usize, 2));
                prop_assert!(input.iter().all(|number| number.is_finite()), "{:?}", input);
            }
        }
    }
}
