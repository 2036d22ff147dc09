//! A small neural network: layers of weighted sums, with rectifiers between them.

use crate::random::Random;

/// A multilayer perceptron with rectified linear units after every layer but the last.
///
/// Weights are `f32` in rows by input, so that the forward pass is a sum of rows; inputs of 0, the output of half of the
/// units, cost nothing. File formats are left to another crate: [`Mlp::tensors`] returns the parts to write, and
/// [`Mlp::from_tensors`] reads them back.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    pub(super) layers: Vec<Layer>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Layer {
    /// By input, then by output.
    pub weights: Vec<f32>,
    pub bias: Vec<f32>,
}

/// A named part of a network, as in files of weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'a> {
    /// `l0.weight`, `l0.bias`, `l1.weight` and so on.
    pub name: String,
    /// Inputs and outputs of a weight, outputs of a bias.
    pub shape: Vec<usize>,
    /// The numbers, the last dimension fastest.
    pub data: &'a [f32],
}

/// The result of a forward pass: the output of every layer. Reusing it saves allocations.
#[derive(Clone, Debug, Default)]
pub struct Activations(pub(super) Vec<Vec<f32>>);

/// A network with more layers is not small.
const LAYERS_MOST: usize = 16;

impl Layer {
    pub fn inputs(&self) -> usize {
        self.weights.len() / self.bias.len().max(1)
    }
}

impl Mlp {
    /// Creates a network of random weights. `sizes` are those of the input, the hidden layers and the output; 0 counts as
    /// one unit. Weights are normal with variance 2 / inputs (He et al.: "Delving Deep into Rectifiers", ICCV 2015); those
    /// of the last layer are a tenth as large, so that all values begin near 0.
    #[must_use]
    pub fn random(sizes: &[usize], random: &mut Random) -> Self {
        let last = sizes.len().saturating_sub(2);
        let layer = |(at, pair): (usize, &[usize])| {
            let [inputs, outputs] = [0, 1].map(|end| pair.get(end).copied().unwrap_or(1).max(1));
            let deviation = (2.0 / inputs as f64).sqrt() * if at == last { 0.1 } else { 1.0 };
            let weights = (0..inputs * outputs).map(|_| (random.normal() * deviation) as f32).collect();
            Layer { weights, bias: vec![0.0; outputs] }
        };
        Self { layers: sizes.windows(2).enumerate().map(layer).collect() }
    }

