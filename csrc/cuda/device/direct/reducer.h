// The loop of the kernels that reduce the values of all ranks at once. Every element is reduced by one thread, in
// canonical order, and stored wherever it is needed. In place is safe, because the thread that writes an element has
// read it from every rank.
#pragma once

#include "cuda/device/arithmetic.h"
#include "cuda/device/combine.h"

namespace ringcomm::cuda {

// The work of a block. It lies in shared memory, so that the code that fills it in is compiled once for all types.
struct Reduction {
  const char* source[kMaxRanks];  // by rank
  char* target[kMaxRanks];
  double factor[kMaxRanks];  // of premul_sum, else 1
  std::int32_t num_sources, num_targets;
  std::int32_t divisor;  // of sums; 1: none
  std::int32_t scaled;   // by the factors
  u64 count;             // of the kernel's elements
  u64 first, step;       // rows of this block: first, first + step, ...; a row is a chunk of every thread
};

// Rows of one rank that a block takes at once: a thread has eight chunks in flight, whatever the number of ranks.
template <int kRanks>
inline constexpr int kDeep = 8 / kRanks;
// Rows that `nbytes` of each rank fill.
RINGCOMM_DEVICE u64 rows_of(u64 nbytes) { return ceil_div(nbytes, blockDim.x * sizeof(Vec)); }
// The first row of block `block` of `blocks`, which take rows in turn; the messages before had `rows` rows.
RINGCOMM_DEVICE u64 first_row(u64 block, u64 blocks, u64 rows) { return (block + blocks - rows % blocks) % blocks; }

static_assert(kMaxLaunchRanks <= kGroupRanks && kMaxRanks <= 4 * kGroupRanks, "tree_of_groups has four groups");

// Reduces what the loops for few ranks leave: everything of more ranks than a group has, misaligned buffers, and what
// is behind the last full chunk. `chunks` of kSize bytes come first, then single elements from `begin` on. Fractions
// are always scaled, because a factor of 1 changes no bit. A function of its own: the loops for few ranks need all
// registers.
template <typename T, int kSize, typename Combine>
RINGCOMM_DEVICE_CALL void reduce_rest(const Reduction& what, Combine step, u64 chunks, u64 begin) {
  constexpr int kWords = kSize < 4 ? 1 : kSize / 4, kEach = kSize / static_cast<int>(sizeof(T));
  using Group = Combiner<T, Combine, kGroupRanks, 1, kCanBeScaled<T, Combine>>;
  using Partials = typename Group::template Partials<kWords>;
  const Group whole(what.num_sources, what.divisor, what.factor, step);
  const u64 count = chunks + what.count - begin;
  for (u64 i = what.first * blockDim.x + threadIdx.x; i < count; i += what.step * blockDim.x) {
    const bool is_chunk = kEach > 1 && i < chunks;
    const u64 at = (is_chunk ? i * kEach : begin + i - chunks) * sizeof(T);
    const auto load_at = [&](const char* from) {
      if constexpr (kEach > 1)
        if (is_chunk) return load_chunk<kSize>(from);
      Chunk<kSize> chunk{};
      put_element<T>(chunk.word, 0, load_one(reinterpret_cast<const T*>(from)));
      return chunk;
    };
    const auto group = [&](int g) {
      const int first = g * kGroupRanks, ranks = static_cast<int>(smaller(what.num_sources - first, kGroupRanks));
      Chunk<kSize> value[kGroupRanks] = {};
      RINGCOMM_UNROLL for (int p = 0; p < kGroupRanks; ++p) {
        if (p < ranks) value[p] = load_at(what.source[first + p] + at);
      }
      return Group(ranks, 1, what.factor + first, step).template add_up<kWords>([&](int p) { return value[p].word; });
    };
    const auto join = [&](const Partials& left, const Partials& right) {
      return whole.template join<kWords>(left, right);
    };
    const int groups = static_cast<int>(ceil_div(what.num_sources, kGroupRanks));
    Chunk<kSize> result;
    whole.template store_words<kWords>(result.word, tree_of_groups<Partials>(groups, group, join));
    for (int t = 0; t < what.num_targets; ++t) {
      char* const to = what.target[t] + at;
      if constexpr (kEach > 1)
        if (is_chunk) store_chunk<kSize>(to, result);
      if (!is_chunk) store_one(reinterpret_cast<T*>(to), element<T>(result.word, 0));
    }
  }
}

// Reduces the sources, of which there are at most kMost, into the targets.
template <typename T, typename Combine, int kMost>
class Reducer {
  // Worth a separate loop for two ranks and one for four.
  static constexpr bool kUsual = std::is_same_v<Combine, Sum> && std::is_floating_point_v<AccOf<T>> && sizeof(T) > 1;
  static constexpr bool kHasFew = kUsual || sizeof(T) >= 4;
  // Bytes that a thread takes of each rank at once. 8-bit elements are added up in 32 bits, so half as many fill the
  // registers.
  static constexpr int kBytes = sizeof(T) > 1 || kIsBitwise<T, Combine> ? 16 : 8;
  static constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  // Those of reduce_rest.
  static constexpr int kRest = kMost <= kGroupRanks ? sizeof(T) : sizeof(T) >= 4 ? sizeof(Vec) : 4 * sizeof(T);
  static constexpr int kRestEach = kRest / static_cast<int>(sizeof(T));

