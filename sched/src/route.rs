//! Which model answers a request: the best one that still meets its deadline, a smaller one under higher load.
//!
//! The question and the measure are those of Jha, Chuppala et al.: "Quality-of-Service Aware LLM Serving" (§4.2 and §5.1),
//! "the paper" in these modules. Its answer, a network trained by deep Q-learning, is one of the policies here; a rule that
//! only predicts, and tuned thresholds, do as well or better in our simulation.
//!
//! ```text
//!   RoutedRequest ─┐                     ┌─ RoutingPolicy: fixed, turns, least loaded, rule, thresholds, DQN
//!   State ─────────┼─► survey: for each ─┤
//!   Models ────────┘   model its best    └─ guard: never late while another is in time ──► ModelChoice
//!                      replica, and when
//!                      it would answer        tokens seen ──► Curve::observe_*     outcomes ──► Router::observe
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`serving`] | simulated engines on GPUs, on which policies are tried, tuned and trained |
//! | [`tune`] | the cross-entropy method, which tunes thresholds |
//! | [`train`] | networks, trained by double deep Q-learning |
//!
//! A gateway keeps a [`Router`] and, for each engine, a [`Replica`] with its counts and its [`Curve`]:
//!
//! ```
//! use sched::route::{ClientPath, Cost, Curve, EngineLoad, Model, ModelSet, Reason};
//! use sched::route::{Replica, RoutedRequest, Router, RoutingPolicy, Slo, State};
//!
//! const MS: u64 = 1_000_000;
//! let large = Model { id: 1, rewards: vec![1.0] };
//! let small = Model { id: 2, rewards: vec![0.7] };
//! let mut router = Router::new(vec![large, small], RoutingPolicy::Rule { margin: 1.1 });
//!
//! let guess = |gpu_ms: f64, more_ms: f64| {
//!     Curve::new(Cost { gpu_ns: gpu_ms * 1e6, gpu_per_sequence_ns: more_ms * 1e6, ..Cost::default() })
//! };
//! let replica = |model, curve| Replica {
//!     model,
//!     group: 0,
//!     usable: true,
//!     most_running: 32,
//!     load: EngineLoad::default(),
//!     curve,
//! };
//! let mut replicas = [replica(0, guess(22.0, 3.6)), replica(1, guess(7.0, 0.3))];
//!
//! // 200 tokens within 8 s, to a client 30 ms away.
//! let request = RoutedRequest {
//!     class: 0,
//!     prompt_tokens: 100,
//!     expected_tokens: 200,
//!     max_tokens: 500,
//!     slo: Slo::within(8_000 * MS),
//!     weight: 1.0,
//!     allowed: ModelSet::ALL,
//! };
//! let path = ClientPath { smoothed_rtt_ns: 60 * MS, ..ClientPath::default() };
//! let choice = router.route(&request, &State { replicas: &replicas, admitted: &[], cached: &[], path }, 0).expect("a usable replica");
//! assert_eq!((choice.model, choice.reason), (0, Reason::InTime));
//!
//! // The engine turns out to be slower: its tokens come 60 ms apart at a batch of 1.
//! for _ in 0..100 {
//!     replicas[0].curve.observe_step(1.0, 0.0, 60 * MS);
//! }
//! let choice = router.route(&request, &State { replicas: &replicas, admitted: &[], cached: &[], path }, 500 * MS).expect("a usable replica");
//! assert_eq!((choice.model, choice.reason), (1, Reason::InTime));
//! ```
//!
//! Nothing here reads or writes files: [`Curve::to_numbers`], [`Thresholds::parameters`], [`Mlp::tensors`] and the fields of a
//! [`Dqn`] are the state worth keeping, for TOML or the `safetensors` format, which another crate implements.
//!
//! **Invariant:** everything here is a function of its arguments: loads, times and seeds come from the caller. No numbers
//! cause a panic, and a guarded router never prefers a model predicted late to one in time.

mod admitted;
mod choice;
mod considerate;
mod curve;
mod durations;
mod features;
mod lengths;
mod mlp;
mod policy;
mod rate;
mod request;
mod rls;
mod router;
pub mod serving;
mod state;
mod survey;
pub mod train;
pub mod tune;

pub use admitted::Commitment;
pub use choice::{FallbackCause, ModelChoice, Reason};
pub use curve::{Cost, Curve, WINDOW_TOKENS};
pub use durations::{AnswerDuration, AnswerDurations};
pub use features::{Features, fingerprint};
pub use lengths::{AnswerLengths, MeanLengths, OpenAnswer};
pub use mlp::{Activations, Mlp, Tensor};
pub use policy::{DOUBT, Dqn, Measure, RoutingPolicy, Thresholds};
pub use request::{Model, ModelSet, RoutedRequest, Slo, unread_tokens};
pub use router::{MARGIN, MARGIN_PERCENT, Router, RouterCounters};
pub use state::{ClientPath, EngineLoad, Prediction, Replica, State, share_groups};

pub use crate::random::Random;
