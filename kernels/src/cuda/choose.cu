// Chooses a token for each row of logits, `[n_rows, vocab]`, as the engine's sampler does on the host: after temperature, top-k,
// top-p and min-p, by a number that the caller drew. Before it, penalties and masks; beside it, log-probabilities.
//
// Weights are whole numbers, 2^40 for the most probable token. So a sum of weights is the same in any order, and no row's choice
// depends on how threads share the work. What must be sorted in the sampler is found here by descending through the bits of a key.
#include "element.cuh"
#include "reduce.cuh"

constexpr int kChooseThreads = 256;
constexpr float kOne = 1099511627776.0f;

// A change of one token's logit: `(logit + bias)`, divided by `repetition` if positive and multiplied otherwise, less `subtract`.
// A bias of minus infinity rules the token out, whatever its logit.
struct Edit {
  uint32_t token;
  float bias, repetition, subtract;
};

// Applies a row's edits, those of one token side by side and in their order, and then its mask, a bit for each token that is allowed. `edits` of row `i` are
// `edit_start[i] .. edit_start[i + 1]`; `mask_start[i]` is where its mask begins, in words of `masks`, plus 1; 0 is no mask.
// Grid: (n_rows).
KERNEL(kChooseThreads, edit_logits,
       (float* logits, const Edit* edits, const uint32_t* edit_start, const uint32_t* masks, const uint32_t* mask_start, uint32_t vocab)) {
  float* row = logits + uint64_t{blockIdx.x} * vocab;
  for (uint32_t i = edit_start[blockIdx.x] + threadIdx.x; i < edit_start[blockIdx.x + 1]; i += kChooseThreads) {
    uint32_t token = edits[i].token;
    // The thread of a token's first edit applies them all. Placeholders of items are tokens past the vocabulary.
    if (token >= vocab || (i > edit_start[blockIdx.x] && edits[i - 1].token == token)) continue;
    float logit = row[token];
    for (uint32_t j = i; j < edit_start[blockIdx.x + 1] && edits[j].token == token; j++) {
      Edit edit = edits[j];
      logit += edit.bias;
      logit = logit > 0 ? logit / edit.repetition : logit * edit.repetition;
      logit = edit.bias == -INFINITY ? -INFINITY : logit - edit.subtract;
    }
    row[token] = logit;
  }
  sync_block();
  if (mask_start[blockIdx.x] == 0) return;
  const uint32_t* mask = masks + mask_start[blockIdx.x] - 1;
  for (uint32_t token = threadIdx.x; token < vocab; token += kChooseThreads) {
    if (!(mask[token / 32] >> token % 32 & 1)) row[token] = -INFINITY;
  }
}

