#include "cuda/device/direct.h"

namespace ringcomm::cuda {

Kernel<CallArgs> direct_integer_kernel(DType dtype, ReduceOp op) {
  return direct_of_group<TypeGroup::kIntegers>(dtype, op);
}

}  // namespace ringcomm::cuda
