// Attention of bf16 rows on tensor cores, in the manner of FlashAttention-2 (Dao, 2023): 64 queries of a head stay in registers
// while the keys of their sequence pass by in tiles.
#pragma once
#include "keys.cuh"
#include "softmax.cuh"

constexpr int kAttentionThreads = 128;
constexpr uint32_t kQueryTile = 64;

// Keys of a tile: fewer for the widest heads, whose sums leave no more registers.
template <int D>
constexpr int kKeyTile = D > 128 ? 32 : 64;

// Bytes of dynamic shared memory: two tiles of keys and two of values, and the queries where registers have no room for them.
template <int D>
constexpr int kAttentionShared = (4 * kKeyTile<D> + (Queries<D>::kIsShared ? kQueryTile : 0)) * kPitch<D> * 2;
static_assert(kAttentionShared<256> <= 99 << 10, "what a block of an sm_89 has");

// `q`, `out: [Σ queries, n_heads head_dim]`, rows `q_stride` and `out_stride` elements apart; `D` is the head's width rounded up.
// A query that sees no key gives zeros. A block's tiles of keys start at multiples of the tile whatever its queries see, and a
// tile that a row does not see leaves it as it is: a row's value does not depend on the rows beside it.
// Grid: (tiles of queries of the longest sequence, n_heads, n_seqs).
template <int D, bool kMayCap, class Keys>
DEVICE void attention_bf16(bf16* out, const bf16* q, const Keys& keys, const Heads& heads, const Bias& bias, uint32_t q_stride, uint32_t out_stride) {
  SHARED_DYNAMIC(shared);
  constexpr int kKeys = kKeyTile<D>;
  auto* tiles = reinterpret_cast<bf16*>(shared);
  uint32_t seq = blockIdx.z, head = blockIdx.y;
  uint32_t first_row = keys.query_start[seq], n_queries = keys.query_start[seq + 1] - first_row;
  uint32_t first = blockIdx.x * kQueryTile;
  if (first >= n_queries || !keys.takes(n_queries)) return;
  uint32_t kv_head = head / (heads.n_heads / heads.n_kv_heads), n_keys = keys.n_keys(seq);
  Scores<kMayCap> scores(heads, bias, seq, head, first_row, n_queries, n_keys);
  uint32_t last = first + kQueryTile < n_queries ? first + kQueryTile - 1 : n_queries - 1;
  int end = scores.end(static_cast<int>(last)), begin = scores.begin(static_cast<int>(first)) / kKeys;
  int n_tiles = end <= 0 ? 0 : static_cast<int>(div_up(static_cast<uint32_t>(end), kKeys));

  auto load = [&](int tile) {
    bf16* to = tiles + (tile & 1) * 2 * kKeys * kPitch<D>;
    load_tile<D, kKeys>(to, [&](uint32_t i) { return keys.key(seq, kv_head, i); }, tile * kKeys, n_keys, keys.width(), keys.is_aligned(),
                        threadIdx.x, kAttentionThreads);
    load_tile<D, kKeys>(to + kKeys * kPitch<D>, [&](uint32_t i) { return keys.value(seq, kv_head, i); }, tile * kKeys, n_keys, keys.width(),
                        keys.is_aligned(), threadIdx.x, kAttentionThreads);
    copy_async_commit();
  };

  uint32_t warp_row = first + threadIdx.x / kWarp * 16, row = warp_row + threadIdx.x % kWarp / 4;
  Queries<D> queries;
  queries.load(tiles + (4 * kKeys + threadIdx.x / kWarp * 16) * kPitch<D>,
               [&](uint32_t i) { return q + uint64_t{first_row + i} * q_stride + head * heads.head_dim; }, warp_row, n_queries, heads.head_dim);
  Running<D> running;
  if (begin < n_tiles) load(begin);
  for (int tile = begin; tile < n_tiles; tile++) {
    copy_async_wait<0>();
    // The tile is there for all warps, and all are done with the one before, whose place the next takes.
    sync_block();
    if (tile + 1 < n_tiles) load(tile + 1);
    const bf16* k = tiles + (tile & 1) * 2 * kKeys * kPitch<D>;
    float products[kKeys / 8][4] = {};
    multiply_keys<D, kKeys>(products, queries, k);
    running.template weigh<kKeys>(products, [&](float product, int half, int key) {
      return scores.of(product, static_cast<int>(row) + 8 * half, tile * kKeys + key);
    });
    multiply_values<D, kKeys>(running.out, products, k + kKeys * kPitch<D>);
  }
  running.finish();
  UNROLL
  for (int half = 0; half < 2; half++) {
    uint32_t i = row + 8 * half;
    if (i >= n_queries) continue;
    float factor = running.sum[half] > 0 || running.sum[half] != running.sum[half] ? 1.0f / running.sum[half] : 0.0f;
    bf16* to = out + uint64_t{first_row + i} * out_stride + head * heads.head_dim;
    UNROLL
    for (int n = 0; n < D / 8; n++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        uint32_t column = n * 8 + threadIdx.x % 4 * 2 + j;
        if (column < heads.head_dim) to[column] = from_f32<bf16>(running.out[n][2 * half + j] * factor);
      }
    }
  }
}
