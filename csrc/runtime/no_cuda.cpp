// Replaces the CUDA engine in builds without it. RINGCOMM_NO_CUDA is the reason; CMake defines it.
#include "core/engine.h"
#include "core/error.h"
#include "core/pool.h"

namespace ringcomm {

std::string why_no_cuda() {
  return concat("this build has no CUDA engine: ", RINGCOMM_NO_CUDA,
                "; build ringcomm from source where CUDA 12.1 or newer is installed");
}

std::string cuda_build() { return ""; }

std::unique_ptr<Engine> make_cuda_engine(int rank, int, const EngineOptions&) {
  fail(ErrorCode::kUnsupported, "Engine: rank ", rank, " asked for engine 'cuda', but ", why_no_cuda());
}

int open_pool(const std::shared_ptr<Engine>& engine, std::size_t, int) {
  fail(ErrorCode::kUnsupported, "mem_pool: rank ", engine->rank(), " expected memory of a GPU, but ", why_no_cuda());
}

void close_pool(int) {}

void give_back_pools() {}

}  // namespace ringcomm
