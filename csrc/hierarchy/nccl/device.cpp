#include "hierarchy/nccl/device.h"

#include "core/error.h"

namespace ringcomm::nccl {

bool is_capturing(cudaStream_t stream, int rank) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing of the call's stream", rank);
  return status != cudaStreamCaptureStatusNone;
}

Events::~Events() {
  if (process_is_ending()) return;
  for (const cudaEvent_t event : idle_) cudaEventDestroy(event);
}

Event Events::record(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (!event) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate", rank_);
  Event shared(event, [pool = shared_from_this()](cudaEvent_t over) {
    const std::lock_guard<std::mutex> lock(pool->mutex_);
    pool->idle_.push_back(over);
  });
  check(cudaEventRecord(event, stream), "cudaEventRecord", rank_);
  return shared;
}

void Events::follow(cudaStream_t stream, const Event& event) const {
  if (event) check(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent", rank_);
}

bool Events::reached(const Event& event) const {
  const DeviceScope on(device_, rank_);
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery of a transfer", rank_);
  return true;
}

Stream::Stream(int device, int rank) : device_(device), rank_(rank) {
  const DeviceScope on(device_, rank_);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate", rank_);
}

Stream::~Stream() {
  if (process_is_ending()) return;
  try {
    const DeviceScope on(device_, rank_);
    cudaStreamDestroy(stream_);
  } catch (const Error&) {
    // the device is lost, and the stream with it
  }
}

}  // namespace ringcomm::nccl
