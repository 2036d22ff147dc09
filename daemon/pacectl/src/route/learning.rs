//! The options of `pacectl route tune` and `pacectl route train`: all numbers of the two methods.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum, value_parser};
use routing::Measured;
use sched::route::{Features, train::Training, tune::Search};

#[derive(Args)]
pub(crate) struct Tune {
    /// The scenario, from `pacectl route calibrate`
    #[arg(long, value_name = "FILE")]
    pub scenario: PathBuf,
    /// The file to write the thresholds to [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The measure that thresholds apply to
    #[arg(long, value_enum, default_value = "predicted")]
    measure: MeasureOption,
    /// The number of generations of the search
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = value_parser!(u32).range(1..=10_000))]
    generations: u32,
    /// The number of candidates in each generation
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = value_parser!(u32).range(2..=10_000))]
    candidates: u32,
    /// How many of the best candidates move the search [default: a sixth of the candidates]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=10_000))]
    elites: Option<u32>,
    /// How much earlier generations weigh in each move (smoothing), from 0 to 1
    #[arg(long, value_name = "W", default_value_t = Search::default().inertia, value_parser = part::<f64>)]
    inertia: f64,
    /// The least spread of candidates, as a fraction of the first spread, from 0 to 1
    #[arg(long, value_name = "P", default_value_t = Search::default().least_spread, value_parser = part::<f64>)]
    least_spread: f64,
    /// The seed of random numbers: the same seed makes the same file
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// The measure that thresholds apply to.
#[derive(Clone, Copy, ValueEnum)]
enum MeasureOption {
    /// The fraction of its limits that an answer is predicted to use
    Predicted,
    /// How full an engine's batch is
    Fill,
}

/// The paper is Jha, Chuppala et al., "Quality-of-Service Aware LLM Serving", which `sched::route` cites.
#[derive(Args)]
pub(crate) struct Train {
    /// The scenario, from `pacectl route calibrate`
    #[arg(long, value_name = "FILE")]
    pub scenario: PathBuf,
    /// The file to write the network to
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The input of the network: "predictions", or "batches-N" for the batches of N engines of each model (in the paper batches-4)
    #[arg(long, value_name = "NAME", default_value = "predictions", value_parser = features)]
    features: Features,
    /// The number of updates of the network (in the paper 1200000, which takes hours)
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = value_parser!(u64).range(1..=100_000_000))]
    iterations: u64,
    /// The sizes of the hidden layers, from one to eight layers (in the paper 256,256)
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "64,64", value_parser = value_parser!(u32).range(1..=4096))]
    hidden: Vec<u32>,
    /// The discount of a reward for each later request, from 0 to 1 (in the paper 0.99)
    #[arg(long, value_name = "G", default_value_t = 0.9, value_parser = part::<f32>)]
    gamma: f32,
    /// The learning rate at the beginning, above 0 and up to 1 (in the paper 0.0001)
    #[arg(long, value_name = "R", default_value_t = 5e-4, value_parser = rate)]
    learning_rate: f32,
    /// The learning rate at the end (in the paper the same as at the beginning) [default: a tenth of the rate at the
    /// beginning]
    #[arg(long, value_name = "R", value_parser = rate)]
    last_learning_rate: Option<f32>,
    /// The number of steps in each update
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// The number of remembered steps
    #[arg(long, value_name = "N", default_value_t = 50_000, value_parser = value_parser!(u32).range(1..=1_000_000))]
    replay: u32,
    /// How many steps must be remembered before learning begins
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = value_parser!(u32).range(1..=1_000_000))]
    warm_up: u32,
    /// The number of updates between two copies of the network to the target network
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = value_parser!(u64).range(1..=100_000_000))]
    target_every: u64,
    /// The fraction of random actions at the beginning, from 0 to 1
    #[arg(long, value_name = "E", default_value_t = Training::paper().epsilon, value_parser = part::<f64>)]
    epsilon: f64,
    /// The fraction of random actions in the second half of the training, from 0 to 1
    #[arg(long, value_name = "E", default_value_t = Training::paper().last_epsilon, value_parser = part::<f64>)]
    last_epsilon: f64,
    /// The seed of random numbers: the same seed makes the same file
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// The maximum of hidden layers.
const MOST_LAYERS: usize = 8;

impl Tune {
    /// Returns the measure that thresholds apply to.
    pub const fn measured(&self) -> Measured {
        match self.measure {
            MeasureOption::Predicted => Measured::Predicted,
            MeasureOption::Fill => Measured::Fill,
        }
    }

