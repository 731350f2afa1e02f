// The arithmetic of one hop of the ring, for every compiled pair of element type and combining step. It works in the
// wire type, so every hop rounds. premul_sum scales and rounds a rank's own values before they enter the ring; avg
// divides once, in the last combine.
#pragma once

#include "cuda/arithmetic.h"
#include "cuda/combine.h"

namespace ringcomm::cuda {

enum class Ends { kPlain, kScaled, kDivided };

// Run by the first `threads` threads of a block. combine: `to`, and `and_to` if it is not null, <- partial (+) own,
// `count` elements. enter: `to` <- own.
struct HopRun {
  u32 threads;
  const char* partial;
  const char* own;
  char* to;
  char* and_to;
  u32 count;
  int divisor;
  double factor;
};

template <typename T, typename Combine, Ends kEnds>
struct Hop {
  using Acc = typename Element<T>::Acc;
  double factor;
  int divisor;

  RINGCOMM_DEVICE T enter(T own) const {
    if constexpr (kEnds == Ends::kScaled) return Element<T>::store(scale(Element<T>::load(own), factor));
    return own;
  }
  RINGCOMM_DEVICE T combine(T partial, T own) const {
    Acc value = Combine::apply(Element<T>::load(partial), Element<T>::load(enter(own)));
    if constexpr (kEnds == Ends::kDivided) value = divide(value, divisor);
    return Element<T>::store(value);
  }
  RINGCOMM_DEVICE Vec enter(const Vec& own) const {
    return each_lane(own, own, [&](T x, T) { return enter(x); });
  }
  RINGCOMM_DEVICE Vec combine(const Vec& partial, const Vec& own) const {
    return each_lane(partial, own, [&](T x, T y) { return combine(x, y); });
  }

 private:
  template <typename F>
  RINGCOMM_DEVICE static Vec each_lane(const Vec& a, const Vec& b, const F& f) {
    Vec result = {};
    RINGCOMM_UNROLL for (int i = 0; i < kPerVec<T>; ++i)
        put_element(result.word, i, f(element<T>(a.word, i), element<T>(b.word, i)));
    return result;
  }
};

template <typename Unit>
struct Pair {
  Unit partial, own;
};

// Narrow types need many registers on the way through their accumulators, and so does a division.
template <typename T, Ends kEnds>
inline constexpr int kHopDepth = kEnds == Ends::kDivided || sizeof(T) == 1 ? 1
                                 : sizeof(T) >= 4                          ? kInFlight
                                                                           : kInFlight / 2;

template <typename Unit, typename T, typename Combine, Ends kEnds>
RINGCOMM_DEVICE void enter_units(const Hop<T, Combine, kEnds>& hop, const HopRun& run, u32 first, u32 count) {
  in_flight<kHopDepth<T, kEnds>>(
      threadIdx.x, run.threads, count, [&](u32 i) { return get<Unit>(run.own, first + i); },
      [&](u32 i, const Unit& value) { put(run.to, first + i, hop.enter(value)); });
}
template <typename Unit, int kDepth, typename AHop>
RINGCOMM_DEVICE void combine_units(const AHop& hop, const HopRun& run, u32 first, u32 count) {
  in_flight<kDepth>(
      threadIdx.x, run.threads, count,
      [&](u32 i) { return Pair<Unit>{get<Unit>(run.partial, first + i), get<Unit>(run.own, first + i)}; },
      [&](u32 i, const Pair<Unit>& v) {
        const Unit result = hop.combine(v.partial, v.own);
        put(run.to, first + i, result);
        if (run.and_to) put(run.and_to, first + i, result);
      });
}

// Moves vectors if all ends are aligned to 16 bytes; all else goes element by element. The parameters are plain, so
// that they stay in registers. Each function is compiled once, and the ring loops around them once for all pairs.
template <typename T, typename Combine>
RINGCOMM_DEVICE_CALL void enter_run(u32 threads, const char* own, char* to, u32 count, double factor) {
  const HopRun run{threads, nullptr, own, to, nullptr, count, 1, factor};
  const Hop<T, Combine, Ends::kScaled> hop{factor, 1};
  const u64 bits = reinterpret_cast<u64>(own) | reinterpret_cast<u64>(to);
  const u32 vectors = bits % 16 == 0 ? count / kPerVec<T> : 0, done = vectors * kPerVec<T>;
  enter_units<Vec>(hop, run, 0, vectors);
  enter_units<T>(hop, run, done, count - done);
}
template <typename T>
inline constexpr bool kCanScale = kIsCompiled<T, ReduceOp::kSum> && std::is_floating_point_v<typename Element<T>::Acc>;

// Single elements, with any step and ends: compiled once for all of them. A factor or divisor of 1 changes no bit.
template <typename T>
struct AnyHop {
  AnyStep<T> step;
  double factor;
  int divisor;

