// Attention over paged, packed keys and values on a CPU, and the encoding of blocks. Plain C ABI, called by `cpu.py`.
//
// The file has two halves. The first, compiled once, holds the contract with Python, the plan (which thread attends to
// which entries) and the merge of what the threads found. The second, below "ONE INSTRUCTION SET", holds everything
// that loops over elements; the first half includes this very file once per instruction set to compile it, and picks a
// set when the library loads. The second half is written in the vector extensions of GCC and Clang; intrinsics serve
// only where these cannot say it.
//
// The meaning of pages, entries and views is in `base.py`, the layout of fields in `codecs/`; `reference.py` is the
// same computation in torch. Codes are in the `lanes` order of `codecs/packing.py`.
//
// Infinities matter here (a hidden score is -inf, an empty row has lse -inf): never compile this with -ffast-math.

#ifndef HFKV_ISA

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int PAD = 16;             // rows of floats are padded to this many: the widest vector of any instruction set
constexpr int QUERY_ROWS = 48;      // rows (queries x grouped heads) that one item attends with: bounds its scratch
constexpr int64_t SERIAL = 400000;  // multiply-adds below which waking other threads costs more than it saves
constexpr int PIECES = 4;           // items per thread: enough to even out a thread that is held up
constexpr int SCORES = 4096;        // scores that an item keeps between reading keys and reading values
constexpr int64_t RUN = 1 << 18;    // bytes read from a file at a time: what a core's own cache still holds for the checksum

enum Format : int32_t { F32, F16, BF16, FP8, INT8, INT4, INT2 };

constexpr int64_t size_of(int32_t format) { return format == F32 ? 4 : format == FP8 ? 1 : 2; }
constexpr int padded(int n) { return (n + PAD - 1) / PAD * PAD; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- the contract with cpu.py: these structs are mirrored there field by field ----

// The keys or the values of a page: what their fields hold, and the byte offsets of these.
struct Operand {
  int32_t format, dim;
  int64_t data, scale, zero;
};

struct Pages {
  const int64_t* addresses;
  int32_t kv_heads, block_size;
  Operand k, v;
};

struct View {
  const int32_t *ids, *first, *entry_begin, *n_sealed, *entry_end, *begin, *end;
  const float *cos, *sin;  // null without rope
  int32_t batch, q_len, stride, sinks, half, interleaved;
};

// A tensor [batch, heads, tokens, dim] with unit stride in `dim`; the other strides are in bytes.
struct Tensor {
  const char* data;
  int64_t batch_stride, head_stride, token_stride;
  int32_t dtype;
  const char* at(int64_t b, int64_t h, int64_t t) const {
    return data + b * batch_stride + h * head_stride + t * token_stride;
  }
};

// ---- plan ----

struct Call {
  const Pages *sealed, *open;
  const View* view;
  Tensor q;
  int32_t heads;
  float scale, softcap;  // softcap 0: none
  int group() const { return heads / sealed->kv_heads; }
  // What one (KV head, row) leaves behind: v_dim accumulators, the maximum of its scores, the sum of its exponentials.
  int record() const { return padded(sealed->v.dim) + PAD; }
};

// Queries [query_begin, query_end) of one batch row, and the entries they see: [first_entry, sink_entries) for the
// sinks and [window_entry, window_entry + count - sinks) for the rest.
struct Share {
  int row, query_begin, query_end;
  int first_entry, sink_entries, window_entry, count;
  int min_begin, max_end;  // over the queries
  int splits;
  int64_t records;  // where its records start: [splits, kv_heads, rows]
  int entry(int i) const {
    const int sinks = sink_entries - first_entry;
    return i < sinks ? first_entry + i : window_entry + i - sinks;
  }
};

// One item of work: heads [head_begin, head_end) of a share over its visible entries [begin, end).
struct Item {
  const Share* share;
  int head_begin, head_end, begin, end;
  float* records;
};

Share share_of(const Call& call, int row, int query_begin, int query_end) {
  const View& view = *call.view;
  Share share{row, query_begin, query_end, 0, 0, 0, 0, std::numeric_limits<int>::max(), 0, 0, 0};
  for (int i = query_begin; i < query_end; i++) {
    share.min_begin = std::min(share.min_begin, view.begin[row * view.q_len + i]);
    share.max_end = std::max(share.max_end, view.end[row * view.q_len + i]);
  }
  const int32_t* first = view.first + int64_t(row) * (view.stride + 1);
  const int lo = view.entry_begin[row], hi = std::max(lo, view.entry_end[row]);
  // An entry [first[e], first[e + 1]) is seen if it starts before `end` and ends after `begin`.
  const int stop = int(std::lower_bound(first + lo, first + hi, share.max_end) - first);
  const int start = int(std::upper_bound(first + lo + 1, first + hi + 1, share.min_begin) - first) - 1;
  const int sinks = int(std::lower_bound(first + lo, first + hi, view.sinks) - first);
  share.first_entry = lo;
  share.window_entry = std::min(start, stop);
  share.sink_entries = std::min(sinks, share.window_entry);
  share.count = share.sink_entries - lo + stop - share.window_entry;
  return share;
}

// ---- threads ----

// Parallel regions run in torch's own OpenMP pool when cpu.py found it in the process: a second pool would compete with
// it for the cores. Otherwise, and in a forked child (where the pool's threads do not exist), threads are started per
// region.
using OpenMpRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<OpenMpRegion> openmp_region{nullptr};

template <class Body>
void parallel(int count, int threads, const Body& body) {
  threads = std::min(threads, count);
  if (threads <= 1) {
    for (int i = 0; i < count; i++) body(i);
    return;
  }
  struct Work {
    const Body& body;
    const int count;
    std::atomic<int> next{0};
    static void run(void* self) {
      Work& work = *static_cast<Work*>(self);
      for (int i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) work.body(i);
    }
  } work{body, count};
  if (OpenMpRegion region = openmp_region.load()) return region(&Work::run, &work, threads, 0);
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; i++) helpers.emplace_back(&Work::run, &work);
  Work::run(&work);
  for (auto& helper : helpers) helper.join();
}

// Scratch that a thread keeps between calls; `take` hands out aligned pieces of it, valid until the next `reset`.
class Scratch {
 public:
  void reset(size_t floats) {
    if (floats + PAD > memory_.size()) memory_.resize(floats + PAD);
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    next_ = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
  }
  float* take(size_t floats) {
    float* piece = next_;
    next_ += (floats + PAD - 1) / PAD * PAD;
    return piece;
  }

 private:
  std::vector<float> memory_;
  float* next_ = nullptr;
};

// ---- instruction sets ----

struct Kernels {
  const char* name;
  void (*attend)(const Call&, const Item&);
  // Encode one KV head of one block from keys and values of `dtype` whose tokens are the given strides (bytes) apart.
  void (*seal)(const Pages&, char* page, int head, const char* k, int64_t k_stride, const char* v, int64_t v_stride,
               int32_t dtype);
  uint64_t (*checksum)(const char* row, int64_t nbytes);
};

}  // namespace

#if defined(__clang__)
#define HFKV_BEGIN_TARGET(features)               \
  _Pragma("clang diagnostic ignored \"-Wpsabi\"") \
      HFKV_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define HFKV_END_TARGET _Pragma("clang attribute pop")
#else
#define HFKV_BEGIN_TARGET(features) _Pragma("GCC push_options") HFKV_PRAGMA(GCC target(features))
#define HFKV_END_TARGET _Pragma("GCC pop_options")
#endif
#define HFKV_PRAGMA(text) _Pragma(#text)

#define HFKV_BASELINE 0
#define HFKV_AVX2 1
#define HFKV_AVX512 2

#define HFKV_ISA HFKV_BASELINE
#define HFKV_NAMESPACE baseline
#include "cpu.cpp"
#undef HFKV_ISA
#undef HFKV_NAMESPACE

#if defined(__x86_64__)
HFKV_BEGIN_TARGET("avx2,fma,f16c")
#define HFKV_ISA HFKV_AVX2
#define HFKV_NAMESPACE avx2
#include "cpu.cpp"
#undef HFKV_ISA
#undef HFKV_NAMESPACE
HFKV_END_TARGET

