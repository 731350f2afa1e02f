// The checks of a call that only the cuda engine needs, beside those of every engine.
#pragma once

#include "core/engine.h"

namespace ringcomm::cuda {

// The algorithm must serve this call.
void check_algorithm(const Call& call, int rank, int world_size);
// In lists, the rank's own entry must be as long as the single tensor.
void check_parts(const Call& call, int rank, int world_size);
// Every stream is accepted but the per-thread default one.
void check_stream(const char* call, std::uintptr_t stream, int rank);
// `device`, the current one, must be able to access the memory directly.
void check_memory(const Call& call, int device, int rank);
void check_memory(const PackCall& packing, int device, int rank);
void check_memory(const CombineCall& combining, int device, int rank);

}  // namespace ringcomm::cuda
