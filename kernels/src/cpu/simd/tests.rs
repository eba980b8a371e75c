//! Every method of every instruction set of this machine against plain Rust.

use super::*;

#[test]
fn the_set_that_is_taken_is_one_of_this_machine_and_no_slow_one() {
    let taken = Isa::fastest();
    assert!(taken.is_available(), "{taken:?}");
    assert!(!(is_intel() && taken == Isa::Avx512Bf16));
    let faster = Isa::available().skip_while(|isa| *isa != taken).skip(1).count();
    assert!(faster <= usize::from(is_intel()), "{taken:?}");
}

/// A function of a lane in plain Rust, of two values and a integer.
type Plain = fn(f32, f32, f32) -> f32;

/// Expected result of each method in a lane, in the order of [`Lanes`].
const PLAIN: [(&str, Plain); 16] = [
    ("add", |a, b, _| a + b),
    ("sub", |a, b, _| a - b),
    ("mul", |a, b, _| a * b),
    ("div", |a, b, _| a / b),
    ("max", |a, b, _| if a > b { a } else { b }),
    ("min", |a, b, _| if a < b { a } else { b }),
    ("round", |a, _, _| a.round_ties_even()),
    ("scale_by_power", |a, _, n| (f64::from(a) * f64::from(n).exp2()) as f32),
    ("low_halves", |a, _, _| f32::from_bits(a.to_bits() << 16)),
    ("high_halves", |a, _, _| f32::from_bits(a.to_bits() & 0xffff_0000)),
    ("round_to_bf16", |a, _, _| half::bf16::from_f32(a).to_f32()),
    ("high half", |a, _, _| (a.to_bits() >> 16) as f32),
    ("signed_bytes 0", |a, _, _| f32::from(a.to_bits() as i8)),
    ("signed_bytes 3", |a, _, _| f32::from((a.to_bits() >> 24) as i8)),
    ("whole", |a, _, _| a.to_bits() as i32 as f32),
    ("low byte", |a, _, _| (a.to_bits() & 0xff) as f32),
];

/// Results of those methods on a set.
struct Lanes<'a> {
    a: [f32; 16],
    b: [f32; 16],
    n: [f32; 16],
    out: &'a mut [[f32; 16]; PLAIN.len()],
    lanes: &'a mut usize,
}

impl Kernel for Lanes<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [a, b, n] = [self.a, self.b, self.n].map(|values| s.load(&values));
        let mut low_bytes = [0; 16];
        s.store_low_bytes(&mut low_bytes, a);
        let mut high_halves = [0; 16];
        s.store_high_halves(&mut high_halves, a);
        let results = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.max(a, b),
            s.min(a, b),
            s.round(a),
            s.scale_by_power(a, n),
            s.low_halves(a),
            s.high_halves(a),
            s.round_to_bf16(a),
            s.load(&high_halves.map(f32::from)),
            s.signed_bytes(a, 0),
            s.signed_bytes(a, 3),
            s.whole(a),
            s.load(&low_bytes.map(f32::from)),
        ];
        for (out, result) in self.out.iter_mut().zip(results) {
            s.store(out, result);
        }
        *self.lanes = S::LANES;
    }
}

#[test]
fn each_lane_is_what_plain_numbers_give_on_every_set() {
    let special = [0.0, -0.0, 0.5, -2.5, 3.7, 1e-39, -2e38, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let whole = [0.0, 1.0, -1.0, 24.0, -149.0, 200.0, -200.0];
    for first in 0..special.len() * special.len() {
        // Neighbours have different values, and every pair occurs.
        let pair = |lane: usize| (first + lane) % (special.len() * special.len());
        let a = std::array::from_fn(|lane| special[pair(lane) % special.len()]);
        let b = std::array::from_fn(|lane| special[pair(lane) / special.len()]);
        let n = std::array::from_fn(|lane| whole[(first + lane) % whole.len()]);
        for isa in Isa::available() {
            let (mut out, mut lanes) = ([[0.0; 16]; PLAIN.len()], 0);
            let found = FoundIsa::new(Some(isa)).expect("an available set");
            found.run(Lanes { a, b, n, out: &mut out, lanes: &mut lanes });
            for ((name, plain), out) in PLAIN.iter().zip(out) {
                for lane in 0..lanes {
                    let (expect, place) = (plain(a[lane], b[lane], n[lane]), (a[lane], b[lane], n[lane]));
                    let same = out[lane].to_bits() == expect.to_bits();
                    assert!(
                        same || out[lane].is_nan() && expect.is_nan(),
                        "{} {name} of {place:?} is {}, not {expect}",
                        isa.as_str(),
                        out[lane]
                    );
                }
            }
        }
    }
}

/// Products of four bytes with both signs, and the nibbles of bytes.
struct Quads<'a> {
    a: u32,
    b: [u32; 16],
    out: &'a mut [[u32; 16]; 4],
    lanes: &'a mut usize,
}