    /// Returns the number of inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.layers.first().map_or(0, Layer::inputs)
    }

    /// Returns the number of outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.bias.len())
    }

    /// Returns the outputs for `input`. Missing inputs count as 0; surplus ones are ignored.
    pub fn forward<'a>(&self, input: &[f32], activations: &'a mut Activations) -> &'a [f32] {
        let outputs = &mut activations.0;
        outputs.resize_with(self.layers.len(), Vec::new);
        for (at, layer) in self.layers.iter().enumerate() {
            let (before, rest) = outputs.split_at_mut(at);
            let Some(output) = rest.first_mut() else { break };
            let input = before.last().map_or(input, Vec::as_slice);
            output.clear();
            output.extend_from_slice(&layer.bias);
            for (x, row) in input.iter().zip(layer.weights.chunks_exact(layer.bias.len().max(1))) {
                if *x != 0.0 {
                    output.iter_mut().zip(row).for_each(|(sum, weight)| *sum += x * weight);
                }
            }
            if at + 1 < self.layers.len() {
                // NaN must propagate: `max` would hide it.
                output.iter_mut().for_each(|y| {
                    if *y < 0.0 {
                        *y = 0.0;
                    }
                });
            }
        }
        outputs.last().map_or(&[], Vec::as_slice)
    }

    /// Returns all weights under their names, in the shapes `[inputs, outputs]` and `[outputs]`.
    #[must_use]
    pub fn tensors(&self) -> Vec<Tensor<'_>> {
        let of_layer = |(at, layer): (usize, &'_ Layer)| {
            let (name, outputs) = (format!("l{at}"), layer.bias.len());
            (name, vec![layer.inputs(), outputs], outputs)
        };
        let mut tensors = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            let (name, shape, outputs) = of_layer((at, layer));
            tensors.push(Tensor { name: format!("{name}.weight"), shape, data: &layer.weights });
            tensors.push(Tensor { name: format!("{name}.bias"), shape: vec![outputs], data: &layer.bias });
        }
        tensors
    }

    /// Returns the network of [such tensors](Mlp::tensors), in any order. Returns `None` if a tensor is missing or
    /// superfluous, shapes do not fit together, or a number is not finite.
    #[must_use]
    pub fn from_tensors(tensors: &[Tensor<'_>]) -> Option<Self> {
        let find = |name: String| tensors.iter().find(|tensor| tensor.name == name);
        let mut layers: Vec<Layer> = Vec::new();
        for at in 0..LAYERS_MOST {
            let Some(weight) = find(format!("l{at}.weight")) else { break };
            let bias = find(format!("l{at}.bias"))?;
            let (&[inputs, outputs], &[biases]) = (weight.shape.as_slice(), bias.shape.as_slice()) else { return None };
            let fits = layers.last().is_none_or(|before| before.bias.len() == inputs) && inputs > 0 && outputs > 0;
            let whole = Some(weight.data.len()) == inputs.checked_mul(outputs) && bias.data.len() == outputs;
            let finite = weight.data.iter().chain(bias.data).all(|number| number.is_finite());
            (fits && whole && finite && biases == outputs).then_some(())?;
            layers.push(Layer { weights: weight.data.to_vec(), bias: bias.data.to_vec() });
        }
        (!layers.is_empty() && tensors.len() == 2 * layers.len()).then_some(Self { layers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_sums_and_rectifiers() {
        let first = Layer { weights: vec![1.0, -1.0, 2.0, 1.0], bias: vec![0.5, 0.0] };
        let second = Layer { weights: vec![1.0, 10.0], bias: vec![-1.0] };
        let mlp = Mlp { layers: vec![first, second] };
        let mut activations = Activations::default();
        assert_eq!(mlp.forward(&[1.0, 2.0], &mut activations), [5.5 + 10.0 - 1.0]);
        assert_eq!(mlp.forward(&[1.0, 0.0], &mut activations), [1.5 - 1.0]);
        assert_eq!((mlp.inputs(), mlp.outputs()), (2, 1));
    }

    #[test]
    fn no_number_comes_through() {
        let mlp = Mlp::random(&[2, 8, 3], &mut Random::new(1));
        let mut activations = Activations::default();
        assert!(mlp.forward(&[f32::NAN, 1.0], &mut activations).iter().all(|value| value.is_nan()));
        assert_eq!(Mlp { layers: Vec::new() }.forward(&[1.0], &mut activations), []);
    }

    #[test]
    fn tensors_come_back_as_the_same_network() {
        let mlp = Mlp::random(&[5, 7, 4, 3], &mut Random::new(3));
        let mut tensors = mlp.tensors();
        assert_eq!(
            tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(),
            ["l0.weight", "l0.bias", "l1.weight", "l1.bias", "l2.weight", "l2.bias"]
        );
        tensors.reverse();
        assert_eq!(Mlp::from_tensors(&tensors), Some(mlp.clone()));
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let mlp = Mlp::random(&[5, 7, 3], &mut Random::new(3));
        let nan = [f32::NAN; 7];
        type Change = fn(&mut Vec<Tensor<'_>>);
        let wrong: [Change; 6] = [
            |tensors| drop(tensors.pop()),
            |tensors| tensors.clear(),
            |tensors| tensors[0].shape = vec![7, 5],
            |tensors| tensors[0].shape = vec![usize::MAX, usize::MAX],
            |tensors| tensors[3].shape = vec![3, 1],
            |tensors| tensors.push(Tensor { name: "l9.bias".into(), shape: vec![0], data: &[] }),
        ];
        for change in wrong {
            let mut tensors = mlp.tensors();
            change(&mut tensors);
            assert_eq!(Mlp::from_tensors(&tensors), None);
        }
        let mut tensors = mlp.tensors();
        tensors[1].data = &nan;
        assert_eq!(Mlp::from_tensors(&tensors), None);
    }
}
