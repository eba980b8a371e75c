//! Counts of forwards that a back end captures as graphs and replays.

/// Forwards of an encoder, or steps of a decoder, with graphs, and what its graphs keep. Zeros without graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphStats {
    /// Replays of graphs.
    pub replays: u64,
    /// Forwards without a graph. Of a decoder: steps of decoding alone.
    pub eager: u64,
    /// Output tokens of replays, padding included.
    pub tokens: u64,
    /// Those of them that are padding.
    pub padding_tokens: u64,
    /// Graphs that are there.
    pub graphs: usize,
    /// Bytes of device memory that they keep.
    pub n_bytes: usize,
}