impl Kernel for Quads<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let start = s.splat(f32::from_bits(7));
        let b = s.load_bits(&self.b);
        let shifted = s.shift_bytes(b);
        let results = [
            s.dot_bytes(start, self.a, b),
            s.dot_signed_bytes(start, self.a, shifted),
            s.low_nibbles(b),
            s.high_nibbles(b),
        ];
        for (out, result) in self.out.iter_mut().zip(results) {
            let mut lanes = [0.0; 16];
            s.store(&mut lanes, result);
            *out = lanes.map(f32::to_bits);
        }
        *self.lanes = S::LANES;
    }
}

#[test]
fn bytes_are_multiplied_and_taken_apart_alike_on_every_set() {
    let b: [u32; 16] = std::array::from_fn(|i| (i as u32).wrapping_mul(0x9e37_79b9) ^ 0x80ff_017f);
    for a in [0_u32, 0xffff_ffff, 0x8001_7fff, 0x1234_5678] {
        let expected = |lane: usize, product: fn(u8, u8) -> i32| {
            let bytes = a.to_le_bytes().into_iter().zip(b[lane].to_le_bytes());
            (7 + bytes.map(|(a, b)| product(a, b)).sum::<i32>()) as u32
        };
        for isa in Isa::available() {
            let (mut out, mut lanes) = ([[0; 16]; 4], 0);
            let found = FoundIsa::new(Some(isa)).expect("an available set");
            found.run_byte_dot(Quads { a, b, out: &mut out, lanes: &mut lanes });
            for lane in 0..lanes {
                let unsigned_by_signed = |a: u8, b: u8| i32::from(a) * i32::from(b as i8);
                let signed_by_shifted = |a: u8, b: u8| i32::from(a as i8) * i32::from(b ^ 0x80);
                let place = format!("{a:x} {} lane {lane}", isa.as_str());
                assert_eq!(out[0][lane], expected(lane, unsigned_by_signed), "{place}");
                assert_eq!(out[1][lane], expected(lane, signed_by_shifted), "{place}");
                assert_eq!(out[2][lane], b[lane] & 0x0f0f_0f0f, "{place}");
                assert_eq!(out[3][lane], b[lane] >> 4 & 0x0f0f_0f0f, "{place}");
            }
        }
    }
}

/// Largest lanes of four registers, and their values as bf16.
struct Reduced<'a> {
    values: &'a [[f32; 16]; 4],
    largest: &'a mut [f32; 4],
    halves: &'a mut [[u16; 16]; 4],
    lanes: &'a mut usize,
}

impl Kernel for Reduced<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let registers = self.values.each_ref().map(|values| s.load(values));
        *self.largest = s.largest_of_four(registers);
        for (halves, register) in self.halves.iter_mut().zip(registers) {
            s.store_bf16(halves, register);
        }
        *self.lanes = S::LANES;
    }
}

#[test]
fn four_registers_are_reduced_and_values_become_bf16_alike_on_every_set() {
    for largest_at in 0..16 {
        let value = |of: usize, lane: usize| {
            let size = if lane == (largest_at + of) % 16 { 3.3 } else { -1.7 - lane as f32 };
            size * [1.0, 1e-30, 1e30, -2.0][of]
        };
        let values = std::array::from_fn(|of| std::array::from_fn(|lane| value(of, lane)));
        for isa in Isa::available() {
            let (mut largest, mut halves, mut lanes) = ([0.0; 4], [[0; 16]; 4], 0);
            let found = FoundIsa::new(Some(isa)).expect("an available set");
            let kernel =
                Reduced { values: &values, largest: &mut largest, halves: &mut halves, lanes: &mut lanes };
            if isa == Isa::Avx512Bf16 {
                found.run_bf16_dot(kernel)
            } else {
                found.run_byte_dot(kernel)
            }
            for of in 0..4 {
                let expected = values[of][..lanes].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(largest[of], expected, "{} {of}", isa.as_str());
                let expected = values[of].map(|value| half::bf16::from_f32(value).to_bits());
                assert_eq!(halves[of][..lanes], expected[..lanes], "{} {of}", isa.as_str());
            }
        }
    }
}
