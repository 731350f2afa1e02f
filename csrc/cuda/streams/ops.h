// Stream operations without a kernel: copies, which are meant for the GPU's copy engines, and words in memory that a
// stream writes or waits for.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringcomm::cuda {

struct Piece {
  void* target;
  const void* source;
  std::size_t nbytes;
};

// The copies have no order among themselves. `captured`: the stream is being captured.
void copy_pieces(const std::vector<Piece>& pieces, cudaStream_t stream, bool captured, int rank);

// A reader that sees a written word also sees the work that was enqueued before the write. A wait ends once the word is
// `value` or up to 2^31 more. A wait has no time limit: see StreamWaits.
struct WordOp {
  std::uint32_t* word;
  std::uint32_t value;
  bool waits;
};

// Enqueues the operations in this order. Returns cudaErrorNotSupported if the device or its driver lacks them.
cudaError_t try_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream);
void enqueue_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream, int rank);

}  // namespace ringcomm::cuda
