//! Settings of decode graphs.

/// Settings of decode graphs, on back ends that have graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeGraphConfig {
    /// Most sequences of a captured step; a step of more runs without a graph. Default 256.
    pub max_sequences: usize,
    /// Device memory of a decoder's graphs in bytes. Once it is taken, no more are captured. Default 512 MiB.
    pub max_bytes: usize,
}

impl Default for DecodeGraphConfig {
    fn default() -> Self {
        Self { max_sequences: 256, max_bytes: 512 << 20 }
    }
}