HFKV_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define HFKV_ISA HFKV_AVX512
#define HFKV_NAMESPACE avx512
#include "cpu.cpp"
#undef HFKV_ISA
#undef HFKV_NAMESPACE
HFKV_END_TARGET
#endif

namespace {

// The instruction sets this machine has, narrowest first.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> sets{&baseline::kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return sets;
  sets.push_back(&avx2::kernels);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    sets.push_back(&avx512::kernels);
#endif
  return sets;
}

std::atomic<const Kernels*> kernels{available().back()};

const int fork_handler = pthread_atfork(nullptr, nullptr, [] { openmp_region.store(nullptr); });

// ---- decode ----

// What there is to attend to, not yet split.
std::vector<Share> shares_of(const Call& call) {
  const View& view = *call.view;
  const int queries = std::max(1, QUERY_ROWS / call.group());
  std::vector<Share> shares;
  for (int row = 0; row < view.batch; row++)
    for (int i = 0; i < view.q_len; i += queries)
      shares.push_back(share_of(call, row, i, std::min(i + queries, view.q_len)));
  return shares;
}

int64_t rows_of(const Call& call, const Share& share) {
  return int64_t(share.query_end - share.query_begin) * call.group();
}

// Split the shares over their entries into about `pieces` in all. Returns the number of records that takes.
int64_t split(const Call& call, int pieces, std::vector<Share>& shares) {
  int64_t entries = 0, records = 0;
  for (const Share& share : shares) entries += share.count;
  const int per_split = int(std::max<int64_t>(1, (entries + pieces - 1) / pieces));
  for (Share& share : shares) {
    share.splits = ceil_div(share.count, per_split);
    share.records = records;
    records += share.splits * call.sealed->kv_heads * rows_of(call, share);
  }
  return records;
}

std::vector<Item> items_of(const Call& call, const std::vector<Share>& shares, float* records, int threads) {
  const int kv_heads = call.sealed->kv_heads;
  int splits = 0;
  for (const Share& share : shares) splits += share.splits;
  // A context of few entries still occupies every thread: its heads are dealt out instead.
  const int per_item = ceil_div(kv_heads, std::min(kv_heads, ceil_div(threads, std::max(1, splits))));
  std::vector<Item> items;
  for (const Share& share : shares)
    for (int s = 0; s < share.splits; s++)
      for (int h = 0; h < kv_heads; h += per_item)
        items.push_back({&share, h, std::min(h + per_item, kv_heads), int(int64_t(share.count) * s / share.splits),
                         int(int64_t(share.count) * (s + 1) / share.splits),
                         records + (share.records + s * kv_heads * rows_of(call, share)) * call.record()});
  return items;
}

// out and lse of one query and head from the records of a share's splits.
void merge_splits(const Call& call, const Share& share, const float* records, int query, int head, float* out,
                  float* lse) {
  const int group = call.group(), dim = call.sealed->v.dim, v_padded = padded(dim);
  const int64_t rows = rows_of(call, share);
  const int64_t row = (head / group) * rows + (query - share.query_begin) * group + head % group;
  const int64_t step = call.sealed->kv_heads * rows * call.record();
  const float* record = records + (share.records + row) * call.record();
  float top = -INF, sum = 0;
  for (int s = 0; s < share.splits; s++) top = std::max(top, record[s * step + v_padded]);
  std::fill_n(out, dim, 0.0f);
  for (int s = 0; s < share.splits; s++) {
    const float* part = record + s * step;
    const float weight = part[v_padded] == top ? 1.0f : std::exp(part[v_padded] - top);
    sum += weight * part[v_padded + 1];
    for (int d = 0; d < dim; d++) out[d] += weight * part[d];
  }
  if (sum != 0)
    for (int d = 0; d < dim; d++) out[d] /= sum;
  *lse = sum == 0 ? -INF : top + std::log(sum);
}

void decode(const Call& call, int threads, float* out, float* lse) {
  const View& view = *call.view;
  const Pages& pages = *call.sealed;
  std::vector<Share> shares = shares_of(call);
  int64_t work = 0;
  for (const Share& share : shares) work += share.count * rows_of(call, share);
  work *= int64_t(pages.kv_heads) * pages.block_size * (pages.k.dim + pages.v.dim);
  if (work < SERIAL) threads = 1;
  const int64_t count =
      split(call, threads == 1 ? 1 : int(std::min<int64_t>(threads * PIECES, 2 * work / SERIAL)), shares);
  thread_local Scratch scratch;
  scratch.reset(count * call.record());
  float* records = scratch.take(count * call.record());
  const std::vector<Item> items = items_of(call, shares, records, threads);
  const Kernels& set = *kernels.load();
  parallel(int(items.size()), threads, [&](int i) { set.attend(call, items[i]); });
  for (const Share& share : shares)
    for (int i = share.query_begin; i < share.query_end; i++)
      for (int h = 0; h < call.heads; h++) {
        const int64_t at = (int64_t(share.row) * view.q_len + i) * call.heads + h;
        merge_splits(call, share, records, i, h, out + at * call.sealed->v.dim, lse + at);
      }
}

// Threads for sealing m blocks: one for less than what takes a few tens of microseconds.
int seal_threads(const Pages& sealed, int m, int threads) {
  return int64_t(m) * sealed.kv_heads * sealed.block_size * (sealed.k.dim + sealed.v.dim) < 40000 ? 1 : threads;
}

}  // namespace

// ---- the C ABI ----

