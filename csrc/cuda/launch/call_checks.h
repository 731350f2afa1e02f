// The checks of a call that only the cuda engine needs, beside those of every engine.
#pragma once

#include "core/engine.h"

namespace ringcomm::cuda {

// Throws unless the algorithm can serve this call.
void check_algorithm(const Call& call, int rank, int world_size);
// Throws unless, in lists, the rank's own entry is as long as the single tensor.
void check_parts(const Call& call, int rank, int world_size);
// Throws for the per-thread default stream; every other stream is accepted.
void check_stream(const char* call, std::uintptr_t stream, int rank);
// Each throws unless `device`, the current one, can access the memory directly.
void check_memory(const Call& call, int device, int rank);
void check_memory(const PackCall& packing, int device, int rank);
void check_memory(const CombineCall& combining, int device, int rank);

}  // namespace ringcomm::cuda
