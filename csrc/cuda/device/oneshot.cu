#include "cuda/device/oneshot.h"

namespace ringcomm::cuda {

namespace {

// Compiled only for small messages that programs wait for: sums of losses, gradients and counts, and maxima. A kernel
// for every pair would take as long to compile as those of direct, which serves the other pairs with the same bits.
template <typename T, typename Combine>
inline constexpr bool kPays =
    std::is_same_v<Combine, Sum>
        ? (std::is_integral_v<T> ? sizeof(T) >= 4 : std::is_floating_point_v<AccOf<T>> && sizeof(T) >= 2)
        : Combine::kOp == ReduceOp::kMax && (std::is_integral_v<T> ? sizeof(T) >= 4 : std::is_same_v<T, float>);

}  // namespace

Kernel<CallArgs> oneshot_kernel(DType dtype, ReduceOp op) {
  return kernel_of<CallArgs>(dtype, op, [](auto element, auto combine) -> Kernel<CallArgs> {
    using T = typename decltype(element)::Type;
    using Combine = decltype(combine);
    if constexpr (kPays<T, Combine>) return oneshot<T, Combine>;
    return nullptr;
  });
}

}  // namespace ringcomm::cuda