extern "C" {

const char* hfkv_isa() { return kernels.load()->name; }

int hfkv_isa_count() { return int(available().size()); }

// For tests: use the i-th available instruction set, narrowest first.
void hfkv_force_isa(int i) { kernels.store(available().at(i)); }

void hfkv_use_openmp(void* gomp_parallel) { openmp_region.store(reinterpret_cast<OpenMpRegion>(gomp_parallel)); }

void hfkv_decode(const Pages* sealed, const Pages* open, const View* view, const char* q, int64_t batch_stride,
                 int64_t head_stride, int64_t token_stride, int32_t dtype, int32_t heads, float scale, float softcap,
                 int32_t threads, float* out, float* lse) {
  const Call call{sealed, open, view, {q, batch_stride, head_stride, token_stride, dtype}, heads, scale, softcap};
  if (view->batch && view->q_len) decode(call, threads, out, lse);
}

// Copy tokens into native pages: `segments` [m, 5] of (row, first token, count, page, slot).
void hfkv_write(const Pages* open, const Tensor* k, const Tensor* v, const int32_t* segments, int32_t m,
                int32_t threads) {
  const int64_t element = size_of(open->k.format);
  const auto copy = [&](int i) {
    const int32_t* segment = segments + int64_t(i / open->kv_heads) * 5;
    const int64_t head = i % open->kv_heads, row = segment[0], token = segment[1], count = segment[2],
                  slot = segment[4];
    for (const bool keys : {true, false}) {
      const Tensor& from = keys ? *k : *v;
      const Operand& to = keys ? open->k : open->v;
      const int64_t bytes = to.dim * element;
      char* at =
          reinterpret_cast<char*>(open->addresses[segment[3]]) + to.data + (head * open->block_size + slot) * bytes;
      if (from.token_stride == bytes)
        std::memcpy(at, from.at(row, head, token), count * bytes);
      else
        for (int64_t t = 0; t < count; t++) std::memcpy(at + t * bytes, from.at(row, head, token + t), bytes);
    }
  };
  int64_t tokens = 0;
  for (int i = 0; i < m; i++) tokens += segments[i * 5 + 2];
  const bool small = tokens * open->kv_heads * (open->k.dim + open->v.dim) * element < (1 << 18);
  parallel(m * open->kv_heads, small ? 1 : threads, copy);
}

// Encode whole blocks of exact keys and values into pages `ids`: `places` [m, 2] of (row, first token).
void hfkv_seal(const Pages* sealed, const int32_t* ids, int32_t m, const Tensor* k, const Tensor* v,
               const int32_t* places, int32_t threads) {
  const Kernels& set = *kernels.load();
  parallel(m * sealed->kv_heads, seal_threads(*sealed, m, threads), [&](int i) {
    const int block = i / sealed->kv_heads, head = i % sealed->kv_heads;
    const int32_t row = places[2 * block], token = places[2 * block + 1];
    set.seal(*sealed, reinterpret_cast<char*>(sealed->addresses[ids[block]]), head, k->at(row, head, token),
             k->token_stride, v->at(row, head, token), v->token_stride, k->dtype);
  });
}

// The same from native pages `sources` [m].
void hfkv_seal_pages(const Pages* sealed, const int32_t* ids, int32_t m, const Pages* open, const int32_t* sources,
                     int32_t threads) {
  const Kernels& set = *kernels.load();
  const int64_t element = size_of(open->k.format), k_stride = open->k.dim * element, v_stride = open->v.dim * element;
  parallel(m * sealed->kv_heads, seal_threads(*sealed, m, threads), [&](int i) {
    const int block = i / sealed->kv_heads, head = i % sealed->kv_heads;
    const char* from = reinterpret_cast<const char*>(open->addresses[sources[block]]);
    const int64_t tokens = int64_t(head) * open->block_size;
    set.seal(*sealed, reinterpret_cast<char*>(sealed->addresses[ids[block]]), head,
             from + open->k.data + tokens * k_stride, k_stride, from + open->v.data + tokens * v_stride, v_stride,
             open->k.format);
  });
}

// Checksums of `m` rows of `nbytes` bytes: what `checksums` in `files.py` computes.
void hfkv_checksums(const char* rows, int64_t nbytes, int32_t m, uint64_t* sums) {
  const Kernels& set = *kernels.load();
  for (int i = 0; i < m; i++) sums[i] = set.checksum(rows + i * nbytes, nbytes);
}

// Fill `m` rows of `nbytes` bytes from `offsets` of a file, and compare their checksums with `sums`. Returns the first row that
// could not be read or is not what was written; `m` where there is none.
int32_t hfkv_read_pages(int32_t descriptor, char* rows, int64_t nbytes, int32_t m, const int64_t* offsets,
                        const uint64_t* sums) {
  const Kernels& set = *kernels.load();
  for (int i = 0; i < m;) {
    int stop = i + 1;
    while (stop < m && offsets[stop] == offsets[stop - 1] + nbytes && (stop + 1 - i) * nbytes <= RUN) stop++;
    const int64_t total = (stop - i) * nbytes;
    for (int64_t done = 0; done < total;) {
      const ssize_t count = pread(descriptor, rows + i * nbytes + done, total - done, offsets[i] + done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return i + int(done / nbytes);
      done += count;
    }
    for (; i < stop; i++)
      if (set.checksum(rows + i * nbytes, nbytes) != sums[i]) return i;
  }
  return m;
}

}  // extern "C"

#else  // ---- ONE INSTRUCTION SET ----

namespace {
namespace HFKV_NAMESPACE {

#if HFKV_ISA == HFKV_AVX512
constexpr int W = 16;
#elif HFKV_ISA == HFKV_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint64_t vl __attribute__((vector_size(W * 4)));
typedef int16_t vh __attribute__((vector_size(W * 4)));        // 2 W elements
typedef uint8_t vb __attribute__((vector_size(W * 2)));        // 2 W elements
typedef uint16_t half_vh __attribute__((vector_size(W * 2)));  // W elements
typedef uint8_t quarter_vb __attribute__((vector_size(W)));    // W elements

// Rows of a register tile: 3 rows x 4 columns of float accumulators leave four of 16 registers for operands.
constexpr int TILE = 3;

template <class V, class T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
inline vf loadf(const float* p) { return load<vf>(p); }
inline vf all(float x) { return x - vf{}; }
inline vi all(int32_t x) { return x - vi{}; }

// A NaN in `b` survives either.
inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }
inline vf where(vi mask, vf x) { return (vf)(mask & (vi)x); }
inline vf absolute(vf x) { return (vf)((vi)x & 0x7FFFFFFF); }

#if defined(__clang__)
#define HFKV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HFKV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// Lanes i and i ^ STEP exchanged.
template <int STEP, int... I>
inline vf swapped(vf v, std::integer_sequence<int, I...>) {
  return HFKV_SHUFFLE(v, v, (I ^ STEP)...);
}
template <int STEP>
inline vf swapped(vf v) {
  return swapped<STEP>(v, std::make_integer_sequence<int, W>());
}
// Lane i of `b` where i has the bit STEP, of `a` elsewhere.
template <int STEP, int... I>
inline vf blended(vf a, vf b, std::integer_sequence<int, I...>) {
  return HFKV_SHUFFLE(a, b, (I & STEP ? W + I : I)...);
}
template <int STEP>
inline vf blended(vf a, vf b) {
  return blended<STEP>(a, b, std::make_integer_sequence<int, W>());
}

template <int STEP = W / 2>
inline float sum_of(vf v) {
  v += swapped<STEP>(v);
  if constexpr (STEP > 1) return sum_of<STEP / 2>(v);
  return v[0];
}
template <int STEP = W / 2>
inline float max_of(vf v) {
  v = larger(swapped<STEP>(v), v);
  if constexpr (STEP > 1) return max_of<STEP / 2>(v);
  return v[0];
}

// Lane i of the result is the sum of the lanes of v[i], for the N vectors v (N a power of two up to W).
template <int N, int STEP = W / 2>
inline vf sums_of(vf* v) {
  if constexpr (STEP >= N) {
    for (int i = 0; i < N; i++) v[i] += swapped<STEP>(v[i]);
  } else {
    for (int i = 0; i < STEP; i++)
      v[i] = blended<STEP>(v[i], v[i + STEP]) + swapped<STEP>(blended<STEP>(v[i + STEP], v[i]));
  }
  if constexpr (STEP > 1) return sums_of<N, STEP / 2>(v);
  return v[0];
}

// Adding and subtracting this rounds to the nearest even integer, whose low bits the sum's bit pattern ends in.
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t ROUND_BITS = 0x4B400000;

// e^x to 2e-7; 0 below -87, exact at -inf. x must be below 88.
inline vf exponential(vf x) {
  const vf shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
  const vf f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  const vf power = (vf)(((vi)shifted << 23) + (127 << 23));
  return (vf)((vi)(p * power) & ~(x < -87.0f));
}

// tanh to 3e-7 (near zero the quotient of exponentials would cancel).
inline vf hyperbolic_tangent(vf x) {
  const vf a = absolute(x), square = x * x;
  vf p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vf near = p * square * x + x;
  const vf far = 1.0f - 2.0f / (exponential(2.0f * smaller(all(10.0f), a)) + 1.0f);
  return a < 0.625f ? near : (vf)((vi)far | ((vi)x & (vi)all(-0.0f)));
}

// Integers to twice their width. GCC 12 makes four instructions of what is one where a vector is wider than 128 bits.
inline vh widened(vb x) {
#if HFKV_ISA == HFKV_AVX512
  return (vh)_mm512_cvtepu8_epi16((__m256i)x);
#elif HFKV_ISA == HFKV_AVX2
  return (vh)_mm256_cvtepu8_epi16((__m128i)x);
#else
  return __builtin_convertvector(x, vh);
#endif
}
inline half_vh sign_extended(quarter_vb x) {
#if HFKV_ISA == HFKV_AVX512
  return (half_vh)_mm256_cvtepi8_epi16((__m128i)x);
#elif HFKV_ISA == HFKV_AVX2
  return (half_vh)_mm_cvtepi8_epi16(_mm_set_epi64x(0, (int64_t)x));
#else
  typedef int8_t signed_vb __attribute__((vector_size(W)));
  typedef int16_t signed_vh __attribute__((vector_size(W * 2)));
  return (half_vh) __builtin_convertvector((signed_vb)x, signed_vh);
#endif
}
inline vu widened(half_vh x) {
#if HFKV_ISA == HFKV_AVX512
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif HFKV_ISA == HFKV_AVX2
  return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vu);
#endif
}

// Integers to half and to a quarter of their width.
inline half_vh narrowed(vu x) {
#if HFKV_ISA == HFKV_AVX2
  return (half_vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
  return __builtin_convertvector(x, half_vh);
#endif
}
inline quarter_vb narrowed_twice(vu x) {
#if HFKV_ISA == HFKV_AVX2
  const __m128i halves = (__m128i)narrowed(x);
  return (quarter_vb)_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
#else
  return __builtin_convertvector(x, quarter_vb);
#endif
}

inline vf from_half(half_vh h) {
#if HFKV_ISA == HFKV_AVX512
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif HFKV_ISA == HFKV_AVX2
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  const vu wide = widened(h), magnitude = wide & 0x7FFF, sign = (wide & 0x8000) << 16;
  const vu normal = (magnitude << 13) + (112u << 23);
  const vu special = (vu)(magnitude >= 0x7C00) & (112u << 23);
  const vf tiny = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
  return (vf)((magnitude < 0x0400 ? (vu)tiny : normal + special) | sign);
#endif
}

// a[2i] b[2i] + a[2i + 1] b[2i + 1]
inline vi multiply_add_pairs(vh a, vh b) {
#if HFKV_ISA == HFKV_AVX512
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif HFKV_ISA == HFKV_AVX2
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (vi)vpaddq_s32(vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b)),
                        vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  return ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// ---- rows of elements to floats ----

// e4m3 is float16 with three bits of mantissa and an exponent that is smaller by 8: what is read that way lacks this
// factor.
constexpr float E4M3_FACTOR = 256.0f;

// W elements as floats; those of FP8 are not yet multiplied by E4M3_FACTOR.
template <int FORMAT>
inline vf elements(const char* p) {
  if constexpr (FORMAT == F32) return load<vf>(p);
  if constexpr (FORMAT == F16) return from_half(load<half_vh>(p));
  if constexpr (FORMAT == BF16) return (vf)(widened(load<half_vh>(p)) << 16);
  return from_half(sign_extended(load<quarter_vb>(p)) << 7 & uint16_t(0xBFFF));
}

// n elements as floats times `factor`, padded with zeros to a whole vector.
template <int FORMAT>
void widen(const char* from, int n, float factor, float* to) {
  constexpr int BYTES = size_of(FORMAT);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, elements<FORMAT>(from + i * BYTES) * factor);
  if (i == n) return;
  char tail[W * BYTES] = {};  // a whole vector would read past the page
  std::memcpy(tail, from + i * BYTES, (n - i) * BYTES);
  store(to + i, elements<FORMAT>(tail) * factor);
}

void widen(int32_t format, const void* from, int n, float factor, float* to) {
  const char* p = static_cast<const char*>(from);
  switch (format) {
    case F32: return widen<F32>(p, n, factor, to);
    case F16: return widen<F16>(p, n, factor, to);
    case BF16: return widen<BF16>(p, n, factor, to);
    default: return widen<FP8>(p, n, factor, to);
  }
}

constexpr int LINE = 64;  // bytes of a cache line

// Ask for the cache line `ahead` bytes after p: where the next block has what p points at in this one. The hardware's
// own prefetchers stop at every 4 KB, which is about the size of a block.
inline void prefetch(const void* p, int64_t ahead) { __builtin_prefetch(static_cast<const char*>(p) + ahead); }

// ---- products with elements that are floats ----

// Calls tile(r, n), n a constant, for groups of n <= TILE of `rows` rows from row r, as even as can be.
template <class Tile>
inline void for_row_tiles(int rows, const Tile& tile) {
  const int size = ceil_div(rows, ceil_div(rows, TILE));
  for (int r = 0; r < rows; r += size) switch (std::min(size, rows - r)) {
      case 1: tile(r, std::integral_constant<int, 1>()); break;
      case 2: tile(r, std::integral_constant<int, 2>()); break;
      default: tile(r, std::integral_constant<int, TILE>());
    }
}

// A matrix [n, dim] of elements that are floats of some width, rows `stride` bytes apart, and the way from there to
// that of the next block.
struct Rows {
  const char* data;
  int64_t stride, ahead;
  int n, dim;
};

// s[r][t] = x[r] . m[t] for R rows; s has room for a whole tile of t.
template <int FORMAT, int R>
void score_tile(const Rows& m, const float* x, int64_t x_stride, float* s, int64_t s_stride) {
  constexpr int T = R == 1 ? std::min(W, 8) : 4, BYTES = size_of(FORMAT);
  for (int t = 0; t < m.n; t += T) {
    const char* rows[T];
    for (int i = 0; i < T; i++) rows[i] = m.data + std::min(t + i, m.n - 1) * m.stride;
    vf sum[R][T] = {};
    if constexpr (FORMAT == F32) {  // as much as memory gives: rows one by one, since it streams best in order
#pragma GCC unroll 8
      for (int i = 0; i < T; i++) {
        vf row_sum[R] = {};
        for (int d = 0; d < m.dim; d += W) {
          prefetch(rows[i] + d * BYTES, m.ahead);
          const vf element = elements<FORMAT>(rows[i] + d * BYTES);
          for (int r = 0; r < R; r++) row_sum[r] += loadf(x + r * x_stride + d) * element;
        }
        for (int r = 0; r < R; r++) sum[r][i] = row_sum[r];
      }
    } else {  // as much as widening takes: rows side by side share the loads of x
      for (int d = 0; d < m.dim; d += W) {
        vf factor[R];
        for (int r = 0; r < R; r++) factor[r] = loadf(x + r * x_stride + d);
        for (int i = 0; i < T; i++) {
          prefetch(rows[i] + d * BYTES, m.ahead);
          const vf element = elements<FORMAT>(rows[i] + d * BYTES);
          for (int r = 0; r < R; r++) sum[r][i] += factor[r] * element;
        }
      }
    }
    for (int r = 0; r < R; r++) {
      const vf sums = sums_of<T>(sum[r]);
      std::memcpy(s + r * s_stride + t, &sums, T * sizeof(float));
    }
  }
}

// out[r] += sum of x[r][t] m[t], t from `begin` to `end`, for R rows and C vectors of columns from column d.
template <int FORMAT, int R, int C>
inline void value_columns(const Rows& m, int begin, int end, int d, const float* x, int64_t x_stride, float* out,
                          int64_t out_stride) {
  constexpr int BYTES = size_of(FORMAT);
  vf sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = loadf(out + r * out_stride + d + c * W);
  const char* row = m.data + begin * m.stride + d * BYTES;
  // These columns are pieces of lines here and there, but memory streams best in order: they fetch their share of the
  // rows as a whole.
  const char* line = m.data + begin * m.stride + int64_t(end - begin) * d * BYTES;
  for (int t = begin; t < end; t++, row += m.stride) {
    for (int i = 0; i < C * W * BYTES; i += LINE, line += LINE) prefetch(line, m.ahead);
    vf element[C];
    for (int c = 0; c < C; c++) element[c] = elements<FORMAT>(row + c * W * BYTES);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] += x[r * x_stride + t] * element[c];
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * out_stride + d + c * W, sum[r][c]);
}

