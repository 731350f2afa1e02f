#include "cuda/device/known.h"

namespace ringcomm::cuda {

Kernel<KnownArgs> known_integer_kernel(DType dtype, ReduceOp op) {
  return known_of_group<TypeGroup::kIntegers>(dtype, op);
}

}  // namespace ringcomm::cuda
