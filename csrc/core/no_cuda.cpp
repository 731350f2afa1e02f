// In place of the CUDA engine, where it was not built. RINGCOMM_NO_CUDA says why; it comes from CMake.
#include "core/engine.h"
#include "core/error.h"

namespace ringcomm {

std::string why_no_cuda() {
  return concat("this build has no CUDA engine: ", RINGCOMM_NO_CUDA, "; install CUDA 12 or newer, then ringcomm again");
}

std::unique_ptr<Engine> make_cuda_engine(int rank, int, const EngineOptions&) {
  fail(ErrorCode::kUnsupported, "Engine: rank ", rank, " asked for engine 'cuda', but ", why_no_cuda());
}

}  // namespace ringcomm
