// Replaces the CUDA engine and the NCCL wire in builds without them. RINGCOMM_NO_CUDA is the reason; CMake defines it.
#include "core/engine.h"
#include "core/error.h"
#include "core/pool.h"
#include "core/wire.h"

namespace ringcomm {

std::string why_no_cuda() {
  return concat("this build has no CUDA engine: ", RINGCOMM_NO_CUDA, "; install CUDA 12 or newer, then ringcomm again");
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

std::string why_no_nccl(const std::string&) { return concat("NCCL moves memory of GPUs, and ", why_no_cuda()); }

std::string nccl_version(const std::string& path) { fail(ErrorCode::kUnsupported, why_no_nccl(path)); }

std::string nccl_unique_id(const std::string& path) { fail(ErrorCode::kUnsupported, why_no_nccl(path)); }

std::unique_ptr<Wire> make_nccl_wire(const NcclOptions& options) {
  fail(ErrorCode::kUnsupported, why_no_nccl(options.path));
}

}  // namespace ringcomm
