// What the cuda engine expects of a call beyond what every engine does.
#pragma once

#include "core/engine.h"

namespace ringcomm::cuda {

// An algorithm that has a kernel for the call.
void check_algorithm(const Call& call, int rank);
// Lists whose own entry is as long as the single tensor.
void check_parts(const Call& call, int rank, int world_size);
// Any stream but the per-thread default one.
void check_stream(const char* call, std::uintptr_t stream, int rank);
// Memory that `device`, the current one, can reach by itself.
void check_memory(const Call& call, int device, int rank);
void check_memory(const Packing::Piece& piece, int device, int rank);
void check_memory(const Combining& combining, int device, int rank);

}  // namespace ringcomm::cuda
