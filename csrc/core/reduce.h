// The arithmetic of a reduction, shared by all engines: reading an element, combining two values, finishing a result.
// It is never compiled with fast-math or contraction, so that a CPU and a GPU give the same bits (a NaN stays a NaN;
// its payload is not guaranteed).
#pragma once

#include <type_traits>

#include "core/schedule.h"
#include "core/types.h"

namespace ringcomm {

// Wrapping integer arithmetic without undefined behaviour.
template <typename A>
RINGCOMM_HD A wrapping_add(A a, A b) {
  if constexpr (std::is_same_v<A, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}
template <typename A>
RINGCOMM_HD A wrapping_mul(A a, A b) {
  if constexpr (std::is_same_v<A, bool>) {
    return a && b;
  } else if constexpr (std::is_integral_v<A>) {
    using U = std::conditional_t<(sizeof(A) < sizeof(unsigned)), unsigned, std::make_unsigned_t<A>>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) * static_cast<U>(b)));
  } else {
    return a * b;
  }
}

// The combining step of an operator; avg and premul_sum are sums with an extra step at the end or the start.
template <ReduceOp op>
struct ReduceStep {
  static constexpr ReduceOp kOp = op;

  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    if constexpr (op == ReduceOp::kSum) {
      return wrapping_add(a, b);
    } else if constexpr (op == ReduceOp::kProd) {
      return wrapping_mul(a, b);
    } else if constexpr (op == ReduceOp::kMin) {
      return (a < b || a != a) ? a : b;  // NaN wins, as in torch
    } else if constexpr (op == ReduceOp::kMax) {
      return (a > b || a != a) ? a : b;
    } else if constexpr (op == ReduceOp::kBand) {
      return static_cast<A>(a & b);
    } else if constexpr (op == ReduceOp::kBor) {
      return static_cast<A>(a | b);
    } else {
      static_assert(op == ReduceOp::kBxor, "the operator has no step of its own");
      return static_cast<A>(a ^ b);
    }
  }
};
using Sum = ReduceStep<ReduceOp::kSum>;

// The operators that have a step of their own.
#define RINGCOMM_FOR_EACH_STEP(X) X(kSum) X(kProd) X(kMin) X(kMax) X(kBand) X(kBor) X(kBxor)

RINGCOMM_HD constexpr ReduceOp combine_of(ReduceOp op) {
  return op == ReduceOp::kAvg || op == ReduceOp::kPremulSum ? ReduceOp::kSum : op;
}

#define X(e) || op == ReduceOp::e
RINGCOMM_HD constexpr bool has_own_step(ReduceOp op) { return false RINGCOMM_FOR_EACH_STEP(X); }
#undef X
#define X(e, text)                                     \
  static_assert(has_own_step(combine_of(ReduceOp::e)), \
                text " needs a step: a name in RINGCOMM_FOR_EACH_STEP, or another operator's in combine_of");
RINGCOMM_FOR_EACH_REDUCE_OP(X)
#undef X

// avg divides once, after the sum; integers truncate.
template <typename A>
RINGCOMM_HD A divide(A sum, int world_size) {
  if constexpr (std::is_same_v<A, bool>) {
    return sum;
  } else if constexpr (std::is_integral_v<A>) {
    using Wide = std::conditional_t<(sizeof(A) < sizeof(std::int64_t)), std::int32_t, std::int64_t>;
    return static_cast<A>(static_cast<Wide>(sum) / world_size);
  } else {
    return sum / static_cast<A>(world_size);
  }
}
// premul_sum multiplies each rank's values by that rank's factor, in the accumulator type.
template <typename A>
RINGCOMM_HD A scale(A value, double factor) {
  if constexpr (std::is_same_v<A, bool>) {
    return value;
  } else {
    return wrapping_mul(value, static_cast<A>(factor));
  }
}

}  // namespace ringcomm
