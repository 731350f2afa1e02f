// What a stream does without a kernel: copies, which the GPU's copy engines make, and words in memory that it writes or
// waits for.
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

// In no order among themselves. `captured`: the stream is being captured.
void copy_pieces(const std::vector<Piece>& pieces, cudaStream_t stream, bool captured, int rank);

// What was enqueued before a write is done, for whoever sees the word. A wait ends once the word is `value` or up to
// 2^31 more. A stream waits for ever: see StreamWaits.
struct WordOp {
  std::uint32_t* word;
  std::uint32_t value;
  bool waits;
};

// In this order. cudaErrorNotSupported: the device or its driver has no such operations.
cudaError_t try_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream);
void enqueue_word_ops(const std::vector<WordOp>& ops, cudaStream_t stream, int rank);

}  // namespace ringcomm::cuda
