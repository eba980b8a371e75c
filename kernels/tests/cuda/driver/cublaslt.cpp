// libcublasLt.so of the stand-in: `cublasLtMatmul` as loops in a fixed order, on a stream of the stand-in.
//
// D = alpha op(A) op(B) + beta C, matrices column-major as BLAS has them; A, B, C and D of f32, bf16 or (A, B) s8 with s32 or
// f32 sums; epilogues: none, bias.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace driver {
struct Device;
}

extern "C" int standin_submit(void* stream, const char* what, std::function<bool(driver::Device&)> run);
extern "C" bool standin_is_allocated(driver::Device& device, uint64_t address, size_t bytes);

namespace {

// `cublasStatus_t`.
enum Status : int { kOk = 0, kNotInitialized = 1, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15 };

// `cudaDataType`.
enum Type : int { kF32 = 0, kS8 = 3, kS32 = 10, kBf16 = 14 };

// `cublasComputeType_t`: full f32, and s32. TF32 is refused: the product may not use it.
enum Compute : int { kComputeF32 = 68, kComputeS32 = 72 };

struct Layout {
  Type type;
  uint64_t rows, columns;
  int64_t leading;
  int order = 0;
  int32_t batch = 1;
  int64_t stride = 0;
};

struct Description {
  Compute compute;
  Type scale;
  int transpose_a = 0, transpose_b = 0;
  int epilogue = 1;
  const void* bias = nullptr;
  Type bias_type = kF32;
  int pointer_mode = 0;
};

size_t size(Type type) { return type == kF32 || type == kS32 ? 4 : type == kBf16 ? 2 : 1; }

bool is_type(Type type) { return type == kF32 || type == kS8 || type == kS32 || type == kBf16; }

template <class T>
T load(const char* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

float value(const char* base, Type type, int64_t index) {
  switch (type) {
    case kF32: return load<float>(base + index * 4);
    case kS32: return static_cast<float>(load<int32_t>(base + index * 4));
    case kS8: return static_cast<float>(load<int8_t>(base + index));
    case kBf16: {
      uint32_t bits = uint32_t{load<uint16_t>(base + index * 2)} << 16;
      float wide;
      memcpy(&wide, &bits, 4);
      return wide;
    }
  }
  return 0;
}

void store(char* base, Type type, int64_t index, float x) {
  if (type == kF32) memcpy(base + index * 4, &x, 4);
  if (type == kBf16) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t half = x != x ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(base + index * 2, &half, 2);
  }
}

size_t bytes(const Layout& layout) {
  if (layout.rows == 0 || layout.columns == 0) return 0;
  size_t one = (layout.columns - 1) * static_cast<size_t>(layout.leading) + layout.rows;
  return (one + static_cast<size_t>(layout.batch - 1) * static_cast<size_t>(layout.stride)) * size(layout.type);
}

// Rows of D that are summed side by side.
constexpr uint64_t kTile = 16;

struct Product {
  Description how;
  Layout a, b, c, d;
  const char *a_base, *b_base, *c_base;
  char* d_base;
  float alpha, beta;
  int32_t alpha_s32, beta_s32;

  uint64_t inner() const { return how.transpose_a ? a.rows : a.columns; }

  int64_t at_a(uint64_t row, uint64_t k) const { return static_cast<int64_t>(how.transpose_a ? k + row * a.leading : row + k * a.leading); }
  int64_t at_b(uint64_t k, uint64_t column) const { return static_cast<int64_t>(how.transpose_b ? column + k * b.leading : k + column * b.leading); }

  // `op(A)` of a batch as panels of `kTile` rows, `[rows / kTile, inner, kTile]`: rows of a panel side by side, zeros beyond the last.
  template <class Sum, class Read>
  std::vector<Sum> panels(int64_t batch, Read read) const {
    uint64_t n_inner = inner(), n_panels = (d.rows + kTile - 1) / kTile;
    std::vector<Sum> out(n_panels * n_inner * kTile);
    for (uint64_t row = 0; row < d.rows; row++) {
      Sum* panel = out.data() + row / kTile * n_inner * kTile + row % kTile;
      for (uint64_t k = 0; k < n_inner; k++) panel[k * kTile] = read(a_base, batch * a.stride + at_a(row, k));
    }
    return out;
  }

  // All sums of a batch, each in the order of `k`, `kTile` rows side by side; `finish` takes each with its row and column.
  template <class Sum, class Read, class Finish>
  void sums(int64_t batch, Read read, Finish finish) const {
    uint64_t n_inner = inner();
    std::vector<Sum> a_panels = panels<Sum>(batch, read), b_column(n_inner);
    for (uint64_t column = 0; column < d.columns; column++) {
      for (uint64_t k = 0; k < n_inner; k++) b_column[k] = read(b_base, batch * b.stride + at_b(k, column));
      for (uint64_t first = 0; first < d.rows; first += kTile) {
        const Sum* panel = a_panels.data() + first * n_inner;
        Sum tile[kTile] = {};
        for (uint64_t k = 0; k < n_inner; k++) {
          for (uint64_t i = 0; i < kTile; i++) tile[i] += panel[k * kTile + i] * b_column[k];
        }
        for (uint64_t i = 0; i < kTile && first + i < d.rows; i++) finish(tile[i], first + i, column);
      }
    }
  }

