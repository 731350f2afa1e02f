#include "cuda/device/direct/known.h"

namespace ringcomm::cuda {

template Kernel<KnownArgs> known_of_group<TypeGroup::kNarrowFloats>(DType dtype, ReduceOp op);

}  // namespace ringcomm::cuda