  RINGCOMM_DEVICE T combine(T partial, T own) const {
    if constexpr (kCanScale<T>) own = Hop<T, Sum, Ends::kScaled>{factor, 1}.enter(own);
    auto value = step.apply(Element<T>::load(partial), Element<T>::load(own));
    if (divisor != 1) value = divide(value, divisor);
    return Element<T>::store(value);
  }
};
template <typename T, typename Combine, Ends kEnds>
RINGCOMM_DEVICE void combine_vectors(const HopRun& run, u32 vectors) {
  combine_units<Vec, kHopDepth<T, kEnds>>(Hop<T, Combine, kEnds>{run.factor, run.divisor}, run, 0, vectors);
}

// Any combining step of a type: the ring loops around the steps are compiled once for all of them.
template <typename T>
RINGCOMM_DEVICE void combine_any(const HopRun& run, ReduceOp step, Ends ends) {
  const u64 bits = reinterpret_cast<u64>(run.partial) | reinterpret_cast<u64>(run.own) | reinterpret_cast<u64>(run.to) |
                   reinterpret_cast<u64>(run.and_to);
  const u32 vectors = bits % 16 == 0 ? run.count / kPerVec<T> : 0, done = vectors * kPerVec<T>;
  if constexpr (kIsCompiled<T, ReduceOp::kSum>)
    if (ends == Ends::kDivided) combine_vectors<T, Sum, Ends::kDivided>(run, vectors);
  if constexpr (kCanScale<T>)
    if (ends == Ends::kScaled) combine_vectors<T, Sum, Ends::kScaled>(run, vectors);
#define X(e, Combine)                        \
  if constexpr (kIsCompiled<T, ReduceOp::e>) \
    if (ends == Ends::kPlain && step == ReduceOp::e) combine_vectors<T, Combine, Ends::kPlain>(run, vectors);
  RINGCOMM_FOR_EACH_COMBINE(X)
#undef X
  const AnyHop<T> hop{{step}, ends == Ends::kScaled ? run.factor : 1, ends == Ends::kDivided ? run.divisor : 1};
  // Any step takes more registers than one.
  constexpr int kDepth = std::is_floating_point_v<T> ? kInFlight / 2 : kHopDepth<T, Ends::kPlain>;
  combine_units<T, kDepth>(hop, run, done, run.count - done);
}

// What the ring needs to know of its elements.
template <typename T>
class HopArithmetic {
 public:
  static constexpr bool kReduces = true;
  RINGCOMM_DEVICE explicit HopArithmetic(const CallArgs& args) : args_(args) {}

  RINGCOMM_DEVICE static constexpr u32 element() { return sizeof(T); }
  RINGCOMM_DEVICE bool scales() const { return kCanScale<T> && args_.reduce_op == ReduceOp::kPremulSum; }

  RINGCOMM_DEVICE void enter(const HopRun& run) const {
    if constexpr (kCanScale<T>)
      if (scales()) return enter_run<T, Sum>(run.threads, run.own, run.to, run.count, run.factor);
    copy_to_both(run.threads, run.own, run.count * sizeof(T), run.to, nullptr);
  }
  RINGCOMM_DEVICE void combine(const HopRun& run, bool final) const {
    const bool divides = final && args_.reduce_op == ReduceOp::kAvg;
    combine_any<T>(run, arithmetic_for(args_.dtype, args_.reduce_op).op,
                   divides    ? Ends::kDivided
                   : scales() ? Ends::kScaled
                              : Ends::kPlain);
  }

 private:
  const CallArgs& args_;
};

// Used instead where bytes are only copied.
class JustBytes {
 public:
  static constexpr bool kReduces = false;
  RINGCOMM_DEVICE explicit JustBytes(const CallArgs&) {}
  RINGCOMM_DEVICE u32 element() const { return 1; }
  RINGCOMM_DEVICE bool scales() const { return false; }
  RINGCOMM_DEVICE void enter(const HopRun& run) const {
    copy_to_both(run.threads, run.own, run.count, run.to, nullptr);
  }
  RINGCOMM_DEVICE void combine(const HopRun&, bool) const {}
};

}  // namespace ringcomm::cuda
