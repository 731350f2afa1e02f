// Vector arithmetic: elements out of 16 bytes, combined over the ranks in canonical order in the type they are added up
// in, finished, and rounded once into 16 bytes again.
#pragma once

#include <type_traits>

#include "core/reduce.h"
#include "cuda/move.h"

namespace ringcomm::cuda {

template <typename T>
using AccOf = typename Element<T>::Acc;
template <typename T>
inline constexpr int kPerVec = static_cast<int>(sizeof(Vec) / sizeof(T));

// Element i of `words`, and into words that hold zeros there. `i` is known at compile time once loops are unrolled.
template <typename T>
RINGCOMM_DEVICE T element(const u32* words, int i) {
  if constexpr (sizeof(T) == 8) {
    return bits::cast<T>(words[2 * i] | static_cast<u64>(words[2 * i + 1]) << 32);
  } else if constexpr (sizeof(T) == 4) {
    return bits::cast<T>(words[i]);
  } else {
    using Raw = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>;
    constexpr int kEach = 4 / sizeof(T);
    return bits::cast<T>(static_cast<Raw>(words[i / kEach] >> (i % kEach * 8 * sizeof(T))));
  }
}
template <typename T>
RINGCOMM_DEVICE void put_element(u32* words, int i, T value) {
  if constexpr (sizeof(T) == 8) {
    const u64 raw = bits::cast<u64>(value);
    words[2 * i] = static_cast<u32>(raw);
    words[2 * i + 1] = static_cast<u32>(raw >> 32);
  } else if constexpr (sizeof(T) == 4) {
    words[i] = bits::cast<u32>(value);
  } else {
    using Raw = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>;
    constexpr int kEach = 4 / sizeof(T);
    words[i / kEach] |= static_cast<u32>(bits::cast<Raw>(value)) << (i % kEach * 8 * sizeof(T));
  }
}

// The canonical tree over the first `ranks` of N leaves, N a power of two: a node whose right side has no rank is its
// left side. So one unrolled tree serves every number of ranks; absent leaves hold anything.
template <int N, typename Leaf, typename Combine>
RINGCOMM_HD constexpr auto tree_of_first(int ranks, int first, const Leaf& leaf, const Combine& combine) {
  if constexpr (N == 1) {
    return leaf(first);
  } else {
    const auto left = tree_of_first<N / 2>(ranks, first, leaf, combine);
    const auto both = combine(left, tree_of_first<N / 2>(ranks, first + N / 2, leaf, combine));
    return first + N / 2 < ranks ? both : left;
  }
}

namespace proof {
// Values that tell every order and grouping of the leaves apart.
struct Leaf {
  RINGCOMM_HD constexpr u64 operator()(int rank) const { return rank + 2; }
};
struct Node {
  RINGCOMM_HD constexpr u64 operator()(u64 left, u64 right) const {
    return (left * 0x9e3779b97f4a7c15u + 1) ^ (right * 31 + 7);
  }
};
template <int kRanks>
constexpr bool same_tree() {
  const u64 want = tree_reduce<kRanks>(0, Leaf{}, Node{});
  const bool fits_4 = kRanks > 4 || tree_of_first<4>(kRanks, 0, Leaf{}, Node{}) == want;
  const bool fits_2 = kRanks > 2 || tree_of_first<2>(kRanks, 0, Leaf{}, Node{}) == want;
  return fits_2 && fits_4 && tree_of_first<8>(kRanks, 0, Leaf{}, Node{}) == want;
}
static_assert(same_tree<1>() && same_tree<2>() && same_tree<3>() && same_tree<4>(), "not the canonical order");
static_assert(same_tree<5>() && same_tree<6>() && same_tree<7>() && same_tree<8>(), "not the canonical order");
}  // namespace proof

// Only sums are averaged, and only sums of fractions scaled.
template <typename T, typename Combine>
inline constexpr bool kCanBeScaled = std::is_same_v<Combine, Sum> && std::is_floating_point_v<AccOf<T>>;

// What the kernel of a pair (T, Combine) does to the values of up to kRanks ranks; kScaled: times a factor each.
template <typename T, typename Combine, int kRanks, bool kScaled = false>
class Combiner {
  using Acc = AccOf<T>;
  static constexpr bool kDivides = std::is_same_v<Combine, Sum> && !std::is_same_v<Acc, bool>;
  static constexpr bool kBitwise =
      std::is_same_v<Combine, Band> || std::is_same_v<Combine, Bor> || std::is_same_v<Combine, Bxor>;

 public:
  // `factors`: one per rank, read if kScaled.
  RINGCOMM_DEVICE Combiner(int world_size, ReduceOp op, [[maybe_unused]] const double* factors = nullptr)
      : world_size_(world_size), average_(op == ReduceOp::kAvg) {
    if constexpr (kScaled) {
      RINGCOMM_UNROLL for (int p = 0; p < kRanks; ++p) factor_[p] =
          p < world_size ? static_cast<Acc>(factors[p]) : Acc(1);
    }
  }

  // One element; value(p) is rank p's.
  template <typename Value>
  RINGCOMM_DEVICE T combine(const Value& value) const {
    return Element<T>::store(finish(tree<T>(value)));
  }
  // kWords words of elements; words(p) points to rank p's.
  template <int kWords, typename Words>
  RINGCOMM_DEVICE void combine_words(u32* result, const Words& words) const {
    if constexpr (kBitwise && std::is_integral_v<T>) {  // any width will do
      RINGCOMM_UNROLL for (int i = 0; i < kWords; ++i) result[i] = tree<u32>([&](int p) { return words(p)[i]; });
    } else {
      constexpr int kElements = kWords * 4 / static_cast<int>(sizeof(T));
      Acc acc[kElements];
      RINGCOMM_UNROLL for (int i = 0; i < kElements; ++i) acc[i] =
          tree<T>([&](int p) { return element<T>(words(p), i); });
      if constexpr (kDivides) {
        if (average_) {
          RINGCOMM_UNROLL for (int i = 0; i < kElements; ++i) acc[i] = divide(acc[i], world_size_);
        }
      }
      RINGCOMM_UNROLL for (int i = 0; i < kWords; ++i) result[i] = 0;
      RINGCOMM_UNROLL for (int i = 0; i < kElements; ++i) put_element<T>(result, i, Element<T>::store(acc[i]));
    }
  }

 private:
  template <typename Value>
  RINGCOMM_DEVICE Acc finish(Value value) const {
    if constexpr (kDivides)
      if (average_) return divide(value, world_size_);
    return value;
  }
  template <typename V, typename Value>
  RINGCOMM_DEVICE auto tree(const Value& value) const {
    using A = AccOf<V>;
    const auto leaf = [&](int p) -> A {
      if constexpr (kScaled)
        return Element<V>::load(value(p)) * factor_[p];
      else
        return Element<V>::load(value(p));
    };
    return tree_of_first<kRanks>(world_size_, 0, leaf, [](A a, A b) { return Combine::apply(a, b); });
  }

  const int world_size_;
  const bool average_;
  Acc factor_[kScaled ? kRanks : 1];
};

}  // namespace ringcomm::cuda
