#include "nccl/device.h"

#include <atomic>
#include <cstdlib>

#include "core/error.h"

namespace ringcomm::nccl {

namespace {

std::atomic<bool> ending{false};

// Handlers of exit run in reverse order: registered after the runtime has started, ours comes before its own.
void watch_for_exit() {
  [[maybe_unused]] static const int registered = std::atexit([] { ending.store(true, std::memory_order_relaxed); });
}

}  // namespace

void check(cudaError_t status, const char* what, int rank) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(ErrorCode::kSystem, what, ": rank ", rank, " expected success, got ", cudaGetErrorString(status), " (",
       cudaGetErrorName(status), "); see the kernel log (dmesg, Xid) if it persists");
}

bool process_is_ending() { return ending.load(std::memory_order_relaxed); }

OnDevice::OnDevice(int device, int rank) {
  int now = 0;
  check(cudaGetDevice(&now), "cudaGetDevice", rank);
  if (now != device) {
    check(cudaSetDevice(device), "cudaSetDevice", rank);
    before_ = now;
  }
  watch_for_exit();
  check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode", rank);
}

OnDevice::~OnDevice() {
  cudaThreadExchangeStreamCaptureMode(&mode_);
  if (before_ >= 0) cudaSetDevice(before_);
}

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
  const OnDevice on(device_, rank_);
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery of a transfer", rank_);
  return true;
}

Stream::Stream(int device, int rank) : device_(device), rank_(rank) {
  const OnDevice on(device_, rank_);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate", rank_);
}

Stream::~Stream() {
  if (process_is_ending()) return;
  try {
    const OnDevice on(device_, rank_);
    cudaStreamDestroy(stream_);
  } catch (const Error&) {
    // the device is lost, and the stream with it
  }
}

}  // namespace ringcomm::nccl
