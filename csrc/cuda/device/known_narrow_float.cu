#include "cuda/device/known.h"

namespace ringcomm::cuda {

Kernel<KnownArgs> known_narrow_float_kernel(DType dtype, ReduceOp op) {
  return known_of_group<TypeGroup::kNarrowFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
