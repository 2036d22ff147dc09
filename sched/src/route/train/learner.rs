//! The decider during training: the network, occasional random actions, and an update after each decision.

use super::{
    adam::{Adam, Gradient},
    recipe::{Trained, Training},
    replay::{Replay, Step},
};
use crate::{
    random::Random,
    route::{
        choice::{ModelChoice, Reason},
        mlp::{Activations, Mlp},
        policy::Dqn,
        rate::Rate,
        request::{Model, RoutedRequest},
        serving::{Decide, RunOutcome, Setup},
        state::State,
        survey::{Candidate, survey},
    },
};

pub(super) struct Learner<'a> {
    training: &'a Training,
    models: Vec<Model>,
    classes: usize,
    network: Mlp,
    target: Mlp,
    adam: Adam,
    gradient: Gradient,
    replay: Replay,
    random: Random,
    updates: u64,
    /// The steps of this episode, by the number of the decision.
    steps: Vec<Pending>,
    rate: Rate,
    candidates: Vec<Candidate>,
    activations: [Activations; 2],
    /// Sum and count for each tenth of the training.
    losses: [(f64, u64); TENTHS],
    rewards: [(f64, u64); TENTHS],
}

/// A decision whose reward or next state is not yet known.
struct Pending {
    state: Vec<f32>,
    action: usize,
    weight: f32,
    reward: Option<f32>,
    stored: bool,
}

const TENTHS: usize = 10;

impl<'a> Learner<'a> {
    pub fn new(setup: &Setup, training: &'a Training, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let inputs = training.features.len(setup.models.len(), setup.classes());
        let sizes: Vec<usize> = [inputs].iter().chain(&training.hidden).chain(&[setup.models.len()]).copied().collect();
        let network = Mlp::random(&sizes, &mut random);
        Self {
            training,
            models: setup.models.clone(),
            classes: setup.classes(),
            target: network.clone(),
            adam: Adam::new(&network),
            gradient: Gradient::new(&network),
            network,
            replay: Replay::new(training.replay),
            random,
            updates: 0,
            steps: Vec::new(),
            rate: Rate::default(),
            candidates: Vec::new(),
            activations: Default::default(),
            losses: [(0.0, 0); TENTHS],
            rewards: [(0.0, 0); TENTHS],
        }
    }

    pub fn is_done(&self) -> bool {
        self.updates >= self.training.iterations
    }

    /// Stores the last step, which has no successor, and clears the episode.
    pub fn end_episode(&mut self) {
        for number in 0..self.steps.len() {
            self.store(number, true);
        }
        self.steps.clear();
        self.rate = Rate::default();
    }

    pub fn into_trained(self) -> Trained {
        let means =
            |sums: &[(f64, u64); TENTHS]| sums.iter().map(|(sum, count)| sum / (*count).max(1) as f64).collect();
        let (losses, rewards) = (means(&self.losses), means(&self.rewards));
        Trained { dqn: Dqn::new(self.network, self.training.features, &self.models, self.classes), losses, rewards }
    }

    /// Returns the completed fraction of the training, from 0 to 1.
    fn progress(&self) -> f64 {
        (self.updates as f64 / self.training.iterations.max(1) as f64).min(1.0)
    }

    fn tenth(&self) -> usize {
        ((self.progress() * TENTHS as f64) as usize).min(TENTHS - 1)
    }

    fn explores(&mut self) -> bool {
        let part = (2.0 * self.progress()).min(1.0);
        let epsilon = self.training.epsilon + part * (self.training.last_epsilon - self.training.epsilon);
        self.random.uniform() <= epsilon
    }

    /// Moves a step into the memory once its reward and the next state are known.
    fn store(&mut self, number: usize, last: bool) {
        let next = self.steps.get(number + 1).map(|next| next.state.clone());
        let Some(step) = self.steps.get_mut(number).filter(|step| !step.stored) else { return };
        if let Some(reward) = step.reward
            && (next.is_some() || last)
        {
            step.stored = true;
            self.replay.push(Step {
                state: step.state.clone(),
                action: step.action,
                reward: reward * step.weight,
                next,
            });
        }
    }

    fn update(&mut self) {
        if self.is_done() || self.replay.len() < self.training.warm_up.max(1) {
            return;
        }
        let [now, later] = &mut self.activations;
        self.gradient.clear();
        let mut loss = 0.0;
        for _ in 0..self.training.batch {
            let Some(step) = self.replay.draw(&mut self.random) else { return };
            let future = step.next.as_ref().map_or(0.0, |next| {
                let action = largest(self.network.forward(next, later));
                self.target.forward(next, later).get(action).copied().unwrap_or(0.0)
            });
            let wanted = self.training.gamma.mul_add(future, step.reward);
            let value = self.network.forward(&step.state, now).get(step.action).copied().unwrap_or(0.0);
            let error = value - wanted;
            loss += f64::from(error * error) / 2.0;
            // The derivative of Huber's loss: an error counts for at most 1 (Mnih et al., Nature 2015).
            self.gradient.add(&self.network, &step.state, now, step.action, error.clamp(-1.0, 1.0));
        }
        let tenth = self.tenth();
        if let Some((sum, count)) = self.losses.get_mut(tenth) {
            (*sum, *count) = (*sum + loss / self.training.batch.max(1) as f64, *count + 1);
        }
        let (first, last) = (self.training.learning_rate, self.training.last_learning_rate);
        let rate = (self.progress() as f32).mul_add(last - first, first);
        self.adam.step(&mut self.network, &self.gradient, self.training.batch, rate);
        self.updates += 1;
        if self.updates.is_multiple_of(self.training.target_every.max(1)) {
            self.target.clone_from(&self.network);
        }
    }
}

impl Decide for Learner<'_> {
    fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
        self.rate.arrived(now_ns);
        let survey = survey(&mut self.candidates, &self.models, request, state, (self.rate.per_sec(), now_ns));
        let mut input = Vec::new();
        self.training.features.fill(&survey, self.classes, &mut input);
        let action = if self.explores() {
            self.random.below(self.models.len())
        } else {
            largest(self.network.forward(&input, &mut self.activations[0]))
        };
        let choice = self.candidates.iter().find(|candidate| candidate.model == action);
        let choice = choice.map(|candidate| candidate.choice(Reason::Value));
        self.steps.push(Pending { state: input, action, weight: request.sound_weight(), reward: None, stored: false });
        if let Some(before) = self.steps.len().checked_sub(2) {
            self.store(before, false);
        }
        self.update();
        choice
    }

    fn ended(&mut self, outcome: &RunOutcome) {
        let tenth = self.tenth();
        if let Some(step) = self.steps.get_mut(outcome.number) {
            step.reward = Some(outcome.reward);
            if let Some((sum, count)) = self.rewards.get_mut(tenth) {
                (*sum, *count) = (*sum + f64::from(outcome.reward * step.weight), *count + 1);
            }
        }
        self.store(outcome.number, false);
    }
}

/// Returns the index of the largest value.
fn largest(values: &[f32]) -> usize {
    let best = values.iter().enumerate().max_by(|(_, one), (_, other)| one.total_cmp(other));
    best.map_or(0, |(at, _)| at)
}