// out[r] += sum of x[r][t] m[t] for R rows
template <int FORMAT, int R>
void value_tile(const Rows& m, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  constexpr int C = R == 1 ? 8 : 4, TOKENS = 16;  // so many rows stay in the first-level cache for every column
  for (int t = 0; t < m.n; t += TOKENS) {
    const int end = std::min(t + TOKENS, m.n);
    int d = 0;
    for (; d + C * W <= m.dim; d += C * W) value_columns<FORMAT, R, C>(m, t, end, d, x, x_stride, out, out_stride);
    for (; d < m.dim; d += W) value_columns<FORMAT, R, 1>(m, t, end, d, x, x_stride, out, out_stride);
  }
}

// s[r] = m x[r] for `count` rows
template <int FORMAT>
void multiply_scores(const Rows& m, const float* x, int64_t x_stride, int count, float* s, int64_t s_stride) {
  for_row_tiles(count, [&](int r, auto n) {
    score_tile<FORMAT, decltype(n)::value>(m, x + r * x_stride, x_stride, s + r * s_stride, s_stride);
  });
}

// out[r] += x[r] m for `count` rows
template <int FORMAT>
void multiply_values(const Rows& m, const float* x, int64_t x_stride, int count, float* out, int64_t out_stride) {
  for_row_tiles(count, [&](int r, auto n) {
    value_tile<FORMAT, decltype(n)::value>(m, x + r * x_stride, x_stride, out + r * out_stride, out_stride);
  });
}

// ---- products with integer codes ----

