//! The CPU back end: packed weights, SIMD, attention over pages as they lie.