// A float as an integer of the same order.
DEVICE uint32_t ordered(float x) {
  uint32_t bits = bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float unordered(uint32_t key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The largest and the sum of a value in each thread, the same in all threads afterwards. `scratch: [threads / 32]`.
DEVICE uint64_t block_max(uint64_t x, uint64_t* scratch) {
  UNROLL
  for (int lane = 16; lane > 0; lane /= 2) {
    uint64_t other = shuffle_xor(x, lane);
    x = other > x ? other : x;
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  sync_block();
  for (int warp = 0; warp < kChooseThreads / kWarp; warp++) x = scratch[warp] > x ? scratch[warp] : x;
  sync_block();
  return x;
}

DEVICE uint64_t block_total(uint64_t x, uint64_t* scratch) {
  UNROLL
  for (int lane = 16; lane > 0; lane /= 2) x += shuffle_xor(x, lane);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  sync_block();
  x = 0;
  for (int warp = 0; warp < kChooseThreads / kWarp; warp++) x += scratch[warp];
  sync_block();
  return x;
}

// A place in the order of keys, largest first: the key, and the amount of all larger ones.
struct Descent {
  uint32_t key;
  uint64_t above;
};

// The largest key with which the amounts of all keys from it up reach `target`; the least key if none does. Eight bits at a time.
// `scratch: [256 + 1]`.
template <class Key, class Amount>
DEVICE Descent descend(uint32_t n, Key key, Amount amount, uint64_t target, uint64_t* scratch) {
  Descent found = {0, 0};
  for (int shift = 24; shift >= 0; shift -= 8) {
    scratch[threadIdx.x] = 0;
    sync_block();
    for (uint32_t i = threadIdx.x; i < n; i += kChooseThreads) {
      uint32_t k = key(i);
      bool is_below = shift == 24 || k >> (shift + 8) == found.key >> (shift + 8);
      uint64_t a = is_below ? amount(i) : 0;
      if (a) atomic_add(scratch + (k >> shift & 0xff), a);
    }
    sync_block();
    // All threads walk down the same counts.
    uint32_t digit = 255;
    while (digit > 0 && found.above + scratch[digit] < target) found.above += scratch[digit--];
    found.key |= digit << shift;
    sync_block();
  }
  return found;
}

// The token at `place`, counted in amounts, of all tokens in order. `scratch: [256]`.
template <class Amount>
DEVICE uint32_t at_place(uint32_t n, Amount amount, uint64_t place, uint64_t* scratch) {
  uint32_t chunk = div_up(n, kChooseThreads), first = threadIdx.x * chunk, end = first + chunk < n ? first + chunk : n;
  uint64_t sum = 0;
  for (uint32_t i = first; i < end; i++) sum += amount(i);
  scratch[threadIdx.x] = sum;
  sync_block();
  uint64_t before = 0;
  uint32_t owner = 0;
  while (owner < kChooseThreads - 1 && before + scratch[owner] <= place) before += scratch[owner++];
  uint32_t i = owner * chunk, stop = i + chunk < n ? i + chunk : n;
  while (i + 1 < stop && before + amount(i) <= place) before += amount(i++);
  sync_block();
  return i;
}

// Settings of a row. `top_k` of 0: all. `draw`: 53 random bits.
struct Sampling {
  uint64_t draw;
  float temperature, top_p, min_p;
  uint32_t top_k;
};

enum Status : uint32_t { kChosen, kNotFinite, kNothingAllowed };

// The chosen token; or, with a status of `kNotFinite`, the first whose logit is NaN or infinity.
struct Choice {
  uint32_t token;
  uint32_t status;
};

DEVICE Choice choose_row(const float* row, const Sampling& how, uint32_t vocab, uint64_t* scratch) {
  // Of equals the lowest token is the largest.
  uint64_t best = 0, broken = 0;
  for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) {
    float logit = row[i];
    if (logit != logit || logit == INFINITY) {
      uint64_t early = uint64_t{1} << 32 | (0xffffffffu - i);
      broken = early > broken ? early : broken;
    } else if (logit != -INFINITY) {
      uint64_t key = uint64_t{ordered(logit)} << 32 | (0xffffffffu - i);
      best = key > best ? key : best;
    }
  }
  broken = block_max(broken, scratch);
  best = block_max(best, scratch);
  if (broken) return {0xffffffffu - static_cast<uint32_t>(broken), kNotFinite};
  if (best == 0) return {0, kNothingAllowed};
  uint32_t top = 0xffffffffu - static_cast<uint32_t>(best);
  if (how.temperature <= 0 || how.top_k == 1) return {top, kChosen};

  float largest = unordered(static_cast<uint32_t>(best >> 32));
  uint32_t least = 0;
  if (how.top_k > 0 && how.top_k < vocab) {
    least = descend(vocab, [&](uint32_t i) { return ordered(row[i]); }, [](uint32_t) { return uint64_t{1}; }, how.top_k, scratch).key;
  }
  // Weights of the tokens that top-k leaves, its equals included; they are at most 1, so their bits are in their order.
  auto weight = [&](uint32_t i) { return ordered(row[i]) >= least ? expf((row[i] - largest) / how.temperature) : 0.0f; };
  auto key = [&](uint32_t i) { return bits_of(weight(i)); };
  auto mass = [&](uint32_t i) { return static_cast<uint64_t>(weight(i) * kOne); };

  // Tokens stay whose key is above `floor`, and of those at `floor` the first `n_equal`.
  bool is_nucleus = how.top_p < 1;
  uint32_t floor = 0, n_equal = 0xffffffffu;
  if (is_nucleus) {
    uint64_t total = 0;
    for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) total += mass(i);
    total = block_total(total, scratch);
    uint64_t target = static_cast<uint64_t>(ceil(static_cast<double>(how.top_p) * static_cast<double>(total)));
    target = target < 1 ? 1 : target > total ? total : target;
    Descent last = descend(vocab, key, mass, target, scratch);
    uint64_t one = static_cast<uint64_t>(float_of(last.key) * kOne);
    floor = last.key;
    n_equal = static_cast<uint32_t>((target - last.above + one - 1) / one);
  }
  if (how.min_p > 0 && bits_of(how.min_p) > floor) {
    floor = bits_of(how.min_p);
    n_equal = 0xffffffffu;
  }
  uint64_t kept = 0, at_floor = 0;
  for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) {
    uint32_t k = key(i);
    if (k > floor) kept += mass(i);
    if (k == floor && mass(i) > 0) at_floor++;
  }
  kept = block_total(kept, scratch);
  at_floor = block_total(at_floor, scratch);
  uint64_t total = kept + (at_floor < n_equal ? at_floor : n_equal) * static_cast<uint64_t>(float_of(floor) * kOne);
  if (total == 0) return {top, kChosen};
  double share = static_cast<double>(how.draw) / 9007199254740992.0;
  uint64_t place = static_cast<uint64_t>(share * static_cast<double>(total));
  place = place < total ? place : total - 1;
  if (!is_nucleus) return {at_place(vocab, [&](uint32_t i) { return key(i) >= floor ? mass(i) : 0; }, place, scratch), kChosen};
  // A nucleus is in the order of weights, heaviest first, and of equals in that of tokens.
  Descent hit = descend(vocab, key, mass, place + 1, scratch);
  uint64_t nth = (place - hit.above) / static_cast<uint64_t>(float_of(hit.key) * kOne);
  return {at_place(vocab, [&](uint32_t i) { return uint64_t{key(i) == hit.key}; }, nth, scratch), kChosen};
}

