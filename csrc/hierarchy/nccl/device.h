// The parts of the CUDA runtime that the transport uses.
#pragma once

#include <cuda_runtime.h>

#include "cuda/runtime.h"
#include "cuda/streams/events.h"

namespace ringcomm::nccl {

using cuda::check;
using cuda::DeviceScope;
using cuda::process_is_ending;
using cuda::StreamEventPtr;
using cuda::StreamEvents;

struct Place {
  int device, rank, world_size;
};

// Whether the device has reached the event. Callable from any thread.
bool reached(const Place& place, const StreamEventPtr& event);

// A stream that does not wait for other streams implicitly.
class Stream {
 public:
  Stream(int device, int rank);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  const int device_, rank_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace ringcomm::nccl
