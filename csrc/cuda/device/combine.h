// Vector arithmetic: unpacks elements from 16 bytes, combines them over the ranks in canonical order in the accumulator
// type, and rounds the result once into 16 bytes again.
#pragma once

#include <type_traits>

#include "cuda/device/arithmetic.h"
#include "cuda/device/move.h"

namespace ringcomm::cuda {

template <typename T>
using AccOf = typename Element<T>::Acc;
template <typename T>
inline constexpr int kPerVec = static_cast<int>(sizeof(Vec) / sizeof(T));

// Reads element i of `words`; writes it into words that hold zeros. `i` is a compile-time constant once loops are
// unrolled.
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

// The 4 to 16 bytes that a thread loads or stores at once.
template <int kBytes>
struct Chunk {
  u32 word[kBytes < 4 ? 1 : kBytes / 4];
};
template <int kBytes>
RINGCOMM_DEVICE Chunk<kBytes> load_chunk(const char* from) {
  if constexpr (kBytes == 16) {
    const Vec v = load(reinterpret_cast<const Vec*>(from));
    return {{v.word[0], v.word[1], v.word[2], v.word[3]}};
  } else if constexpr (kBytes == 8) {
    Chunk<8> chunk;
    load_half(from, chunk.word[0], chunk.word[1]);
    return chunk;
  } else {
    static_assert(kBytes == 4, "no type is a quarter as wide as half a vector");
    return {{load_one(reinterpret_cast<const u32*>(from))}};
  }
}
template <int kBytes>
RINGCOMM_DEVICE void store_chunk(char* to, const Chunk<kBytes>& chunk) {
  if constexpr (kBytes == 16)
    store(reinterpret_cast<Vec*>(to), Vec{{chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]}});
  else if constexpr (kBytes == 8)
    store_half(to, chunk.word[0], chunk.word[1]);
  else
    store_one(reinterpret_cast<u32*>(to), chunk.word[0]);
}

// The canonical tree over the first `ranks` of N leaves, N a power of two. A node whose right side has no rank equals
// its left side, so one unrolled tree serves every number of ranks from kLeast on. Absent leaves may hold anything.
template <int N, int kLeast = 1, int kFirst = 0, typename Leaf, typename Combine>
RINGCOMM_HD constexpr auto tree_of_first(int ranks, const Leaf& leaf, const Combine& combine) {
  if constexpr (N == 1) {
    return leaf(kFirst);
  } else {
    constexpr int kRight = kFirst + N / 2;
    const auto left = tree_of_first<N / 2, kLeast, kFirst>(ranks, leaf, combine);
    const auto both = combine(left, tree_of_first<N / 2, kLeast, kRight>(ranks, leaf, combine));
    return kRight < kLeast || kRight < ranks ? both : left;
  }
}

// Ranks whose values a thread holds at once. More are combined in groups of as many.
inline constexpr int kGroupRanks = 8;

// The canonical tree over one to four groups, of which only the last may have less than kGroupRanks ranks. It consists
// of the trees of the groups, because it splits at powers of two. Each group is needed once, in order.
template <typename Value, typename Tree, typename Combine>
RINGCOMM_HD constexpr Value tree_of_groups(int groups, const Tree& tree, const Combine& combine) {
  Value sum{}, first_pair{};
  for (int g = 0; g < groups; ++g) {
    const Value group = tree(g);
    if (g == 2) first_pair = sum;
    sum = g % 2 ? combine(sum, group) : group;
  }
  return groups > 2 ? combine(first_pair, sum) : sum;
}

namespace proof {
// Values that distinguish every order and grouping of the leaves.
struct Leaf {  // of the ranks from `first` on; nvcc takes a lambda outside a kernel for one of the host
  int first = 0;
  RINGCOMM_HD constexpr u64 operator()(int rank) const { return first + rank + 2; }
};
RINGCOMM_HD constexpr u64 node(u64 left, u64 right) { return (left * 0x9e3779b97f4a7c15u + 1) ^ (right * 31 + 7); }
template <int kRanks>
constexpr bool same_tree() {
  const u64 want = tree_reduce<kRanks>(0, Leaf{}, node);
  const bool fits_4 = kRanks > 4 || tree_of_first<4>(kRanks, Leaf{}, node) == want;
  const bool fits_2 = kRanks > 2 || tree_of_first<2>(kRanks, Leaf{}, node) == want;
  const bool fits_least = tree_of_first<8, kRanks>(kRanks, Leaf{}, node) == want;
  return fits_2 && fits_4 && fits_least && tree_of_first<8>(kRanks, Leaf{}, node) == want;
}
static_assert(same_tree<1>() && same_tree<2>() && same_tree<3>() && same_tree<4>(), "not the canonical order");
static_assert(same_tree<5>() && same_tree<6>() && same_tree<7>() && same_tree<8>(), "not the canonical order");

template <int kRanks>
RINGCOMM_HD constexpr u64 tree_of_group(int group) {
  const int first = group * kGroupRanks, ranks = kRanks - first;
  return tree_of_first<kGroupRanks>(ranks < kGroupRanks ? ranks : kGroupRanks, Leaf{first}, node);
}
template <int kRanks>
constexpr bool same_tree_of_groups() {
  return tree_of_groups<u64>(static_cast<int>(ceil_div(kRanks, kGroupRanks)), tree_of_group<kRanks>, node) ==
         tree_reduce<kRanks>(0, Leaf{}, node);
}
static_assert(same_tree_of_groups<8>() && same_tree_of_groups<9>() && same_tree_of_groups<16>(), "not canonical");
static_assert(same_tree_of_groups<17>() && same_tree_of_groups<23>() && same_tree_of_groups<24>(), "not canonical");
static_assert(same_tree_of_groups<25>() && same_tree_of_groups<29>() && same_tree_of_groups<32>(), "not canonical");
}  // namespace proof

