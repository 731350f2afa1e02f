// The loops over memory: reducing several sources into one or more outputs, and copying, vectorised for this processor.
#pragma once

#include <cstddef>
#include <vector>

#include "core/norm.h"
#include "core/types.h"

namespace ringcomm::cpu {

struct ReduceArgs {
  DType dtype;
  ReduceOp op;
  const void* const* sources;  // `ranks` of them, in rank order
  int ranks;
  const double* factors;  // premul_sum: one per source; else null
  int divisor;            // avg: the divisor of the sum
  void* const* outputs;   // `num_outputs` copies of the result; the first may be one of the sources
  int num_outputs;
  std::size_t count;
  bool streaming;  // use streaming stores, which bypass the caches
};

struct Kernels {
  const char* isa;
  // In canonical order: the balanced tree over the sources.
  void (*reduce)(const ReduceArgs& args);
  void (*copy)(void* dst, const void* src, std::size_t nbytes, bool streaming);
  // See core/norm.h; `fold` adds to kFoldLimbs limbs.
  double (*abs_max)(const void* data, std::size_t count, DType dtype);
  void (*fold)(const void* data, std::size_t count, DType dtype, int exponent, std::int64_t* limbs);
};

// The best kernels for this processor; RINGCOMM_ISA=baseline|avx2|avx512 in the environment selects others.
const Kernels& kernels();
// All kernels that this build has and this processor can run, best first. They give the same bits.
std::vector<const Kernels*> usable_kernels();

}  // namespace ringcomm::cpu
