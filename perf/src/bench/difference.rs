//! The effect of a change: two builds of paced run the same steps in turns, and the table shows the instructions per
//! payload of both, the change, and how much rounds of one build differ.

use std::{fmt::Write as _, path::Path};

use anyhow::{Context as _, Result, ensure};
use instruments::{
    load::{echo::Echo, one_way::Direction, value},
    relay::{Kind, Started, program},
};

use super::{Step, over_one_connection};

/// Payloads per second of the steps with a rate: four in each tick of the generator.
const RATE: f64 = 16e3;

/// How long each step is measured, in seconds of a clock that counts instructions.
const SECONDS: f64 = 0.2;

/// The cost of a step in one round.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Instructions per payload.
    instructions: f64,
    loss_percent: f64,
}

/// All rounds of one step.
struct Row {
    step: String,
    before: Vec<Cost>,
    after: Vec<Cost>,
}

/// Measures the build beside this program, in turns with the one at `before`; prints the table.
///
/// CPU time is interpreted as a number of instructions, so the clock has to count these (`tests/vm/run --icount`).
///
/// # Errors
/// When a program is missing, does not start, or carries nothing.
pub async fn run(before: Option<&Path>, rounds: usize) -> Result<()> {
    ensure!(rounds > 0, "at least one round is needed");
    let after = program(Kind::Paced)?;
    let mut rows: Vec<_> =
        steps().map(|step| (step, Row { step: step.name(), before: Vec::new(), after: Vec::new() })).collect();
    for _ in 0..rounds {
        for (step, row) in &mut rows {
            if let Some(before) = before {
                row.before.push(cost(*step, before).await?);
            }
            row.after.push(cost(*step, &after).await?);
            eprintln!("{}", row.line());
        }
    }
    println!("| step | before: instructions | loss, % | after: instructions | loss, % | change, % | noise, % |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (_, row) in &rows {
        println!("{}", row.line());
    }
    Ok(())
}

/// The steps: one tunnel and a hundred, in both directions at once and in each direction alone.
fn steps() -> impl Iterator<Item = Step> {
    let echo = [(1, 64), (100, 4)].map(|(tunnels, window)| {
        Step::Echo(Echo { tunnels: over_one_connection(tunnels), window, seconds: SECONDS, sockets: false })
    });
    let one_way = [Direction::Up, Direction::Down].into_iter().flat_map(|direction| {
        [1, 100].map(|tunnels| Step::AtRate {
            direction,
            tunnels: over_one_connection(tunnels),
            rate: RATE,
            seconds: SECONDS,
        })
    });
    echo.into_iter().chain(one_way)
}

/// Runs a step against a fresh relay, because earlier work would count.
async fn cost(step: Step, program: &Path) -> Result<Cost> {
    let started = Started::paced(program)?;
    let figures = step.run(Kind::Paced, &started.relay).await.with_context(|| step.name())?;
    let of = |metric| value(&figures, metric).with_context(|| format!("no {metric}"));
    Ok(Cost { instructions: of("relay CPU per payload")?, loss_percent: of("loss")? })
}

impl Row {
    fn line(&self) -> String {
        let mut line = format!("| {} |", self.step);
        for costs in [&self.before, &self.after] {
            match mean(costs) {
                Some(mean) => _ = write!(line, " {:.0} | {:.2} |", mean.instructions, mean.loss_percent),
                None => line += " – | – |",
            }
        }
        match (mean(&self.before), mean(&self.after)) {
            (Some(before), Some(after)) => {
                _ = write!(line, " {:+.1} |", 100.0 * (after.instructions / before.instructions - 1.0));
            }
            _ => line += " – |",
        }
        let noise = [&self.before, &self.after].into_iter().filter_map(|costs| spread_percent(costs)).reduce(f64::max);
        match noise {
            Some(noise) => _ = write!(line, " {noise:.1} |"),
            None => line += " – |",
        }
        line
    }
}

fn mean(costs: &[Cost]) -> Option<Cost> {
    let count = costs.len() as f64;
    let sum = |of: fn(&Cost) -> f64| costs.iter().map(of).sum::<f64>() / count;
    (count > 0.0)
        .then(|| Cost { instructions: sum(|cost| cost.instructions), loss_percent: sum(|cost| cost.loss_percent) })
}

/// Returns how far the dearest round lies above the cheapest, in percent, or `None` for a single round.
fn spread_percent(costs: &[Cost]) -> Option<f64> {
    let all = || costs.iter().map(|cost| cost.instructions);
    let (least, most) = (all().reduce(f64::min)?, all().reduce(f64::max)?);
    (costs.len() > 1).then(|| 100.0 * (most / least - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(instructions: &[f64]) -> Vec<Cost> {
        instructions.iter().map(|&instructions| Cost { instructions, loss_percent: 0.5 }).collect()
    }

    #[test]
    fn a_row_shows_means_their_change_and_the_wider_spread_of_both_builds() {
        let row = Row { step: "up".into(), before: costs(&[990.0, 1010.0]), after: costs(&[480.0, 520.0]) };
        assert_eq!(row.line(), "| up | 1000 | 0.50 | 500 | 0.50 | -50.0 | 8.3 |");
        let alone = Row { step: "up".into(), before: Vec::new(), after: costs(&[500.0]) };
        assert_eq!(alone.line(), "| up | – | – | 500 | 0.50 | – | – |");
    }
}
