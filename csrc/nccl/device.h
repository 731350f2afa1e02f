// The CUDA runtime as the wire uses it: events are used again, streams are its own.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cuda/runtime.h"

namespace ringcomm::nccl {

using cuda::check;
using cuda::process_is_ending;

// The calling thread works on `device` within a scope, and may allocate and query whatever other threads capture.
class OnDevice {
 public:
  OnDevice(int device, int rank) : device_(device, rank), relaxed_(rank) {}

 private:
  const cuda::DeviceGuard device_;
  const cuda::RelaxedCapture relaxed_;
};

bool is_capturing(cudaStream_t stream, int rank);

// A point in a stream.
using Event = std::shared_ptr<std::remove_pointer_t<cudaEvent_t>>;

// Events of one device, used again and again. Outlives the events that it gave.
class Events : public std::enable_shared_from_this<Events> {
 public:
  Events(int device, int rank) : device_(device), rank_(rank) {}
  ~Events();
  // The point where `stream` is now. The device is the current one.
  Event record(cudaStream_t stream);
  // What is enqueued on `stream` from now on comes after `event`, if there is one.
  void follow(cudaStream_t stream, const Event& event) const;
  // Whether the stream has come there.
  bool reached(const Event& event) const;

 private:
  const int device_, rank_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

// A stream that waits for no other unless it is told to.
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