  int64_t at_c(int64_t batch, uint64_t row, uint64_t column) const {
    return batch * c.stride + static_cast<int64_t>(row) + static_cast<int64_t>(column) * c.leading;
  }
  int64_t at_d(int64_t batch, uint64_t row, uint64_t column) const {
    return batch * d.stride + static_cast<int64_t>(row) + static_cast<int64_t>(column) * d.leading;
  }

  void sums_of_bytes(int64_t batch) const {
    auto read = [](const char* base, int64_t index) { return int32_t{load<int8_t>(base + index)}; };
    sums<int32_t>(batch, read, [&](int32_t sum, uint64_t row, uint64_t column) {
      int64_t in_c = at_c(batch, row, column), at = at_d(batch, row, column);
      if (d.type == kS32) {
        int32_t before = beta_s32 ? load<int32_t>(c_base + in_c * 4) : 0, result = alpha_s32 * sum + beta_s32 * before;
        memcpy(d_base + at * 4, &result, 4);
      } else {
        store(d_base, d.type, at, alpha * static_cast<float>(sum) + (beta != 0 ? beta * value(c_base, c.type, in_c) : 0));
      }
    });
  }

  template <Type type>
  void sums_of_floats(int64_t batch) const {
    auto read = [](const char* base, int64_t index) { return value(base, type, index); };
    sums<float>(batch, read, [&](float sum, uint64_t row, uint64_t column) {
      sum = alpha * sum + (beta != 0 ? beta * value(c_base, c.type, at_c(batch, row, column)) : 0);
      if (how.epilogue == 4) sum += value(static_cast<const char*>(how.bias), how.bias_type, static_cast<int64_t>(row));
      store(d_base, d.type, at_d(batch, row, column), sum);
    });
  }

  bool run(driver::Device& device) {
    auto holds = [&](const char* base, size_t n) { return n == 0 || standin_is_allocated(device, reinterpret_cast<uint64_t>(base), n); };
    bool is_in = holds(a_base, bytes(a)) && holds(b_base, bytes(b)) && holds(d_base, bytes(d));
    if (beta != 0 || beta_s32 != 0) is_in = is_in && holds(c_base, bytes(c));
    if (how.epilogue == 4) is_in = is_in && holds(static_cast<const char*>(how.bias), d.rows * size(how.bias_type));
    if (!is_in) return false;
    for (int32_t batch = 0; batch < d.batch; batch++) {
      if (how.compute == kComputeS32) sums_of_bytes(batch);
      else if (a.type == kBf16) sums_of_floats<kBf16>(batch);
      else sums_of_floats<kF32>(batch);
    }
    return true;
  }

  // What cublasLt refuses, and what the product has no use for.
  Status check() const {
    uint64_t m = how.transpose_a ? a.columns : a.rows, n = how.transpose_b ? b.rows : b.columns;
    uint64_t inner_b = how.transpose_b ? b.columns : b.rows;
    if (m != d.rows || n != d.columns || inner() != inner_b || c.rows != d.rows || c.columns != d.columns) return kInvalidValue;
    for (const Layout* layout : {&a, &b, &c, &d}) {
      if (layout->leading < static_cast<int64_t>(layout->rows) || layout->order != 0 || layout->batch != d.batch) return kInvalidValue;
    }
    if (a.type != b.type || c.type != d.type) return kNotSupported;
    bool bytes_in = a.type == kS8;
    if (bytes_in != (how.compute == kComputeS32)) return kNotSupported;
    if (!bytes_in && (how.compute != kComputeF32 || a.type == kS32 || (d.type != kF32 && d.type != a.type))) return kNotSupported;
    // Products of bytes need leading dimensions of whole words.
    if (bytes_in && (a.leading % 4 || b.leading % 4 || (d.type != kS32 && how.scale != kF32))) return kNotSupported;
    if (how.epilogue != 1 && how.epilogue != 4) return kNotSupported;
    if (how.epilogue == 4 && !how.bias) return kInvalidValue;
    return kOk;
  }
};

template <class T>
Status set(T& field, const void* value, size_t n) {
  if (n != sizeof field) return kInvalidValue;
  memcpy(&field, value, n);
  return kOk;
}

struct Preference {
  size_t workspace = 0;
};

// The first bytes of `cublasLtMatmulAlgo_t`, which callers keep and hand back.
struct Algorithm {
  uint64_t data[8];
};

// `cublasLtMatmulHeuristicResult_t`.
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

constexpr uint64_t kPlainLoops = 0x706c61696e;

// A number of columns of D for which only an algorithm that was chosen for it is taken; 0: none.
std::atomic<uint64_t> strict_columns{0};

}  // namespace

