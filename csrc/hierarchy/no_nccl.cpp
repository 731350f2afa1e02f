// Replaces the NCCL transport in builds without the CUDA engine.
#include "core/engine.h"
#include "core/error.h"
#include "hierarchy/transport.h"

namespace ringcomm {

std::string why_no_nccl(const std::string&) { return concat("NCCL moves memory of GPUs, and ", why_no_cuda()); }

std::string nccl_version(const std::string& path) { fail(ErrorCode::kUnsupported, why_no_nccl(path)); }

std::string nccl_unique_id(const std::string& path) { fail(ErrorCode::kUnsupported, why_no_nccl(path)); }

std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options) {
  fail(ErrorCode::kUnsupported, why_no_nccl(options.path));
}

}  // namespace ringcomm
