// The loops of core/norm.h, vectorised for this processor.
#pragma once

#include "core/norm.h"

namespace ringcomm::cpu {

struct NormKernels {
  const char* isa;
  double (*abs_max)(const Span& span, DType dtype);
  void (*fold)(const Span& span, DType dtype, int exponent, FoldSums& sums);
};

// The kernels for the instruction set that `kernels()` has chosen.
const NormKernels& norm_kernels();

}  // namespace ringcomm::cpu
