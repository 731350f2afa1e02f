// The loop of the kernels that reduce the values of all ranks at once. Every element is reduced by one thread, in
// canonical order, and stored wherever it is needed. In place is safe, because the thread that writes an element has
// read it from every rank.
#pragma once

#include "cuda/arithmetic.h"
#include "cuda/combine.h"

namespace ringcomm::cuda {

// What a block reduces. It lies in shared memory, so that the code that fills it in is compiled once for all types.
struct Reduction {
  const char* source[kMaxRanks];  // by rank
  char* target[kMaxRanks];
  double factor[kMaxRanks];  // of premul_sum
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

// Reduces kSize bytes of all ranks; load(p) gives those of rank p.
template <typename T, typename Combine, int kSize, bool kScaled, typename Load>
RINGCOMM_DEVICE Chunk<kSize> reduce_at(const Reduction& what, const Load& load) {
  constexpr int kWords = kSize < 4 ? 1 : kSize / 4;
  using Group = Combiner<T, Combine, kGroupRanks, 1, kScaled>;
  using Partials = typename Group::template Partials<kWords>;
  const auto group = [&](int g) {
    const int first = g * kGroupRanks, ranks = static_cast<int>(smaller(what.num_sources - first, kGroupRanks));
    Chunk<kSize> value[kGroupRanks] = {};
    RINGCOMM_UNROLL for (int p = 0; p < kGroupRanks; ++p) {
      if (p < ranks) value[p] = load(first + p);
    }
    return Group(ranks, 1, what.factor + first).template add_up<kWords>([&](int p) { return value[p].word; });
  };
  const auto combine = [](Partials left, const Partials& right) {
    RINGCOMM_UNROLL for (int i = 0; i < Partials::kCount; ++i) left.of[i] = Combine::apply(left.of[i], right.of[i]);
    return left;
  };
  const Partials sum =
      tree_of_groups<Partials>(static_cast<int>(ceil_div(what.num_sources, kGroupRanks)), group, combine);
  Chunk<kSize> result;
  Group(what.num_sources, what.divisor, what.factor).template store_words<kWords>(result.word, sum);
  return result;
}
// Reduces more ranks than a group has. A function of its own: the loops for few ranks need all registers.
template <typename T, typename Combine, bool kScaled>
RINGCOMM_DEVICE_CALL void reduce_groups(const Reduction& what, bool whole_vectors) {
  constexpr int kSize = sizeof(T) >= 4 ? sizeof(Vec) : 4 * sizeof(T);
  constexpr int kEach = kSize / static_cast<int>(sizeof(T));
  const u64 chunks = whole_vectors ? what.count / kEach : 0;
  const u64 first = what.first * blockDim.x + threadIdx.x, step = what.step * blockDim.x;
  for (u64 v = first; v < chunks; v += step) {
    const auto result = reduce_at<T, Combine, kSize, kScaled>(
        what, [&](int p) { return load_chunk<kSize>(what.source[p] + v * kSize); });
    for (int t = 0; t < what.num_targets; ++t) store_chunk<kSize>(what.target[t] + v * kSize, result);
  }
  for (u64 i = chunks * kEach + first; i < what.count; i += step) {
    const auto result = reduce_at<T, Combine, sizeof(T), kScaled>(what, [&](int p) {
      Chunk<sizeof(T)> chunk{};
      put_element<T>(chunk.word, 0, load_one(reinterpret_cast<const T*>(what.source[p]) + i));
      return chunk;
    });
    for (int t = 0; t < what.num_targets; ++t)
      store_one(reinterpret_cast<T*>(what.target[t]) + i, element<T>(result.word, 0));
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
      if (what_.num_sources > kGroupRanks) return reduce_groups<T, Combine, kScaled>(what_, aligned);
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
    reduce_elements<kScaled>(chunks * kEach);
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
  // The elements after the last full chunk, or all elements of misaligned buffers.
  template <bool kScaled>
  RINGCOMM_DEVICE void reduce_elements(u64 begin) const {
    if (begin == what_.count) return;
    const Combiner<T, Combine, kGroupRanks, 1, kScaled> combiner(what_.num_sources, what_.divisor, what_.factor);
    for (u64 i = begin + first(); i < what_.count; i += what_.step * blockDim.x) {
      T value[kGroupRanks] = {};
      RINGCOMM_UNROLL for (int p = 0; p < kGroupRanks; ++p) {
        if (p < what_.num_sources) value[p] = load_one(reinterpret_cast<const T*>(what_.source[p]) + i);
      }
      const T result = combiner.combine([&](int p) { return value[p]; });
      for (int t = 0; t < what_.num_targets; ++t) store_one(reinterpret_cast<T*>(what_.target[t]) + i, result);
    }
  }
  RINGCOMM_DEVICE u64 first() const { return what_.first * blockDim.x + threadIdx.x; }

  const Reduction& what_;
};

}  // namespace ringcomm::cuda
