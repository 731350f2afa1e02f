#include "cuda/device/direct.h"

namespace ringcomm::cuda {

Kernel<CallArgs> direct_wide_float_kernel(DType dtype, ReduceOp op) {
  return direct_of_group<TypeGroup::kWideFloats>(dtype, op);
}

}  // namespace ringcomm::cuda
