// The combine kernel: two messages of one rank into one, elementwise. A block takes spans of 16-byte vectors, all loads
// of a thread before its first store; what is not on 16 bytes goes element by element.
#include "cuda/combine.h"

#include "cuda/arithmetic.h"
#include "cuda/kernels.h"

namespace ringcomm::cuda {

namespace {

template <typename T, typename Combine>
class TwoIntoOne {
  using Acc = AccOf<T>;
  static constexpr bool kDivides = std::is_same_v<Combine, Sum> && !std::is_same_v<Acc, bool>;
  static constexpr u32 kRounds = 4;  // batches of loads that a block takes before it looks for its next span
  struct Pair {
    Vec first, second;
  };
  struct Two {
    T first, second;
  };

 public:
  RINGCOMM_DEVICE explicit TwoIntoOne(const CombineArgs& args) : args_(args), average_(args.op == ReduceOp::kAvg) {}

  RINGCOMM_DEVICE void run() const {
    const bool wide = aligned(args_.first) && aligned(args_.second) && aligned(args_.output);
    const u64 vectors = wide ? args_.count / kPerVec<T> : 0;
    spans(vectors, [&](u64 at, u32 count) {
      in_flight<kInFlight>(
          threadIdx.x, blockDim.x, count,
          [&](u32 i) {
            return Pair{load(reinterpret_cast<const Vec*>(args_.first) + at + i),
                        load(reinterpret_cast<const Vec*>(args_.second) + at + i)};
          },
          [&](u32 i, const Pair& pair) { store(reinterpret_cast<Vec*>(args_.output) + at + i, combined(pair)); });
    });
    const u64 done = vectors * kPerVec<T>;
    const T* const first = reinterpret_cast<const T*>(args_.first) + done;
    const T* const second = reinterpret_cast<const T*>(args_.second) + done;
    T* const output = reinterpret_cast<T*>(args_.output) + done;
    spans(args_.count - done, [&](u64 at, u32 count) {
      in_flight<kInFlight>(
          threadIdx.x, blockDim.x, count,
          [&](u32 i) { return Two{load_one(first + at + i), load_one(second + at + i)}; },
          [&](u32 i, const Two& two) { store_one(output + at + i, combined(two.first, two.second)); });
    });
  }

 private:
  // each(first, count) for this block's share of [0, total).
  template <typename Each>
  RINGCOMM_DEVICE static void spans(u64 total, const Each& each) {
    const u64 span = static_cast<u64>(kRounds) * kInFlight * blockDim.x;
    for (u64 at = blockIdx.x * span; at < total; at += gridDim.x * span)
      each(at, static_cast<u32>(smaller(span, total - at)));
  }
  RINGCOMM_DEVICE T combined(T first, T second) const {
    Acc value = Combine::apply(Element<T>::load(first), Element<T>::load(second));
    if constexpr (kDivides)
      if (average_) value = divide(value, args_.divisor);
    return Element<T>::store(value);
  }
  RINGCOMM_DEVICE Vec combined(const Pair& pair) const {
    Vec result{};
    RINGCOMM_UNROLL for (int i = 0; i < kPerVec<T>; ++i)
        put_element<T>(result.word, i, combined(element<T>(pair.first.word, i), element<T>(pair.second.word, i)));
    return result;
  }

  const CombineArgs& args_;
  const bool average_;
};

template <typename T, typename Combine>
RINGCOMM_KERNEL(kMostThreads)
combine(const __grid_constant__ CombineArgs args) {
  TwoIntoOne<T, Combine>(args).run();
}

struct Pick {
  template <typename Tag, typename Combine>
  Kernel<CombineArgs> operator()(Tag, Combine) const {
    return combine<typename Tag::type, Combine>;
  }
};

}  // namespace

Kernel<CombineArgs> combine_kernel(DType dtype, ReduceOp op) { return kernel_of<CombineArgs>(dtype, op, Pick{}); }

}  // namespace ringcomm::cuda
