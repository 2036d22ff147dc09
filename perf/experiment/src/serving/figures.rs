//! The figures of a run.

use plan::serving::{ServingPlan, Workload};

use super::answer::Answered;

/// The figures of one run: sums, so that runs can be added, and the counts behind them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Figures {
    /// By task: how many requests, the sum of their rewards, how many were in time, and how many each model answered.
    pub tasks: Vec<Task>,
    /// How many windows there were, and how many reached each of the workload's thresholds.
    pub windows: (usize, Vec<usize>),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Task {
    pub requests: usize,
    pub reward: f64,
    pub met: usize,
    pub selected: Vec<usize>,
}

impl Figures {
    pub fn of(plan: &ServingPlan, workload: &Workload, answered: &[Answered]) -> Self {
        let none = Task { selected: vec![0; plan.models.len()], ..Task::default() };
        let mut tasks = vec![none; plan.tasks.len()];
        for one in answered {
            let Some(task) = tasks.get_mut(one.task) else { continue };
            task.requests += 1;
            task.reward += one.reward;
            task.met += usize::from(one.met);
            if let Some(selected) = one.model.and_then(|model| task.selected.get_mut(model)) {
                *selected += 1;
            }
        }
        Self { tasks, windows: windows(answered, plan.window, &workload.thresholds) }
    }

    /// Returns the sum of one task, or of all.
    pub fn of_task(&self, task: Option<usize>) -> Task {
        let mut sum =
            Task { selected: vec![0; self.tasks.first().map_or(0, |task| task.selected.len())], ..Task::default() };
        let wanted = self.tasks.iter().enumerate().filter(|(at, _)| task.is_none_or(|task| task == *at));
        for (_, one) in wanted {
            sum.requests += one.requests;
            sum.reward += one.reward;
            sum.met += one.met;
            sum.selected.iter_mut().zip(&one.selected).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    pub fn score(&self) -> Option<f64> {
        self.of_task(None).score()
    }
}

impl Task {
    /// Returns `None` if there was no request.
    pub fn score(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.reward / self.requests as f64)
    }

    pub fn met_pct(&self) -> Option<f64> {
        (self.requests > 0).then(|| 100.0 * self.met as f64 / self.requests as f64)
    }

    /// Returns the percentage of the requests that reached a model.
    pub fn selected_pct(&self, model: usize) -> Option<f64> {
        let all = self.selected.iter().sum::<usize>();
        let selected = self.selected.get(model)?;
        (all > 0).then(|| 100.0 * *selected as f64 / all as f64)
    }
}

/// Counts windows of `size` consecutive requests. Each request is the first of a window if enough requests follow it
/// (the paper, table 2).
fn windows(answered: &[Answered], size: usize, thresholds: &[f64]) -> (usize, Vec<usize>) {
    if thresholds.is_empty() {
        return (0, Vec::new());
    }
    let mut counts = vec![0; thresholds.len()];
    let mut all = 0;
    for window in answered.windows(size.max(1)) {
        let mean = window.iter().map(|one| one.reward).sum::<f64>() / window.len() as f64;
        all += 1;
        // Rewards are rounded to f32; a mean of 0.96 has to count as 0.96.
        let reached = thresholds.iter().map(|threshold| mean >= threshold - 1e-6);
        counts.iter_mut().zip(reached).for_each(|(count, reached)| *count += usize::from(reached));
    }
    (all, counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_without_requests_has_no_shares() {
        let task = Task { requests: 4, reward: 1.0, met: 2, selected: vec![1, 3] };
        assert_eq!((task.score(), task.met_pct(), task.selected_pct(1)), (Some(0.25), Some(50.0), Some(75.0)));
        let none = Task { selected: vec![0, 0], ..Task::default() };
        assert_eq!((none.score(), none.met_pct(), none.selected_pct(1)), (None, None, None));
    }

    #[test]
    fn windows_overlap_and_count_from_their_threshold_on() {
        let answered: Vec<_> = [1.0, 1.0, f64::from(0.94_f32), 0.98, 1.0]
            .map(|reward| Answered { task: 0, model: Some(0), met: true, reward })
            .to_vec();
        assert_eq!(windows(&answered, 2, &[1.0, 0.97, 0.96]), (4, vec![1, 3, 4]));
        assert_eq!(windows(&answered, 20, &[0.0]), (0, vec![0]));
        assert_eq!(windows(&answered, 2, &[]), (0, Vec::new()));
    }
}