    /// Returns the search.
    ///
    /// # Errors
    /// There are more elites than candidates.
    pub fn search(&self) -> Result<Search> {
        let Self { generations, candidates, inertia, least_spread, seed, .. } = *self;
        let elites = self.elites();
        ensure!(
            elites <= candidates,
            "--elites {elites} is more than --candidates {candidates}: lower it, or raise --candidates"
        );
        let (generations, candidates, elites) = (generations as usize, candidates as usize, elites as usize);
        Ok(Search { generations, candidates, elites, inertia, least_spread, seed })
    }

    fn elites(&self) -> u32 {
        self.elites.unwrap_or((self.candidates / 6).max(1))
    }

    /// Returns the command that makes the same file.
    pub fn command(&self) -> String {
        let Self { scenario, generations, candidates, inertia, least_spread, seed, .. } = self;
        let measure = match self.measure {
            MeasureOption::Predicted => "predicted",
            MeasureOption::Fill => "fill",
        };
        format!(
            "pacectl route tune --scenario {} --measure {measure} --generations {generations} --candidates {candidates} --elites {} \
             --inertia {inertia} --least-spread {least_spread} --seed {seed}",
            scenario.display(),
            self.elites(),
        )
    }
}

impl Train {
    /// Returns the training.
    ///
    /// # Errors
    /// There are too many layers, or the memory is too small for learning to begin.
    pub fn training(&self) -> Result<Training> {
        let Self { replay, warm_up, .. } = *self;
        ensure!(
            self.hidden.len() <= MOST_LAYERS,
            "--hidden has {} layers: name {MOST_LAYERS} at most",
            self.hidden.len()
        );
        ensure!(
            warm_up <= replay,
            "--warm-up {warm_up} is more than --replay {replay}, so learning would never begin: lower it, or raise --replay"
        );
        Ok(Training {
            features: self.features,
            hidden: self.hidden.iter().map(|units| *units as usize).collect(),
            iterations: self.iterations,
            batch: self.batch as usize,
            replay: replay as usize,
            warm_up: warm_up as usize,
            gamma: self.gamma,
            learning_rate: self.learning_rate,
            last_learning_rate: self.last_learning_rate(),
            epsilon: self.epsilon,
            last_epsilon: self.last_epsilon,
            target_every: self.target_every,
            seed: self.seed,
        })
    }

    fn last_learning_rate(&self) -> f32 {
        self.last_learning_rate.unwrap_or(self.learning_rate / 10.0)
    }

    /// Returns the command that makes the same file.
    pub fn command(&self) -> String {
        let Self { scenario, iterations, gamma, learning_rate, batch, replay, warm_up, target_every, .. } = self;
        let layers: Vec<_> = self.hidden.iter().map(ToString::to_string).collect();
        format!(
            "pacectl route train --scenario {} --features {} --iterations {iterations} --hidden {} --gamma {gamma} \
             --learning-rate {learning_rate} --last-learning-rate {} --batch {batch} --replay {replay} --warm-up {warm_up} \
             --target-every {target_every} --epsilon {} --last-epsilon {} --seed {}",
            scenario.display(),
            self.features.name().trim_end_matches("-v1"),
            layers.join(","),
            self.last_learning_rate(),
            self.epsilon,
            self.last_epsilon,
            self.seed,
        )
    }
}

fn features(text: &str) -> Result<Features, &'static str> {
    Features::from_name(&format!("{text}-v1")).ok_or("expected predictions, or batches-1 to batches-1024")
}

fn part<T: std::str::FromStr + PartialOrd + From<u8>>(text: &str) -> Result<T, &'static str> {
    let number = text.parse().ok().filter(|number| (T::from(0)..=T::from(1)).contains(number));
    number.ok_or("expected a number from 0 to 1")
}

