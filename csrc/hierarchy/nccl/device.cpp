#include "hierarchy/nccl/device.h"

#include "core/error.h"

namespace ringcomm::nccl {

bool reached(const Place& place, const StreamEventPtr& event) {
  const cuda::DeviceGuard on(place.device, place.rank);
  return cuda::reached(*event, place.rank);
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