// Any combining step of T, chosen at run time: loops that are not worth a version for each step are compiled once.
template <typename T>
struct AnyStep {
  ReduceOp op;

  template <typename A>
  RINGCOMM_DEVICE A apply(A a, A b) const {
    A result = a;
#define X(e)                                 \
  if constexpr (kIsCompiled<T, ReduceOp::e>) \
    if (const A value = ReduceStep<ReduceOp::e>::apply(a, b); op == ReduceOp::e) result = value;
    RINGCOMM_FOR_EACH_STEP(X)
#undef X
    return result;
  }
};

// Only sums are averaged, and only sums of fractions scaled.
template <typename T, typename Combine>
inline constexpr bool kCanBeAveraged = std::is_same_v<Combine, Sum> || std::is_same_v<Combine, AnyStep<T>>;
template <typename T, typename Combine>
inline constexpr bool kCanBeScaled = kCanBeAveraged<T, Combine> && std::is_floating_point_v<AccOf<T>>;

// A step that works on bits only, so that elements of any width will do.
template <typename T, typename Combine>
inline constexpr bool kIsBitwise = false;
template <typename T, ReduceOp op>
inline constexpr bool kIsBitwise<T, ReduceStep<op>> = std::is_integral_v<T> && is_bitwise(op);

// Combines the values of kLeast to kRanks ranks, for the kernel of (T, Combine). kScaled: multiplies each by a factor.
template <typename T, typename Combine, int kRanks, int kLeast = 1, bool kScaled = false>
class Combiner {
  using Acc = AccOf<T>;
  static constexpr bool kDivides = kCanBeAveraged<T, Combine> && !std::is_same_v<Acc, bool>;
  static constexpr bool kBitwise = kIsBitwise<T, Combine>;

 public:
  // The partial results: accumulators of elements, or whole words where only their bits count.
  template <int kWords>
  struct Partials {
    static constexpr int kCount = kWords * 4 / static_cast<int>(kBitwise ? 4 : sizeof(T));
    std::conditional_t<kBitwise, u32, Acc> of[kCount];
  };

  // Sums are divided by `divisor`. `factors`: one per rank, read if kScaled.
  RINGCOMM_DEVICE Combiner(int ranks, int divisor, [[maybe_unused]] const double* factors = nullptr, Combine step = {})
      : step_(step), ranks_(ranks), divisor_(divisor) {
    if constexpr (kScaled) {
      RINGCOMM_UNROLL for (int p = 0; p < kRanks; ++p) factor_[p] = p < ranks ? static_cast<Acc>(factors[p]) : Acc(1);
    }
  }

  // kWords words of elements; words(p) points to those of rank p.
  template <int kWords, typename Words>
  RINGCOMM_DEVICE void combine_words(u32* result, const Words& words) const {
    store_words<kWords>(result, add_up<kWords>(words));
  }

  // The two halves of combine_words, between which groups of ranks are joined.
  template <int kWords, typename Words>
  RINGCOMM_DEVICE Partials<kWords> add_up(const Words& words) const {
    Partials<kWords> partials;
    RINGCOMM_UNROLL for (int i = 0; i < Partials<kWords>::kCount; ++i) {
      if constexpr (kBitwise)
        partials.of[i] = tree<u32>([&](int p) { return words(p)[i]; });
      else
        partials.of[i] = tree<T>([&](int p) { return element<T>(words(p), i); });
    }
    return partials;
  }
  template <int kWords>
  RINGCOMM_DEVICE Partials<kWords> join(Partials<kWords> left, const Partials<kWords>& right) const {
    RINGCOMM_UNROLL for (int i = 0; i < Partials<kWords>::kCount; ++i) left.of[i] =
        step_.apply(left.of[i], right.of[i]);
    return left;
  }
  template <int kWords>
  RINGCOMM_DEVICE void store_words(u32* result, Partials<kWords> partials) const {
    if constexpr (kBitwise) {
      RINGCOMM_UNROLL for (int i = 0; i < kWords; ++i) result[i] = partials.of[i];
    } else {
      constexpr int kCount = Partials<kWords>::kCount;
      if constexpr (kDivides) {
        if (divisor_ != 1) {
          RINGCOMM_UNROLL for (int i = 0; i < kCount; ++i) partials.of[i] = divide(partials.of[i], divisor_);
        }
      }
      RINGCOMM_UNROLL for (int i = 0; i < kWords; ++i) result[i] = 0;
      RINGCOMM_UNROLL for (int i = 0; i < kCount; ++i) put_element<T>(result, i, Element<T>::store(partials.of[i]));
    }
  }

 private:
  template <typename V, typename Value>
  RINGCOMM_DEVICE auto tree(const Value& value) const {
    using A = AccOf<V>;
    const auto leaf = [&](int p) -> A {
      if constexpr (kScaled)
        return Element<V>::load(value(p)) * factor_[p];
      else
        return Element<V>::load(value(p));
    };
    return tree_of_first<kRanks, kLeast>(ranks_, leaf, [&](A a, A b) { return step_.apply(a, b); });
  }

  const Combine step_;
  const int ranks_, divisor_;
  Acc factor_[kScaled ? kRanks : 1];
};

}  // namespace ringcomm::cuda