fn rate(text: &str) -> Result<f32, &'static str> {
    part(text).ok().filter(|rate| *rate > 0.0).ok_or("expected a number above 0 and up to 1")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    enum Learn {
        Tune(Tune),
        Train(Train),
    }

    fn parse(words: &str) -> Result<Learn, String> {
        Learn::try_parse_from(["route"].into_iter().chain(words.split_whitespace())).map_err(|error| error.to_string())
    }

    fn search(options: &str) -> Result<(Search, String), String> {
        let Learn::Tune(tune) = parse(&format!("tune --scenario s {options}"))? else { panic!("{options}") };
        let search = tune.search().map_err(|error| error.to_string())?;
        Ok((search, tune.command()))
    }

    fn training(options: &str) -> Result<(Training, String), String> {
        let Learn::Train(train) = parse(&format!("train --scenario s -o n {options}"))? else { panic!("{options}") };
        let training = train.training().map_err(|error| error.to_string())?;
        Ok((training, train.command()))
    }

    #[test]
    fn every_number_of_the_search_is_an_option_and_the_command_in_the_file_repeats_all() {
        assert_eq!(search("").unwrap().0, Search::default());
        let all = "--generations 7 --candidates 30 --elites 3 --inertia 0.6 --least-spread 0.25 --seed 9";
        let wanted = Search { generations: 7, candidates: 30, elites: 3, inertia: 0.6, least_spread: 0.25, seed: 9 };
        let (found, command) = search(all).unwrap();
        assert_eq!(found, wanted);
        let (_, again) = command.split_once(" --scenario s ").unwrap();
        assert_eq!(search(again).unwrap(), (wanted, command.clone()));
        assert_eq!(search("--candidates 60").unwrap().0.elites, 10);
    }

    #[test]
    fn every_number_of_the_training_is_an_option_and_the_command_in_the_file_repeats_all() {
        let (found, _) = training("").unwrap();
        let own = Training {
            features: Features::Predictions,
            iterations: 200_000,
            hidden: vec![64, 64],
            gamma: 0.9,
            learning_rate: 5e-4,
            last_learning_rate: 5e-4 / 10.0,
            ..Training::paper()
        };
        assert_eq!(found, own, "everything else as in `Training::paper`");
        let all = "--features batches-4 --iterations 10 --hidden 8,9,10 --gamma 0.5 --learning-rate 0.25 \
                   --last-learning-rate 0.125 --batch 3 --replay 70 --warm-up 20 --target-every 4 --epsilon 0.75 \
                   --last-epsilon 0.5 --seed 6";
        let wanted = Training {
            features: Features::Batches(4),
            hidden: vec![8, 9, 10],
            iterations: 10,
            batch: 3,
            replay: 70,
            warm_up: 20,
            gamma: 0.5,
            learning_rate: 0.25,
            last_learning_rate: 0.125,
            epsilon: 0.75,
            last_epsilon: 0.5,
            target_every: 4,
            seed: 6,
        };
        let (found, command) = training(all).unwrap();
        assert_eq!(found, wanted);
        let (_, again) = command.split_once(" --scenario s ").unwrap();
        assert_eq!(training(again).unwrap(), (wanted, command.clone()));
        let paper = "--features batches-4 --iterations 1200000 --hidden 256,256 --gamma 0.99 --learning-rate 0.0001 \
                     --last-learning-rate 0.0001";
        assert_eq!(training(paper).unwrap().0, Training::paper());
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range_or_the_remedy() {
        for (options, message) in [
            ("--elites 0", "0 is not in 1..=10000"),
            ("--elites 49", "--elites 49 is more than --candidates 48: lower it, or raise --candidates"),
            ("--candidates 1", "1 is not in 2..=10000"),
            ("--generations 0", "0 is not in 1..=10000"),
            ("--inertia 1.5", "expected a number from 0 to 1"),
            ("--least-spread NaN", "expected a number from 0 to 1"),
        ] {
            let refused = search(options).unwrap_err();
            assert!(refused.contains(message), "{options}: {refused}");
        }
        for (options, message) in [
            ("--hidden 0", "0 is not in 1..=4096"),
            ("--hidden 1,1,1,1,1,1,1,1,1", "--hidden has 9 layers: name 8 at most"),
            ("--iterations 0", "0 is not in 1..=100000000"),
            ("--gamma 1.1", "expected a number from 0 to 1"),
            ("--learning-rate 0", "expected a number above 0 and up to 1"),
            ("--last-learning-rate=-1", "expected a number above 0 and up to 1"),
            ("--batch 0", "0 is not in 1..=65536"),
            ("--replay 1000001", "1000001 is not in 1..=1000000"),
            ("--replay 999", "--warm-up 1000 is more than --replay 999, so learning would never begin"),
            ("--target-every 0", "0 is not in 1..=100000000"),
            ("--epsilon 2", "expected a number from 0 to 1"),
            ("--last-epsilon x", "expected a number from 0 to 1"),
        ] {
            let refused = training(options).unwrap_err();
            assert!(refused.contains(message), "{options}: {refused}");
        }
    }
}
