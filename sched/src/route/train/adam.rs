//! Gradients of a network by backpropagation, and steps along them with Adam.

use crate::route::mlp::{Activations, Layer, Mlp};

/// The gradient of a loss with respect to all weights of a network, summed over samples.
#[derive(Clone, Debug)]
pub struct Gradient {
    layers: Vec<Layer>,
    /// Derivatives of the loss with respect to a layer's outputs, and to its inputs.
    by_output: Vec<f32>,
    by_input: Vec<f32>,
}

/// Adam (Kingma, Ba: "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1) with its defaults.
#[derive(Clone, Debug)]
pub struct Adam {
    means: Vec<Layer>,
    squares: Vec<Layer>,
    steps: i32,
}

const BETAS: [f32; 2] = [0.9, 0.999];
const EPSILON: f32 = 1e-8;

impl Gradient {
    /// Creates a zero gradient for networks of the same sizes as `network`.
    #[must_use]
    pub fn new(network: &Mlp) -> Self {
        Self { layers: zeros(network), by_output: Vec::new(), by_input: Vec::new() }
    }

    /// Resets it to 0.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            layer.weights.fill(0.0);
            layer.bias.fill(0.0);
        }
    }

    /// Adds the gradient of a sample: `activations` are those of [`Mlp::forward`] for `input`, and `error` is the loss's
    /// derivative with respect to the output of index `output`, the only one that the loss depends on.
    pub fn add(&mut self, network: &Mlp, input: &[f32], activations: &Activations, output: usize, error: f32) {
        self.by_output.clear();
        self.by_output.resize(network.outputs(), 0.0);
        if let Some(by_output) = self.by_output.get_mut(output) {
            *by_output = error;
        }
        let layers = network.layers.iter().zip(&mut self.layers).enumerate();
        for (at, (layer, gradient)) in layers.rev() {
            let inputs = match at.checked_sub(1) {
                None => input,
                Some(before) => activations.0.get(before).map_or(&[][..], Vec::as_slice),
            };
            let outputs = layer.bias.len().max(1);
            gradient.bias.iter_mut().zip(&self.by_output).for_each(|(sum, by)| *sum += by);
            self.by_input.clear();
            let rows = layer.weights.chunks_exact(outputs).zip(gradient.weights.chunks_exact_mut(outputs));
            for (x, (row, sums)) in inputs.iter().zip(rows) {
                // A rectifier whose output was 0 passes no gradient on, and an input of 0 passes none to its weights.
                if *x == 0.0 {
                    self.by_input.push(0.0);
                    continue;
                }
                sums.iter_mut().zip(&self.by_output).for_each(|(sum, by)| *sum += x * by);
                let passed = if at == 0 { 0.0 } else { dot(row, &self.by_output) };
                self.by_input.push(passed);
            }
            std::mem::swap(&mut self.by_output, &mut self.by_input);
        }
    }

    /// Returns all derivatives, in the order of [`Mlp::tensors`].
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.layers.iter().flat_map(|layer| layer.weights.iter().chain(&layer.bias)).copied()
    }
}

impl Adam {
    /// Creates the state for a network.
    #[must_use]
    pub fn new(network: &Mlp) -> Self {
        Self { means: zeros(network), squares: zeros(network), steps: 0 }
    }

    /// Moves the weights one step down the gradient, which is divided by `samples`. A derivative that is not finite
    /// counts as 0, so that one bad sample does not spoil a network.
    pub fn step(&mut self, network: &mut Mlp, gradient: &Gradient, samples: usize, learning_rate: f32) {
        self.steps = self.steps.saturating_add(1);
        let [mean, square] = BETAS.map(|beta| 1.0 / (1.0 - beta.powi(self.steps)));
        let scales = Scales { sample: 1.0 / samples.max(1) as f32, mean, square, learning_rate };
        let moments = self.means.iter_mut().zip(&mut self.squares);
        for ((layer, gradient), (means, squares)) in network.layers.iter_mut().zip(&gradient.layers).zip(moments) {
            scales.step(&mut layer.weights, &gradient.weights, &mut means.weights, &mut squares.weights);
            scales.step(&mut layer.bias, &gradient.bias, &mut means.bias, &mut squares.bias);
        }
    }
}

/// The factors for the numbers of a step.
struct Scales {
    sample: f32,
    mean: f32,
    square: f32,
    learning_rate: f32,
}