// Grid: (n_rows).
KERNEL(kChooseThreads, choose, (Choice * out, const float* logits, const Sampling* how, uint32_t vocab)) {
  SHARED(uint64_t, scratch, 256);
  Choice choice = choose_row(logits + uint64_t{blockIdx.x} * vocab, how[blockIdx.x], vocab, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = choice;
}

// Replaces ids of a step by tokens that were chosen before it: `ids[rows[i]]` by that of choice `from[i]`, 0 if none was. A row comes
// once. Grid: (n / 256).
KERNEL(kChooseThreads, carry_tokens, (uint32_t* ids, const uint32_t* rows, const uint32_t* from, const Choice* choices, uint32_t n)) {
  uint32_t i = blockIdx.x * kChooseThreads + threadIdx.x;
  if (i >= n) return;
  Choice choice = choices[from[i]];
  ids[rows[i]] = choice.status == kChosen ? choice.token : 0;
}

// Natural logarithms of probabilities: of the chosen token, and of the `n_top` most probable that are not ruled out, best first.
// `chosen: [n_rows]`; `top_tokens`, `top_logprobs: [n_rows, n_top]`, where there are fewer the token is `vocab`. Grid: (n_rows).
KERNEL(kChooseThreads, log_probabilities,
       (float* chosen, uint32_t* top_tokens, float* top_logprobs, const float* logits, const Choice* choices, uint32_t n_top, uint32_t vocab)) {
  SHARED(uint64_t, scratch, 256);
  SHARED(double, sums, kChooseThreads);
  const float* row = logits + uint64_t{blockIdx.x} * vocab;
  auto key = [&](uint32_t i) { return uint64_t{ordered(row[i])} << 32 | (0xffffffffu - i); };
  uint64_t best = 0;
  for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) {
    if (row[i] != -INFINITY) best = key(i) > best ? key(i) : best;
  }
  best = block_max(best, scratch);
  float largest = best ? unordered(static_cast<uint32_t>(best >> 32)) : 0.0f;
  double sum = 0;
  for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) sum += static_cast<double>(expf(row[i] - largest));
  sums[threadIdx.x] = sum;
  sync_block();
  for (uint32_t half = kChooseThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    sync_block();
  }
  double norm = static_cast<double>(largest) + log(sums[0]);
  Choice choice = choices[blockIdx.x];
  if (threadIdx.x == 0 && choice.status == kChosen) chosen[blockIdx.x] = static_cast<float>(static_cast<double>(row[choice.token]) - norm);
  uint64_t before = ~uint64_t{0};
  for (uint32_t place = 0; place < n_top; place++) {
    uint64_t next = 0;
    for (uint32_t i = threadIdx.x; i < vocab; i += kChooseThreads) {
      uint64_t k = key(i);
      if (row[i] != -INFINITY && k < before && k > next) next = k;
    }
    next = block_max(next, scratch);
    before = next;
    if (threadIdx.x != 0) continue;
    uint64_t at = uint64_t{blockIdx.x} * n_top + place;
    top_tokens[at] = next ? 0xffffffffu - static_cast<uint32_t>(next) : vocab;
    top_logprobs[at] = next ? static_cast<float>(static_cast<double>(unordered(static_cast<uint32_t>(next >> 32))) - norm) : -INFINITY;
  }
}