// The codes of a matrix [rows, lanes] with a scale and a zero point per row, in `lanes` order.
struct Codes {
  const uint8_t* data;
  const uint16_t *scale, *zero;
  int rows, lanes;
  int64_t ahead, grids_ahead;  // from `data` and from `scale` and `zero` to those of the next block
};

constexpr int MAX_ROWS = 256;  // 256 x 255 x 32767 is the largest sum of products that an int32 holds

// A row of weights with the codes' scales folded in, as 16-bit integers: pair j in the low half of words[j], ready to
// be broadcast. Their product with codes c is `step * (words . c) + bias`.
struct Weights {
  uint64_t* words;
  float step, bias;
};

// `x . (scale * c + zero)` = `w . c + x . zero` with `w = x * scale`. Rounding w costs its residual's product with c; the
// codes in there are `centre` on average, and that much of the error is put back. R rows at once hide the latency of
// their sums. The scale and zero of a slot that x gives no weight may be NaN.
template <int R>
void fold(const float* x, int64_t x_stride, const float* scale, const float* zero, int n, float centre, float* w,
          Weights* weights) {
  vf top[R] = {}, offset[R] = {}, residual[R] = {};
  for (int i = 0; i < n; i += W)
    for (int r = 0; r < R; r++) {
      const vf value = loadf(x + r * x_stride + i), weight = where(value != 0.0f, value * loadf(scale + i));
      offset[r] += where(value != 0.0f, value * loadf(zero + i));
      top[r] = larger(absolute(weight), top[r]);
      store(w + r * MAX_ROWS + i, weight);
    }
  float inverse[R];
  for (int r = 0; r < R; r++) {
    const float largest = max_of(top[r]);
    weights[r].step = largest * (1.0f / 32767.0f);
    inverse[r] = largest > 1e-30f ? 32767.0f / largest : 0.0f;
  }
  for (int i = 0; i < n; i += W)
    for (int r = 0; r < R; r++) {
      const vf weight = loadf(w + r * MAX_ROWS + i), shifted = weight * inverse[r] + ROUND;
      residual[r] += weight - (shifted - ROUND) * weights[r].step;
      const vl pair = (vl)((vi)shifted - ROUND_BITS);
      store(weights[r].words + i / 2, (pair & 0xFFFF) | (pair >> 16 & 0xFFFF0000));
    }
  for (int r = 0; r < R; r++) weights[r].bias = sum_of(offset[r] + residual[r] * centre);
}