impl Scales {
    fn step(&self, weights: &mut [f32], derivatives: &[f32], means: &mut [f32], squares: &mut [f32]) {
        let moments = means.iter_mut().zip(squares);
        for ((weight, derivative), (mean, square)) in weights.iter_mut().zip(derivatives).zip(moments) {
            let by = if derivative.is_finite() { derivative * self.sample } else { 0.0 };
            *mean = BETAS[0] * *mean + (1.0 - BETAS[0]) * by;
            *square = BETAS[1] * *square + (1.0 - BETAS[1]) * by * by;
            *weight -= self.learning_rate * (*mean * self.mean) / ((*square * self.square).sqrt() + EPSILON);
        }
    }
}

fn zeros(network: &Mlp) -> Vec<Layer> {
    let zero = |layer: &Layer| Layer { weights: vec![0.0; layer.weights.len()], bias: vec![0.0; layer.bias.len()] };
    network.layers.iter().map(zero).collect()
}

/// Returns the dot product, in eight partial sums, since a compiler may not reorder a single one.
fn dot(one: &[f32], other: &[f32]) -> f32 {
    let (whole, rest) = one.as_chunks::<8>();
    let (other_whole, other_rest) = other.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (one, other) in whole.iter().zip(other_whole) {
        for lane in 0..8 {
            sums[lane] += one[lane] * other[lane];
        }
    }
    sums.iter().sum::<f32>() + rest.iter().zip(other_rest).map(|(one, other)| one * other).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Half the squared distance of one output from 0.7.
    fn loss(network: &Mlp, input: &[f32], output: usize) -> f64 {
        let values = network.forward(input, &mut Activations::default())[output];
        0.5 * (f64::from(values) - 0.7).powi(2)
    }

    #[test]
    fn gradients_are_what_small_changes_of_weights_make() {
        for seed in 0..4 {
            let mut random = Random::new(seed);
            let network = Mlp::random(&[4, 6, 5, 3], &mut random);
            let input: Vec<f32> = (0..4).map(|_| random.normal() as f32).collect();
            let output = random.below(3);
            let mut activations = Activations::default();
            let error = network.forward(&input, &mut activations)[output] - 0.7;
            let mut gradient = Gradient::new(&network);
            gradient.add(&network, &input, &activations, output, error);
            let mut derivatives = gradient.values();
            for layer in 0..network.layers.len() {
                let weights = network.layers[layer].weights.len();
                for at in 0..weights + network.layers[layer].bias.len() {
                    let moved = |by: f32| {
                        let mut network = network.clone();
                        let layer = &mut network.layers[layer];
                        *if at < weights { &mut layer.weights[at] } else { &mut layer.bias[at - weights] } += by;
                        loss(&network, &input, output)
                    };
                    let difference = (moved(1e-2) - moved(-1e-2)) / 2e-2;
                    let derivative = f64::from(derivatives.next().unwrap());
                    assert!((derivative - difference).abs() < 2e-3, "seed {seed}: {derivative} and {difference}");
                }
            }
            assert!(derivatives.next().is_none());
        }
    }

    #[test]
    fn steps_lead_to_the_values_that_are_wanted() {
        for seed in 0..3 {
            let mut random = Random::new(seed);
            let mut network = Mlp::random(&[2, 16, 2], &mut random);
            let (mut adam, mut gradient) = (Adam::new(&network), Gradient::new(&network));
            let mut activations = Activations::default();
            let wanted = |x: &[f32], output: usize| if output == 0 { (x[0] - x[1]).abs() } else { x[0] };
            let mut last = 0.0;
            for step in 0..2_000 {
                gradient.clear();
                last = 0.0;
                for _ in 0..16 {
                    let x = [random.normal() as f32, random.normal() as f32];
                    let output = step % 2;
                    let error = network.forward(&x, &mut activations)[output] - wanted(&x, output);
                    last += error * error / 16.0;
                    gradient.add(&network, &x, &activations, output, error);
                }
                adam.step(&mut network, &gradient, 16, 5e-3);
            }
            assert!(last < 0.05, "seed {seed}: {last}");
        }
    }

    #[test]
    fn a_derivative_that_is_no_number_moves_nothing() {
        let network = Mlp::random(&[2, 3, 2], &mut Random::new(1));
        let mut gradient = Gradient::new(&network);
        let mut activations = Activations::default();
        network.forward(&[1.0, 1.0], &mut activations);
        gradient.add(&network, &[1.0, 1.0], &activations, 0, f32::NAN);
        let mut moved = network.clone();
        Adam::new(&network).step(&mut moved, &gradient, 1, 0.1);
        assert!(
            moved
                .layers
                .iter()
                .flat_map(|layer| layer.weights.iter().chain(&layer.bias))
                .all(|weight| weight.is_finite())
        );
    }
}
