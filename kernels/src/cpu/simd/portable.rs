//! Vectors in plain Rust: what every machine has.

use super::vector::{Kernel, Simd};

/// The entry to a kernel, a function of its own in the codegen unit of the module that the kernel is declared in.
pub(super) trait Entry: Kernel {
    /// Runs the kernel.
    fn run_portable(self);
}

impl<K: Kernel> Entry for K {
    #[inline(never)]
    fn run_portable(self) {
        self.run(Portable);
    }
}

/// Four lanes, which compilers put in one register of most machines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

/// One register.
type V = [f32; 4];

/// The top bit of each byte.
const TOP_BITS: u32 = 0x8080_8080;

/// The low half of each byte.
const NIBBLES: u32 = 0x0f0f_0f0f;

/// A method that does the same to each lane.
macro_rules! lanewise {
    ($name:ident, |$($arg:ident),+| $body:expr) => {
        #[inline(always)]
        fn $name(self, $($arg: V),+) -> V {
            let mut out = [0.0; 4];
            for i in 0..4 {
                $(let $arg = $arg[i];)+
                out[i] = $body;
            }
            out
        }
    };
}

impl Simd for Portable {
    type V = V;
    const LANES: usize = 4;
    // Few, since speed does not matter where it runs.
    const HEIGHTS: &[usize] = &[6, 1];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        kernel.run_portable();
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> V {
        // SAFETY: the caller's obligation; an array of f32 has the alignment of bytes when read unaligned.
        unsafe { from.cast::<V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: V) {
        // SAFETY: the caller's obligation.
        unsafe { to.cast::<V>().write_unaligned(v) }
    }

    lanewise!(add, |a, b| a + b);
    lanewise!(sub, |a, b| a - b);
    lanewise!(mul, |a, b| a * b);
    lanewise!(div, |a, b| a / b);
    lanewise!(max, |a, b| if a > b { a } else { b });
    lanewise!(min, |a, b| if a < b { a } else { b });
    // `f32::mul_add` would be a call into libm where the target has no such instruction.
    lanewise!(fma, |a, b, c| a * b + c);
    lanewise!(round, |a| a.round_ties_even());
    lanewise!(low_halves, |pairs| f32::from_bits(pairs.to_bits() << 16));
    lanewise!(high_halves, |pairs| f32::from_bits(pairs.to_bits() & 0xffff_0000));
    lanewise!(shift_bytes, |bytes| f32::from_bits(bytes.to_bits() ^ TOP_BITS));
    lanewise!(low_nibbles, |bytes| f32::from_bits(bytes.to_bits() & NIBBLES));
    lanewise!(high_nibbles, |bytes| f32::from_bits(bytes.to_bits() >> 4 & NIBBLES));
    lanewise!(scale_by_power, |a, n| {
        let half = (n as i32) / 2;
        a * power_of_two(half) * power_of_two(n as i32 - half)
    });

    #[inline(always)]
    fn dot_bytes(self, acc: V, a: u32, b: V) -> V {
        let mut out = acc;
        for i in 0..4 {
            let products = a.to_le_bytes().into_iter().zip(b[i].to_bits().to_le_bytes());
            let sum: i32 = products.map(|(a, b)| i32::from(a) * i32::from(b as i8)).sum();
            out[i] = f32::from_bits(out[i].to_bits().wrapping_add(sum as u32));
        }
        out
    }

    #[inline(always)]
    fn signed_bytes(self, quads: V, part: usize) -> V {
        quads.map(|quad| f32::from(quad.to_bits().to_le_bytes()[part % 4] as i8))
    }

    #[inline(always)]
    fn store_low_bytes(self, to: &mut [u8; 16], v: V) {
        for (to, v) in to.iter_mut().zip(v) {
            *to = v.to_bits() as u8;
        }
    }

    #[inline(always)]
    fn whole(self, v: V) -> V {
        v.map(|v| v.to_bits() as i32 as f32)
    }
}

/// `2ⁿ` for `n` in −126 ..= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}