// out[r][lane] (+)= weights[r] . codes[:, lane] for R rows and two accumulators of each: for the bit planes from FIRST,
// or for two columns of the only plane. Planes are `per_plane` lanes apart; of a column only `valid` lanes are stored.
template <int BITS, int R, int COLUMNS, int FIRST>
inline void code_columns(const uint8_t* codes, int64_t width, int64_t ahead, int pairs, const Weights* weights,
                         int per_plane, int valid, bool accumulate, float* out, int64_t out_stride) {
  constexpr int PLANES = BITS == 8 ? 1 : 2;
  vi sum[R][COLUMNS][PLANES] = {};
  for (int j = 0; j < pairs; j++, codes += width) {
    prefetch(codes, ahead);
    vh w[R];
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, weights[r].words + j, sizeof pair);
      w[r] = (vh)all(pair);
    }
    for (int c = 0; c < COLUMNS; c++) {
      const vh bytes = widened(load<vb>(codes + c * 2 * W));
      for (int p = 0; p < PLANES; p++) {
        vh code = bytes >> ((FIRST + p) * BITS);
        if ((FIRST + PLANES) * BITS < 8) code &= int16_t((1 << (PLANES - p) * BITS) - 1);
        for (int r = 0; r < R; r++) sum[r][c][p] += multiply_add_pairs(code, w[r]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int p = 0; p < PLANES; p++) {
        // A plane was not cut off from the one above it, whose sum is at hand to be taken off.
        const vi exact = p + 1 < PLANES ? sum[r][c][p] - (sum[r][c][p + 1] << BITS) : sum[r][c][p];
        const vf product = __builtin_convertvector(exact, vf) * weights[r].step + weights[r].bias;
        float* at = out + r * out_stride + (FIRST + p) * per_plane + c * W;
        if (valid == W)
          store(at, accumulate ? loadf(at) + product : product);
        else
          for (int i = 0; i < valid; i++) at[i] = accumulate ? at[i] + product[i] : product[i];
      }
}

template <int BITS, int R>
void code_tile(const uint8_t* codes, const uint8_t* ragged, int64_t ahead, int pairs, const Weights* weights,
               int per_plane, bool accumulate, float* out, int64_t out_stride) {
  const int64_t width = 2 * per_plane;
  int x = 0;
  if constexpr (BITS == 8)
    for (; x + 2 * W <= per_plane; x += 2 * W)
      code_columns<BITS, R, 2, 0>(codes + 2 * x, width, ahead, pairs, weights, per_plane, W, accumulate, out + x,
                                  out_stride);
  for (; x < per_plane; x += W) {
    const int valid = std::min(W, per_plane - x);
    const uint8_t* column = valid == W ? codes + 2 * x : ragged;
    const int64_t next = valid == W ? width : 2 * W;
    code_columns<BITS, R, 1, 0>(column, next, ahead, pairs, weights, per_plane, valid, accumulate, out + x, out_stride);
    if constexpr (BITS == 2)
      code_columns<BITS, R, 1, 2>(column, next, ahead, pairs, weights, per_plane, valid, accumulate, out + x,
                                  out_stride);
  }
}

// What `multiply_codes` needs: grids as floats, weights before and after rounding, and a padded copy of a last column
// that is not whole.
struct CodeScratch {
  static constexpr size_t WORDS = TILE * MAX_ROWS / 2, RAGGED = MAX_ROWS / 2 * 2 * W;
  static constexpr size_t FLOATS = (2 + TILE) * MAX_ROWS + WORDS * 2 + RAGGED / 4;
  float *scale, *zero, *w;
  uint64_t* words;
  uint8_t* ragged;
  explicit CodeScratch(float* floats)
      : scale(floats),
        zero(scale + MAX_ROWS),
        w(zero + MAX_ROWS),
        words(reinterpret_cast<uint64_t*>(w + TILE * MAX_ROWS)),
        ragged(reinterpret_cast<uint8_t*>(words + WORDS)) {}
};

// out[r] (+)= x[r] . (scale * codes + zero) over the rows of `m`, for `count` rows x padded with zeros to whole
// vectors.
template <int BITS>
void multiply_codes(Codes m, const float* x, int64_t x_stride, int count, bool accumulate, float* out,
                    int64_t out_stride, const CodeScratch& scratch) {
  const int per_plane = ceil_div(m.lanes, 8 / BITS), whole = per_plane / W * W;
  for (int begin = 0; begin < m.rows; begin += MAX_ROWS, accumulate = true) {
    const int rows = std::min(MAX_ROWS, m.rows - begin), pairs = ceil_div(rows, 2);
    const uint8_t* codes = m.data + int64_t(begin / 2) * 2 * per_plane;
    for (int i = begin; i < begin + rows; i += 32) {
      prefetch(m.scale + i, m.grids_ahead);
      prefetch(m.zero + i, m.grids_ahead);
    }
    widen(F16, m.scale + begin, rows, 1.0f, scratch.scale);
    widen(F16, m.zero + begin, rows, 1.0f, scratch.zero);
    if (whole < per_plane)
      for (int j = 0; j < pairs; j++)
        std::memcpy(scratch.ragged + j * 2 * W, codes + (int64_t(j) * per_plane + whole) * 2, (per_plane - whole) * 2);
    constexpr float CENTRE = ((1 << BITS) - 1) / 2.0f;
    Weights weights[TILE];
    for (int i = 0; i < TILE; i++) weights[i].words = scratch.words + i * MAX_ROWS / 2;
    for_row_tiles(count, [&](int r, auto n) {
      constexpr int R = decltype(n)::value;
      fold<R>(x + r * x_stride + begin, x_stride, scratch.scale, scratch.zero, rows, CENTRE, scratch.w, weights);
      code_tile<BITS, R>(codes, scratch.ragged, m.ahead, pairs, weights, per_plane, accumulate, out + r * out_stride,
                         out_stride);
    });
  }
}

void multiply_codes(int32_t format, const Codes& m, const float* x, int64_t x_stride, int count, bool accumulate,
                    float* out, int64_t out_stride, const CodeScratch& scratch) {
  switch (format) {
    case INT8: return multiply_codes<8>(m, x, x_stride, count, accumulate, out, out_stride, scratch);
    case INT4: return multiply_codes<4>(m, x, x_stride, count, accumulate, out, out_stride, scratch);
    default: return multiply_codes<2>(m, x, x_stride, count, accumulate, out, out_stride, scratch);
  }
}

// ---- attention of an item ----

int bits_of(const Operand& operand) { return operand.format == INT8 ? 8 : operand.format == INT4 ? 4 : 2; }

// One block as one KV head sees it: its first n slots.
struct Block {
  const Pages* pages;
  const char* page;
  int head, first, n;

  const Operand& operand(bool keys) const { return keys ? pages->k : pages->v; }

  // Where this head's codes or elements start.
  const char* data(bool keys) const {
    const Operand& o = operand(keys);
    const int size = pages->block_size;
    int64_t bytes = int64_t(size) * o.dim * size_of(o.format);
    if (o.format >= INT8) {
      const int rows = keys ? o.dim : size, lanes = keys ? size : o.dim;
      bytes = int64_t(ceil_div(rows, 2)) * 2 * ceil_div(lanes, 8 / bits_of(o));
    }
    return page + o.data + head * bytes;
  }

  // Where this head's scales start; the zero points lie as far from these in every head.
  const char* scales(bool keys) const {
    return page + operand(keys).scale + int64_t(head) * (keys ? pages->k.dim : pages->block_size) * 2;
  }

  Codes codes(bool keys, const Block& next) const {
    const Operand& o = operand(keys);
    const char* scale = scales(keys);
    return {reinterpret_cast<const uint8_t*>(data(keys)),
            reinterpret_cast<const uint16_t*>(scale),
            reinterpret_cast<const uint16_t*>(scale + o.zero - o.scale),
            keys ? o.dim : n,
            keys ? pages->block_size : o.dim,
            next.data(keys) - data(keys),
            next.scales(keys) - scale};
  }

  Rows rows(bool keys, const Block& next) const {
    const Operand& o = operand(keys);
    return {data(keys), o.dim * size_of(o.format), next.data(keys) - data(keys), n, o.dim};
  }

  float fp8_scale(bool keys) const {
    float scale;
    std::memcpy(&scale, page + operand(keys).scale + head * sizeof scale, sizeof scale);
    return scale * E4M3_FACTOR;
  }
};

class Attention {
 public:
  Attention(const Call& call, const Item& item, Scratch& scratch)
      : call_(call),
        view_(*call.view),
        share_(*item.share),
        group_(call.group()),
        rows_((share_.query_end - share_.query_begin) * group_),
        k_padded_(padded(call.sealed->k.dim)),
        v_padded_(padded(call.sealed->v.dim)),
        record_(call.record()),
        score_stride_(padded(call.sealed->block_size)),
        item_(item),
        together_(std::min(std::max(1, SCORES / (rows_ * score_stride_)), item.head_end - item.head_begin)),
        code_scratch_(reserve(scratch).take(CodeScratch::FLOATS)) {
    queries_ = scratch.take(size_t(item.head_end) * rows_ * k_padded_);
    turned_ = scratch.take(size_t(item.head_end) * rows_ * k_padded_);
    scores_ = scratch.take(size_t(together_) * rows_ * score_stride_);
    turned_scores_ = scratch.take(size_t(rows_) * score_stride_);
    elements_ = scratch.take(size_t(call.sealed->block_size) * std::max(k_padded_, v_padded_));
  }

  void run() {
    for (int h = item_.head_begin; h < item_.head_end; h++) start(h);
    for (int i = item_.begin; i < item_.end; i++)
      for (int h = item_.head_begin; h < item_.head_end; h += together_)
        attend(i, h, std::min(h + together_, item_.head_end));
  }

 private:
  const Call& call_;
  const View& view_;
  const Share& share_;
  const int group_, rows_, k_padded_, v_padded_, record_, score_stride_;
  const Item& item_;
  const int together_;  // heads whose scores are kept at a time
  CodeScratch code_scratch_;
  float *queries_, *turned_, *scores_, *turned_scores_, *elements_;

  Scratch& reserve(Scratch& scratch) const {
    scratch.reset(2 * size_t(item_.head_end) * rows_ * k_padded_ + size_t(together_ + 1) * rows_ * score_stride_ +
                  size_t(call_.sealed->block_size) * std::max(k_padded_, v_padded_) + CodeScratch::FLOATS + 8 * PAD);
    return scratch;
  }

  float* record(int head, int row) const { return item_.records + (int64_t(head) * rows_ + row) * record_; }
  bool sinks_are_turned() const { return view_.cos && view_.sinks > 0; }

  Block block_at(int i, int head) const {
    const int e = share_.entry(i);
    const int32_t* first = view_.first + int64_t(share_.row) * (view_.stride + 1) + e;
    const Pages* pages = e < view_.n_sealed[share_.row] ? call_.sealed : call_.open;
    const int64_t address = pages->addresses[view_.ids[int64_t(share_.row) * view_.stride + e]];
    return {pages, reinterpret_cast<const char*>(address), head, first[0],
            std::min(first[1], share_.max_end) - first[0]};
  }

  // What is read after this head's part of entry i: the next head's, then the first one's of the next entry.
  Block after(int i, int head) const {
    if (head + 1 < item_.head_end) return block_at(i, head + 1);
    return i + 1 < item_.end ? block_at(i + 1, item_.head_begin) : block_at(i, head);
  }

  // Row r holds query r / group of the share and head r % group of the group; queries carry the softmax scale.
  void start(int head) {
    for (int r = 0; r < rows_; r++) {
      const int i = share_.query_begin + r / group_, dim = call_.sealed->k.dim;
      float* q = queries_ + (int64_t(head) * rows_ + r) * k_padded_;
      std::fill_n(q, k_padded_, 0.0f);
      widen(call_.q.dtype, call_.q.at(share_.row, head * group_ + r % group_, i), dim, call_.scale, q);
      if (sinks_are_turned()) rotate(q, i, turned_ + (int64_t(head) * rows_ + r) * k_padded_);
      float* out = record(head, r);
      std::fill_n(out, record_, 0.0f);
      out[v_padded_] = -INF;
    }
  }

  void rotate(const float* q, int query, float* turned) const {
    std::copy_n(q, k_padded_, turned);
    const int half = view_.half, step = view_.interleaved ? 2 : 1, apart = view_.interleaved ? 1 : half;
    const int64_t at = (int64_t(share_.row) * view_.q_len + query) * half;
    for (int j = 0; j < half; j++) {
      const float c = view_.cos[at + j], s = view_.sin[at + j], a = q[j * step], b = q[j * step + apart];
      turned[j * step] = a * c - b * s;
      turned[j * step + apart] = b * c + a * s;
    }
  }

  // Entry i as heads [head_begin, head_end) see it. First their keys, then their values: that is the order of a page, and
  // memory streams best in order.
  void attend(int i, int head_begin, int head_end) {
    for (const bool keys : {true, false})
      for (int h = head_begin; h < head_end; h++) {
        const Block block = block_at(i, h);
        if (block.n <= 0) return;
        float* scores = scores_ + int64_t(h - head_begin) * rows_ * score_stride_;
        keys ? attend_keys(block, after(i, h), scores) : add_values(block, after(i, h), scores);
      }
  }

  void attend_keys(const Block& block, const Block& next, float* scores) const {
    const int64_t at = int64_t(block.head) * rows_ * k_padded_;
    score(block, next, queries_ + at, scores);
    const bool turned = sinks_are_turned() && block.first < view_.sinks;
    if (turned) score(block, next, turned_ + at, turned_scores_);
    for (int r = 0; r < rows_; r++) {
      float* s = scores + r * score_stride_;
      hide(block, r, turned, s);
      weigh(s, ceil_div(block.n, W), record(block.head, r));
    }
  }

  // s[r][slot] = q[r] . k[slot]
  void score(const Block& block, const Block& next, const float* q, float* s) const {
    const Operand& k = block.pages->k;
    if (k.format >= INT8)
      return multiply_codes(k.format, block.codes(true, next), q, k_padded_, rows_, false, s, score_stride_,
                            code_scratch_);
    int32_t format = k.format;
    const Rows rows = readable(block.rows(true, next), &format);
    switch (format) {
      case F32: multiply_scores<F32>(rows, q, k_padded_, rows_, s, score_stride_); break;
      case F16: multiply_scores<F16>(rows, q, k_padded_, rows_, s, score_stride_); break;
      case BF16: multiply_scores<BF16>(rows, q, k_padded_, rows_, s, score_stride_); break;
      default: multiply_scores<FP8>(rows, q, k_padded_, rows_, s, score_stride_);
    }
    if (k.format == FP8) scale_rows(s, block.n, block.fp8_scale(true));
  }

  // out[r] += p[r] . v
  void add_values(const Block& block, const Block& next, float* p) const {
    const Operand& v = block.pages->v;
    float* out = record(block.head, 0);
    if (v.format >= INT8)
      return multiply_codes(v.format, block.codes(false, next), p, score_stride_, rows_, true, out, record_,
                            code_scratch_);
    if (v.format == FP8) scale_rows(p, block.n, block.fp8_scale(false));
    int32_t format = v.format;
    const Rows rows = readable(block.rows(false, next), &format);
    switch (format) {
      case F32: return multiply_values<F32>(rows, p, score_stride_, rows_, out, record_);
      case F16: return multiply_values<F16>(rows, p, score_stride_, rows_, out, record_);
      case BF16: return multiply_values<BF16>(rows, p, score_stride_, rows_, out, record_);
      default: return multiply_values<FP8>(rows, p, score_stride_, rows_, out, record_);
    }
  }

  // The rows themselves where they consist of whole vectors and are read only once, else a padded copy of them as
  // floats.
  Rows readable(const Rows& from, int32_t* format) const {
    if (from.dim % W == 0 && (*format == F32 || rows_ <= TILE)) return from;
    const int stride = padded(from.dim);
    for (int t = 0; t < from.n; t++) {
      prefetch(from.data + t * from.stride, from.ahead);
      widen(*format, from.data + t * from.stride, from.dim, 1.0f, elements_ + t * stride);
    }
    *format = F32;
    return {reinterpret_cast<const char*>(elements_), int64_t(stride * sizeof(float)), 0, from.n, from.dim};
  }

  void scale_rows(float* s, int n, float factor) const {
    for (int r = 0; r < rows_; r++)
      for (int t = 0; t < n; t += W) store(s + r * score_stride_ + t, loadf(s + r * score_stride_ + t) * factor);
  }

  // Cap the scores `s` of row r, take those of turned sinks, and set what its query does not see to -inf: it sees the slots
  // [0, sinks) and [lo, hi).
  void hide(const Block& block, int r, bool turned, float* s) const {
    const int64_t at = int64_t(share_.row) * view_.q_len + share_.query_begin + r / group_;
    const int begin = view_.begin[at], end = view_.end[at];
    const bool all_seen = begin <= block.first && block.first + block.n <= end && block.n % W == 0;
    if (all_seen && call_.softcap == 0) return;
    const auto slot = [&](int index) { return std::min(std::max(index - block.first, 0), block.n); };
    const int sinks = slot(std::min(view_.sinks, std::min(begin, end))), lo = slot(begin), hi = slot(end);
    if (turned) std::copy_n(turned_scores_ + r * score_stride_, sinks, s);
    const int stop = ceil_div(block.n, W) * W;
    if (call_.softcap != 0)
      for (int t = 0; t < stop; t += W) store(s + t, hyperbolic_tangent(loadf(s + t) / call_.softcap) * call_.softcap);
    if (sinks < lo) std::fill(s + sinks, s + lo, -INF);
    std::fill(s + std::max(lo, hi), s + stop, -INF);
  }

  // Turn scores into weights exp(s - maximum); where the maximum grows, what was summed so far shrinks.
  void weigh(float* s, int vectors, float* out) const {
    float &top = out[v_padded_], &sum = out[v_padded_ + 1];
    vf tops = loadf(s);
    for (int i = 1; i < vectors; i++) tops = larger(loadf(s + i * W), tops);
    const float highest = max_of(tops);
    if (highest > top) {
      const float shrink = std::exp(top - highest);
      sum *= shrink;
      for (int d = 0; d < v_padded_; d += W) store(out + d, loadf(out + d) * shrink);
      top = highest;
    }
    const float shift = top == -INF ? 0.0f : top;
    vf sums = {};
    for (int i = 0; i < vectors; i++) {
      const vf weight = exponential(loadf(s + i * W) - shift);
      sums += weight;
      store(s + i * W, weight);
    }
    sum += sum_of(sums);
  }
};

void attend(const Call& call, const Item& item) {
  thread_local Scratch scratch;
  Attention(call, item, scratch).run();
}

// ---- sealing ----

// Smallest and largest element of every channel of x [n, stride].
void channel_ranges(const float* x, int n, int stride, float* low, float* high) {
  for (int d = 0; d < stride; d += W) {
    vf lo = loadf(x + d), hi = lo;
    for (int t = 1; t < n; t++) {
      lo = smaller(loadf(x + t * stride + d), lo);
      hi = larger(loadf(x + t * stride + d), hi);
    }
    store(low + d, lo);
    store(high + d, hi);
  }
}

// Smallest and largest element of every row of x [n, stride], of which `dim` columns count.
void token_ranges(const float* x, int n, int dim, int stride, float* low, float* high) {
  for (int t = 0; t < n; t++) {
    const float* row = x + t * stride;
    vf lo = all(row[0]), hi = lo;
    int d = 0;
    for (; d + W <= dim; d += W) {
      lo = smaller(loadf(row + d), lo);
      hi = larger(loadf(row + d), hi);
    }
    low[t] = -max_of(-lo), high[t] = max_of(hi);
    for (; d < dim; d++) {
      low[t] = std::min(low[t], row[d]);
      high[t] = std::max(high[t], row[d]);
    }
  }
}

// The largest float16 that is not above x, as in codecs/affine.py; x must not be NaN.
inline vu half_down(vf x) {
  const vf limit = all(65504.0f), finite = smaller(limit, larger(-limit, x));
  const vi sign = (vi)((vu)finite >> 16) & 0x8000, magnitude = (vi)absolute(finite);
  // Below 2^-14 the spacing is 2^-24, which is the spacing of floats next to 0.5: the addition does the rounding.
  const vi tiny = (vi)((vf)magnitude + 0.5f) - (126 << 23);
  const vi normal = (magnitude - (112 << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  const vi nearest = magnitude < (113 << 23) ? tiny : normal, half = sign | nearest;
  const vi below = sign != 0 ? (half == 0xFBFF ? half : half + 1) : (nearest == 0 ? all(0x8001) : half - 1);
  return (vu)(from_half(narrowed((vu)half)) > x ? below : half);
}

// The grids of codecs/affine.py for n ranges [low, high]: scale and zero point of each. As floats they replace the
// ranges.
void choose_grids(float* low, float* high, int n, int levels, uint16_t* scale, uint16_t* zero) {
  for (int i = 0; i < n; i += W) {
    // Which of two zeros is the smaller one depends on the order of comparisons: adding 0 makes both +0.
    const half_vh z = narrowed(half_down(loadf(low + i) + 0.0f));
    const vf range = loadf(high + i) + 0.0f - from_half(z);
    const half_vh s = narrowed(half_down(-range / float(levels)) ^ 0x8000);
    std::memcpy(zero + i, &z, std::min(W, n - i) * sizeof(uint16_t));
    std::memcpy(scale + i, &s, std::min(W, n - i) * sizeof(uint16_t));
    store(low + i, from_half(z));
    store(high + i, from_half(s));
  }
}

// Codes of W elements.
inline quarter_vb quantized(vf x, vf scale, vf zero, float levels) {
  const vf steps = smaller(larger((x - zero) / (scale > 0.0f ? scale : all(1.0f)), vf{}), all(levels));
  return narrowed_twice((vu)((vi)(steps + ROUND) - ROUND_BITS));
}

// Codes [tokens, stride] of values, in `lanes` order: rows are tokens. Codes beyond the last channel are zero, as are
// those of keys below.
template <int BITS>
void pack_values(const uint8_t* codes, int tokens, int stride, int dim, uint8_t* to) {
  const int per_plane = ceil_div(dim, 8 / BITS);
  for (int t = 0; t < tokens; t += 2, codes += 2 * stride)
    for (int x = 0; x < per_plane; x++, to += 2) {
      uint8_t even = 0, odd = 0;
      for (int p = 0; p < 8 / BITS; p++) {
        even |= codes[p * per_plane + x] << (p * BITS);
        odd |= codes[p * per_plane + x + stride] << (p * BITS);
      }
      to[0] = even;
      to[1] = odd;
    }
}

// Codes [tokens, stride] of keys: rows are channels, so that two neighbours in memory are one pair.
template <int BITS>
void pack_keys(const uint8_t* codes, int tokens, int stride, int dim, uint8_t* to) {
  const int per_plane = ceil_div(tokens, 8 / BITS);
  for (int x = 0; x < per_plane; x++)
    for (int j = 0; j < dim; j += 2) {
      uint16_t pair = 0;
      for (int p = 0; p < 8 / BITS; p++) {
        uint16_t plane;
        std::memcpy(&plane, codes + (p * per_plane + x) * stride + j, sizeof plane);
        pair |= plane << (p * BITS);
      }
      std::memcpy(to + j * per_plane + 2 * x, &pair, sizeof pair);
    }
}

template <int BITS>
void pack(bool keys, const uint8_t* codes, int tokens, int stride, int dim, uint8_t* to) {
  keys ? pack_keys<BITS>(codes, tokens, stride, dim, to) : pack_values<BITS>(codes, tokens, stride, dim, to);
}

// Keys x [n, stride]: a grid per channel. `low` and `high` are room for as many ranges.
void quantize_keys(const float* x, int n, int dim, int stride, int levels, uint8_t* codes, uint16_t* scale,
                   uint16_t* zero, float* low, float* high) {
  channel_ranges(x, n, stride, low, high);
  choose_grids(low, high, dim, levels, scale, zero);
  for (int t = 0; t < n; t++)
    for (int d = 0; d < dim; d += W)
      store(codes + t * stride + d,
            quantized(loadf(x + t * stride + d), loadf(high + d), loadf(low + d), float(levels)));
}

// Values x [n, stride]: a grid per token.
void quantize_values(const float* x, int n, int dim, int stride, int levels, uint8_t* codes, uint16_t* scale,
                     uint16_t* zero, float* low, float* high) {
  token_ranges(x, n, dim, stride, low, high);
  choose_grids(low, high, n, levels, scale, zero);
  for (int t = 0; t < n; t++)
    for (int d = 0; d < dim; d += W)
      store(codes + t * stride + d, quantized(loadf(x + t * stride + d), all(high[t]), all(low[t]), float(levels)));
}

// Nearest e4m3 (ties to even) of |x| <= 448.
inline quarter_vb to_e4m3(vf x) {
  const vu sign = (vu)x >> 24 & 0x80, magnitude = (vu)x & 0x7FFFFFFF;
  // Below 2^-6 the spacing is 2^-9, which is the spacing of floats next to 2^14: the addition does the rounding.
  const vu tiny = (vu)((vf)magnitude + 0x1p14f) - (141u << 23);
  const vu normal = (magnitude - (120u << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
  return narrowed_twice(sign | ((vi)magnitude < (121 << 23) ? tiny : normal));
}

// One scale for the whole block.
void seal_fp8(const float* x, int n, int dim, int stride, uint8_t* data, char* scale_at) {
  vf top = {};
  for (int i = 0; i < n * stride; i += W) top = larger(absolute(loadf(x + i)), top);
  const float scale = max_of(top) / 448.0f, divisor = scale > 0 ? scale : 1.0f;
  std::memcpy(scale_at, &scale, sizeof scale);
  for (int t = 0; t < n; t++)
    for (int d = 0; d < dim; d += W) {
      const vf y = smaller(all(448.0f), larger(all(-448.0f), loadf(x + t * stride + d) / divisor));
      const quarter_vb codes = to_e4m3(y);
      std::memcpy(data + t * dim + d, &codes, std::min(W, dim - d));
    }
}

void seal_operand(const Pages& pages, char* page, int head, bool keys, const char* from, int64_t stride_bytes,
                  int32_t dtype) {
  const Operand& operand = keys ? pages.k : pages.v;
  const int n = pages.block_size, dim = operand.dim, stride = padded(dim);
  if (operand.format <= BF16) {
    const int64_t bytes = dim * size_of(dtype);
    for (int t = 0; t < n; t++)
      std::memcpy(page + operand.data + (int64_t(head) * n + t) * bytes, from + t * stride_bytes, bytes);
    return;
  }
  thread_local Scratch scratch;
  const size_t ranges = padded(std::max(n, stride));
  scratch.reset(size_t(n) * stride * 2 + 2 * ranges);
  float* x = scratch.take(size_t(n) * stride);
  for (int t = 0; t < n; t++) {
    std::fill_n(x + t * stride, stride, 0.0f);
    widen(dtype, from + t * stride_bytes, dim, 1.0f, x + t * stride);
  }
  auto* data = reinterpret_cast<uint8_t*>(page + operand.data);
  if (operand.format == FP8)
    return seal_fp8(x, n, dim, stride, data + int64_t(head) * n * dim, page + operand.scale + head * 4);
  const int bits = bits_of(operand);
  const int rows = keys ? dim : n, lanes = keys ? n : dim;
  data += int64_t(head) * ceil_div(rows, 2) * 2 * ceil_div(lanes, 8 / bits);
  auto* scale = reinterpret_cast<uint16_t*>(page + operand.scale) + head * rows;
  auto* zero = reinterpret_cast<uint16_t*>(page + operand.zero) + head * rows;
  auto* codes = reinterpret_cast<uint8_t*>(scratch.take(size_t(n) * stride / 4));
  float *low = scratch.take(ranges), *high = scratch.take(ranges);
  (keys ? quantize_keys : quantize_values)(x, n, dim, stride, (1 << bits) - 1, codes, scale, zero, low, high);
  for (int t = 0; t < n; t++) std::fill(codes + t * stride + dim, codes + (t + 1) * stride, 0);
  switch (bits) {
    case 8: return pack<8>(keys, codes, n, stride, dim, data);
    case 4: return pack<4>(keys, codes, n, stride, dim, data);
    default: return pack<2>(keys, codes, n, stride, dim, data);
  }
}

void seal(const Pages& pages, char* page, int head, const char* k, int64_t k_stride, const char* v, int64_t v_stride,
          int32_t dtype) {
  seal_operand(pages, page, head, true, k, k_stride, dtype);
  seal_operand(pages, page, head, false, v, v_stride, dtype);
}

// A loop that compilers turn into widening products, which is why it says no more than that.
uint64_t checksum(const char* row, int64_t nbytes) {
  uint64_t sum = uint64_t(nbytes);
  const uint32_t words = uint32_t(nbytes / 4);
  for (uint32_t i = 0; i < words; i++) {
    uint32_t word;
    std::memcpy(&word, row + 4 * size_t(i), 4);
    sum += uint64_t(word) * (((i + 1) * 0x9E3779B1u) | 1u);
  }
  if (nbytes % 4) {
    uint32_t word = 0;
    std::memcpy(&word, row + 4 * size_t(words), nbytes % 4);
    sum += uint64_t(word) * (((words + 1) * 0x9E3779B1u) | 1u);
  }
  return sum;
}

#if HFKV_ISA == HFKV_AVX512
const Kernels kernels{"AVX-512", attend, seal, checksum};
#elif HFKV_ISA == HFKV_AVX2
const Kernels kernels{"AVX2", attend, seal, checksum};
#elif defined(__aarch64__)
const Kernels kernels{"NEON", attend, seal, checksum};
#else
const Kernels kernels{"baseline", attend, seal, checksum};
#endif

#undef HFKV_SHUFFLE

}  // namespace HFKV_NAMESPACE
}  // namespace

#endif
