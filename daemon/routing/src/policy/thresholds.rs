//! Thresholds in TOML.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};
use sched::route::{Measure, RoutingPolicy, Thresholds};
use serde::{Deserialize, Serialize};

use super::file::PolicyFile;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "kind")]
    _kind: Kind,
    measure: Measured,
    overload: f64,
    classes: Vec<String>,
    #[serde(rename = "model")]
    models: Vec<Model>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Thresholds,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    name: String,
    limits: Vec<f64>,
    slope: f64,
}

/// The quantity that thresholds are compared with ([`Measure`]), as named in files.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measured {
    /// The fraction of its limits that an answer is predicted to use.
    #[default]
    Predicted,
    /// How full a batch is.
    Fill,
}

impl Measured {
    /// Returns the measure for a router.
    #[must_use]
    pub const fn measure(self) -> Measure {
        match self {
            Self::Predicted => Measure::Predicted,
            Self::Fill => Measure::Fill,
        }
    }
}

pub fn parse(text: &str) -> Result<PolicyFile> {
    let file: File = toml::from_str(text).context("no thresholds")?;
    let classes = file.classes.len();
    for model in &file.models {
        let limits = model.limits.len();
        ensure!(limits == classes, "{} has {limits} limits, and there are {classes} classes", model.name);
    }
    let thresholds = Thresholds {
        measure: file.measure.measure(),
        classes,
        limits: file.models.iter().flat_map(|model| model.limits.iter().copied()).collect(),
        slopes: file.models.iter().map(|model| model.slope).collect(),
        overload: file.overload,
    };
    ensure!(thresholds.parameters().iter().all(|number| number.is_finite()), "a number is not finite");
    let models = file.models.into_iter().map(|model| model.name).collect();
    Ok(PolicyFile { models, classes: file.classes, policy: RoutingPolicy::Thresholds(thresholds) })
}

pub fn write(file: &PolicyFile, of: &Thresholds, made: &str) -> String {
    let mut text = String::new();
    for line in made.lines() {
        _ = writeln!(text, "# {line}");
    }
    let measure = match of.measure {
        Measure::Predicted => "predicted",
        Measure::Fill => "fill",
    };
    let quoted = |name: &String| toml::Value::String(name.clone()).to_string();
    let classes: Vec<_> = file.classes.iter().map(quoted).collect();
    _ = writeln!(text, "kind = \"thresholds\"\nmeasure = \"{measure}\"\noverload = {:?}", of.overload);
    _ = writeln!(text, "# From a pressure of `overload` on, the cheapest model answers everything.");
    _ = writeln!(text, "classes = [{}]", classes.join(", "));
    for (model, (limits, slope)) in file.models.iter().zip(of.limits.chunks(of.classes.max(1)).zip(&of.slopes)) {
        _ = writeln!(text, "\n[[model]]\nname = {}\nlimits = {limits:?}\nslope = {slope:?}", quoted(model));
    }
    text
}
