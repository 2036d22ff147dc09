//! A memory of steps to learn from.

use crate::random::Random;

/// One step: state, action, reward and next state.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    pub state: Vec<f32>,
    pub action: usize,
    pub reward: f32,
    /// `None` after the last request of an episode.
    pub next: Option<Vec<f32>>,
}

/// The latest steps, at most `most`.
#[derive(Clone, Debug)]
pub(super) struct Replay {
    steps: Vec<Step>,
    most: usize,
    oldest: usize,
}

impl Replay {
    pub fn new(most: usize) -> Self {
        Self { steps: Vec::new(), most: most.max(1), oldest: 0 }
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn push(&mut self, step: Step) {
        if self.steps.len() < self.most {
            self.steps.push(step);
        } else if let Some(oldest) = self.steps.get_mut(self.oldest) {
            *oldest = step;
            self.oldest = (self.oldest + 1) % self.most;
        }
    }

    /// Returns a step chosen uniformly at random; `None` if there is none.
    pub fn draw(&self, random: &mut Random) -> Option<&Step> {
        self.steps.get(random.below(self.steps.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_steps_are_kept() {
        let mut replay = Replay::new(3);
        assert!(replay.draw(&mut Random::new(1)).is_none());
        for action in 0..8 {
            replay.push(Step { state: Vec::new(), action, reward: 0.0, next: None });
        }
        let mut kept: Vec<_> = replay.steps.iter().map(|step| step.action).collect();
        kept.sort_unstable();
        assert_eq!((kept.as_slice(), replay.len()), (&[5, 6, 7][..], 3));
    }
}