 public:
  RINGCOMM_DEVICE explicit Reducer(const Reduction& what) : what_(what) {}

  RINGCOMM_DEVICE void run() const {
    if constexpr (kCanBeScaled<T, Combine>)
      if (what_.scaled) return reduce<true>();
    reduce<false>();
  }

 private:
  // Scaled reductions have their own loop, so that the usual sums multiply nothing.
  template <bool kScaled>
  RINGCOMM_DEVICE void reduce() const {
    const bool aligned = aligned_buffers();
    if constexpr (kMost > kGroupRanks)
      if (what_.num_sources > kGroupRanks) return reduce_groups<kScaled>(aligned ? what_.count / kRestEach : 0);
    const u64 chunks = aligned ? what_.count / kEach : 0;
    if constexpr (!kHasFew) {
      reduce_chunks<8, 1, kScaled>(chunks);
    } else if (what_.num_sources > 4) {
      reduce_chunks<8, 5, kScaled>(chunks);
    } else if constexpr (!kUsual || kScaled) {
      reduce_chunks<4, 1, kScaled>(chunks);
    } else {
      if (what_.num_sources > 2)
        reduce_chunks<4, 3, kScaled>(chunks);
      else
        reduce_chunks<2, 1, kScaled>(chunks);
    }
    if (chunks * kEach < what_.count) reduce_rest<T, kRest>(what_, AnyStep<T>{Combine::kOp}, 0, chunks * kEach);
  }
  // Usual sums have a version of their own here too.
  template <bool kScaled>
  RINGCOMM_DEVICE void reduce_groups(u64 chunks) const {
    if constexpr (kUsual && !kScaled)
      reduce_rest<T, kRest>(what_, Sum{}, chunks, chunks * kRestEach);
    else
      reduce_rest<T, kRest>(what_, AnyStep<T>{Combine::kOp}, chunks, chunks * kRestEach);
  }
  RINGCOMM_DEVICE bool aligned_buffers() const {
    u64 bits = 0;
    for (int p = 0; p < what_.num_sources; ++p) bits |= reinterpret_cast<u64>(what_.source[p]);
    for (int t = 0; t < what_.num_targets; ++t) bits |= reinterpret_cast<u64>(what_.target[t]);
    return bits % sizeof(Vec) == 0;
  }

  template <int kRanks, int kLeast, bool kScaled>
  RINGCOMM_DEVICE void reduce_chunks(u64 chunks) const {
    constexpr int kBatch = kDeep<kRanks>;
    const Combiner<T, Combine, kRanks, kLeast, kScaled> combiner(what_.num_sources, what_.divisor, what_.factor);
    const u64 step = what_.step * blockDim.x;
    for (u64 v = first(); v < chunks; v += kBatch * step) {
      Chunk<kBytes> value[kBatch][kRanks] = {};
      RINGCOMM_UNROLL for (int k = 0; k < kBatch; ++k) {
        RINGCOMM_UNROLL for (int p = 0; p < kRanks; ++p) {
          if ((p < kLeast || p < what_.num_sources) && v + k * step < chunks)
            value[k][p] = load_chunk<kBytes>(what_.source[p] + (v + k * step) * kBytes);
        }
      }
      RINGCOMM_UNROLL for (int k = 0; k < kBatch; ++k) {
        if (v + k * step >= chunks) break;
        Chunk<kBytes> result;
        combiner.template combine_words<kBytes / 4>(result.word, [&](int p) { return value[k][p].word; });
        for (int t = 0; t < what_.num_targets; ++t)
          store_chunk<kBytes>(what_.target[t] + (v + k * step) * kBytes, result);
      }
    }
  }
  RINGCOMM_DEVICE u64 first() const { return what_.first * blockDim.x + threadIdx.x; }

  const Reduction& what_;
};

}  // namespace ringcomm::cuda
