//! Functions of each lane: exponential, error function, hyperbolic tangent, activations.
//!
//! `exp` is the polynomial of Cephes' `expf`; `erf` and `tanh` the rational functions that Eigen and XNNPACK
//! use. The first is within two units in the last place, the others within 5e-7, which the tests below hold on
//! every instruction set.

use super::simd::{Kernel, Simd};
use crate::ops::Activation;

/// `Σ coefficients[i] · xⁿ⁻ⁱ`, highest power first.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::V, coefficients: [f32; N]) -> S::V {
    let mut y = s.splat(coefficients[0]);
    for &c in &coefficients[1..] {
        y = s.fma(y, x, s.splat(c));
    }
    y
}

/// `eˣ` for `x` up to 89; exactly 1 at 0, exactly 0 from −104 down, infinity at 89.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(-104.0), x);
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first short enough that its product with n is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let coefficients =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0];
    s.scale_by_power(polynomial(s, r, coefficients), n)
}

/// `eˣ · 2ⁿ` within 8e-5 of itself where that is up to 2¹²⁷, exactly 0 from 2⁻¹⁶⁰ down: for weights that become bf16 or bytes.
#[inline(always)]
pub(super) fn exp_coarse<S: Simd>(s: S, x: S::V, n: S::V) -> S::V {
    s.exp2_coarse(s.fma(x, s.splat(std::f32::consts::LOG2_E), n))
}

/// The error function.
#[inline(always)]
fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.min(s.splat(4.0), s.max(s.splat(-4.0), x));
    let x2 = s.mul(x, x);
    let odd = polynomial(
        s,
        x2,
        [
            -2.726_142_3e-10,
            2.770_681_4e-8,
            -2.101_024e-6,
            -5.692_506_4e-5,
            -7.349_906_3e-4,
            -2.954_6e-3,
            -1.609_603_3e-2,
        ],
    );
    let even = polynomial(
        s,
        x2,
        [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329_2e-3, -1.426_473_9e-2],
    );
    s.ratio(s.mul(x, odd), even)
}

/// `1 / (1 + e⁻ˣ)` within 5e-7 of itself from −69 up; below that it is what it is there, 1.1e-30.
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    // A bound in the range of a ratio, first, so that a lane that is not a number stays one.
    let e = exp(s, s.min(s.splat(69.0), s.sub(s.splat(0.0), x)));
    s.ratio(s.splat(1.0), s.add(s.splat(1.0), e))
}

/// The hyperbolic tangent.
#[inline(always)]
fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.min(s.splat(7.905_311), s.max(s.splat(-7.905_311), x));
    let x2 = s.mul(x, x);
    let odd = polynomial(
        s,
        x2,
        [
            -2.760_768_5e-16,
            2.000_188e-13,
            -8.604_672e-11,
            5.122_297_1e-8,
            1.485_722_4e-5,
            6.372_619_3e-4,
            4.893_524_6e-3,
        ],
    );
    let even = polynomial(s, x2, [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3]);
    s.ratio(s.mul(x, odd), even)
}

/// An activation of each lane.
#[inline(always)]
pub(super) fn activate<S: Simd>(s: S, act: Activation, x: S::V) -> S::V {
    match act {
        Activation::None => x,
        Activation::Gelu => {
            let half = s.mul(x, s.splat(0.5));
            s.fma(half, erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2))), half)
        }
        Activation::GeluTanh => {
            // 0.5 (1 + tanh u) is sigmoid(2u), here with 2u = 2√(2/π) (x + 0.044715 x³).
            let inner = s.fma(s.mul(s.mul(x, x), s.splat(0.044_715)), x, x);
            s.mul(x, sigmoid(s, s.mul(inner, s.splat(1.595_769))))
        }
        Activation::QuickGelu => s.mul(x, sigmoid(s, s.mul(x, s.splat(1.702)))),
        Activation::Silu => s.mul(x, sigmoid(s, x)),
        Activation::Relu => s.max(x, s.splat(0.0)),
        Activation::Tanh => tanh(s, x),
        Activation::Sigmoid => sigmoid(s, x),
    }
}

/// `x = c · tanh(x / c)` of each value.
#[inline(always)]
pub(super) fn softcap<S: Simd>(s: S, x: &mut [f32], c: f32) {
    let (bound, inverse) = (s.splat(c), s.splat(1.0 / c));
    for x in x.chunks_mut(S::LANES) {
        let capped = s.mul(tanh(s, s.mul(s.load_or(x, 0.0), inverse)), bound);
        s.store_some(x, capped);
    }
}

/// `x = x · act(gate)` over slices of one length.
pub(super) struct MultiplyGated<'a> {
    /// The values.
    pub(super) x: &'a mut [f32],
    pub(super) gate: &'a [f32],
    pub(super) act: Activation,
}

impl Kernel for MultiplyGated<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, gate) in self.x.chunks_mut(S::LANES).zip(self.gate.chunks(S::LANES)) {
            let gated = s.mul(s.load_or(x, 0.0), activate(s, self.act, s.load_or(gate, 0.0)));
            s.store_some(x, gated);
        }
    }
}

/// [`softcap`] over a slice.
pub(super) struct Softcap<'a> {
    /// The values.
    pub(super) x: &'a mut [f32],
    /// The bound.
    pub(super) c: f32,
}

impl Kernel for Softcap<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        softcap(s, self.x, self.c);
    }
}

