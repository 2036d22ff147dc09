//! The demo of models: a mix of urgent and batch requests to three engines behind a thin link that a download fills, by round
//! robin over plain HTTP and by paced.
//!
//! Both contenders get the same requests at the same times from the same client over the same link, one after the other. Each
//! has engines that were started for it, and the same warm-up requests, which are not counted.
//!
//! | module | what it is |
//! |---|---|
//! | [`mod@arrivals`] | the due times and contents of requests, from a seed |
//! | [`calibration`] | deadlines and rates, from the measured speed of the machine |
//! | [`client`] | sends requests, and records their outcome |
//! | `contender` | who chooses the engine that answers |
//! | [`download`] | fills the link |
//! | [`stage`] | namespaces, the link, engines, gateway and edge |
//! | `measurement` | measures each model alone, and a load by one contender |
//! | [`rows`] | results, as lines of JSON and as tables |
//! | [`picture`] | results as SVG |
//! | `options` | the options of the command |
//! | [`guard`] | ends all processes and cleans up, however the demo ends |

pub mod arrivals;
pub mod calibration;
pub mod client;
mod contender;
pub mod download;
pub mod guard;
mod measurement;
mod options;
pub mod picture;
pub mod rows;
pub mod stage;

use anyhow::{Context as _, Result, ensure};
use instruments::origin::{Origin, json_lines};

use self::{
    arrivals::arrivals,
    measurement::{alone, offer},
    rows::{Load, Run},
    stage::Stage,
};
pub use self::{contender::Contender, measurement::Offered, options::Demo};

/// Measures, prints the results, and writes rows and picture.
///
/// # Errors
/// Without root, or when a process does not start or the download breaks off.
pub fn run(demo: &Demo) -> Result<()> {
    demo.check()?;
    demo.engine.look()?;
    println!("engines: {}", demo.engine.name());
    println!("link: {} Mbit/s each way, which a download fills; seeds {:?}", demo.mbit, demo.seeds);
    let runs = compare(demo)?;
    println!("\n{}", rows::report(&runs));
    if let Some(path) = &demo.json {
        let lines = json_lines(&runs, &Origin::of_this_run("wall")?)?;
        std::fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))?;
        println!("rows: {}", path.display());
    }
    if let Some(path) = &demo.plot {
        std::fs::write(path, picture::picture(&runs)).with_context(|| format!("failed to write {}", path.display()))?;
        println!("picture: {}", path.display());
    }
    Ok(())
}

/// Measures each load by each contender.
///
/// # Errors
/// As [`run`].
pub fn compare(demo: &Demo) -> Result<Vec<Run>> {
    let alone = alone(demo.engine, demo.mbit)?;
    let large = alone[0];
    println!("{}", rows::calibration(&alone));
    let mut runs = Vec::new();
    for load in &demo.loads {
        let per_second = large.per_second() * load;
        for seed in &demo.seeds {
            let mix = arrivals(*seed, per_second, demo.seconds);
            ensure!(!mix.is_empty(), "no request arrives within {} s: raise --seconds", demo.seconds);
            for contender in Contender::ALL {
                eprintln!("seed {seed}, {} requests in {} s: {}", mix.len(), demo.seconds, contender.name());
                let stage = Stage::new(demo.engine, demo.mbit, demo.policy)?;
                let seen = offer(&stage, contender, large, &mix)?;
                let of = Load { times: *load, per_second, alone: &alone, seed: *seed };
                runs.push(Run::of(demo, contender, &of, &seen));
                if let Some(folder) = demo.decisions.as_ref().filter(|_| contender == Contender::Paced) {
                    let path = folder.join(format!("load-{load}-seed-{seed}.jsonl"));
                    std::fs::write(&path, stage.decisions()?)
                        .with_context(|| format!("failed to write {}", path.display()))?;
                }
            }
        }
    }
    Ok(runs)
}
