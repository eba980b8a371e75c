// Attention of few queries over the pages of their sequences, bf16: a step of decoding, self or cross.
//
// The query heads that share a key head are the rows of one product (with all queries of the sequence), so each page is read once
// for all of them. Keys come in splits of 256, always the same for a sequence; a block takes one split, its four warps 64 keys
// each, and what they found is joined in order: first the warps' parts, then, in a second kernel, the splits'. So a row's
// value depends on its own sequence alone. The idea of splits is that of Flash-Decoding (Dao et al., 2023).
//
// A block has the queries of one sequence, or of several that have the pages of the split in common (`decode_shared`): beams over
// one encoder output, prompts that begin alike. Rows of a product do not see each other, so a row is the same in both.
#include "keys.cuh"
#include "softmax.cuh"

constexpr int kDecodeThreads = 128;
constexpr uint32_t kSplitKeys = 256;
constexpr uint32_t kWarps = kDecodeThreads / kWarp;
constexpr uint32_t kWarpKeys = kSplitKeys / kWarps;
// Queries of a sequence times heads that share a key head, of one block.
constexpr uint32_t kRows = 16;

// Keys that a warp has in shared memory at a time.
template <int D>
constexpr uint32_t kStep = D > 128 ? 16 : 32;

// Bytes of dynamic shared memory: keys and values of each warp, and the queries where registers have no room for them. At the
// end the warps' parts take the same place.
template <int D>
constexpr uint32_t kDecodeShared = kWarps * (2 * kStep<D> + (Queries<D>::kIsShared ? kRows : 0)) * kPitch<D> * 2;
static_assert(kDecodeShared<256> <= 99 << 10, "what a block of an sm_89 has");
static_assert(kDecodeShared<32> >= kWarps * kRows * (32 + 2) * 4 && kDecodeShared<256> >= kWarps * kRows * (256 + 2) * 4);

// What is known of a row after a split: its largest score, its sum of weights, and its weighted sum of values.
struct Parts {
  // [Σ queries, n_heads, n_splits].
  float* largest;
  float* sum;
  // [Σ queries, n_heads, n_splits, head_dim].
  float* out;
  // Splits of the longest sequence.
  uint32_t n_splits;

  DEVICE uint64_t at(uint32_t query, uint32_t head, uint32_t n_heads, uint32_t split) const {
    return (uint64_t{query} * n_heads + head) * n_splits + split;
  }
};

// A query: its sequence and the lengths of that, its number there, and its row among all queries.
struct Query {
  uint32_t seq, n_queries, n_keys, number, row;
};

// The queries of a sequence. Grid: (splits, key heads times tiles of 16 rows, n_seqs).
struct OwnQueries {
  uint32_t seq, split, first_row, n, n_keys;

  DEVICE explicit OwnQueries(const PagedKeys<bf16>& keys) : seq(blockIdx.z), split(blockIdx.x), first_row(keys.query_start[seq]) {
    n = keys.query_start[seq + 1] - first_row;
    n_keys = keys.n_keys(seq);
  }

  DEVICE Query operator[](uint32_t i) const { return {seq, n, n_keys, i, first_row + i}; }
};

// Splits with the queries that read each, on the host's plan.
struct SharedSplits {
  // [n]: a split's number, the first of its queries in `queries`, and how many they are: with their heads at most 16 rows.
  const uint32_t* splits;
  // Sequence, number and row of each.
  const uint32_t* queries;
};

// The queries that read a split of pages in common. The split is whole for each sequence, or all end at the same key of it.
// Grid: (planned splits, key heads).
struct SharedQueries {
  const PagedKeys<bf16>& keys;
  const uint32_t* queries;
  uint32_t seq, split, n, n_keys;

  DEVICE SharedQueries(const PagedKeys<bf16>& of, const SharedSplits& shared) : keys(of) {
    const uint32_t* at = shared.splits + 3 * blockIdx.x;
    queries = shared.queries + 3 * at[1];
    seq = queries[0];
    split = at[0];
    n = at[2];
    n_keys = keys.n_keys(seq);
  }