extern "C" void standin_strict_columns(uint64_t columns) { strict_columns = columns; }

extern "C" int cublasLtCreate(void** handle) {
  *handle = new int(0);
  return kOk;
}

extern "C" int cublasLtDestroy(void* handle) {
  delete static_cast<int*>(handle);
  return kOk;
}

extern "C" size_t cublasLtGetVersion() { return 130000; }

extern "C" int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  if (!is_type(static_cast<Type>(type))) return kNotSupported;
  *out = new Layout{static_cast<Type>(type), rows, columns, leading};
  return kOk;
}

extern "C" int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return kOk;
}

extern "C" int cublasLtMatrixLayoutSetAttribute(void* handle, int attribute, const void* value, size_t n) {
  auto* layout = static_cast<Layout*>(handle);
  switch (attribute) {
    case 1: return set(layout->order, value, n);
    case 5: return set(layout->batch, value, n);
    case 6: return set(layout->stride, value, n);
    default: return kNotSupported;
  }
}

extern "C" int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
  if (compute != kComputeF32 && compute != kComputeS32) return kNotSupported;
  *out = new Description{static_cast<Compute>(compute), static_cast<Type>(scale)};
  return kOk;
}

extern "C" int cublasLtMatmulDescDestroy(void* how) {
  delete static_cast<Description*>(how);
  return kOk;
}

extern "C" int cublasLtMatmulDescSetAttribute(void* handle, int attribute, const void* value, size_t n) {
  auto* how = static_cast<Description*>(handle);
  switch (attribute) {
    case 2: return set(how->pointer_mode, value, n);
    case 3: return set(how->transpose_a, value, n);
    case 4: return set(how->transpose_b, value, n);
    case 7: return set(how->epilogue, value, n);
    case 8: return set(how->bias, value, n);
    case 26: return set(how->bias_type, value, n);
    default: return kNotSupported;
  }
}

extern "C" int cublasLtMatmulPreferenceCreate(void** out) {
  *out = new Preference;
  return kOk;
}

extern "C" int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Preference*>(preference);
  return kOk;
}

extern "C" int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t n) {
  if (attribute == 1) return set(static_cast<Preference*>(preference)->workspace, value, n);
  // Alignments and masks of reductions: taken, without effect on plain loops.
  return attribute <= 12 ? kOk : kInvalidValue;
}

extern "C" int cublasLtMatmulAlgoGetHeuristic(void*, void* how, void* a, void* b, void* c, void* d, void*, int wanted, Heuristic* out, int* found) {
  Product product{*static_cast<Description*>(how), *static_cast<Layout*>(a), *static_cast<Layout*>(b), *static_cast<Layout*>(c), *static_cast<Layout*>(d),
                  nullptr, nullptr, nullptr, nullptr, 1, 0, 1, 0};
  *found = 0;
  Status status = product.check();
  if (status || wanted < 1) return status ? status : kInvalidValue;
  memset(out, 0, sizeof *out);
  out->algorithm.data[0] = kPlainLoops;
  out->algorithm.data[1] = static_cast<Layout*>(d)->columns;
  *found = 1;
  return kOk;
}

extern "C" int cublasLtMatmul(void* handle, void* how, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout, const void* beta,
                              const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm, void*, size_t, void* stream) {
  if (!handle) return kNotInitialized;
  if (algorithm && algorithm->data[0] != kPlainLoops) return kInvalidValue;
  uint64_t columns = static_cast<Layout*>(d_layout)->columns;
  if (algorithm && columns == strict_columns && algorithm->data[1] != columns) return kNotSupported;
  auto product = std::make_shared<Product>(Product{*static_cast<Description*>(how), *static_cast<Layout*>(a_layout), *static_cast<Layout*>(b_layout),
                                                   *static_cast<Layout*>(c_layout), *static_cast<Layout*>(d_layout), static_cast<const char*>(a),
                                                   static_cast<const char*>(b), static_cast<const char*>(c), static_cast<char*>(d), 0, 0, 0, 0});
  if (product->how.pointer_mode != 0) return kNotSupported;
  if (product->how.scale == kS32) {
    memcpy(&product->alpha_s32, alpha, 4);
    memcpy(&product->beta_s32, beta, 4);
    product->alpha = static_cast<float>(product->alpha_s32);
  } else {
    memcpy(&product->alpha, alpha, 4);
    memcpy(&product->beta, beta, 4);
  }
  if (Status status = product->check()) return status;
  int result = standin_submit(stream, "cublasLtMatmul", [product](driver::Device& device) { return product->run(device); });
  return result ? kExecutionFailed : kOk;
}
