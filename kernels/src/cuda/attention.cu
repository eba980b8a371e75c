// Attention inside each sequence of a batch, and of prompts over the pages of their sequences. One kernel for each padded width
// of a head; where scores are capped, for two.
#include "attention.cuh"

#define ATTENTION(name, width, may_cap)                                                                                             \
  KERNEL(kAttentionThreads, name##_bf16_##width,                                                                                    \
         (bf16 * out, const bf16* q, RaggedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {       \
    attention_bf16<width, may_cap>(out, q, keys, heads, bias, q_stride, out_stride);                                                \
  }                                                                                                                                 \
  KERNEL(kAttentionThreads, paged_##name##_bf16_##width,                                                                            \
         (bf16 * out, const bf16* q, PagedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride, uint32_t out_stride)) {        \
    attention_bf16<width, may_cap>(out, q, keys, heads, bias, q_stride, out_stride);                                                \
  }

ATTENTION(attention, 32, false)
ATTENTION(attention, 64, false)
ATTENTION(attention, 80, false)
ATTENTION(attention, 96, false)
ATTENTION(attention, 128, false)
ATTENTION(attention, 256, false)
ATTENTION(capped_attention, 128, true)
ATTENTION(capped_attention, 256, true)
