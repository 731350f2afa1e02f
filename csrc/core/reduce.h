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

struct Sum {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return wrapping_add(a, b);
  }
};
struct Prod {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return wrapping_mul(a, b);
  }
};
struct Min {  // NaN wins, as in torch
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};
struct Band {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct Bor {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct Bxor {
  template <typename A>
  RINGCOMM_HD static A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

// The combining step of each operator: avg and premul_sum are sums with an extra step at the end or the start.
#define RINGCOMM_FOR_EACH_COMBINE(X) \
  X(kSum, Sum)                       \
  X(kProd, Prod)                     \
  X(kMin, Min)                       \
  X(kMax, Max)                       \
  X(kBand, Band)                     \
  X(kBor, Bor)                       \
  X(kBxor, Bxor)

RINGCOMM_HD constexpr ReduceOp combine_of(ReduceOp op) {
  return op == ReduceOp::kAvg || op == ReduceOp::kPremulSum ? ReduceOp::kSum : op;
}

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
