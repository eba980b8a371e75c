//! Checks of sizes and of indices in host memory. It knows no staged handles.

use crate::ops::{KernelError, Result};

/// An error unless `actual` is `expected`.
pub(crate) fn same(op: &'static str, what: &'static str, actual: &[usize], expected: &[usize]) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(KernelError::Shape { op, what, expected: expected.to_vec(), actual: actual.to_vec() })
}

/// An error unless `value` is a multiple of `unit`, which is at least one. Returns the quotient.
pub(crate) fn divides(op: &'static str, what: &'static str, unit: usize, value: usize) -> Result<usize> {
    if unit == 0 || !value.is_multiple_of(unit) {
        return Err(KernelError::Shape { op, what, expected: vec![unit], actual: vec![value] });
    }
    Ok(value / unit)
}

/// An error unless every index is below `len`.
pub(crate) fn indices(op: &'static str, what: &'static str, indices: &[u32], len: usize) -> Result<()> {
    match indices.iter().find(|&&index| index as usize >= len) {
        Some(&index) => Err(KernelError::Index { op, what, index: index as usize, len }),
        None => Ok(()),
    }
}

/// An error unless `offsets` starts at 0, never falls and ends at `len`.
pub(crate) fn offsets(op: &'static str, what: &'static str, offsets: &[u32], len: usize) -> Result<()> {
    let ends =
        offsets.first().map(|&o| o as usize) == Some(0) && offsets.last().map(|&o| o as usize) == Some(len);
    if !ends || offsets.windows(2).any(|pair| pair[1] < pair[0]) {
        let actual = offsets.iter().map(|&o| o as usize).collect();
        return Err(KernelError::Shape { op, what, expected: vec![0, len], actual });
    }
    Ok(())
}
