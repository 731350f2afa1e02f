#include "cuda/device/known.h"

namespace ringcomm::cuda {

Kernel<KnownArgs> known_wide_float_kernel(DType dtype, ReduceOp op) {
  return known_of_group<TypeGroup::kWideFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
