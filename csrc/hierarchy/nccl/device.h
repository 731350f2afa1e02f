// The parts of the CUDA runtime that the transport uses: events are reused, streams are its own.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cuda/runtime.h"

namespace ringcomm::nccl {

using cuda::check;
using cuda::DeviceScope;
using cuda::process_is_ending;

bool is_capturing(cudaStream_t stream, int rank);

// A point in a stream.
using Event = std::shared_ptr<std::remove_pointer_t<cudaEvent_t>>;

// A pool of events of one device. It outlives the events that it has handed out.
class Events : public std::enable_shared_from_this<Events> {
 public:
  Events(int device, int rank) : device_(device), rank_(rank) {}
  ~Events();
  // Records the present point of `stream`. The device must be the current one.
  Event record(cudaStream_t stream);
  // Makes work enqueued on `stream` from now on wait for `event`, if it is not null.
  void follow(cudaStream_t stream, const Event& event) const;
  // Whether the stream has reached the event.
  bool reached(const Event& event) const;

 private:
  const int device_, rank_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

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
