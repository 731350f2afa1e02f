// The loops over memory: reduce many sources into one or more outputs, and copy, vectorised for the processor at hand.
#pragma once

#include <cstddef>
#include <vector>

#include "core/types.h"

namespace ringcomm::cpu {

struct ReduceArgs {
  DType dtype;
  ReduceOp op;
  const void* const* sources;  // `ranks` of them, in rank order
  int ranks;
  const double* factors;  // premul_sum: one per source; else null
  int divisor;            // avg: what the sum is divided by
  void* const* outputs;   // `num_outputs` copies of the result; the first may be one of the sources
  int num_outputs;
  std::size_t count;
  bool streaming;  // write past the caches
};

struct Kernels {
  const char* isa;
  // Canonical order: the balanced tree over the sources.
  void (*reduce)(const ReduceArgs& args);
  void (*copy)(void* dst, const void* src, std::size_t nbytes, bool streaming);
};

// The best ones this processor runs; RINGCOMM_ISA=baseline|avx2|avx512 in the environment asks for lesser ones.
const Kernels& kernels();
// All that this build has and this processor runs, best first. They give the same bits.
std::vector<const Kernels*> usable_kernels();

}  // namespace ringcomm::cpu
