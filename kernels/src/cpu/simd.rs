//! The vector trait, and the instruction sets behind it.
//!
//! A kernel is written once over [`Simd`] and runs through [`FoundIsa::run`], which enters a function compiled for
//! the instruction set; everything below it is `#[inline(always)]`, so that it is compiled there too, or entered
//! through [`Simd::call`]. The idea is memchr's (`src/vector.rs`). A value of a [`Simd`] type is proof that the machine
//! has the set: it is made only by [`FoundIsa::run`] and its like, of an [`Isa`] that was found on this machine.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use vector::{Kernel, Simd};

#[cfg(target_arch = "aarch64")]
use neon::Entries;
use portable::Entry;
#[cfg(target_arch = "x86_64")]
use x86::Entries;

use crate::ops::{KernelError, Result};
use std::sync::OnceLock;

/// An instruction set to run kernels on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, four lanes; multiplication and addition round separately.
    Portable,
    /// AVX2 and FMA, eight lanes.
    Avx2,
    /// The same with the dot product of bytes.
    AvxVnni,
    /// AVX-512 F, BW and VL, sixteen lanes; bf16 is widened.
    Avx512,
    /// The same with the dot product of bytes.
    Avx512Vnni,
    /// The same with the bf16 dot product too.
    Avx512Bf16,
    /// NEON, four lanes; bytes are multiplied as words.
    Neon,
    /// The same with the dot product of signed bytes, of which unsigned ones are made by a subtraction.
    NeonDot,
    /// The same with the dot product of unsigned by signed bytes.
    NeonI8mm,
}

impl Isa {
    /// Every set this crate knows, on every machine; those of one machine slowest first.
    pub const ALL: [Self; 9] = [
        Self::Portable,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Neon,
        Self::NeonDot,
        Self::NeonI8mm,
    ];

    /// The name used in settings and errors.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Neon => "neon",
            Self::NeonDot => "neondot",
            Self::NeonI8mm => "neoni8mm",
        }
    }

    /// `true` if this machine has the set.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            // Every machine with the one dot product has the other.
            Self::Avx512Bf16 => Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => Self::NeonDot.is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            // Of another architecture.
            _ => false,
        }
    }

    /// The sets of this machine, slowest first, except that [`Self::fastest`] may come before the last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The set of this name, of those that this machine has.
    ///
    /// # Errors
    /// [`NoSuchIsa`] for any other name.
    pub fn named(name: &str) -> std::result::Result<Self, NoSuchIsa> {
        Self::available().find(|isa| isa.as_str() == name).ok_or_else(|| NoSuchIsa(name.to_owned()))
    }

    /// The set that kernels run on where none is asked for.
    ///
    /// On Intel's machines the bf16 dot product is left out: it multiplies half as much in a cycle there (16 pairs every
    /// other one, measured on Emerald Rapids) as widened values do. On AMD's it is twice as fast.
    pub fn fastest() -> Self {
        // Asking the processor takes microseconds on a virtual machine.
        static FASTEST: OnceLock<Isa> = OnceLock::new();
        *FASTEST.get_or_init(|| {
            let is_slow = |isa: &Self| *isa == Self::Avx512Bf16 && is_intel();
            Self::available().filter(|isa| !is_slow(isa)).last().unwrap_or(Self::Portable)
        })
    }
}

/// A name that is of no set of this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no instruction set of this machine, which has {names}", names = names_of_available())]
pub struct NoSuchIsa(String);

fn names_of_available() -> String {
    Isa::available().map(Isa::as_str).collect::<Vec<_>>().join(", ")
}

/// `true` if Intel made the processor.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// An [`Isa`] found on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundIsa(Isa);

impl FoundIsa {
    /// The set asked for, or the fastest there is.
    ///
    /// # Errors
    /// [`KernelError::Isa`] if the machine lacks the set asked for.
    pub(crate) fn new(forced: Option<Isa>) -> Result<Self> {
        match forced {
            Some(isa) if !isa.is_available() => Err(KernelError::Isa(isa.as_str())),
            Some(isa) => Ok(Self(isa)),
            None => Ok(Self::fastest()),
        }
    }

    /// The fastest set there is.
    pub(crate) fn fastest() -> Self {
        Self(Isa::fastest())
    }

    /// The set.
    pub(crate) fn get(self) -> Isa {
        self.0
    }

    /// Runs a kernel without dot products compiled for the set: those that differ in nothing else share the code.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the field is private and `new` checked that this machine has the set; the second holds the first.
            Isa::Avx2 | Isa::AvxVnni => unsafe { kernel.run_avx2() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; each of these sets holds the first.
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { kernel.run_avx512() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => unsafe { kernel.run_neon() },
            // The portable set; those of another architecture are never found.
            _ => kernel.run_portable(),
        }
    }

    /// Runs a kernel with dot products of pairs of bf16.
    ///
    /// # Panics
    /// Unless the set [has](Self::has_bf16_dot) them: nothing is compiled for others.
    pub(crate) fn run_bf16_dot<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512Bf16 => unsafe { kernel.run_avx512bf16() },
            _ => {
                drop(kernel);
                unreachable!("{} has no dot product of pairs", self.0.as_str())
            }
        }
    }

    /// Runs a kernel with dot products of four bytes, on sets that have none by other instructions.
    pub(crate) fn run_byte_dot<K: Kernel>(self, kernel: K) {
        if self.has_byte_dot() { self.run_byte_dot_only(kernel) } else { self.run(kernel) }
    }

    /// The same for a kernel that is meant for such sets alone.
    ///
    /// # Panics
    /// Unless the set [has](Self::has_byte_dot) them: nothing is compiled for others.
    pub(crate) fn run_byte_dot_only<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::AvxVnni => unsafe { kernel.run_avxvnni() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`; the second set holds the first.
            Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { kernel.run_avx512vnni() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonDot => unsafe { kernel.run_neondot() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonI8mm => unsafe { kernel.run_neoni8mm() },
            _ => {
                drop(kernel);
                unreachable!("{} has no dot product of bytes", self.0.as_str())
            }
        }
    }

    /// `true` if the set has the dot product of pairs of bf16; elsewhere pairs are taken apart.
    pub(crate) fn has_bf16_dot(self) -> bool {
        self.0 == Isa::Avx512Bf16
    }

    /// `true` if the set has a dot product of four bytes.
    pub(crate) fn has_byte_dot(self) -> bool {
        matches!(self.0, Isa::AvxVnni | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::NeonDot | Isa::NeonI8mm)
    }

    /// Rows of the largest register tile of the set.
    pub(crate) fn tile_rows(self) -> usize {
        match self.0 {
            Isa::Portable | Isa::Avx2 | Isa::AvxVnni => 6,
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => 8,
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => 14,
        }
    }
}

#[cfg(test)]
mod tests;
