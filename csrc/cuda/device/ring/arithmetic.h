// The arithmetic of one hop of the ring, for every compiled pair of element type and combining step. It works in the
// wire type, so every hop rounds. premul_sum scales and rounds a rank's own values before they enter the ring; avg
// divides once, in the last combine.
#pragma once

#include "cuda/device/arithmetic.h"
#include "cuda/device/combine.h"

namespace ringcomm::cuda {

// Run by the first `threads` threads of a block. combine: `to`, and `and_to` if it is not null, <- partial (+) own,
// `count` elements. enter: `to` <- own.
struct RingRun {
  u32 threads;
  const char* partial;
  const char* own;
  char* to;
  char* and_to;
  u32 count;
  int divisor;
  double factor;
};

// f(a, b), or f of each pair of elements in two vectors.
template <typename T, typename Unit, typename F>
RINGCOMM_DEVICE Unit each_lane(const Unit& a, const Unit& b, const F& f) {
  if constexpr (std::is_same_v<Unit, T>) {
    return f(a, b);
  } else {
    Vec result = {};
    RINGCOMM_UNROLL for (int i = 0; i < kPerVec<T>; ++i)
        put_element(result.word, i, f(element<T>(a.word, i), element<T>(b.word, i)));
    return result;
  }
}
// A rank's own value on its way into the ring.
template <typename T>
RINGCOMM_DEVICE T enter_one(T own, double factor) {
  return Element<T>::store(scale(Element<T>::load(own), factor));
}

template <typename Unit>
struct Pair {
  Unit partial, own;
};

// Narrow types need many registers on the way through their accumulators.
template <typename T>
inline constexpr int kRingInFlight = sizeof(T) == 1   ? 1
                                     : sizeof(T) >= 4 ? kInFlight
                                                      : kInFlight / 2;

template <typename T, typename Unit>
RINGCOMM_DEVICE void enter_units(const RingRun& run, u32 first, u32 count) {
  const auto step = [&](T own, T) { return enter_one(own, run.factor); };
  in_flight<kRingInFlight<T>>(
      threadIdx.x, run.threads, count, [&](u32 i) { return get<Unit>(run.own, first + i); },
      [&](u32 i, const Unit& value) { put(run.to, first + i, each_lane<T>(value, value, step)); });
}
template <typename T, typename Unit, int kDepth, typename Step>
RINGCOMM_DEVICE void combine_units(const Step& step, const RingRun& run, u32 first, u32 count) {
  in_flight<kDepth>(
      threadIdx.x, run.threads, count,
      [&](u32 i) { return Pair<Unit>{get<Unit>(run.partial, first + i), get<Unit>(run.own, first + i)}; },
      [&](u32 i, const Pair<Unit>& v) {
        const Unit result = each_lane<T>(v.partial, v.own, step);
        put(run.to, first + i, result);
        if (run.and_to) put(run.and_to, first + i, result);
      });
}

// Moves vectors if all ends are aligned to 16 bytes; all else goes element by element. The parameters are plain, so
// that they stay in registers. Each function is compiled once, and the ring loops around them once for all pairs.
template <typename T>
RINGCOMM_DEVICE_CALL void enter_run(u32 threads, const char* own, char* to, u32 count, double factor) {
  const RingRun run{threads, nullptr, own, to, nullptr, count, 1, factor};
  const u64 bits = reinterpret_cast<u64>(own) | reinterpret_cast<u64>(to);
  const u32 vectors = bits % 16 == 0 ? count / kPerVec<T> : 0, done = vectors * kPerVec<T>;
  enter_units<T, Vec>(run, 0, vectors);
  enter_units<T, T>(run, done, count - done);
}
template <typename T>
inline constexpr bool kCanScale = kIsCompiled<T, ReduceOp::kSum> && std::is_floating_point_v<typename Element<T>::Acc>;

// Plain sums of aligned runs have a loop of their own. All the rest shares one, in which a factor or divisor of 1
// changes no bit.
template <typename T>
RINGCOMM_DEVICE void combine_run(const RingRun& run, ReduceOp op, double factor, int divisor) {
  const auto any = [=](T partial, T own) {
    if constexpr (kCanScale<T>) own = enter_one(own, factor);
    auto value = AnyStep<T>{op}.apply(Element<T>::load(partial), Element<T>::load(own));
    if (divisor != 1) value = divide(value, divisor);
    return Element<T>::store(value);
  };
  const u64 bits = reinterpret_cast<u64>(run.partial) | reinterpret_cast<u64>(run.own) | reinterpret_cast<u64>(run.to) |
                   reinterpret_cast<u64>(run.and_to);
  const u32 vectors = bits % 16 == 0 ? run.count / kPerVec<T> : 0, done = vectors * kPerVec<T>;
  constexpr int kDepth = static_cast<int>(larger(1, kRingInFlight<T> / 2));  // it takes more registers
  bool usual = false;
  if constexpr (kIsCompiled<T, ReduceOp::kSum>) {
    const auto sum = [](T partial, T own) {
      return Element<T>::store(Sum::apply(Element<T>::load(partial), Element<T>::load(own)));
    };
    usual = op == ReduceOp::kSum && factor == 1 && divisor == 1;
    if (usual) combine_units<T, Vec, kRingInFlight<T>>(sum, run, 0, vectors);
  }
  if (!usual) combine_units<T, Vec, kDepth>(any, run, 0, vectors);
  combine_units<T, T, kDepth>(any, run, done, run.count - done);
}

// The elements of the ring, as values that are reduced.
template <typename T>
class RingArithmetic {
 public:
  static constexpr bool kReduces = true;
  RINGCOMM_DEVICE explicit RingArithmetic(const CallArgs& args) : args_(args) {}

  RINGCOMM_DEVICE static constexpr u32 element() { return sizeof(T); }
  RINGCOMM_DEVICE bool scales() const { return kCanScale<T> && args_.reduce_op == ReduceOp::kPremulSum; }

  RINGCOMM_DEVICE void enter(const RingRun& run) const {
    if constexpr (kCanScale<T>)
      if (scales()) return enter_run<T>(run.threads, run.own, run.to, run.count, run.factor);
    copy_to_both(run.threads, run.own, run.count * sizeof(T), run.to, nullptr);
  }
  RINGCOMM_DEVICE void combine(const RingRun& run, bool final) const {
    const bool divides = final && args_.reduce_op == ReduceOp::kAvg;
    combine_run<T>(run, arithmetic_for(args_.dtype, args_.reduce_op).op, scales() ? run.factor : 1,
                   divides ? run.divisor : 1);
  }

 private:
  const CallArgs& args_;
};

// The same for bytes that are only copied.
class ByteArithmetic {
 public:
  static constexpr bool kReduces = false;
  RINGCOMM_DEVICE explicit ByteArithmetic(const CallArgs&) {}
  RINGCOMM_DEVICE u32 element() const { return 1; }
  RINGCOMM_DEVICE bool scales() const { return false; }
  RINGCOMM_DEVICE void enter(const RingRun& run) const {
    copy_to_both(run.threads, run.own, run.count, run.to, nullptr);
  }
  RINGCOMM_DEVICE void combine(const RingRun&, bool) const {}
};

}  // namespace ringcomm::cuda
