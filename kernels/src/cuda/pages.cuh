// The paged cache of one layer, as the product lays it out.
//
// A page holds `kPageTokens` tokens of every head: `[n_kv_heads, 32, head_stride]`, keys and values apart. `head_stride` is the
// head's width rounded up to 8 elements; what is beyond the width is zero. So a row starts at a multiple of 16 bytes, and a
// product over the padded width is one over the width.
#pragma once
#include "element.cuh"

constexpr uint32_t kPageTokens = 32;

template <class T>
struct Pages {
  T* k;
  T* v;
  // Elements from a page to the next.
  uint64_t page_stride;
  uint32_t head_stride;
  uint32_t n_kv_heads;

  // Element 0 of a token of a head, from the start of `k` or `v`.
  DEVICE uint64_t at(uint32_t page, uint32_t head, uint32_t token) const {
    return page * page_stride + (uint64_t{head} * kPageTokens + token) * head_stride;
  }
};

// The sequences of a step, as `ops::PagedBatch`.
struct PagedSequences {
  // [n_seqs + 1]: first query row of each sequence.
  const uint32_t* query_start;
  // [n_seqs]: keys of each, the ones of this step included.
  const uint32_t* seq_lens;
  // [n_seqs + 1]: first entry of each sequence in `block_tables`.
  const uint32_t* table_start;
  const uint32_t* block_tables;
  // A launch leaves out sequences of fewer or of more queries: another launch takes them.
  uint32_t min_queries, max_queries;

  DEVICE bool takes(uint32_t n_queries) const { return n_queries >= min_queries && n_queries <= max_queries; }
};
