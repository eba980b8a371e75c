//! CTranslate2's `model.bin`, version 6: a list of named tensors and of aliases, little-endian throughout.
//!
//! ```text
//! u32 version · str spec · u32 revision
//! u32 n · n × ( str name · u8 rank · rank × u32 dimension · u8 dtype · u32 n_bytes · bytes )
//! u32 n · n × ( str alias · str name )
//! str: u16 length with the closing zero · bytes
//! ```
//!
//! As `Model::load` reads it: https://github.com/OpenNMT/CTranslate2/blob/v4.6.0/src/models/model.cc. Nothing is
//! believed before it was held against the bytes that are there.

use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;

const VERSION: u32 = 6;
const SPEC: &str = "WhisperSpec";
/// No model has more, and no length in the file makes us allocate more.
const MAX_TENSORS: u32 = 100_000;

/// Element types, by their number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 0.
    F32,
    /// 1.
    I8,
    /// 2.
    I16,
    /// 3.
    I32,
    /// 4.
    F16,
    /// 5.
    Bf16,
}

impl Dtype {
    fn from_number(n: u8) -> Result<Self> {
        Ok(match n {
            0 => Self::F32,
            1 => Self::I8,
            2 => Self::I16,
            3 => Self::I32,
            4 => Self::F16,
            5 => Self::Bf16,
            _ => bail!("element type {n} is unknown"),
        })
    }

    const fn size(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
        }
    }
}

/// A tensor, its bytes in the file.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major, little-endian.
    pub data: &'a [u8],
}

/// The tensors of a file.
#[derive(Clone, Debug, Default)]
pub struct Stored<'a>(HashMap<String, Tensor<'a>>);

impl<'a> Stored<'a> {
    /// The tensor of that name.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, name: &str) -> Result<&Tensor<'a>> {
        self.0.get(name).with_context(|| format!("there is no tensor {name}"))
    }

    /// True if there is one.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// Reads a whole file.
///
/// # Errors
/// If it is no Whisper model of the version that is read here, or is cut short.
pub fn parse(bytes: &[u8]) -> Result<Stored<'_>> {
    let mut reader = Reader(bytes);
    let version = reader.u32()?;
    ensure!(version == VERSION, "format version {version}, expected {VERSION}");
    let spec = reader.text()?;
    ensure!(spec == SPEC, "a {spec}, expected a {SPEC}");
    reader.u32()?;
    let mut tensors = HashMap::new();
    for _ in 0..reader.count()? {
        let name = reader.text()?;
        let tensor = reader.tensor().with_context(|| format!("tensor {name}"))?;
        tensors.insert(name, tensor);
    }
    for _ in 0..reader.count()? {
        let (alias, name) = (reader.text()?, reader.text()?);
        let tensor: &Tensor<'_> =
            tensors.get(&name).with_context(|| format!("{alias} stands for {name}, which is missing"))?;
        tensors.insert(alias, tensor.clone());
    }
    ensure!(reader.0.is_empty(), "{} bytes too many", reader.0.len());
    Ok(Stored(tensors))
}

/// The bytes of the file that are not read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (taken, rest) =
            self.0.split_at_checked(n).with_context(|| format!("{} bytes left, {n} needed", self.0.len()))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into()?)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn count(&mut self) -> Result<u32> {
        let n = self.u32()?;
        ensure!(n <= MAX_TENSORS, "{n} entries, at most {MAX_TENSORS}");
        Ok(n)
    }

    fn text(&mut self) -> Result<String> {
        let n = u16::from_le_bytes(self.array()?);
        let bytes = self.take(usize::from(n))?;
        let text = bytes.strip_suffix(&[0]).context("a text without its closing zero")?;
        Ok(std::str::from_utf8(text)?.to_owned())
    }

    fn tensor(&mut self) -> Result<Tensor<'a>> {
        let [rank] = self.array()?;
        let shape = (0..rank).map(|_| Ok(usize::try_from(self.u32()?)?)).collect::<Result<Vec<_>>>()?;
        let [dtype] = self.array()?;
        let dtype = Dtype::from_number(dtype)?;
        let n_bytes = usize::try_from(self.u32()?)?;
        let expected = shape.iter().try_fold(dtype.size(), |n, d| n.checked_mul(*d));
        ensure!(expected == Some(n_bytes), "{n_bytes} bytes for {dtype:?} {shape:?}");
        Ok(Tensor { shape, dtype, data: self.take(n_bytes)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend(u16::try_from(text.len() + 1).unwrap().to_le_bytes());
        out.extend(text.bytes().chain([0]));
    }

    /// One f16 tensor `a` of shape `[1, 2]` with the alias `b`.
    fn file() -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        text(&mut out, SPEC);
        out.extend(3u32.to_le_bytes());
        out.extend(1u32.to_le_bytes());
        text(&mut out, "a");
        out.push(2);
        out.extend([1u32, 2].map(u32::to_le_bytes).concat());
        out.push(4);
        out.extend(4u32.to_le_bytes());
        out.extend([1, 2, 3, 4]);
        out.extend(1u32.to_le_bytes());
        text(&mut out, "b");
        text(&mut out, "a");
        out
    }

    #[test]
    fn tensors_and_aliases_are_read() {
        let bytes = file();
        let stored = parse(&bytes).unwrap();
        for name in ["a", "b"] {
            let tensor = stored.get(name).unwrap();
            assert_eq!((tensor.shape.as_slice(), tensor.dtype), ([1, 2].as_slice(), Dtype::F16));
            assert_eq!(tensor.data, [1, 2, 3, 4]);
        }
        assert!(stored.get("c").is_err());
    }

    #[test]
    fn a_file_that_is_cut_or_altered_is_an_error_and_never_a_panic() {
        let whole = file();
        for n in 0..whole.len() {
            assert!(parse(&whole[..n]).is_err(), "the first {n} bytes");
        }
        for i in 0..whole.len() {
            let mut altered = whole.clone();
            altered[i] = 0xff;
            let _ = parse(&altered);
        }
        assert!(parse(&[whole, vec![0]].concat()).is_err());
    }
}
