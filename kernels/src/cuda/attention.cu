// Attention inside each sequence of a batch, and of prompts over the pages of their sequences. One kernel for each padded width
// of a head.
#include "attention.cuh"

#define ATTENTION(width)                                                                                                            \
  KERNEL(kAttentionThreads, attention_bf16_##width,                                                                                 \
         (bf16 * out, const bf16* q, RaggedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {       \
    attention_bf16<width>(out, q, keys, heads, bias, q_stride, out_stride);                                                         \
  }                                                                                                                                 \
  KERNEL(kAttentionThreads, paged_attention_bf16_##width,                                                                           \
         (bf16 * out, const bf16* q, PagedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {        \
    attention_bf16<width>(out, q, keys, heads, bias, q_stride, out_stride);                                                         \
  }

ATTENTION(32)
ATTENTION(64)
ATTENTION(80)
ATTENTION(96)
ATTENTION(128)
ATTENTION(256)
