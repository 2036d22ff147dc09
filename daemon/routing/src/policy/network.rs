//! Networks in the `safetensors` format: a length, a header in JSON, and numbers.

use std::collections::HashMap;

use anyhow::{Context as _, Result, ensure};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sched::route::{Dqn, RoutingPolicy, Tensor};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::file::PolicyFile;

/// The only entry of a file's metadata. Several entries would have no fixed order, so the same network would not
/// always give the same file.
const ENTRY: &str = "paced";

#[derive(Deserialize, Serialize)]
struct Metadata {
    models: Vec<String>,
    classes: Vec<String>,
    features: String,
    fingerprint: String,
    /// The hash of all numbers, tensor by tensor in the order of their names: the format has no checksum.
    sha256: String,
    made: String,
}

/// Whether bytes begin like such a file: with a length of less than 4 GiB, and an object.
pub fn is_one(bytes: &[u8]) -> bool {
    bytes.get(4..9) == Some(b"\0\0\0\0{")
}

pub fn parse(bytes: &[u8]) -> Result<PolicyFile> {
    const DAMAGED: &str = "no weights that can be read";
    let (_, header) = SafeTensors::read_metadata(bytes).context(DAMAGED)?;
    let metadata = header.metadata().as_ref().and_then(|entries| entries.get(ENTRY));
    let metadata = metadata.context("weights without models and classes: not made by `pacectl route train`")?;
    let metadata: Metadata = serde_json::from_str(metadata).context(DAMAGED)?;
    let file = SafeTensors::deserialize(bytes).context(DAMAGED)?;
    let mut views: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for (name, view) in file.iter() {
        ensure!(view.dtype() == Dtype::F32, "tensor {name} is not of 32-bit floats");
        let numbers = view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        views.push((name.to_owned(), view.shape().to_vec(), numbers.collect()));
    }
    // The checksum covers the tensors in one order; the library returns them in any order.
    views.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    let tensors: Vec<_> =
        views.iter().map(|(name, shape, data)| Tensor { name: name.clone(), shape: shape.clone(), data }).collect();
    ensure!(checksum(&tensors) == metadata.sha256, "the checksum does not match the weights: the file is damaged");
    let classes = metadata.classes.len().to_string();
    let entries = [("features", &*metadata.features), ("classes", &classes), ("fingerprint", &metadata.fingerprint)];
    let dqn = Dqn::from_parts(&tensors, entries).context("the tensors do not form a network")?;
    let file = PolicyFile { models: metadata.models, classes: metadata.classes, policy: RoutingPolicy::RoundRobin };
    // The fingerprint alone does not show that the layers have the right numbers of inputs and outputs.
    let same = Dqn::new(dqn.network.clone(), dqn.features, &file.router_models(|_, _| 1.0), file.classes.len());
    let fits = dqn.network.outputs() == file.models.len()
        && dqn.network.inputs() == dqn.features.len(file.models.len(), file.classes.len());
    ensure!(fits && same.fingerprint == dqn.fingerprint, "the network is not for the models and classes that it names");
    Ok(PolicyFile { policy: RoutingPolicy::Dqn(dqn), ..file })
}

pub fn write(file: &PolicyFile, of: &Dqn, made: &str) -> Result<Vec<u8>> {
    let mut tensors = of.network.tensors();
    tensors.sort_by(|one, other| one.name.cmp(&other.name));
    let metadata = Metadata {
        models: file.models.clone(),
        classes: file.classes.clone(),
        features: of.features.name(),
        fingerprint: format!("{:016x}", of.fingerprint),
        sha256: checksum(&tensors),
        made: made.to_owned(),
    };
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|tensor| tensor.data.iter().flat_map(|number| number.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map(|view| (tensor.name.clone(), view))
    });
    let views: Vec<_> = views.collect::<Result<_, _>>()?;
    let metadata = HashMap::from([(ENTRY.to_owned(), serde_json::to_string(&metadata)?)]);
    Ok(safetensors::serialize(views, Some(metadata.into_iter().collect()))?)
}

fn checksum(tensors: &[Tensor<'_>]) -> String {
    let mut sum = Sha256::new();
    for tensor in tensors {
        tensor.data.iter().for_each(|number| sum.update(number.to_le_bytes()));
    }
    sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
