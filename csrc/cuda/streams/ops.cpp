#include "cuda/streams/ops.h"

#if !defined(RINGCOMM_EMULATE)
#include <cuda.h>
#endif

#include <algorithm>

#include "cuda/runtime.h"
#include "cuda/streams/events.h"

namespace ringcomm::cuda {

namespace {

// A batch lets copies to several peers run side by side, and asks the driver to leave the multiprocessors alone. The
// legacy stream and captures cannot have batches.
cudaError_t copy_batch([[maybe_unused]] const std::vector<Piece>& pieces, [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<std::size_t> nbytes;
  for (const Piece& piece : pieces) {
    targets.push_back(piece.target);
    sources.push_back(piece.source);
    nbytes.push_back(piece.nbytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(targets.data(), sources.data(), nbytes.data(), pieces.size(), &attributes, &first, 1,
                              stream);
#else
  std::size_t failed = 0;
  return cudaMemcpyBatchAsync(targets.data(), const_cast<void**>(sources.data()), nbytes.data(), pieces.size(),
                              &attributes, &first, 1, &failed, stream);
#endif
#else
  return cudaErrorNotSupported;
#endif
}

// A driver that is older than the runtime has no batches.
bool lacks_batches(cudaError_t status) {
  constexpr auto kCallRequiresNewerDriver = static_cast<cudaError_t>(36);
  return status == cudaErrorNotSupported || status == cudaErrorSymbolNotFound || status == kCallRequiresNewerDriver;
}

}  // namespace

void copy_pieces(const std::vector<Piece>& pieces, cudaStream_t stream, bool captured, int rank) {
  if (pieces.empty()) return;
  if (!is_default(stream) && !captured) {
    const cudaError_t status = copy_batch(pieces, stream);
    if (!lacks_batches(status)) return check(status, "cudaMemcpyBatchAsync of a call's parts", rank);
    cudaGetLastError();
  }
  for (const Piece& piece : pieces)
    check(cudaMemcpyAsync(piece.target, piece.source, piece.nbytes, cudaMemcpyDefault, stream),
          "cudaMemcpyAsync of a call's part", rank);
}

cudaError_t try_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream) {
#if defined(RINGCOMM_EMULATE)
  const auto function = &cuStreamBatchMemOp;
#else
  static const auto function = reinterpret_cast<decltype(&cuStreamBatchMemOp)>(driver_function("cuStreamBatchMemOp"));
  if (!function) return cudaErrorNotSupported;
#endif
  constexpr std::size_t kMost = 128;  // the driver takes up to 255 at a time
  for (std::size_t at = 0; at < ops.size(); at += kMost) {
    std::vector<CUstreamBatchMemOpParams> some(std::min(kMost, ops.size() - at));
    for (std::size_t i = 0; i < some.size(); ++i) {
      const WordOp& op = ops[at + i];
      some[i] = {};
      if (op.waits) {
        some[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        some[i].waitValue.address = reinterpret_cast<CUdeviceptr>(op.word);
        some[i].waitValue.value = op.value;
        some[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      } else {
        some[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        some[i].writeValue.address = reinterpret_cast<CUdeviceptr>(op.word);
        some[i].writeValue.value = op.value;
        some[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      }
    }
    // The driver's errors are those of the runtime under other names.
    const auto status = static_cast<cudaError_t>(function(stream, static_cast<unsigned>(some.size()), some.data(), 0));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

void enqueue_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream, int rank) {
  if (!ops.empty()) check(try_word_ops(ops, stream), "cuStreamBatchMemOp on the call's stream", rank);
}

}  // namespace ringcomm::cuda