  DEVICE Query operator[](uint32_t i) const {
    const uint32_t* at = queries + 3 * i;
    return {at[0], keys.query_start[at[0] + 1] - keys.query_start[at[0]], keys.n_keys(at[0]), at[1], at[2]};
  }
};

// A split beyond a sequence's keys is left as it is.
template <int D, bool kMayCap, class BlockQueries>
DEVICE void decode(const Parts& parts, const bf16* q, const PagedKeys<bf16>& keys, const Heads& heads, const Bias& bias, uint32_t q_stride,
                   const BlockQueries& of_block) {
  SHARED_DYNAMIC(shared);
  constexpr uint32_t kTile = kStep<D> * kPitch<D>;
  uint32_t seq = of_block.seq, kv_head = blockIdx.y % heads.n_kv_heads, split = of_block.split;
  uint32_t group = heads.n_heads / heads.n_kv_heads, n_queries = of_block.n, n_rows = n_queries * group, n_keys = of_block.n_keys;
  uint32_t first_row = blockIdx.y / heads.n_kv_heads * kRows;
  if (first_row >= n_rows || split * kSplitKeys >= n_keys || !keys.takes(n_queries)) return;
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  bf16* tile = reinterpret_cast<bf16*>(shared) + warp * 2 * kTile;

  auto load = [&](uint32_t first_key) {
    auto k = [&](uint32_t i) { return keys.key(seq, kv_head, i); };
    auto v = [&](uint32_t i) { return keys.value(seq, kv_head, i); };
    load_tile<D, kStep<D>>(tile, k, first_key, n_keys, keys.width(), true, lane, kWarp);
    copy_async_commit();
    load_tile<D, kStep<D>>(tile + kTile, v, first_key, n_keys, keys.width(), true, lane, kWarp);
    copy_async_commit();
  };
  // Row `i` is query `i / group` of head `kv_head * group + i % group`.
  auto row_of = [&](uint32_t i) {
    return q + uint64_t{of_block[i / group].row} * q_stride + (kv_head * group + i % group) * heads.head_dim;
  };
  Queries<D> queries;
  queries.load(reinterpret_cast<bf16*>(shared) + 2 * kWarps * kTile + warp * kRows * kPitch<D>, row_of, first_row, n_rows, heads.head_dim);
  // The lane's rows. One beyond the last is the last once more, which nobody reads.
  uint32_t row[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
  uint32_t spare = n_rows - 1;
  Query row_query[2] = {of_block[(row[0] < n_rows ? row[0] : spare) / group], of_block[(row[1] < n_rows ? row[1] : spare) / group]};
  uint32_t row_head[2] = {kv_head * group + (row[0] < n_rows ? row[0] : spare) % group, kv_head * group + (row[1] < n_rows ? row[1] : spare) % group};
  auto scores_of = [&](int half) {
    const Query& query = row_query[half];
    return Scores<kMayCap>(heads, bias, query.seq, row_head[half], query.row - query.number, query.n_queries, query.n_keys);
  };
  Scores<kMayCap> scores[2] = {scores_of(0), scores_of(1)};

  Running<D> running;
  uint32_t begin = split * kSplitKeys + warp * kWarpKeys;
  for (uint32_t first_key = begin; first_key < begin + kWarpKeys && first_key < n_keys; first_key += kStep<D>) {
    load(first_key);
    float products[kStep<D> / 8][4] = {};
    copy_async_wait<1>();
    sync_warp();
    multiply_keys<D, kStep<D>>(products, queries, tile);
    running.template weigh<kStep<D>>(products, [&](float product, int half, int key) {
      return scores[half].of(product, static_cast<int>(row_query[half].number), static_cast<int>(first_key) + key);
    });
    copy_async_wait<0>();
    sync_warp();
    multiply_values<D, kStep<D>>(running.out, products, tile + kTile);
    // All lanes are done with the tile before it is written again.
    sync_warp();
  }
  running.finish();

  // The warps' parts side by side: [warps, 16 rows, D + 2], largest and sum last.
  constexpr uint32_t kPart = D + 2;
  sync_block();
  auto* found = reinterpret_cast<float*>(shared);
  UNROLL
  for (int half = 0; half < 2; half++) {
    float* to = found + (warp * kRows + lane / 4 + 8 * half) * kPart;
    UNROLL
    for (int n = 0; n < D / 8; n++) {
      to[n * 8 + lane % 4 * 2] = running.out[n][2 * half];
      to[n * 8 + lane % 4 * 2 + 1] = running.out[n][2 * half + 1];
    }
    if (lane % 4 == 0) {
      to[D] = running.largest[half];
      to[D + 1] = running.sum[half];
    }
  }
  sync_block();
  for (uint32_t i = threadIdx.x; i < kRows * D; i += kDecodeThreads) {
    uint32_t r = i / D, column = i % D;
    if (first_row + r >= n_rows || column >= heads.head_dim) continue;
    const float* part = found + r * kPart;
    float largest = -INFINITY;
    for (uint32_t w = 0; w < kWarps; w++) largest = fmaxf(largest, part[w * kRows * kPart + D]);
    float base = base_of(largest), sum = 0, out = 0;
    for (uint32_t w = 0; w < kWarps; w++) {
      const float* from = part + w * kRows * kPart;
      float factor = exp2_fast(from[D] - base);
      sum += from[D + 1] * factor;
      out += from[column] * factor;
    }
    uint32_t head = kv_head * group + (first_row + r) % group;
    uint64_t at = parts.at(of_block[(first_row + r) / group].row, head, heads.n_heads, split);
    parts.out[at * heads.head_dim + column] = out;
    if (column == 0) {
      parts.largest[at] = largest;
      parts.sum[at] = sum;
    }
  }
}

#define DECODE(name, width, may_cap)                                                                                                    \
  KERNEL(kDecodeThreads, name##_bf16_##width, (Parts parts, const bf16* q, PagedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride)) { \
    decode<width, may_cap>(parts, q, keys, heads, bias, q_stride, OwnQueries(keys));                                                   \
  }                                                                                                                                    \
  KERNEL(kDecodeThreads, name##_shared_bf16_##width,                                                                                   \
         (Parts parts, const bf16* q, PagedKeys<bf16> keys, Heads heads, Bias bias, uint32_t q_stride, SharedSplits shared)) {         \
    decode<width, may_cap>(parts, q, keys, heads, bias, q_stride, SharedQueries(keys, shared));                                        \
  }

DECODE(decode, 32, false)
DECODE(decode, 64, false)
DECODE(decode, 80, false)
DECODE(decode, 96, false)
DECODE(decode, 128, false)
DECODE(decode, 256, false)
DECODE(capped_decode, 128, true)
DECODE(capped_decode, 256, true)

// Joins the splits of each row in order: `out: [Σ queries, n_heads head_dim]`. Grid: (queries of the longest sequence, n_heads,
// n_seqs).
KERNEL(kDecodeThreads, join_splits_bf16, (bf16 * out, Parts parts, PagedSequences sequences, Heads heads, uint32_t out_stride)) {
  uint32_t seq = blockIdx.z, head = blockIdx.y, first_query = sequences.query_start[seq], query = first_query + blockIdx.x;
  uint32_t n_queries = sequences.query_start[seq + 1] - first_query;
  if (blockIdx.x >= n_queries || !sequences.takes(n_queries)) return;
  uint32_t n_splits = div_up(sequences.seq_lens[seq], kSplitKeys);
  uint64_t first = parts.at(query, head, heads.n_heads, 0);
  float largest = -INFINITY;
  for (uint32_t split = 0; split < n_splits; split++) largest = fmaxf(largest, parts.largest[first + split]);
  float base = base_of(largest), sum = 0;
  for (uint32_t split = 0; split < n_splits; split++) sum += parts.sum[first + split] * exp2_fast(parts.largest[first + split] - base);
  float scale = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
  for (uint32_t column = threadIdx.x; column < heads.head_dim; column += kDecodeThreads) {
    float value = 0;
    for (uint32_t split = 0; split < n_splits; split++) {
      value += parts.out[(first + split) * heads.head_dim + column] * exp2_fast(parts.largest[first + split] - base);
    }
    out[uint64_t{query} * out_stride + head * heads.head_dim + column] = from_f32<bf16>(value * scale);
  }
}