/// `out = act(x) · y` over slices of one length.
pub(super) struct Gate<'a> {
    /// Inputs of the activation.
    pub(super) x: &'a [f32],
    /// The factor.
    pub(super) y: &'a [f32],
    /// The result.
    pub(super) out: &'a mut [f32],
    /// The function.
    pub(super) act: Activation,
}

impl Kernel for Gate<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vectors = self.x.chunks(S::LANES).zip(self.y.chunks(S::LANES));
        for (out, (x, y)) in self.out.chunks_mut(S::LANES).zip(vectors) {
            let activated = activate(s, self.act, s.load_or(x, 0.0));
            s.store_some(out, s.mul(activated, s.load_or(y, 0.0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{FoundIsa, Isa};
    use super::*;

    /// Function under test.
    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        ExpCoarse,
        Erf,
        Tanh,
        Sigmoid,
    }

    /// `out = function(x)`.
    struct Map<'a> {
        function: Function,
        x: &'a [f32],
        out: &'a mut [f32],
    }

    impl Kernel for Map<'_> {
        fn run<S: Simd>(self, s: S) {
            for (x, out) in self.x.chunks(S::LANES).zip(self.out.chunks_mut(S::LANES)) {
                let x = s.load_or(x, 0.0);
                let y = match self.function {
                    Function::Exp => exp(s, x),
                    Function::ExpCoarse => exp_coarse(s, x, s.splat(0.0)),
                    Function::Erf => erf(s, x),
                    Function::Tanh => tanh(s, x),
                    Function::Sigmoid => sigmoid(s, x),
                };
                s.store_some(out, y);
            }
        }
    }

    fn each_isa(function: Function, x: &[f32], check: impl Fn(f32, f32)) {
        for isa in Isa::available() {
            let mut out = vec![0.0; x.len()];
            let found = FoundIsa::new(Some(isa)).expect("an available set");
            found.run(Map { function, x, out: &mut out });
            x.iter().zip(&out).for_each(|(&x, &y)| check(x, y));
        }
    }

    /// Maclaurin series in f64, good to |x| ≤ 4.
    fn erf_series(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let x: Vec<f32> = (-8700..=8800).map(|i| i as f32 / 100.0).collect();
        each_isa(Function::Exp, &x, |x, y| {
            let expect = f64::from(x).exp();
            assert!((f64::from(y) - expect).abs() <= 2.4e-7 * expect, "exp({x}) = {y}, not {expect}");
        });
    }

    #[test]
    fn a_coarse_exp_is_within_its_bound() {
        let x: Vec<f32> = (-8700..=8800).map(|i| i as f32 / 100.0).collect();
        each_isa(Function::ExpCoarse, &x, |x, y| {
            let expect = f64::from(x).exp();
            assert!((f64::from(y) - expect).abs() <= 8e-5 * expect, "exp({x}) = {y}, not {expect}");
        });
        for x in [f32::NEG_INFINITY, -200.0, -111.0] {
            each_isa(Function::ExpCoarse, &[x], |_, y| assert_eq!(y, 0.0));
        }
        each_isa(Function::ExpCoarse, &[f32::NAN], |_, y| assert!(y.is_nan()));
    }

    #[test]
    fn exp_is_exact_at_its_ends() {
        let x = [0.0, -0.0, f32::NEG_INFINITY, -200.0, 89.0, f32::NAN];
        let expect = [1.0, 1.0, 0.0, 0.0, f32::INFINITY, f32::NAN];
        for (x, expect) in x.into_iter().zip(expect) {
            each_isa(Function::Exp, &[x], |_, y| {
                assert!(y == expect || (y.is_nan() && expect.is_nan()), "exp({x}) = {y}")
            });
        }
    }

    #[test]
    fn erf_is_within_half_a_millionth() {
        let x: Vec<f32> = (-450..=450).map(|i| i as f32 / 100.0).collect();
        each_isa(Function::Erf, &x, |x, y| {
            let expect = erf_series(f64::from(x.clamp(-4.0, 4.0)));
            assert!((f64::from(y) - expect).abs() <= 5e-7, "erf({x}) = {y}, not {expect}");
        });
    }

    #[test]
    fn a_sigmoid_is_within_half_a_millionth_of_itself() {
        let x: Vec<f32> = (-6900..=9000).map(|i| i as f32 / 100.0).collect();
        each_isa(Function::Sigmoid, &x, |x, y| {
            let expect = 1.0 / (1.0 + f64::from(-x).exp());
            assert!((f64::from(y) - expect).abs() <= 5e-7 * expect, "sigmoid({x}) = {y}, not {expect}");
        });
        let ends = [f32::NEG_INFINITY, -1e30, -100.0];
        each_isa(Function::Sigmoid, &ends, |x, y| assert!((0.0..1.2e-30).contains(&y), "sigmoid({x}) = {y}"));
        each_isa(Function::Sigmoid, &[f32::INFINITY, 1e30], |x, y| assert_eq!(y, 1.0, "sigmoid({x})"));
        each_isa(Function::Sigmoid, &[f32::NAN], |_, y| assert!(y.is_nan()));
    }

    #[test]
    fn tanh_is_within_half_a_millionth() {
        let x: Vec<f32> = (-1000..=1000).map(|i| i as f32 / 100.0).chain([1e-6, -1e-3, 50.0]).collect();
        each_isa(Function::Tanh, &x, |x, y| {
            let expect = f64::from(x).tanh();
            assert!((f64::from(y) - expect).abs() <= 5e-7 * expect.abs(), "tanh({x}) = {y}, not {expect}");
        });
    }
}
