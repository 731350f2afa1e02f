#include "cuda/device/oneshot.h"

namespace ringcomm::cuda {

namespace {

// Compiled only for small messages that programs wait for: sums of losses, gradients and counts, and maxima. A kernel
// for every pair would take as long to compile as those of direct, which serves the other pairs with the same bits.
template <typename T, typename Combine>
inline constexpr bool kPays =
    std::is_same_v<Combine, Sum>
        ? (std::is_integral_v<T> ? sizeof(T) >= 4 : std::is_floating_point_v<AccOf<T>> && sizeof(T) >= 2)
        : std::is_same_v<Combine, Max> && (std::is_integral_v<T> ? sizeof(T) >= 4 : std::is_same_v<T, float>);

struct Pick {
  template <typename Tag, typename Combine>
  Kernel<CallArgs> operator()(Tag, Combine) const {
    if constexpr (kPays<typename Tag::type, Combine>) return oneshot<typename Tag::type, Combine>;
    return nullptr;
  }
};

}  // namespace

Kernel<CallArgs> oneshot_kernel(DType dtype, ReduceOp op) { return kernel_of<CallArgs>(dtype, op, Pick{}); }

}  // namespace ringcomm::cuda
