// Where attention finds the keys and values of a sequence: in rows of a batch, or in pages of the cache.
#pragma once
#include "pages.cuh"

// Rows of all sequences one after another, `[Σ keys, n_kv_heads head_dim]`, `k_stride` and `v_stride` elements apart.
template <class T>
struct RaggedKeys {
  const T* k;
  const T* v;
  // [n_seqs + 1].
  const uint32_t* query_start;
  const uint32_t* key_start;
  uint32_t k_stride, v_stride;
  uint32_t head_dim;

  DEVICE bool takes(uint32_t) const { return true; }
  DEVICE uint32_t n_keys(uint32_t seq) const { return key_start[seq + 1] - key_start[seq]; }
  DEVICE const T* key(uint32_t seq, uint32_t head, uint32_t i) const {
    return k + uint64_t{key_start[seq] + i} * k_stride + head * head_dim;
  }
  DEVICE const T* value(uint32_t seq, uint32_t head, uint32_t i) const {
    return v + uint64_t{key_start[seq] + i} * v_stride + head * head_dim;
  }
  // Elements of a row that may be read, and whether they may be by 16 bytes.
  DEVICE uint32_t width() const { return head_dim; }
  DEVICE bool is_aligned() const { return (head_dim | k_stride | v_stride) % kPack<T> == 0; }
};

template <class T>
struct PagedKeys {
  Pages<T> pages;
  PagedSequences sequences;
  const uint32_t* query_start;

  DEVICE bool takes(uint32_t n_queries) const { return sequences.takes(n_queries); }
  DEVICE uint32_t n_keys(uint32_t seq) const { return sequences.seq_lens[seq]; }
  DEVICE uint64_t at(uint32_t seq, uint32_t head, uint32_t i) const {
    return pages.at(sequences.block_tables[sequences.table_start[seq] + i / kPageTokens], head, i % kPageTokens);
  }
  DEVICE const T* key(uint32_t seq, uint32_t head, uint32_t i) const { return pages.k + at(seq, head, i); }
  DEVICE const T* value(uint32_t seq, uint32_t head, uint32_t i) const { return pages.v + at(seq, head, i); }
  DEVICE uint32_t width() const { return pages.head_stride; }
  DEVICE bool is_aligned() const { return true; }
};
